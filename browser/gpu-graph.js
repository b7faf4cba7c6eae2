'use strict';
// A graph's device part as a tab keeps it: bind groups and scalars are made once and the launches encoded anew for each
// replay. What orders transfers and answers is not here. A classic script for a page or a worker: it defines `gpuGraph`.

/** @typedef {number | bigint | [number, number | bigint, number | bigint]} GpuSize a whole number, or variable, scale and offset. */
/** @typedef {{number: number, op: any[], waits: number[]}} GpuStep */
/** @typedef {{programs: Map<number, string>, slots: [number, number, number][], lanes: GpuStep[][]}} GpuPart */
/** @typedef {{steps: GpuStep[], items: GpuItem[]}} GpuRun */
/**
 * A step made ready: a launch, with its plan unless a slot was bound anew, or what runs a copy or fill.
 * @typedef {{
 *   launch: null | {program: GpuProgram, id: number, grid: number[], sizes: GpuSize[], values: (number | {slot: number})[]},
 *   plan: GpuPlan | null, other: (() => void) | null, slots: number[],
 * }} GpuItem
 */
/** @typedef {{number: number, error: InstanceType<typeof gpuQueue.GpuError>, program: string | null}} GpuLaunchFailure */

const gpuGraph = (() => {
  const { GpuError, SLOT } = gpuQueue;
  /** Launches of a replay in one submission. */
  const MAX_LAUNCHES = 4096;
  let graphs = 0;

  class Prepared {
    /**
     * @param {GpuRuntime} runtime
     * @param {GpuPart} part
     */
    constructor(runtime, part) {
      this.runtime = runtime;
      this.queue = /** @type {GpuRun[]} */ ([]);
      /** @type {(GpuRange | null)[]} */
      this.slots = part.slots.map(() => null);
      /** @type {GpuItem[][]} the items that use each slot. */
      this.users = part.slots.map(() => []);
      /** @type {Map<string, number>} places in the scalars' buffer by what stands there. */
      this.places = new Map();
      /** @type {{place: number, letter: string, size: [number, number | bigint, number | bigint]}[]} */
      this.patches = [];
      /** @type {GpuItem[]} launches whose grid depends on variables. */
      this.variable = [];
      /** @type {number[]} the words of constant scalars, by place. */
      const constants = [];
      this.readRuns(part, constants);
      this.host = new Uint8Array(Math.max(1, this.places.size) * SLOT);
      this.view = new DataView(this.host.buffer);
      constants.forEach((word, place) => this.view.setUint32(place * SLOT, word, true));
      const { queue } = runtime;
      queue.open();
      this.scalars = queue.device.createBuffer({
        label: `g${++graphs}`,
        size: this.host.length,
        usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST,
      });
      this.changed = true;
    }

    /**
     * @param {GpuPart} part
     * @param {number[]} constants
     */
    readRuns(part, constants) {
      const transfers = [...part.lanes[1], ...part.lanes[2]].map(({ number }) => number).sort((a, b) => a - b);
      let passed = 0;
      /** @type {GpuRun | null} */
      let run = null;
      for (const step of part.lanes[0]) {
        while (passed < transfers.length && transfers[passed] < step.number) {
          passed += 1;
          run = null;
        }
        if (!run) this.queue.push((run = { steps: [], items: [] }));
        run.steps.push(step);
        run.items.push(this.item(step.op, part, constants));
      }
    }

    /**
     * @param {any[]} op
     * @param {GpuPart} part
     * @param {number[]} constants
     * @returns {GpuItem}
     */
    item(op, part, constants) {
      const { runtime } = this;
      if (op[0] === 1) {
        const [, target, source] = op;
        return this.other([target, source], () => {
          const [to, from] = [this.range(target), this.range(source)];
          runtime.copy(to.memory, to.offset, from.memory, from.offset, to.nbytes);
        });
      }
      if (op[0] === 2) {
        const [, target, pattern] = op;
        return this.other([target], () => {
          const { memory, offset, nbytes } = this.range(target);
          runtime.fill(memory, offset, nbytes, pattern);
        });
      }
      const [, id, grid, block, given] = op;
      const signature = (part.programs.get(id) ?? '').replaceAll('x', '');
      const values = [...signature].map((letter, index) =>
        letter === 'p' ? { slot: given[index] } : this.place(letter, given[index], constants),
      );
      const slots = values.flatMap((value) => (typeof value === 'number' ? [] : [value.slot]));
      /** @type {GpuSize[]} */
      const sizes = grid ?? [1];
      const fixed = [0, 1, 2].map((at) => (Array.isArray(sizes[at]) ? 0 : Number(sizes[at] ?? 1)));
      /** @type {GpuItem} */
      const item = {
        // The program may be loaded later, or again: it is looked up when it runs.
        launch: { program: /** @type {any} */ (null), id, grid: fixed, sizes, values },
        plan: null,
        other: null,
        slots,
      };
      if (block) item.other = () => runtime.refuseBlock(id);
      if (sizes.some(Array.isArray)) this.variable.push(item);
      for (const slot of slots) this.users[slot].push(item);
      return item;
    }

    /**
     * @param {number[]} slots
     * @param {() => void} other
     * @returns {GpuItem}
     */
    other(slots, other) {
      return { launch: null, plan: null, other, slots };
    }

    /**
     * Where a scalar stands; equal ones share a place.
     * @param {string} letter
     * @param {GpuSize} value
     * @param {number[]} constants
     */
    place(letter, value, constants) {
      const linear = Array.isArray(value);
      const key = linear ? `${letter}${value.join()}` : `${letter}${Object.is(value, -0) ? '-0' : value}`;
      let place = this.places.get(key);
      if (place === undefined) {
        place = this.places.size;
        this.places.set(key, place);
        if (linear) this.patches.push({ place, letter, size: value });
        constants[place] = linear ? 0 : wordOf(letter, value);
      }
      return place;
    }

    /**
     * From now on a slot stands for this range.
     * @param {number} slot
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     */
    bind(slot, memory, offset, nbytes) {
      const before = this.slots[slot];
      if (before?.memory === memory && before.offset === offset && before.nbytes === nbytes) return;
      this.slots[slot] = this.runtime.range(memory, offset, nbytes);
      for (const item of this.users[slot]) item.plan = null;
    }

    /**
     * From now on the variables have these values.
     * @param {(number | bigint)[]} values
     */
    patch(values) {
      for (const { place, letter, size } of this.patches) {
        const word = wordOf(letter, valueOf(size, values));
        if (this.view.getUint32(place * SLOT, true) === word) continue;
        this.view.setUint32(place * SLOT, word, true);
        this.changed = true;
      }
      for (const { launch } of this.variable) {
        launch?.sizes.forEach((size, at) => (launch.grid[at] = Number(valueOf(size, values))));
      }
    }

    /**
     * Runs the steps `first` … of the graph in order, up to the first that fails.
     * @param {GpuRun} run
     * @param {number} first
     * @returns {GpuLaunchFailure | null}
     */
    run({ items }, first) {
      const { runtime } = this;
      const { queue, launcher } = runtime;
      if (this.changed) {
        queue.flush();
        queue.device.queue.writeBuffer(this.scalars, 0, this.host);
        this.changed = false;
      }
      const { trace } = runtime;
      let index = 0;
      let id = null;
      try {
        for (; index < items.length; index++) {
          const item = items[index];
          const { launch } = item;
          if (item.other || !launch) {
            id = launch?.id ?? null;
            item.other?.();
            continue;
          }
          id = launch.id;
          const program = runtime.launchable(id);
          if (program !== launch.program) {
            launch.program = program;
            item.plan = null;
          }
          runtime.checkGrid(program, launch.grid);
          const [x, y, z] = launch.grid;
          const estimate = program.estimate(x * y * z);
          queue.admit(estimate);
          const plan = (item.plan ??= this.plan(program, launch));
          const told = trace ? runtime.tells(trace, id, index) : null;
          launcher.launch(program, plan, x, y, z, MAX_LAUNCHES, told);
          // Temporaries were given back: others may have them next time.
          if (plan.detours.length) item.plan = null;
        }
      } catch (error) {
        if (!(error instanceof GpuError)) throw error;
        const program = id === null ? null : runtime.programName(id);
        return { number: first + index, error, program };
      }
      return null;
    }

    /**
     * @param {GpuProgram} program
     * @param {{values: (number | {slot: number})[]}} launch
     */
    plan(program, { values }) {
      const { queue, launcher } = this.runtime;
      queue.open();
      const bound = values.map((value) => (typeof value === 'number' ? value : this.range(value.slot)));
      return launcher.plan(program, bound, this.scalars);
    }

    /** @param {number} slot */
    range(slot) {
      const range = this.slots[slot];
      if (!range) throw new GpuError('DeviceError', `slot ${slot} of a graph is not bound`);
      return range;
    }

    /** Forgets everything. */
    close() {
      this.runtime.queue.destroy(this.scalars);
      this.queue = [];
    }
  }

  /**
   * @param {GpuSize} size
   * @param {(number | bigint)[]} values
   */
  function valueOf(size, values) {
    if (!Array.isArray(size)) return size;
    // Products may be beyond what a number holds exactly.
    return BigInt(size[1]) * BigInt(values[size[0]]) + BigInt(size[2]);
  }

  const scratch = new DataView(new ArrayBuffer(4));

  /**
   * The word that a scalar is for the GPU.
   * @param {string} letter
   * @param {number | bigint} value
   */
  function wordOf(letter, value) {
    if (letter === 'f') {
      scratch.setFloat32(0, Number(value), true);
      return scratch.getUint32(0, true);
    }
    return Number(BigInt.asUintN(32, BigInt(value)));
  }

  return { Prepared, wordOf };
})();
