'use strict';
// What the browser's code makes of an input: reads lines of JSON, `[what, input]`, and answers each with one. Run by
// fuzz/browser.py, which holds the answers against Python's.

const assert = require('node:assert/strict');
const path = require('node:path');
const readline = require('node:readline');

const { Encoder } = require('cbor-x');
const browser = path.join(__dirname, '..', 'browser');
const cbor = require(path.join(browser, 'cbor.js'));
const messages = require(path.join(browser, 'messages.js'));
const replay = require(path.join(browser, 'replay.js'));
const wgsl = require(path.join(browser, 'wgsl.js'));

const other = new Encoder({ useRecords: false, mapsAsObjects: false, useTag259ForMaps: false, tagUint8Array: false });

const bytes = (hex) => new Uint8Array(Buffer.from(hex, 'hex'));
const hex = (data) => Buffer.from(data).toString('hex');

/** A value in JSON that keeps what JSON does not: bytes, maps, large integers, all numbers. */
function told(value) {
  if (value instanceof Uint8Array) return { bytes: hex(value) };
  if (Array.isArray(value)) return value.map(told);
  if (value instanceof Map) return { map: [...value].map(([key, item]) => [told(key), told(item)]) };
  if (typeof value === 'bigint') return { integer: String(value) };
  if (typeof value === 'number') return { number: Object.is(value, -0) ? '-0' : String(value) };
  return value;
}

/** The same without the classes in which cbor-x differs. */
function plain(item) {
  if (item instanceof Uint8Array) return { bytes: hex(item) };
  if (Array.isArray(item)) return item.map(plain);
  if (item instanceof Map) return new Map([...item].map(([key, inner]) => [plain(key), plain(inner)]));
  if (typeof item === 'bigint' && Number.isSafeInteger(Number(item))) return Number(item);
  return Object.is(item, -0) ? 0 : item;
}

const READERS = {
  cbor(input) {
    const data = bytes(input);
    const value = cbor.decode(data);
    assert.deepStrictEqual(plain(value), plain(other.decode(data)), 'cbor-x reads something else');
    const again = Uint8Array.from(cbor.encode(value));
    assert.deepStrictEqual(plain(cbor.decode(again)), plain(value), 'encoded and decoded it is something else');
    return { value: told(value), encoded: hex(again) };
  },
  message(input) {
    const data = bytes(input);
    const { message, bulk } = messages.receive(data.buffer);
    const commands = [];
    if (message.kind === messages.KIND.BATCH) {
      for (const command of message.commands) {
        try {
          messages.checkCommand(command);
          commands.push(true);
        } catch (error) {
          if (!(error instanceof messages.ProtocolError)) throw error;
          commands.push(false);
        }
      }
    }
    return { fields: told(Object.values(message)), bulk: bulk && hex(bulk), commands };
  },
  graph(input) {
    const data = bytes(input);
    const graphs = new replay.Graphs({ prepare: () => ({ queue: [], close() {} }) });
    const cut = data.length >> 1;
    graphs.add({ graph: 1, offset: 0, total: data.length }, data.subarray(0, cut));
    graphs.add({ graph: 1, offset: cut, total: data.length }, data.subarray(cut));
    const { transfers } = graphs.graphs.get(1);
    graphs.close();
    return { transfers };
  },
  wgsl(input) {
    const read = wgsl.parseModule(input);
    return {
      bindings: read.bindings.map((b) => [b.index, b.space, b.access, b.type, b.name]),
      entries: read.entryPoints.map((e) => [e.name, e.stage, e.workgroupSize]),
      overrides: read.overrides.map((o) => [o.name, o.id, o.type, o.hasDefault]),
    };
  },
};
const NAMED = new Set([cbor.CborError, messages.ProtocolError]);

readline.createInterface({ input: process.stdin }).on('line', (line) => {
  const [what, input] = JSON.parse(line);
  let answer;
  try {
    answer = { read: READERS[what](input) };
  } catch (error) {
    const named = NAMED.has(error.constructor) || error.name === 'WgslError';
    answer = named ? { refused: error.message } : { fault: error.stack };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
});
