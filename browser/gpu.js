'use strict';
// The runtime of a tab's GPU: memory, programs, launches and graphs of one session on a GPUDevice of its own. It knows no
// message and no socket. A classic script for a page or a worker: it defines `gpu`.

/** @typedef {InstanceType<typeof gpu.GpuRuntime>} GpuRuntime */
/**
 * Measures launches while a timeline is made; times are milliseconds of `performance.now()`.
 * @typedef {{step: number, launched: (span: {number: number, program: number, step: number, start: number, end: number}) => void}} GpuTrace
 */

const gpu = (() => {
  const { GpuError } = gpuQueue;
  /** What programs may use; the rest of a device's features is about pictures. */
  const FEATURES = /** @type {GPUFeatureName[]} */ (['timestamp-query', 'shader-f16', 'subgroups']);
  const LIMITS = /** @type {const} */ ([
    'maxBufferSize',
    'maxStorageBufferBindingSize',
    'maxUniformBufferBindingSize',
    'maxStorageBuffersPerShaderStage',
    'maxUniformBuffersPerShaderStage',
    'maxBindingsPerBindGroup',
    'maxComputeWorkgroupStorageSize',
    'maxComputeInvocationsPerWorkgroup',
    'maxComputeWorkgroupSizeX',
    'maxComputeWorkgroupSizeY',
    'maxComputeWorkgroupSizeZ',
    'maxComputeWorkgroupsPerDimension',
    'minStorageBufferOffsetAlignment',
    'minUniformBufferOffsetAlignment',
  ]);
  const SOFTWARE = /swiftshader|llvmpipe|lavapipe|basic render|software/i;
  const LAUNCH_SECONDS = 60;
  const ANSWER_SECONDS = 30;
  /** What copies of a launch's arguments may need: to flush for them would take the launch's own slots away. */
  const DETOUR_SLOTS = 128;

  /**
   * What the browser answers, unless its GPU hangs.
   * @template T
   * @param {Promise<T>} promise
   * @returns {Promise<T>}
   */
  async function inTime(promise) {
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const late = new Promise((_, reject) => {
      const message = `the browser's GPU has not answered for ${ANSWER_SECONDS} s; a launch that never ends may hold it`;
      timer = setTimeout(() => reject(new GpuError('DeviceError', message, { reason: 'hung' })), ANSWER_SECONDS * 1000);
    });
    try {
      return await Promise.race([promise, /** @type {Promise<never>} */ (late)]);
    } finally {
      clearTimeout(timer);
    }
  }

  async function requestAdapter() {
    if (!globalThis.isSecureContext) {
      throw new GpuError('DeviceError', 'WebGPU is only there for https, for this machine itself and for files', {
        reason: 'insecure',
      });
    }
    if (!navigator.gpu) throw new GpuError('DeviceError', 'this browser has no WebGPU', { reason: 'no-webgpu' });
    const adapter = await inTime(navigator.gpu.requestAdapter({ powerPreference: 'high-performance' }));
    if (!adapter) throw new GpuError('DeviceError', 'this browser offers no GPU adapter', { reason: 'no-adapter' });
    return adapter;
  }

  /** @param {GPUAdapter} adapter */
  function limitsOf({ limits }) {
    const pairs = LIMITS.flatMap((name) => (limits[name] === undefined ? [] : [[name, limits[name]]]));
    return /** @type {Record<string, number>} */ (Object.fromEntries(pairs));
  }

  /** @param {GPUAdapter} adapter */
  function describe(adapter) {
    const { vendor = '', architecture = '', device = '', description = '' } = adapter.info ?? {};
    const name = description || [vendor, architecture, device].filter(Boolean).join(' ') || 'a GPU';
    const limits = limitsOf(adapter);
    const fallback = /** @type {{isFallbackAdapter?: boolean}} */ (adapter.info ?? {}).isFallbackAdapter === true;
    const software = fallback || SOFTWARE.test([name, architecture, device].join(' '));
    const features = [...adapter.features].sort();
    return {
      device: {
        kind: 'browser',
        dialects: ['wgsl'],
        adapter: name,
        alignment: limits.minStorageBufferOffsetAlignment,
        f16: adapter.features.has('shader-f16'),
        timestamps: adapter.features.has('timestamp-query'),
        native_graphs: true,
        software,
        limits,
      },
      adapterName: name,
      features,
      limits,
      software,
    };
  }

  /** What this browser's GPU is, as the server is told and as people read it. */
  async function describeAdapter() {
    return describe(await requestAdapter());
  }

  class GpuRuntime {
    /**
     * A runtime on a device of its own.
     * @param {{memory?: number | null, launchSeconds?: number | null}} [options] the cap of memory, and how long a launch may take.
     */
    static async open({ memory = null, launchSeconds = null } = {}) {
      const adapter = await requestAdapter();
      const requiredFeatures = FEATURES.filter((name) => adapter.features.has(name));
      let device;
      try {
        device = await inTime(adapter.requestDevice({ requiredFeatures, requiredLimits: limitsOf(adapter) }));
      } catch (error) {
        if (error instanceof GpuError) throw error;
        throw new GpuError('DeviceError', `the browser gave no GPU device: ${error}`, { reason: 'no-device' });
      }
      return new GpuRuntime(device, describe(adapter), memory, launchSeconds ?? LAUNCH_SECONDS);
    }

    /**
     * @param {GPUDevice} device
     * @param {ReturnType<typeof describe>} description
     * @param {number | null} memory
     * @param {number} launchSeconds
     */
    constructor(device, description, memory, launchSeconds) {
      this.description = description;
      this.queue = new gpuQueue.Queue(device, launchSeconds);
      this.pool = new gpuMemory.MemoryPool(this.queue, memory);
      this.launcher = new gpuLaunch.Launcher(this.queue, this.pool);
      /** Settles once with why the device is gone. */
      this.lost = this.queue.lost;
      /** @type {GpuTrace | null} */
      this.trace = null;
      /** @type {Map<number, GpuRange>} */
      this.bound = new Map();
      /** @type {Map<number, GpuProgram>} */
      this.programs = new Map();
    }

    describe() {
      return { ...this.description.device, memory: this.pool.cap };
    }

    /** Bytes in use. */
    get memoryUsed() {
      return this.pool.usedBytes;
    }

    /** The number of the client's command that runs. */
    get number() {
      return this.queue.number;
    }

    set number(number) {
      this.queue.number = number;
    }

    // -- memory

    /** @param {number} nbytes */
    allocate(nbytes) {
      return this.pool.allocate(nbytes);
    }

    /** @param {GpuMemory} memory */
    release(memory) {
      this.pool.release(memory);
    }

    /**
     * Lets launches use a range of memory under an id.
     * @param {number} id
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     */
    bind(id, memory, offset, nbytes) {
      this.bound.set(id, this.range(memory, offset, nbytes));
    }

    /** @param {number} id */
    unbind(id) {
      this.bound.delete(id);
    }

    /**
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     * @returns {GpuRange}
     */
    range(memory, offset, nbytes) {
      return { memory, offset, nbytes, key: `${memory.id}:${offset}:${nbytes}` };
    }

    /**
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {Uint8Array} bytes
     */
    write(memory, offset, bytes) {
      this.pool.write(memory, offset, bytes);
    }

    /**
     * The bytes as they are after everything before this call.
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     */
    read(memory, offset, nbytes) {
      return this.pool.read(memory, offset, nbytes);
    }

    /**
     * Calls `send` once with a view of the bytes that is good only during the call.
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     * @param {GpuSend} send
     */
    download(memory, offset, nbytes, send) {
      return this.pool.download(memory, offset, nbytes, send);
    }

    /**
     * @param {GpuMemory} target
     * @param {number} targetOffset
     * @param {GpuMemory} source
     * @param {number} sourceOffset
     * @param {number} nbytes
     */
    copy(target, targetOffset, source, sourceOffset, nbytes) {
      this.pool.copier.copy(target.buffer, targetOffset, source.buffer, sourceOffset, nbytes);
    }

    /**
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     * @param {Uint8Array} pattern
     */
    fill(memory, offset, nbytes, pattern) {
      this.pool.copier.fill(memory.buffer, offset, nbytes, pattern);
    }

    // -- programs

    /**
     * Compiles a program; returns the compiler's warnings.
     * @param {number} id
     * @param {GpuProgramSpec} spec
     * @param {string} source
     */
    load(id, spec, source) {
      const program = new gpuProgram.Program(spec);
      this.programs.set(id, program);
      return gpuProgram.compile(this.queue.device, program, spec, source);
    }

    /** @param {number} id */
    drop(id) {
      this.programs.delete(id);
    }

    /** @param {number} id */
    programName(id) {
      return this.programs.get(id)?.name ?? null;
    }

    /**
     * The program under an id; throws why it can't be launched.
     * @param {number} id
     */
    launchable(id) {
      const program = this.programs.get(id);
      if (!program) throw new GpuError('LaunchError', `there is no program ${id}`);
      const { failure } = program;
      if (failure) throw new GpuError(failure.code, failure.message, failure.details);
      if (!program.pipeline) throw new GpuError('LaunchError', `'${program.name}' is still being compiled`);
      return program;
    }

    // -- launches

    /**
     * @param {number} id
     * @param {(number | bigint)[] | null} grid
     * @param {unknown[] | null} block
     * @param {unknown[]} values
     * @param {number} number
     * @param {boolean} [timed]
     * @returns {null | Promise<number>} the seconds it took, where that was asked.
     */
    launch(id, grid, block, values, number, timed = false) {
      this.queue.number = number;
      const program = this.launchable(id);
      if (block) this.refuseBlock(id);
      const sizes = [0, 1, 2].map((at) => Number(grid?.[at] ?? 1));
      if (grid && (grid.length < 1 || grid.length > 3)) {
        throw new GpuError('LaunchError', `the grid of '${program.name}' has ${grid.length} sizes, not 1 to 3`);
      }
      const { signature } = program;
      if (values.length !== signature.length) {
        throw new GpuError('LaunchError', `'${program.name}' takes ${signature.length} arguments, not ${values.length}`);
      }
      const checked = values.map((value, at) =>
        signature[at] === 'p' ? this.argument(program, at, value) : scalarWord(program, at, value),
      );
      if (!timed) {
        this.run(id, program, sizes, checked, null);
        return null;
      }
      this.queue.flush();
      /** @type {Promise<number>} */
      const seconds = new Promise((resolve) => {
        this.run(id, program, sizes, checked, (start, end) => resolve((end - start) / 1000));
      });
      this.queue.flush();
      const submission = this.queue.inFlight[this.queue.inFlight.length - 1];
      return this.queue.answer(seconds).then(async (value) => {
        await this.queue.verify(submission);
        return value;
      });
    }

    /**
     * Runs packed launches, commands `first` … in order, up to the first that fails.
     * @param {Uint8Array} data
     * @param {number} first
     * @returns {GpuLaunchFailure | null}
     */
    launchPacked(data, first) {
      const fail = (/** @type {string} */ message) => new GpuError('LaunchError', message);
      let number = first;
      let id = null;
      try {
        if (data.length % 4) throw fail(`${data.length} bytes are no packed launches`);
        const aligned = data.byteOffset % 4 ? data.slice() : data;
        const list = new Uint32Array(aligned.buffer, aligned.byteOffset, aligned.length / 4);
        for (let at = 0; at < list.length; number++) {
          this.queue.number = number;
          id = list[at];
          const program = this.launchable(id);
          const { signature } = program;
          if (at + 2 + signature.length > list.length) {
            throw fail(`a packed launch of '${program.name}' is cut off after ${list.length - at} words`);
          }
          const values = new Array(signature.length);
          for (let i = 0; i < values.length; i++) {
            const word = list[at + 2 + i];
            values[i] = signature[i] === 'p' ? this.argument(program, i, word) : word;
          }
          this.run(id, program, [list[at + 1] || 1, 1, 1], values, null);
          at += 2 + signature.length;
        }
      } catch (error) {
        if (!(error instanceof GpuError)) throw error;
        return { number, error, program: id === null ? null : this.programName(id) };
      }
      return null;
    }

    /**
     * @param {number} id
     * @param {GpuProgram} program
     * @param {number[]} grid
     * @param {(GpuRange | number)[]} values ranges and the words of scalars.
     * @param {((start: number, end: number) => void) | null} told
     */
    run(id, program, grid, values, told) {
      const { queue, launcher } = this;
      this.checkGrid(program, grid);
      const [x, y, z] = grid;
      queue.admit(program.estimate(x * y * z));
      queue.reserve(program.scalars + DETOUR_SLOTS);
      queue.open();
      if (program.scalars) {
        for (let i = 0; i < values.length; i++) {
          const value = values[i];
          if (typeof value === 'number') values[i] = queue.wordSlot(value);
        }
      }
      const plan = launcher.plan(program, values, queue.arena);
      const { trace } = this;
      launcher.launch(program, plan, x, y, z, undefined, told ?? (trace ? this.tells(trace, id, 0) : null));
    }

    /**
     * What notes when a launch ran.
     * @param {GpuTrace} trace
     * @param {number} program
     * @param {number} index
     */
    tells(trace, program, index) {
      const { number } = this.queue;
      const step = trace.step ? trace.step + index : 0;
      return (/** @type {number} */ start, /** @type {number} */ end) =>
        trace.launched({ number, program, step, start, end });
    }

    /**
     * @param {GpuProgram} program
     * @param {number[]} grid
     */
    checkGrid({ name }, grid) {
      const limit = this.queue.device.limits.maxComputeWorkgroupsPerDimension;
      for (const size of grid) {
        if (!(Number.isInteger(size) && size >= 1 && size <= limit)) {
          throw new GpuError(
            'LaunchError',
            `the grid [${grid}] of '${name}' is not of numbers from 1 to ${limit}, this GPU's maxComputeWorkgroupsPerDimension`,
            { grid, limit },
          );
        }
      }
    }

    /**
     * @param {number} id
     * @returns {never}
     */
    refuseBlock(id) {
      const name = this.programName(id);
      throw new GpuError('LaunchError', `a launch of '${name}' has a block; in WGSL @workgroup_size says it`);
    }

    /**
     * @param {GpuProgram} program
     * @param {number} at
     * @param {unknown} value
     */
    argument({ name }, at, value) {
      const range = this.bound.get(/** @type {number} */ (value));
      if (!range) {
        throw new GpuError('LaunchError', `argument ${at} of '${name}' is buffer ${value}, which does not exist`);
      }
      return range;
    }

    /**
     * Makes a graph's device part ready.
     * @param {GpuPart} part
     */
    prepare(part) {
      return new gpuGraph.Prepared(this, part);
    }

    // -- order

    /** Gives the GPU what was collected. */
    flush() {
      this.queue.flush();
    }

    /** Waits until all work so far is over; throws what went wrong since it last threw. */
    settled() {
      return this.queue.settled();
    }

    /** Destroys everything. */
    close() {
      this.queue.close();
      this.pool.close();
    }
  }

  /**
   * @param {GpuProgram} program
   * @param {number} at
   * @param {unknown} value
   */
  function scalarWord({ name, signature }, at, value) {
    const letter = signature[at];
    const number = typeof value === 'boolean' ? Number(value) : value;
    if (typeof number === 'number' || typeof number === 'bigint') {
      if (letter === 'f') {
        if (Number.isFinite(Math.fround(Number(number))) || !Number.isFinite(Number(number))) {
          return gpuGraph.wordOf(letter, number);
        }
        throw new GpuError('LaunchError', `argument ${at} of '${name}' is ${number}, which is too large for a float`);
      }
      const [low, high] = letter === 'i' ? [-(2 ** 31), 2 ** 31] : [0, 2 ** 32];
      if (Number.isInteger(Number(number)) && number >= low && number < high) return gpuGraph.wordOf(letter, number);
    }
    throw new GpuError('LaunchError', `argument ${at} of '${name}' is ${String(value).slice(0, 40)}, which does not fit its type`);
  }

  return { GpuError, GpuRuntime, describeAdapter };
})();
