'use strict';
// Launches one program with given ranges of memory: what WebGPU can bind is bound, the rest goes through temporaries. It
// knows no ids and no graph. A classic script for a page or a worker: it defines `gpuLaunch`.

/**
 * A buffer argument: bytes `offset … offset + nbytes` of a memory; equal ranges have equal keys.
 * @typedef {{memory: GpuMemory, offset: number, nbytes: number, key: string}} GpuRange
 */
/** @typedef {{temporary: GPUBuffer, range: GpuRange, back: boolean}} GpuDetour */
/**
 * How a launch binds its arguments. One with detours is good for one launch only.
 * @typedef {{group: GPUBindGroup, detours: GpuDetour[]}} GpuPlan
 */
/** @typedef {InstanceType<typeof gpuLaunch.Launcher>} GpuLauncher */

const gpuLaunch = (() => {
  const { GpuError, SLOT } = gpuQueue;
  const { words } = gpuCopy;
  /** Bind groups that are kept: to make one costs about half of a launch. */
  const KEPT_PLANS = 8192;
  /** Passes in one query set: more than a batch of single launches has. */
  const TIMED = 1024;

  class Launcher {
    /**
     * @param {GpuQueue} queue
     * @param {GpuMemoryPool} pool
     */
    constructor(queue, pool) {
      this.queue = queue;
      this.pool = pool;
      this.device = queue.device;
      /** @type {Map<string, GpuPlan>} */
      this.plans = new Map();
      /** @type {{set: GPUQuerySet, resolved: GPUBuffer} | null} */
      this.queries = null;
      /** @type {{batch: GpuBatch, used: number, told: ((start: number, end: number) => void)[]} | null} */
      this.timing = null;
    }

    /**
     * How to bind arguments: ranges for buffers, slots of `scalars` for numbers.
     * @param {GpuProgram} program
     * @param {(GpuRange | number)[]} values
     * @param {GPUBuffer} scalars
     * @returns {GpuPlan}
     */
    plan(program, values, scalars) {
      let key = `${scalars.label}:${program.serial}`;
      for (const value of values) key += typeof value === 'number' ? `,${value}` : `,${value.key}`;
      const known = this.plans.get(key);
      if (known) return known;
      const plan = this.newPlan(program, values, scalars);
      if (!plan.detours.length) {
        if (this.plans.size >= KEPT_PLANS) this.plans.clear();
        this.plans.set(key, plan);
      }
      return plan;
    }

    /**
     * @param {GpuProgram} program
     * @param {(GpuRange | number)[]} values
     * @param {GPUBuffer} scalars
     * @returns {GpuPlan}
     */
    newPlan(program, values, scalars) {
      const { device } = this;
      // All that can be refused comes before the first temporary is taken.
      values.forEach((value, index) => {
        if (typeof value !== 'number') checkSize(program, index, value, device.limits);
      });
      const copied = detoured(program, values, device.limits);
      /** @type {GpuDetour[]} */
      const detours = [];
      /** @type {GPUBindGroupEntry[]} */
      const entries = values.map((value, binding) => {
        if (typeof value === 'number') {
          return { binding, resource: { buffer: scalars, offset: value * SLOT, size: 16 } };
        }
        const size = bindingSize(value);
        if (!copied.has(binding)) {
          return { binding, resource: { buffer: value.memory.buffer, offset: value.offset, size } };
        }
        const temporary = this.pool.copier.temporary(size);
        detours.push({ temporary, range: value, back: program.arguments[binding].written });
        return { binding, resource: { buffer: temporary, size } };
      });
      const layout = /** @type {GPUBindGroupLayout} */ (program.layout);
      return { group: device.createBindGroup({ layout, entries }), detours };
    }

    /**
     * Encodes a launch.
     * @param {GpuProgram} program
     * @param {GpuPlan} plan
     * @param {number} x
     * @param {number} y
     * @param {number} z
     * @param {number} [most] launches of a batch.
     * @param {((start: number, end: number) => void) | null} [told] is called with when it ran, in milliseconds.
     */
    launch(program, plan, x, y, z, most, told = null) {
      const { queue } = this;
      const { copier } = this.pool;
      for (const { temporary, range } of plan.detours) {
        const { memory, offset, nbytes } = range;
        // What is bound behind the last byte must not depend on who had the temporary before.
        if (nbytes % 4 || !nbytes) queue.encoder().clearBuffer(temporary, Math.max(0, words(nbytes) - 4), 4);
        if (nbytes) copier.copyBytes(temporary, 0, memory.buffer, offset, nbytes);
      }
      const pass = told ? this.timedPass(told) : queue.pass();
      const batch = queue.open();
      const pipeline = /** @type {GPUComputePipeline} */ (program.pipeline);
      if (batch.pipeline !== pipeline) {
        pass.setPipeline(pipeline);
        batch.pipeline = pipeline;
      }
      pass.setBindGroup(0, plan.group);
      pass.dispatchWorkgroups(x, y, z);
      if (told) queue.endPass(batch);
      for (const { temporary, range, back } of plan.detours) {
        const { memory, offset, nbytes } = range;
        if (back && nbytes) copier.copyBytes(memory.buffer, offset, temporary, 0, nbytes);
        copier.giveBack(temporary);
      }
      queue.launched(program.estimate(x * y * z), most);
      if (program.unsure) queue.flush();
    }

    // -- time

    /**
     * @param {(start: number, end: number) => void} told
     */
    timedPass(told) {
      const { queue, device } = this;
      if (!device.features.has('timestamp-query')) {
        queue.after(async (submission) => {
          await submission.done;
          told(submission.startedAt, submission.doneAt);
        });
        return queue.pass();
      }
      this.queries ??= {
        set: device.createQuerySet({ type: 'timestamp', count: 2 * TIMED }),
        resolved: device.createBuffer({ size: 16 * TIMED, usage: GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC }),
      };
      if (this.timing?.batch === queue.batch && this.timing?.used === TIMED) queue.flush();
      const batch = queue.open();
      if (this.timing?.batch !== batch) {
        this.timing = { batch, used: 0, told: [] };
        this.readTimes(this.timing.told);
        // The first pass of a submission measures more than itself.
        queue.ownPass(this.timestamps(this.timing));
      }
      this.timing.told.push(told);
      return queue.ownPass(this.timestamps(this.timing));
    }

    /**
     * @param {{used: number}} timing
     * @returns {GPUComputePassDescriptor}
     */
    timestamps(timing) {
      const first = 2 * timing.used++;
      const { set } = /** @type {{set: GPUQuerySet}} */ (this.queries);
      return {
        timestampWrites: { querySet: set, beginningOfPassWriteIndex: first, endOfPassWriteIndex: first + 1 },
      };
    }

    /**
     * Reads the open batch's times once it is over.
     * @param {((start: number, end: number) => void)[]} told
     */
    readTimes(told) {
      const { queue, pool, queries } = this;
      if (!queries) return;
      const staging = pool.stagingBuffer(16 * TIMED);
      queue.before((encoder) => {
        const count = 2 * (told.length + 1);
        encoder.resolveQuerySet(queries.set, 0, count, queries.resolved, 0);
        encoder.copyBufferToBuffer(queries.resolved, 0, staging, 0, 8 * count);
      });
      queue.after(async (submission) => {
        const size = 16 * (told.length + 1);
        const map = staging.mapAsync(GPUMapMode.READ, 0, size);
        const mapped = await queue.answer(Promise.all([map, submission.done])).then(
          () => true,
          () => false,
        );
        if (queue.failure) return;
        const { startedAt, doneAt } = submission;
        /** @type {number[]} */
        let stamps = [];
        if (mapped) {
          stamps = [...new BigUint64Array(staging.getMappedRange(0, size))].map(Number);
          staging.unmap();
          pool.staging.keep(staging);
        }
        // The device's clock has its own zero: its last stamp is about when the submission was over.
        const zero = doneAt - stamps[stamps.length - 1] / 1e6;
        told.forEach((tell, index) => {
          const [start, end] = [stamps[2 * index + 2], stamps[2 * index + 3]];
          if (end > start) tell(zero + start / 1e6, zero + end / 1e6);
          else tell(startedAt, doneAt);
        });
      });
    }
  }

  /**
   * What is bound for a range: whole words, and at least one.
   * @param {GpuRange} range
   */
  const bindingSize = ({ nbytes }) => Math.max(4, words(nbytes));

  /**
   * Which arguments can't be bound where they are.
   * @param {GpuProgram} program
   * @param {(GpuRange | number)[]} values
   * @param {GPUSupportedLimits} limits
   */
  function detoured(program, values, limits) {
    /** @type {Set<number>} */
    const copied = new Set();
    values.forEach((range, index) => {
      if (typeof range === 'number') return;
      const { memory, offset, nbytes } = range;
      const { space } = program.arguments[index];
      const align = space === 'uniform' ? limits.minUniformBufferOffsetAlignment : limits.minStorageBufferOffsetAlignment;
      // Behind the last byte of a memory is nobody's: the rest of its last word may be bound with it.
      const whole = nbytes > 0 ? nbytes % 4 === 0 : memory.nbytes === 0;
      if (offset % align || !(whole || (nbytes && offset + nbytes === memory.nbytes))) copied.add(index);
    });
    values.forEach((range, index) => {
      if (typeof range === 'number') return;
      const one = program.arguments[index];
      values.forEach((other, at) => {
        if (at === index || typeof other === 'number' || range.memory !== other.memory) return;
        const two = program.arguments[at];
        const shared =
          range.nbytes > 0 &&
          other.nbytes > 0 &&
          range.offset < other.offset + other.nbytes &&
          other.offset < range.offset + range.nbytes;
        if (one.written) {
          if (two.written && shared && index < at) throw bothWritten(program, index, at, range.key === other.key);
          return;
        }
        // WebGPU binds no buffer as one that may be written and as one that is not, wherever the ranges are, and no byte
        // twice for writing, whether it is written or not.
        const readsOnly = one.access === 'read' && two.access === 'read_write' && !copied.has(at);
        const twice = one.access === 'read_write' && shared && index > at && !copied.has(at);
        if ((two.written && shared) || readsOnly || (twice && two.access === 'read_write')) copied.add(index);
      });
    });
    return copied;
  }

  /**
   * @param {GpuProgram} program
   * @param {number} first
   * @param {number} second
   * @param {boolean} same
   */
  function bothWritten(program, first, second, same) {
    const why =
      program.alias && same
        ? 'are the same range, which WebGPU binds only once for writing even with alias=True: let the source take it once'
        : 'are both written and share bytes; name what is written with writes=';
    return new GpuError('LaunchError', `arguments ${first} and ${second} of '${program.name}' ${why}`, {
      arguments: [first, second],
    });
  }

  /**
   * @param {GpuProgram} program
   * @param {number} index
   * @param {GpuRange} range
   * @param {GPUSupportedLimits} limits
   */
  function checkSize(program, index, range, limits) {
    const { nbytes } = range;
    const size = bindingSize(range);
    const { space, least, type } = program.arguments[index];
    const limit = space === 'uniform' ? limits.maxUniformBufferBindingSize : limits.maxStorageBufferBindingSize;
    if (size > limit) {
      throw new GpuError(
        'LaunchError',
        `argument ${index} of '${program.name}' has ${nbytes} bytes; this GPU binds at most ${limit} for a var<${space}>`,
        { argument: index, nbytes, limit },
      );
    }
    if (least !== null && size < least) {
      throw new GpuError(
        'LaunchError',
        `argument ${index} of '${program.name}' has ${nbytes} bytes; its type ${type} needs at least ${least}`,
        { argument: index, nbytes, least },
      );
    }
  }

  return { Launcher };
})();
