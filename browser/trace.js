'use strict';
// Measures what one queue's device does while a timeline is made, as wsgrad/devices/trace.py does: notes spans and sends
// them, some at a time. What is measured is the executor's and the runtime's business. Defines `trace`.

const trace = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;

  const RECORD_NBYTES = 56;
  const ROOM = Math.floor((1 << 16) / RECORD_NBYTES);
  const PERIOD_NANOSECONDS = 20e6;
  const KEPT_REPLAYS = 1024;

  const SPAN = Object.freeze({
    LAUNCH: 1,
    REPLAY: 2,
    UPLOAD: 3,
    DOWNLOAD: 4,
    COPY: 5,
    FILL: 6,
    READ: 7,
    WRITE: 8,
    ALLOC: 9,
    COMPILE: 10,
  });

  /** Nanoseconds of the clock that spans and `Time` use. */
  function now() {
    return Math.round(performance.now() * 1e6);
  }

  /** Something that is being measured. */
  class Span {
    /**
     * @param {DeviceTrace} owner
     * @param {number} kind
     * @param {number} program
     * @param {number} graph
     * @param {number} step
     * @param {number} number
     * @param {number} nbytes
     * @param {number} start
     */
    constructor(owner, kind, program, graph, step, number, nbytes, start) {
      this.owner = owner;
      this.values = [kind, program, graph, step, number, nbytes];
      this.start = start;
    }

    /** It is over. */
    close() {
      this.owner.note(this.values, this.start, now());
    }
  }

  /** The spans of a queue. Of a graph's replay they are its steps, else commands. */
  class DeviceTrace {
    /**
     * @param {number} queue
     * @param {number} trace the timeline's number
     * @param {(array: unknown[], bulk: Uint8Array) => void} reply
     */
    constructor(queue, trace, reply) {
      this.trace = trace;
      /** Which step of a graph is run: its place in the device's order, from 1. */
      this.step = 0;
      this.queue = queue;
      this.reply = reply;
      this.graph = 0;
      this.number = 0;
      this.began = now();
      this.sentAt = this.began;
      this.view = new DataView(new ArrayBuffer(ROOM * RECORD_NBYTES));
      this.used = 0;
      this.ended = false;
      /** @type {Map<number, number>} Graphs by the commands that replayed them, for launches whose times come later. */
      this.replays = new Map();
    }

    /**
     * From now on what is measured belongs to this replay; 0 and 0: it is a command of its own again.
     * @param {number} graph
     * @param {number} number
     */
    replaying(graph, number) {
      this.graph = graph;
      this.number = number;
      this.step = 0;
      if (number) this.replays.set(number, graph);
      if (this.replays.size > KEPT_REPLAYS) this.replays.delete(/** @type {number} */ (this.replays.keys().next().value));
    }

    /**
     * The runtime tells when a launch ran, in milliseconds.
     * @param {{ number: number, program: number, step: number, start: number, end: number }} span
     */
    launched({ number, program, step, start, end }) {
      const graph = this.replays.get(number) ?? 0;
      this.note([SPAN.LAUNCH, program, graph, graph ? step : 0, number, 0], start * 1e6, end * 1e6);
    }

    /**
     * Begins a span. During a replay it is the present step's, whatever `number` is.
     * @param {number} kind
     * @param {number} number
     * @param {number} [program]
     * @param {number} [nbytes]
     */
    open(kind, number, program = 0, nbytes = 0) {
      const of = this.graph ? this.number : number;
      return new Span(this, kind, program, this.graph, this.graph ? this.step : 0, of, nbytes, now());
    }

    /**
     * Notes a whole replay, as far as it belongs to the timeline: transfers may have held it for long.
     * @param {number} start
     * @param {number} graph
     * @param {number} number
     */
    replayed(start, graph, number) {
      this.note([SPAN.REPLAY, 0, graph, 0, number, 0], Math.max(start, this.began), now());
    }

    /**
     * @param {number[]} values
     * @param {number} start
     * @param {number} end
     */
    note(values, start, end) {
      if (this.ended) return;
      if (this.used === ROOM) this.flush();
      const [kind, program, graph, step, number, nbytes] = values;
      const { view } = this;
      const at = this.used * RECORD_NBYTES;
      view.setUint16(at, kind, true);
      view.setUint32(at + 4, program, true);
      view.setUint32(at + 12, graph, true);
      view.setUint32(at + 16, step, true);
      view.setBigUint64(at + 24, BigInt(number), true);
      view.setBigInt64(at + 32, BigInt(Math.round(start)), true);
      view.setBigInt64(at + 40, BigInt(Math.round(end)), true);
      view.setBigUint64(at + 48, BigInt(nbytes), true);
      this.used += 1;
    }

    /**
     * Sends what there is.
     * @param {boolean} [last]
     */
    flush(last = false) {
      if (this.used === 0 && !last) return;
      this.reply(
        [wire.KIND.SPANS, this.queue, this.trace, last],
        new Uint8Array(this.view.buffer, 0, this.used * RECORD_NBYTES),
      );
      this.used = 0;
      this.sentAt = now();
    }

    /** A message has been worked off: sends what there is, if it is much or old. */
    settle() {
      if (this.used > ROOM / 2 || now() - this.sentAt > PERIOD_NANOSECONDS) this.flush();
    }

    /** Nothing more will be noted. */
    end() {
      this.flush(true);
      this.ended = true;
    }
  }

  /**
   * The only answer where nothing was measured.
   * @param {{ queue: number, trace: number }} profile
   */
  function nothing({ queue, trace: number }) {
    return [wire.KIND.SPANS, queue, number, true];
  }

  return { SPAN, DeviceTrace, now, nothing };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, trace);
