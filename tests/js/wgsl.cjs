'use strict';
// Checks browser/wgsl.js against tests/wgsl_vectors.json and prints how many vectors held; run by tests/browser/test_wgsl_twin.py.

const fs = require('node:fs');
const path = require('node:path');
const assert = require('node:assert/strict');

const wgsl = require('../../browser/wgsl.js');
const vectors = JSON.parse(fs.readFileSync(path.join(__dirname, '..', 'wgsl_vectors.json'), 'utf8'));

for (const { name, source, error, bindings, entry_points: entries, overrides } of vectors) {
  if (error !== undefined) {
    assert.throws(() => wgsl.parseModule(source), { name: 'WgslError', message: error }, name);
    continue;
  }
  const read = wgsl.parseModule(source);
  assert.deepEqual(read.bindings.map((b) => [b.index, b.space, b.access, b.type, b.name]), bindings, name);
  assert.deepEqual(read.entryPoints.map((e) => [e.name, e.stage, e.workgroupSize]), entries, name);
  assert.deepEqual(read.overrides.map((o) => [o.name, o.id, o.type, o.hasDefault]), overrides, name);
  assert.equal(wgsl.withoutComments(source).length, source.length, name);
}
console.log(`${vectors.length} vectors`);
