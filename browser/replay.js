'use strict';
// Runs a graph's steps on one runtime, up to the next transfer at a time: the JavaScript of wsgrad/devices/replay.py. What
// is transferred, how, and what becomes of an error is the executor's. Defines `replay`.

const replay = (() => {
  /** @type {typeof cbor} */
  const codec = typeof cbor === 'undefined' ? module?.require('./cbor.js') : cbor;
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;
  /** @type {typeof part} */
  const parts = typeof part === 'undefined' ? module?.require('./part.js') : part;

  const SEND = 3;
  const RECEIVE = 4;
  const MAX_NBYTES = 1 << 26;
  const MAX_ITEMS = 1 << 26;

  /** @typedef {{ memory: any, offset: number }} Place */
  /** @typedef {(buffer: number, offset: number, nbytes: number) => Place} Lookup */
  /**
   * A replay has come to a transfer, which is the executor's to do before it goes on.
   * @typedef {{ place: number, sends: boolean, at: Place, nbytes: number }} Halt
   */

  /** A step failed; the ones before it have run. */
  class ReplayFailure extends Error {
    /**
     * @param {number} step its number in the graph
     * @param {Error} error
     * @param {string | null} program what it would have launched
     */
    constructor(step, error, program) {
      super(error.message);
      this.step = step;
      this.error = error;
      this.program = program;
    }
  }

  /**
   * Arrays of unsigned integers, all of the same length.
   * @param {any} value
   * @param {number} width
   * @returns {number[][]}
   */
  function rows(value, width) {
    if (!Array.isArray(value)) throw new wire.ProtocolError('bindings that are no array');
    for (const row of value) {
      const fits = Array.isArray(row) && row.length === width;
      if (!fits || !row.every((/** @type {any} */ item) => Number.isSafeInteger(item) && item >= 0)) {
        throw new wire.ProtocolError('a binding that is none');
      }
    }
    return value;
  }

  /** A graph's part on one queue. */
  class Graph {
    /**
     * @param {Uint8Array} data in CBOR the device's part and, in pairs, its buffers and what they stand for
     * @param {any} runtime
     */
    constructor(data, runtime) {
      const array = decode(data);
      if (!Array.isArray(array) || array.length !== 2) throw new wire.ProtocolError('a graph without its bindings');
      this.part = parts.parse(array[0]);
      /** @type {Map<number, [number, number]>} */
      this.bindings = new Map(rows(array[1], 2).map(([number, buffer]) => [number, [buffer, 0]]));
      const { buffers } = this.part;
      if (this.bindings.size !== buffers.size || ![...buffers.keys()].every((number) => this.bindings.has(number))) {
        throw new wire.ProtocolError('a graph whose bindings are not those of its buffers');
      }
      this.transfers = this.part.lanes[1].length + this.part.lanes[2].length;
      /** @type {any} */
      this.prepared = null;
      /** @type {any} */
      this.runtime = runtime;
      /** @type {{ steps: { number: number, op: any[] }[] }[]} Runs of the runtime's, and between them each transfer. */
      this.queue = [];
      /** @type {Error | null} What can't be prepared fails where it is run. */
      this.broken = null;
      try {
        this.prepared = runtime.prepare(this.part);
        const ours = [...this.part.lanes[1], ...this.part.lanes[2]].map((step) => ({ steps: [step] }));
        this.queue = [...this.prepared.queue, ...ours].sort((a, b) => a.steps[0].number - b.steps[0].number);
      } catch (error) {
        this.broken = /** @type {Error} */ (error);
      }
      /** @type {Place[]} */
      this.slots = [];
      this.bound = '';
    }

    /**
     * Runs the graph once.
     * @param {Lookup} lookup finds a buffer's memory
     * @param {number} generation changes whenever an id may have come to mean another range
     * @param {any} bindings `[buffer number, buffer, offset]` for what stands for something else in this replay
     * @param {any[]} values of the variables
     * @param {number} number the replay's command
     * @returns {Generator<Halt, void, void>}
     */
    *replay(lookup, generation, bindings, values, number) {
      if (this.broken !== null) throw this.broken;
      this.bind(lookup, generation, rows(bindings, 3));
      const checked = parts.checkValues(this.part, values);
      if (checked.length) this.prepared.patch(checked);
      const { runtime, part } = this;
      let position = 1;
      let transfer = 0;
      for (const entry of this.queue) {
        const [{ op }] = entry.steps;
        if (op[0] === SEND || op[0] === RECEIVE) {
          yield { place: transfer, sends: op[0] === SEND, at: this.slots[op[1]], nbytes: part.slots[op[1]][2] };
          transfer += 1;
        } else {
          runtime.number = number;
          if (runtime.trace) runtime.trace.step = position;
          const failure = this.prepared.run(entry, position);
          if (runtime.trace) runtime.trace.step = 0;
          if (failure !== null) {
            throw new ReplayFailure(entry.steps[failure.number - position].number, failure.error, failure.program);
          }
        }
        position += entry.steps.length;
      }
    }

    close() {
      this.prepared?.close();
    }

    /**
     * @param {Lookup} lookup
     * @param {number} generation
     * @param {number[][]} changes
     */
    bind(lookup, generation, changes) {
      const bound = `${generation} ${changes.join(' ')}`;
      if (this.bound === bound) return;
      const bindings = new Map(this.bindings);
      for (const [number, buffer, offset] of changes) {
        if (!bindings.has(number)) {
          throw new wire.ProtocolError('a replay that substitutes a buffer which its graph does not have');
        }
        bindings.set(number, [buffer, offset]);
      }
      this.bound = '';
      this.slots = this.part.slots.map(([of, at, nbytes], slot) => {
        const [buffer, offset] = /** @type {[number, number]} */ (bindings.get(of));
        const place = lookup(buffer, offset + at, nbytes);
        this.prepared.bind(slot, place.memory, place.offset, nbytes);
        return place;
      });
      this.bound = bound;
    }
  }

  /** @param {Uint8Array} data */
  function decode(data) {
    try {
      return codec.decode(data, { maxItems: MAX_ITEMS });
    } catch (error) {
      if (error instanceof codec.CborError) throw new wire.ProtocolError(`a graph is malformed: ${error.message}`);
      throw error;
    }
  }

  /** The graphs of one queue, and the chunks that came for their replays before these got to them. */
  class Graphs {
    /** @param {any} runtime */
    constructor(runtime) {
      this.runtime = runtime;
      /** @type {Map<number, Graph>} */
      this.graphs = new Map();
      /** @type {Map<number, { data: Uint8Array, filled: number }>} */
      this.pieces = new Map();
      /** @type {Map<number, { message: any, data: Uint8Array }[]>} */
      this.kept = new Map();
      /** @type {Map<number, any>} */
      this.failures = new Map();
    }

    /**
     * Takes a piece of a graph; with the last one it is made ready.
     * @param {any} message
     * @param {Uint8Array} piece
     * @throws {ProtocolError}
     */
    add(message, piece) {
      const { graph, offset, total } = message;
      const known = this.pieces.get(graph);
      const filled = known?.filled ?? 0;
      const fits = offset === filled && offset + piece.length <= total && (known?.data.length ?? total) === total;
      if (!fits || total > MAX_NBYTES) {
        throw new wire.ProtocolError(`${piece.length} bytes at ${offset} of a graph do not follow ${filled} bytes`);
      }
      const data = known?.data ?? new Uint8Array(total);
      data.set(piece, offset);
      if (offset + piece.length < total) {
        this.pieces.set(graph, { data, filled: offset + piece.length });
        return;
      }
      this.pieces.delete(graph);
      this.forget(graph);
      this.graphs.set(graph, new Graph(data, this.runtime));
    }

    /**
     * A graph goes, if there is one.
     * @param {number} graph
     */
    forget(graph) {
      this.graphs.get(graph)?.close();
      this.graphs.delete(graph);
    }

    /**
     * A replay will come: chunks for it may come before.
     * @param {any} message
     * @throws {ProtocolError} of a graph that is not there
     */
    announced(message) {
      for (const transfer of this.transfers(message)) this.kept.set(transfer, []);
    }

    /**
     * The graph that a replay runs.
     * @param {any} message
     * @returns {Graph}
     */
    start(message) {
      const graph = this.graphs.get(message.graph);
      if (graph === undefined) throw new wire.ProtocolError(`a replay of graph ${message.graph}, which is not here`);
      return graph;
    }

    /**
     * A replay is over, or was dropped. Returns how many chunks had come for it and go unused.
     * @param {any} message
     */
    over(message) {
      this.failures.delete(message.number);
      let unused = 0;
      for (const transfer of this.transfers(message)) {
        unused += this.kept.get(transfer)?.length ?? 0;
        this.kept.delete(transfer);
      }
      return unused;
    }

    /**
     * Keeps a chunk if it is for an announced replay.
     * @param {any} message
     * @param {Uint8Array} data
     */
    keep(message, data) {
      const kept = this.kept.get(message.transfer);
      kept?.push({ message, data });
      return kept !== undefined;
    }

    /**
     * The next chunk that came for a transfer.
     * @param {number} transfer
     */
    take(transfer) {
      return this.kept.get(transfer)?.shift();
    }

    close() {
      for (const graph of [...this.graphs.keys()]) this.forget(graph);
    }

    /** @param {any} message */
    transfers(message) {
      const { transfers } = this.start(message);
      return Array.from({ length: transfers }, (_, place) => message.transfer + place);
    }
  }

  return { Graphs, ReplayFailure };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, replay);
