'use strict';
// Checks browser/cbor.js against tests/vectors.json and prints how many vectors held; run by tests/transport/test_vectors.py.

const fs = require('node:fs');
const path = require('node:path');
const assert = require('node:assert/strict');

const cbor = require('../../browser/cbor.js');
const vectors = JSON.parse(fs.readFileSync(path.join(__dirname, '..', 'vectors.json'), 'utf8'));

const bytes = (hex) => new Uint8Array(Buffer.from(hex, 'hex'));
const hex = (data) => Buffer.from(data).toString('hex');

/** The value of a vector; `wrap` says how a float is written for encoding or comparing. */
function value(json, wrap) {
  if (Array.isArray(json)) return json.map((item) => value(item, wrap));
  if (json === null || typeof json !== 'object') return json;
  if ('bytes' in json) return bytes(json.bytes);
  if ('float' in json) return wrap(Number(json.float));
  if ('integer' in json) return BigInt(json.integer);
  return new Map(json.map.map(([key, item]) => [value(key, wrap), value(item, wrap)]));
}

for (const vector of vectors.valid) {
  // A view in the middle of a larger buffer, as messages arrive.
  const data = bytes(`eeeeee${vector.hex}ee`).subarray(3, -1);
  assert.deepStrictEqual(cbor.decode(data), value(vector.value, (x) => x), vector.name);
  assert.equal(cbor.decodeFirst(bytes(`00${vector.hex}ff`), 1).end, data.length + 1, vector.name);
  if (vector.only_decode) continue;
  assert.equal(hex(cbor.encode(value(vector.value, (x) => new cbor.Float(x)))), vector.hex, vector.name);
}
for (const vector of vectors.invalid) {
  assert.throws(() => cbor.decode(bytes(vector.hex)), cbor.CborError, `${vector.name} was accepted`);
}

for (const nbytes of [0, 23, 24, 255, 256, 65535, 65536]) {
  assert.equal(hex(cbor.encode(new Uint8Array(nbytes))).startsWith(hex(cbor.bytesHead(nbytes))), true);
}
assert.equal(hex(cbor.bytesHead(2 ** 40)), '5b0000010000000000');
assert.equal(hex(cbor.encode({ a: 1, b: undefined })), 'a2616101' + '6162f6');
for (const bad of [() => 0, 1n << 64n, -(1n << 63n) - 1n, new Date(0), new Map([[1.5, 0]]), Symbol('x')]) {
  assert.throws(() => cbor.encode(bad), cbor.CborError);
}
for (const hostile of ['81'.repeat(40_000), 'a100'.repeat(20_000), '9801'.repeat(20_000)]) {
  assert.throws(() => cbor.decode(bytes(hostile)), cbor.CborError);
}

console.log(`${vectors.valid.length} valid, ${vectors.invalid.length} invalid`);
