'use strict';
// Compares browser/cbor.js with cbor-x on random values, on damaged encodings and on random bytes: what ours takes, the
// other must read as the same. Arguments: seed, rounds. Run by tests/transport/test_cbor_fuzz.py.

const assert = require('node:assert/strict');

const { Encoder } = require('cbor-x');
const cbor = require('../../browser/cbor.js');

const other = new Encoder({ useRecords: false, mapsAsObjects: false, useTag259ForMaps: false, tagUint8Array: false });
let state = Number(process.argv[2]) >>> 0;

/** A number from 0 to `n` - 1 (xorshift). */
function random(n) {
  state ^= state << 13;
  state ^= state >>> 17;
  state ^= state << 5;
  return (state >>> 0) % n;
}

const EDGES = [0, 23, 24, 255, 256, 65535, 65536, 2 ** 32 - 1, 2 ** 32, Number.MAX_SAFE_INTEGER];

function integer() {
  const size = EDGES[random(EDGES.length)];
  const near = random(2) ? size : random(Math.min(size, 2 ** 31) + 1);
  return random(2) ? near : -1 - Math.min(near, Number.MAX_SAFE_INTEGER - 1);
}

/** cbor-x writes larger ones as floats, which are no keys here. */
function key() {
  return random(2 ** 31) * (random(2) ? 1 : -1);
}

function text() {
  return String.fromCodePoint(...Array.from({ length: random(8) }, () => [97, 233, 0x4e2d, 0x1f600, 0xfeff][random(5)]));
}

function value(depth) {
  switch (random(depth ? 11 : 8)) {
    case 0:
    case 1:
      return integer();
    case 2:
      return [2n ** 53n, 2n ** 63n, 2n ** 64n - 1n, -(2n ** 53n) - 1n, -(2n ** 63n)][random(5)];
    case 3:
      return text();
    case 4:
      return Buffer.from(Array.from({ length: random(40) }, () => random(256)));
    case 5:
      return [true, false, null][random(3)];
    case 6:
      return [0.5, -1.25, 1e300, -1e-300, 3.4e38, Infinity, -Infinity, NaN, 1 / 3][random(9)];
    case 7:
      return (random(2 ** 31) / 2 ** 20) * (random(2) ? 1 : -1) + 0.1;
    case 8:
      return new Map(Array.from({ length: random(6) }, () => [random(2) ? text() : key(), value(depth - 1)]));
    default:
      return Array.from({ length: random(6) }, () => value(depth - 1));
  }
}

/** With the same classes on both sides; integers beyond 2^53 are BigInts, others numbers. */
function plain(item) {
  if (item instanceof Uint8Array) return { bytes: Buffer.from(item).toString('hex') };
  if (Array.isArray(item)) return item.map(plain);
  if (item instanceof Map) return new Map([...item].map(([key, inner]) => [plain(key), plain(inner)]));
  if (typeof item === 'bigint' && Number.isSafeInteger(Number(item))) return Number(item);
  if (Object.is(item, -0)) return 0;
  return item;
}

/** What ours reads, or undefined where it refuses; anything but a CborError is a fault. */
function ours(bytes) {
  try {
    return { read: cbor.decode(bytes) };
  } catch (error) {
    assert.ok(error instanceof cbor.CborError, `${bytes.toString('hex')}: ${error.stack}`);
    return undefined;
  }
}

let accepted = 0;
let refused = 0;
function compare(bytes) {
  const result = ours(bytes);
  if (result === undefined) {
    refused += 1;
    return;
  }
  accepted += 1;
  assert.deepStrictEqual(plain(result.read), plain(other.decode(bytes)), bytes.toString('hex'));
}

for (let round = Number(process.argv[3]); round > 0; round--) {
  const made = value(4);
  const encoded = Buffer.from(cbor.encode(made));
  assert.deepStrictEqual(plain(other.decode(encoded)), plain(made), encoded.toString('hex'));
  assert.deepStrictEqual(plain(cbor.decode(other.encode(made))), plain(made));
  compare(encoded);
  const damaged = Buffer.from(encoded);
  for (let flips = 1 + random(3); flips > 0; flips--) damaged[random(damaged.length)] ^= 1 << random(8);
  compare(damaged);
  compare(damaged.subarray(0, random(damaged.length + 1)));
  compare(Buffer.from(Array.from({ length: 1 + random(24) }, () => random(256))));
}
console.log(JSON.stringify({ accepted, refused }));
