'use strict';
// A fake of browser/gpu.js for tests without a GPU: memory is arrays, programs are JavaScript functions, and what a device
// would do later is done at once but told later. It stands for the interface, not for WebGPU's rules.

class GpuError extends Error {
  constructor(code, message, details = {}) {
    super(message);
    this.code = code;
    this.details = details;
  }
}

/** Lets other work go on, for a random number of turns. */
async function later() {
  for (let turns = Math.floor(Math.random() * 3); turns > 0; turns--) await new Promise((resolve) => setImmediate(resolve));
}

const WIDTHS = { p: 1, i: 1, I: 1, f: 1, q: 2, Q: 2, d: 2, x: 0 };
const INTEGERS = { i: [-(2n ** 31n), 2n ** 31n - 1n], I: [0n, 2n ** 32n - 1n], q: [-(2n ** 63n), 2n ** 63n - 1n], Q: [0n, 2n ** 64n - 1n] };

/** What a device does in order: `tell` gives its answers in that order too. */
class FakeRuntime {
  constructor({ memory = 1 << 30 } = {}) {
    this.limit = memory;
    this.memoryUsed = 0;
    this.trace = null;
    this.bound = new Map();
    this.programs = new Map();
    this.failures = [];
    this.told = Promise.resolve();
    this.lost = new Promise((resolve) => {
      this.lose = (code, message, details = {}) => {
        this.gone = true;
        resolve(new GpuError(code, message, details));
      };
    });
    this.gone = false;
    this.closed = false;
  }

  static async open(options) {
    await later();
    if (options.memory === 666) throw new GpuError('DeviceError', 'this device does not open');
    const runtime = new FakeRuntime(options);
    FakeRuntime.opened.push(runtime);
    return runtime;
  }

  describe() {
    return { kind: 'browser', alignment: 256 };
  }

  /** In the order of the calls, after a while; never once the device is gone. */
  tell(value) {
    const before = this.told;
    this.told = (async () => {
      await before;
      await later();
      if (this.gone) await new Promise(() => {});
    })();
    return this.told.then(value);
  }

  /** The same of what a device gives only once it knows how the work before went. */
  verified(value) {
    const failed = this.failures.shift();
    return this.tell(() => {
      if (failed !== undefined) throw new GpuError('DeviceError', 'the device found it out late', { number: failed });
      return value();
    });
  }

  async allocate(nbytes) {
    // As a device may, it answers whenever it likes.
    const fits = this.memoryUsed + nbytes <= this.limit;
    if (fits) this.memoryUsed += nbytes;
    await later();
    if (!fits) throw new GpuError('OutOfMemory', `${nbytes} bytes do not fit`);
    return { bytes: new Uint8Array(nbytes) };
  }

  release(memory) {
    this.memoryUsed -= memory.bytes.length;
    memory.bytes = null;
  }

  bind(id, memory, offset, nbytes) {
    this.bound.set(id, { memory, offset, nbytes });
  }

  unbind(id) {
    this.bound.delete(id);
  }

  write(memory, offset, bytes) {
    memory.bytes.set(bytes, offset);
  }

  read(memory, offset, nbytes) {
    const data = memory.bytes.slice(offset, offset + nbytes);
    return this.verified(() => data);
  }

  download(memory, offset, nbytes, send) {
    // Room before the bytes, as a mapped range has it.
    const mapped = new Uint8Array(64 + nbytes);
    mapped.set(memory.bytes.subarray(offset, offset + nbytes), 64);
    return this.verified(() => send(mapped.subarray(64)));
  }

  copy(target, targetOffset, source, sourceOffset, nbytes) {
    target.bytes.set(source.bytes.slice(sourceOffset, sourceOffset + nbytes), targetOffset);
  }

  fill(memory, offset, nbytes, pattern) {
    for (let i = 0; i < nbytes; i++) memory.bytes[offset + i] = pattern[i % pattern.length];
  }

