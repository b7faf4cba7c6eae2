'use strict';
// A node's numbered messages over one connection after another: what to keep until the server has seen it, what to send
// again. The JavaScript of wsgrad/transport/link.py; it knows no socket. Defines `link`.

const link = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;

  /** Of smaller kinds are messages that belong to one connection; the others are counted, at both ends. */
  const FIRST_NUMBERED = 16;
  const SEEN_MESSAGES = 64;
  const SEEN_BYTES = 1 << 19;
  /** More can't be kept: a server that has not seen so much is not worth waiting for. */
  const MAX_KEPT = 64 << 20;
  /** Copies from this size on are made in memory that is used again: the browser zeroes what is new. */
  const LARGE = 1 << 16;
  const MOST_SPARE = 8;

  class Link {
    constructor() {
      /** Numbered messages of the server that have come. */
      this.received = 0;
      this.keptBytes = 0;
      /** @type {Uint8Array[]} What the server may not have, in order. */
      this.kept = [];
      /** @type {ArrayBuffer[]} Of large copies that are not needed any more. */
      this.spare = [];
      this.count = 0;
      this.messagesSince = 0;
      this.bytesSince = 0;
    }

    /** Whether more is kept than may be. */
    get overfull() {
      return this.keptBytes > MAX_KEPT;
    }

    /**
     * Keeps a copy of a message that is sent now, or would be if there was a connection.
     * @param {Uint8Array} bytes
     */
    keep(bytes) {
      this.kept.push(bytes.length < LARGE ? bytes.slice() : this.copied(bytes));
      this.keptBytes += bytes.length;
    }

    /** @param {Uint8Array} bytes */
    copied(bytes) {
      const at = this.spare.findIndex((buffer) => buffer.byteLength >= bytes.length);
      const [buffer] = at < 0 ? [new ArrayBuffer(bytes.length)] : this.spare.splice(at, 1);
      const copy = new Uint8Array(buffer, 0, bytes.length);
      copy.set(bytes);
      return copy;
    }

    /**
     * The server has so many numbered messages.
     * @param {number} count
     */
    seen(count) {
      const more = count - this.count;
      if (more < 0 || more > this.kept.length) {
        const sent = this.count + this.kept.length;
        throw new wire.ProtocolError(`the server has seen ${count} messages of ${sent}, and had seen ${this.count}`);
      }
      for (const bytes of this.kept.splice(0, more)) {
        this.keptBytes -= bytes.length;
        const { buffer } = bytes;
        if (buffer.byteLength >= LARGE && this.spare.length < MOST_SPARE) this.spare.push(/** @type {ArrayBuffer} */ (buffer));
      }
      this.count = count;
    }

    /**
     * There is a new connection, and the server has so many: the rest, to be sent again before anything else.
     * @param {number} count
     */
    resume(count) {
      this.seen(count);
      this.messagesSince = this.bytesSince = 0;
      return this.kept;
    }

    /**
     * Counts a numbered message of the server; whether it is time to tell it how many have come.
     * @param {number} nbytes
     */
    noteReceived(nbytes) {
      this.received += 1;
      this.messagesSince += 1;
      this.bytesSince += nbytes;
      if (this.messagesSince < SEEN_MESSAGES && this.bytesSince < SEEN_BYTES) return false;
      this.messagesSince = this.bytesSince = 0;
      return true;
    }
  }

  return { FIRST_NUMBERED, Link };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, link);
