'use strict';
// Checks a device's part of a graph, as it came in CBOR, and gives its steps names: the JavaScript of
// wsgrad/graph/parse.py's `parse_device_part`. It binds and runs nothing. Defines `part`.

const part = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;

  const MAX_ARGUMENTS = 64;
  const MAX_GRID = 0xffffffff;
  const MAX_INTEGER = 1n << 62n;
  const LETTERS = /^[piIqQfdx]*$/;
  const PATTERNS = [1, 2, 4, 8, 16];
  const COMPUTE = 0;
  const SEND = 1;
  const RECEIVE = 2;
  /** How many fields an operation has: a launch, a copy, a fill, a send, a receive. */
  const FIELDS = [4, 2, 2, 3, 3];
  /** @type {Record<string, [bigint, bigint]>} */
  const INTEGERS = {
    i: [-(1n << 31n), (1n << 31n) - 1n],
    I: [0n, (1n << 32n) - 1n],
    q: [-(1n << 63n), (1n << 63n) - 1n],
    Q: [0n, (1n << 64n) - 1n],
  };

  /** @typedef {{ number: number, op: any[], waits: number[] }} Step an operation is the array that it came as. */
  /** @typedef {[string, number | bigint, number | bigint]} Variable a name with its least and greatest value. */
  /**
   * What one device does. `lanes` are its queues: compute, send, receive; `buffers` the sizes by the graph's numbers.
   * @typedef {{
   *   programs: Map<number, string>, slots: [number, number, number][], lanes: Step[][], variables: Variable[],
   *   buffers: Map<number, number>, launches: number,
   * }} Part
   */

  /** @param {string} what */
  function malformed(what) {
    return new wire.ProtocolError(`a graph is malformed: ${what}`);
  }

  /**
   * @param {unknown} value
   * @param {string} what
   * @param {number} [length]
   * @returns {any[]}
   */
  function list(value, what, length) {
    if (!Array.isArray(value) || (length !== undefined && value.length !== length)) throw malformed(what);
    return value;
  }

  /**
   * @param {any} value
   * @param {string} what
   * @param {number} [limit]
   * @returns {number}
   */
  function unsigned(value, what, limit = Number.MAX_SAFE_INTEGER) {
    if (!Number.isSafeInteger(value) || value < 0 || value > limit) throw malformed(what);
    return value;
  }

  /** @param {any} value */
  function isInteger(value) {
    return typeof value === 'bigint' || Number.isSafeInteger(value);
  }

  /** @param {any} value */
  function isWide(value) {
    return isInteger(value) && BigInt(value) >= -MAX_INTEGER && BigInt(value) <= MAX_INTEGER;
  }

  class Reader {
    /**
     * @param {Map<number, string>} programs
     * @param {[number, number, number][]} slots
     * @param {Variable[]} variables
     */
    constructor(programs, slots, variables) {
      this.programs = programs;
      this.slots = slots;
      this.variables = variables;
    }

    /**
     * @param {any} row
     * @param {number} lane
     * @returns {Step}
     */
    step(row, lane) {
      const [number, op, waits] = list(row, 'a step', 3);
      this.checkOp(list(op, 'an operation'), lane);
      for (const wait of list(waits, 'waits')) unsigned(wait, 'a wait', MAX_GRID);
      return { number: unsigned(number, 'a step', MAX_GRID), op, waits };
    }

    /**
     * @param {any[]} op
     * @param {number} lane
     */
    checkOp([kind, ...fields], lane) {
      if (!Number.isInteger(kind) || fields.length !== FIELDS[kind]) throw malformed('an operation');
      if (lane !== (kind === 3 ? SEND : kind === 4 ? RECEIVE : COMPUTE)) {
        throw malformed('a step in a queue that does not run its kind');
      }
      const [first, second, third, fourth] = fields;
      switch (kind) {
        case 0: {
          const signature = this.programs.get(first);
          if (signature === undefined) throw malformed('a launch of a program that is not listed');
          if (second !== null) this.checkGrid(second);
          if (third !== null) for (const size of list(third, 'a block')) unsigned(size, 'a block');
          this.checkArguments(signature, fourth);
          return;
        }
        case 1:
          if (this.sizeOf(first) !== this.sizeOf(second)) throw malformed('a copy between unequal ranges');
          return;
        case 2:
          if (!(second instanceof Uint8Array) || !PATTERNS.includes(second.length)) throw malformed('a pattern');
          if (this.sizeOf(first) % second.length) throw malformed('a pattern that does not divide its range');
          return;
        default:
          this.sizeOf(first);
          unsigned(second, 'a server', MAX_GRID);
          unsigned(third, 'a device', MAX_GRID);
      }
    }

    /** @param {any} slot */
    sizeOf(slot) {
      if (!Number.isInteger(slot) || slot < 0 || slot >= this.slots.length) throw malformed('a slot');
      return this.slots[slot][2];
    }

    /** @param {any} grid */
    checkGrid(grid) {
      const sizes = list(grid, 'a grid');
      if (sizes.length < 1 || sizes.length > 3) throw malformed('a grid');
      for (const size of sizes) this.checkInteger(size, 1n, BigInt(MAX_GRID));
    }

    /**
     * @param {string} signature
     * @param {any} row
     */
    checkArguments(signature, row) {
      const letters = signature.replaceAll('x', '');
      list(row, "a launch's arguments", letters.length).forEach((value, index) => {
        const letter = letters[index];
        if (letter === 'p') this.sizeOf(value);
        else if (typeof value !== 'number' || !'fd'.includes(letter)) {
          const [low, high] = INTEGERS[letter] ?? [-MAX_INTEGER, MAX_INTEGER];
          this.checkInteger(value, low, high);
        }
      });
    }

    /**
     * A whole number, or a use of a variable that stays in its bounds whatever the variable's value.
     * @param {any} row
     * @param {bigint} least
     * @param {bigint} most
     */
    checkInteger(row, least, most) {
      let bounds;
      if (Array.isArray(row)) {
        const [variable, scale, offset] = list(row, 'a use of a variable', 3);
        const known = Number.isInteger(variable) ? this.variables[variable] : undefined;
        if (known === undefined || !isWide(scale) || !isWide(offset)) throw malformed('a use of a variable');
        bounds = [known[1], known[2]].map((end) => BigInt(scale) * BigInt(end) + BigInt(offset));
      } else {
        if (!isInteger(row)) throw malformed('a number of a launch');
        bounds = [BigInt(row)];
      }
      if (bounds.some((end) => end < least || end > most)) throw malformed('a number of a launch');
    }
  }

  /**
   * Checks a part.
   * @param {any} array `[device, buffers, variables]`
   * @returns {Part}
   * @throws {ProtocolError}
   */
  function parse(array) {
    const [device, bufferRows, variableRows] = list(array, 'a part', 3);
    const [index, programRows, slotRows, laneRows] = list(device, 'a device', 4);
    unsigned(index, 'a device', MAX_GRID);
    const buffers = new Map();
    for (const row of list(bufferRows, 'buffers')) {
      const [number, owner, nbytes] = list(row, 'a buffer', 3).map((item) => unsigned(item, 'a buffer'));
      if (owner === index) buffers.set(number, nbytes);
      else throw malformed('a buffer of another device');
    }
    /** @type {Variable[]} */
    const variables = list(variableRows, 'variables').map((row) => {
      const [name, low, high] = list(row, 'a variable', 3);
      if (typeof name !== 'string' || !isWide(low) || !isWide(high) || low > high) throw malformed('a variable');
      return [name, low, high];
    });
    const programs = new Map();
    for (const row of list(programRows, 'programs')) {
      const [program, signature] = list(row, 'a program', 2);
      if (typeof signature !== 'string' || !LETTERS.test(signature) || signature.length > MAX_ARGUMENTS) {
        throw malformed("a program's signature");
      }
      programs.set(unsigned(program, 'a program', MAX_GRID), signature);
    }
    /** @type {[number, number, number][]} */
    const slots = list(slotRows, 'slots').map((row) => {
      const [buffer, offset, nbytes] = list(row, 'a slot', 3).map((item) => unsigned(item, 'a slot'));
      const size = buffers.get(buffer);
      if (size === undefined || offset + nbytes > size) throw malformed('a slot outside of its buffer');
      return [buffer, offset, nbytes];
    });
    const reader = new Reader(programs, slots, variables);
    const lanes = list(laneRows, 'queues', 3).map((rows, lane) =>
      list(rows, 'a queue').map((row) => reader.step(row, lane)),
    );
    checkOrder(lanes);
    const launches = lanes[COMPUTE].filter(({ op }) => op[0] === 0).length;
    return { programs, slots, lanes, variables, buffers, launches };
  }

  /** @param {Step[][]} lanes */
  function checkOrder(lanes) {
    const here = new Set();
    for (const { number } of lanes.flat()) {
      if (here.has(number)) throw malformed('a step that is there twice');
      here.add(number);
    }
    for (const lane of lanes) {
      let last = -1;
      for (const { number, waits } of lane) {
        if (number <= last) throw malformed('steps that are not in the order of their numbers');
        last = number;
        if (waits.some((wait) => wait >= number || !here.has(wait))) throw malformed('a wait on a later step');
      }
    }
  }

  /**
   * The values of a replay's variables, checked.
   * @param {Part} parsed
   * @param {any[]} values
   * @returns {(number | bigint)[]}
   * @throws {CommandError}
   */
  function checkValues(parsed, values) {
    const { variables } = parsed;
    if (values.length !== variables.length) {
      throw new wire.CommandError(
        'LaunchError',
        `a graph with ${variables.length} variables was given ${values.length} values`,
      );
    }
    values.forEach((value, index) => {
      const [name, low, high] = variables[index];
      if (!isInteger(value) || value < low || value > high) {
        const shown = String(value).slice(0, 100);
        throw new wire.CommandError('LaunchError', `${name}=${shown} is not an integer from ${low} to ${high}`);
      }
    });
    return values;
  }

  return { parse, checkValues };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, part);
