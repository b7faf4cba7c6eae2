'use strict';
// What the ids of one queue's buffers and views stand for: ranges of memory that goes with the last id on it. The
// JavaScript of wsgrad/devices/ranges.py, for a runtime whose memory takes a while to come. Defines `ranges`.

const ranges = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;

  /** Ids from here on are no client's. */
  const SLOTS_FROM = 2 ** 31;

  /** What a tab's owner lends to all sessions together; 0 is as much as there is. */
  class Budget {
    constructor() {
      this.cap = 0;
      this.used = 0;
    }

    /**
     * @param {number} nbytes
     * @throws {CommandError}
     */
    take(nbytes) {
      if (this.cap && this.used + nbytes > this.cap) {
        throw new wire.CommandError(
          'OutOfMemory',
          `${nbytes} bytes do not fit: of the ${this.cap} bytes that this device's owner lends, ${this.used} are in use`,
          { nbytes, cap: this.cap, used: this.used },
        );
      }
      this.used += nbytes;
    }

    /** @param {number} nbytes */
    give(nbytes) {
      this.used -= nbytes;
    }
  }

  /** @typedef {{ memory: any, nbytes: number, references: number }} Base */

  class Ranges {
    /**
     * @param {any} runtime
     * @param {Budget} budget
     */
    constructor(runtime, budget) {
      this.runtime = runtime;
      this.budget = budget;
      /** How many ids were freed: only then may one come to stand for something else. */
      this.frees = 0;
      /** Bytes of this queue's memory. */
      this.used = 0;
      /** @type {Map<number, { base: Base, offset: number, nbytes: number }>} */
      this.known = new Map();
      /** @type {Set<number>} */
      this.coming = new Set();
    }

    /**
     * New memory under a new id.
     * @param {number} buffer
     * @param {number} nbytes
     */
    async alloc(buffer, nbytes) {
      this.checkNew(buffer);
      this.budget.take(nbytes);
      this.used += nbytes;
      this.coming.add(buffer);
      try {
        const memory = await this.runtime.allocate(nbytes);
        try {
          this.runtime.bind(buffer, memory, 0, nbytes);
        } catch (error) {
          this.runtime.release(memory);
          throw error;
        }
        this.known.set(buffer, { base: { memory, nbytes, references: 1 }, offset: 0, nbytes });
      } catch (error) {
        this.giveBack(nbytes);
        throw error;
      } finally {
        this.coming.delete(buffer);
      }
    }

    /**
     * A range of a buffer under a new id.
     * @param {number} view
     * @param {number} buffer
     * @param {number} offset
     * @param {number} nbytes
     */
    view(view, buffer, offset, nbytes) {
      this.checkNew(view);
      const place = this.place(buffer, offset, nbytes);
      this.runtime.bind(view, place.memory, place.offset, nbytes);
      this.known.set(view, { base: place.base, offset: place.offset, nbytes });
      place.base.references += 1;
    }

    /**
     * An id goes; one that there never was is let pass: what should have made it was dropped.
     * @param {number} buffer
     */
    free(buffer) {
      const held = this.known.get(buffer);
      if (held === undefined) return;
      this.known.delete(buffer);
      this.frees += 1;
      this.runtime.unbind(buffer);
      held.base.references -= 1;
      if (held.base.references === 0) {
        this.runtime.release(held.base.memory);
        this.giveBack(held.base.nbytes);
      }
    }

    /**
     * The memory of a range of a buffer or view, checked.
     * @param {number} buffer
     * @param {number} offset
     * @param {number} nbytes
     */
    place(buffer, offset, nbytes) {
      const held = this.known.get(buffer);
      if (held === undefined) {
        const why = 'it was freed, or an earlier error kept it from being made';
        throw new wire.CommandError('DeviceError', `there is no buffer ${buffer}; ${why}`);
      }
      if (offset + nbytes > held.nbytes) {
        const what = `bytes ${offset} to ${offset + nbytes} are outside buffer ${buffer} of ${held.nbytes} bytes`;
        throw new wire.CommandError('DeviceError', what);
      }
      return { memory: held.base.memory, offset: held.offset + offset, base: held.base };
    }

    /** Forgets all ids; the memory is the runtime's to free. */
    clear() {
      this.known.clear();
      this.giveBack(this.used);
    }

    /** @param {number} nbytes */
    giveBack(nbytes) {
      const given = Math.min(nbytes, this.used); // nothing is left once all was cleared
      this.used -= given;
      this.budget.give(given);
    }

    /** @param {number} buffer */
    checkNew(buffer) {
      if (this.known.has(buffer) || this.coming.has(buffer)) {
        throw new wire.CommandError('DeviceError', `there is a buffer ${buffer} already`);
      }
      if (buffer >= SLOTS_FROM) {
        throw new wire.CommandError('DeviceError', `buffer id ${buffer} is too large; ids go up to ${SLOTS_FROM - 1}`);
      }
    }
  }

  return { Budget, Ranges };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, ranges);