  async load(program, spec, source) {
    this.programs.set(program, { ...spec, run: null });
    await later();
    if (source.includes('broken')) throw new GpuError('CompileError', '1:1: broken');
    this.programs.set(program, { ...spec, run: eval(source) });
    return source.includes('warning') ? '1:1: a warning' : undefined;
  }

  drop(program) {
    this.programs.delete(program);
  }

  programName(program) {
    return this.programs.get(program)?.name;
  }

  launch(program, grid, block, values, number, timed) {
    const known = this.program(program);
    const letters = known.signature.replaceAll('x', '');
    if (block !== null) throw new GpuError('LaunchError', 'there is no block here');
    if (letters.length !== values.length) {
      throw new GpuError('LaunchError', `it takes ${letters.length} arguments, not ${values.length}`);
    }
    if (grid !== null && grid.length > 1) throw new GpuError('LaunchError', 'a grid has one dimension here');
    this.call(known, grid === null ? 0 : grid[0], [...letters].map((letter, i) => check(letter, values[i])), number);
    return timed ? this.tell(() => 0.001) : null;
  }

  launchPacked(words, first) {
    const view = new DataView(words.buffer, words.byteOffset, words.byteLength);
    let at = 0;
    let number = first;
    for (; at < words.byteLength; number++) {
      let known = null;
      let program = null;
      try {
        const word = () => {
          if (at + 4 > words.byteLength) throw new GpuError('LaunchError', 'the words of a launch are cut off');
          at += 4;
          return view.getUint32(at - 4, true);
        };
        program = word();
        known = this.program(program);
        const grid = word();
        const values = [...known.signature.replaceAll('x', '')].map((letter) => {
          const start = at;
          for (let i = 0; i < WIDTHS[letter]; i++) word();
          return unpack(letter, view, start);
        });
        this.call(known, grid, values, number);
      } catch (error) {
        return { number, error, program: this.programName(program) ?? null };
      }
    }
    return null;
  }

  program(program) {
    const known = this.programs.get(program);
    if (known === undefined) throw new GpuError('LaunchError', `there is no program ${program}`);
    if (known.run === null) throw new GpuError('CompileError', `${known.name} did not compile`);
    return known;
  }

  call(known, grid, values, number) {
    const letters = known.signature.replaceAll('x', '');
    const given = values.map((value, i) => (letters[i] === 'p' ? this.range(value) : value));
    const written = given.filter((value, i) => letters[i] === 'p' && (known.writes?.includes(i) ?? true));
    written.forEach((one, i) => {
      const clash = written.slice(0, i).some((other) => overlap(one, other));
      if (clash && !known.alias) throw new GpuError('LaunchError', 'two arguments are both written and share bytes');
    });
    const start = performance.now();
    const { trace } = this;
    const step = trace?.step ?? 0;
    if (known.signature.includes('x')) {
      const at = known.signature.indexOf('x');
      for (let i = 0; i < Math.max(grid, 1); i++) known.run(...given.slice(0, at), i, ...given.slice(at));
    } else known.run(...given);
    const end = performance.now();
    if (trace) void this.tell(() => trace.launched({ number, program: 1, step, start, end }));
    if (known.name === 'fails late') this.failures.push(number);
    if (known.name === 'loses the device') {
      this.lose('Timeout', 'fails: it ran too long', { number, program: known.name });
    }
  }

  range(id) {
    const held = typeof id === 'object' ? id : this.bound.get(id);
    if (held === undefined) throw new GpuError('LaunchError', `there is no buffer ${id}`);
    const { memory, offset, nbytes } = held;
    return new DataView(memory.bytes.buffer, memory.bytes.byteOffset + offset, nbytes);
  }

  flush() {}

  settled() {
    return this.verified(() => undefined);
  }

  prepare(part) {
    return new FakePrepared(this, part);
  }

  close() {
    this.gone = this.closed = true;
    FakeRuntime.opened = FakeRuntime.opened.filter((other) => other !== this);
  }
}

FakeRuntime.opened = [];

