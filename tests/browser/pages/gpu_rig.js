'use strict';
// Lets the tests drive browser/gpu.js with JSON: bytes are base64, what is thrown becomes {code, message, details}.

const rig = {
  runtime: null,
  memories: new Map(),
  ranges: new Map(),

  bytes: (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)),
  text(bytes) {
    let result = '';
    for (let at = 0; at < bytes.length; at += 8192) result += String.fromCharCode(...bytes.subarray(at, at + 8192));
    return btoa(result);
  },

  /** The result of a function, or what it threw. */
  async attempt(run) {
    try {
      return { value: (await run()) ?? null };
    } catch (error) {
      if (!(error instanceof gpu.GpuError)) throw error;
      return { code: error.code, message: error.message, details: error.details };
    }
  },

  async open(options) {
    this.runtime?.close();
    this.memories.clear();
    this.ranges.clear();
    this.runtime = await gpu.GpuRuntime.open(options);
    this.why = null;
    this.runtime.lost.then((why) => (this.why = why));
    return this.runtime.describe();
  },
  async empty(id, nbytes) {
    const memory = await this.runtime.allocate(nbytes);
    this.memories.set(id, memory);
    this.view(id, id, 0, nbytes);
  },
  view(id, of, offset, nbytes) {
    const memory = this.memories.get(of);
    this.memories.set(id, memory);
    this.ranges.set(id, [memory, offset, nbytes]);
    this.runtime.bind(id, memory, offset, nbytes);
  },
  async array(id, text) {
    const data = this.bytes(text);
    await this.empty(id, data.length);
    this.runtime.write(this.memories.get(id), 0, data);
  },
  /** A large array: a block of bytes over and over. */
  async tiled(id, text, nbytes) {
    const block = this.bytes(text);
    const data = new Uint8Array(nbytes);
    for (let at = 0; at < nbytes; at += block.length) data.set(block.subarray(0, nbytes - at), at);
    await this.empty(id, nbytes);
    this.runtime.write(this.memories.get(id), 0, data);
  },
  async read(id) {
    const [memory, offset, nbytes] = this.ranges.get(id);
    return this.text(await this.runtime.read(memory, offset, nbytes));
  },
  /** The SHA-256 of a range's bytes, by downloads of 1 MiB. */
  async digest(id) {
    const [memory, offset, nbytes] = this.ranges.get(id);
    const pieces = [];
    const all = [];
    for (let at = 0; at < nbytes; at += 1 << 20) {
      const size = Math.min(1 << 20, nbytes - at);
      all.push(this.runtime.download(memory, offset + at, size, (view) => pieces.push(view.slice())));
    }
    await Promise.all(all);
    const data = await new Blob(pieces).arrayBuffer();
    return this.text(new Uint8Array(await crypto.subtle.digest('SHA-256', data)));
  },
  load(id, source, signature, options = {}) {
    const spec = { name: 'k', entry: 'k', signature, writes: null, alias: false, constants: null, ...options };
    return this.runtime.load(id, spec, source);
  },
  /** Runs a graph's part once, with no transfers. */
  replay(prepared, ranges, values) {
    ranges.forEach((id, slot) => prepared.bind(slot, ...this.ranges.get(id)));
    prepared.patch(values);
    let first = 1;
    for (const run of prepared.queue) {
      const failure = prepared.run(run, first);
      if (failure) return { number: failure.number, code: failure.error.code, message: failure.error.message, program: failure.program };
      first += run.steps.length;
    }
    this.runtime.flush();
    return null;
  },
};
globalThis.rig = rig;
