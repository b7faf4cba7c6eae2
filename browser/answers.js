'use strict';
// Answers what a queue has run, in its order, once the device is through with it: data, times, credit, acknowledgements,
// and failures that a device reports late. It runs nothing itself. Defines `answers`.

const answers = (() => {
  /** @typedef {typeof messages} Wire */
  /** @type {Wire} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;
  const { KIND } = wire;

  /** A device that goes on telling of failures is not asked more often. */
  const MAX_TRIES = 16;

  /**
   * What becomes of an error on the wire.
   * @param {any} error
   * @returns {{ code: string, message: string, details: Record<string, unknown> }}
   */
  function describe(error) {
    const code = typeof error?.code === 'string' ? error.code : 'DeviceError';
    const message = String(error?.message ?? error).slice(0, 16000);
    return { code, message, details: { ...(error?.details ?? {}) } };
  }

  /**
   * Something to answer. Without a promise it waits until the device is through with all that was given to it.
   * @typedef {{
   *   number: number,
   *   promise: Promise<any> | null,
   *   finish: (value: any) => void,
   *   credit: number,
   *   merges: boolean,
   *   tries: number,
   * }} Entry
   */

  class Answers {
    /**
     * @param {number} queue
     * @param {any} runtime
     * @param {{
     *   reply: (array: unknown[], bulk?: Uint8Array | null, inPlace?: boolean) => void,
     *   failed: (number: number) => void,
     *   lost: (error: any) => void,
     *   latest: () => number,
     * }} owner `failed` is told of each failure that the device found late, `latest` is the last command there is
     */
    constructor(queue, runtime, owner) {
      this.queue = queue;
      this.runtime = runtime;
      this.owner = owner;
      /** Nothing is answered any more. */
      this.over = false;
      this.acked = 0;
      this.lastFailed = 0;
      /** @type {number | null} The failure behind which nothing is answered. */
      this.error = null;
      /** @type {Entry[]} */
      this.entries = [];
      this.running = false;
    }

    /**
     * All up to `number` was given to the device: acknowledge it once that is over, and give `credit` back then.
     * @param {number} number
     * @param {number} credit
     */
    settle(number, credit) {
      const last = this.entries[this.entries.length - 1];
      // The first one may have asked the device already.
      if (last?.merges && this.entries.length > 1) {
        last.number = number;
        last.credit += credit;
        return;
      }
      const entry = this.add(number, null, () => {
        if (entry.credit) this.owner.reply([KIND.CREDIT, this.queue, entry.credit]);
        this.ack(entry.number);
      });
      entry.credit = credit;
      entry.merges = true;
    }

    /**
     * @param {number} number
     * @param {Promise<Uint8Array>} promise
     */
    read(number, promise) {
      this.add(number, promise, (data) => {
        if (data === undefined || this.drops(number)) {
          this.ack(number);
          return;
        }
        this.acked = number;
        this.owner.reply([KIND.READ_DATA, this.queue, number, number], data);
      });
    }

    /**
     * The seconds of a timed launch.
     * @param {number} number
     * @param {Promise<number>} promise
     */
    result(number, promise) {
      this.add(number, promise, (seconds) => {
        if (seconds !== undefined && !this.drops(number)) {
          this.owner.reply([KIND.RESULT, this.queue, number, new codec.Float(seconds)]);
        }
      });
    }

    /**
     * A command failed before it came to the device.
     * @param {number} number
     * @param {any} error
     */
    fail(number, error) {
      this.add(number, null, () => {
        if (!this.drops(number)) this.failed(number, error);
      });
    }

    /**
     * Nothing behind is answered before that is over.
     * @param {number} number
     * @param {Promise<any>} promise
     */
    barrier(number, promise) {
      this.add(number, promise, () => {});
    }

    /** The client has raised the error: what comes from here on counts again. */
    cleared() {
      this.add(0, Promise.resolve(), () => {
        this.error = null;
      });
    }

    /**
     * @param {number} number
     * @param {Promise<any> | null} promise
     * @param {(value: any) => void} finish
     * @returns {Entry}
     */
    add(number, promise, finish) {
      const entry = { number, promise, finish, credit: 0, merges: false, tries: 0 };
      promise?.catch(() => {}); // told of in its turn
      this.entries.push(entry);
      if (!this.running) void this.run();
      return entry;
    }

    async run() {
      this.running = true;
      while (this.entries.length) {
        const entry = this.entries[0];
        let value;
        try {
          value = await (entry.promise ?? this.runtime.settled());
        } catch (error) {
          if (this.over || this.broke(entry, error)) return;
          if (entry.promise === null && ++entry.tries < MAX_TRIES) continue;
        }
        if (this.over) return;
        this.entries.shift();
        entry.finish(value);
      }
      this.running = false;
    }

    /**
     * The device tells of a failure; returns whether it is the last it tells.
     * @param {Entry} entry
     * @param {any} error
     */
    broke(entry, error) {
      if (error?.code === 'DeviceLost' || error?.code === 'Timeout') {
        this.owner.lost(error);
        return true;
      }
      const number = typeof error?.details?.number === 'number' ? error.details.number : entry.number;
      if (!this.drops(number) && this.failed(number, error)) this.owner.failed(/** @type {number} */ (this.error));
      return false;
    }

    /**
     * Whether a command is dropped, by what the device has told so far.
     * @param {number} number
     */
    drops(number) {
      return this.error !== null && number > this.error;
    }

    /**
     * Tells the server of a failure; returns whether there was a command left to have it.
     * @param {number} number
     * @param {any} error
     */
    failed(number, error) {
      const { code, message, details } = describe(error);
      delete details.number;
      // A device may name a command late; what was acknowledged can't fail any more.
      const named = Math.max(number, this.acked + 1, this.lastFailed + 1);
      if (named > this.owner.latest()) return false;
      this.error = this.lastFailed = named;
      this.owner.reply([KIND.FAILED, this.queue, named, code, message, details]);
      return true;
    }

    /** @param {number} number */
    ack(number) {
      if (number <= this.acked) return;
      this.acked = number;
      this.owner.reply([KIND.ACK, this.queue, number]);
    }
  }

  /** @type {typeof cbor} */
  const codec = typeof cbor === 'undefined' ? module?.require('./cbor.js') : cbor;

  return { Answers, describe };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, answers);