class FakePrepared {
  constructor(runtime, part) {
    this.runtime = runtime;
    this.part = part;
    this.slots = [];
    this.values = [];
    this.queue = [];
    const transfers = [...part.lanes[1], ...part.lanes[2]];
    let passed = 0;
    for (const step of part.lanes[0]) {
      const before = transfers.filter(({ number }) => number < step.number).length;
      if (!this.queue.length || before > passed) this.queue.push({ steps: [] });
      passed = before;
      this.queue[this.queue.length - 1].steps.push(step);
    }
  }

  bind(slot, memory, offset, nbytes) {
    this.slots[slot] = { memory, offset, nbytes };
  }

  patch(values) {
    this.values = values;
  }

  run(run, first) {
    for (let index = 0; index < run.steps.length; index++) {
      const { op } = run.steps[index];
      let program = null;
      try {
        if (op[0] === 0) program = this.runtime.programName(op[1]) ?? null;
        this.step(op);
      } catch (error) {
        return { number: first + index, error, program };
      }
    }
    return null;
  }

  step([kind, ...fields]) {
    const { runtime } = this;
    if (kind === 0) {
      const [id, grid, block, given] = fields;
      const letters = this.part.programs.get(id).replaceAll('x', '');
      const values = given.map((value, i) =>
        letters[i] === 'p' ? this.slots[value] : check(letters[i], this.size(value)),
      );
      if (block !== null) throw new GpuError('LaunchError', 'there is no block here');
      if (grid !== null && grid.length > 1) throw new GpuError('LaunchError', 'a grid has one dimension here');
      const size = grid === null ? 0 : Number(this.size(grid[0]));
      runtime.call(runtime.program(id), size, values, runtime.number);
    } else if (kind === 1) {
      const [to, from] = [this.slots[fields[0]], this.slots[fields[1]]];
      runtime.copy(to.memory, to.offset, from.memory, from.offset, to.nbytes);
    } else {
      const to = this.slots[fields[0]];
      runtime.fill(to.memory, to.offset, to.nbytes, fields[1]);
    }
  }

  size(value) {
    if (!Array.isArray(value)) return value;
    return BigInt(value[1]) * BigInt(this.values[value[0]]) + BigInt(value[2]);
  }

  close() {}
}

function overlap(one, other) {
  const start = Math.max(one.byteOffset, other.byteOffset);
  const end = Math.min(one.byteOffset + one.byteLength, other.byteOffset + other.byteLength);
  return one.buffer === other.buffer && start < end;
}

function check(letter, value) {
  if (letter === 'p') {
    if (!Number.isInteger(value)) throw new GpuError('LaunchError', `${value} is not a buffer`);
    return value;
  }
  if ('fd'.includes(letter)) {
    if (letter === 'f' && Math.abs(Number(value)) > 3.5e38) throw new GpuError('LaunchError', 'too large for a float');
    return Number(value);
  }
  const fits = typeof value === 'bigint' || Number.isInteger(value);
  if (!fits || BigInt(value) < INTEGERS[letter][0] || BigInt(value) > INTEGERS[letter][1]) {
    throw new GpuError('LaunchError', `${value} does not fit ${letter}`);
  }
  return 'qQ'.includes(letter) ? BigInt(value) : Number(value);
}

function unpack(letter, view, at) {
  switch (letter) {
    case 'i': return view.getInt32(at, true);
    case 'f': return view.getFloat32(at, true);
    case 'q': return view.getBigInt64(at, true);
    case 'Q': return view.getBigUint64(at, true);
    case 'd': return view.getFloat64(at, true);
    default: return view.getUint32(at, true);
  }
}

async function describeAdapter() {
  const device = {
    kind: 'browser',
    dialects: ['wgsl'],
    memory: 1 << 30,
    alignment: 256,
    f16: false,
    timestamps: false,
    native_graphs: true,
    software: true,
  };
  return { device, adapterName: 'a fake', features: [], limits: {}, software: true };
}

module.exports = { GpuError, GpuRuntime: FakeRuntime, describeAdapter };
