'use strict';
// The upload and the download of one queue that are under way, chunk by chunk, and their credit. In which order with
// other commands is the executor's business. Defines `transfers`.

const transfers = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;
  /** @type {typeof trace} */
  const tracing = typeof trace === 'undefined' ? module?.require('./trace.js') : trace;
  const { KIND, ProtocolError } = wire;
  const { SPAN } = tracing;

  /** @typedef {{ memory: any, offset: number }} Place */
  /**
   * An upload under way; without a place its bytes are thrown away behind an error.
   * @typedef {{ number: number, transfer: number, place: Place | null, nbytes: number, received: number }} Upload
   */
  /**
   * A download under way: `started` bytes were asked of the device, `sent` of them are with the server; `early` holds
   * chunks that the device gave out of turn.
   * @typedef {{
   *   number: number, transfer: number, place: Place, nbytes: number, started: number, sent: number, failed: boolean,
   *   chunks: Promise<void>[], early: Map<number, Uint8Array>,
   * }} Download
   */

  class Transfers {
    /**
     * @param {number} queue
     * @param {any} runtime
     * @param {{ barrier: (number: number, promise: Promise<any>) => void }} answers
     * @param {{
     *   reply: (array: unknown[], bulk?: Uint8Array | null, inPlace?: boolean) => void,
     *   done: (number: number) => void,
     *   sent: (nbytes: number) => void,
     * }} owner `done` is told of each command whose bytes have all come, or were all asked of the device
     */
    constructor(queue, runtime, answers, owner) {
      this.queue = queue;
      this.runtime = runtime;
      this.answers = answers;
      this.owner = owner;
      /** @type {Upload | null} */
      this.upload = null;
      /** @type {Download | null} */
      this.download = null;
      /** Chunks that may be sent. */
      this.credit = wire.SLOTS;
      /** Chunks that were written and whose credit the server does not have back. */
      this.owed = 0;
      this.closed = false;
    }

    // -- uploads

    /**
     * An upload behind an error: its bytes are thrown away.
     * @param {number} number
     * @param {number} transfer
     * @param {number} nbytes
     */
    discard(number, transfer, nbytes) {
      this.upload = { number, transfer, place: null, nbytes, received: 0 };
    }

    /**
     * @param {any} message
     * @param {Uint8Array} data
     */
    chunk(message, data) {
      const { upload } = this;
      if (upload === null || upload.transfer !== message.transfer) {
        // Chunks of a dropped upload may still be on their way.
        this.owner.reply([KIND.CREDIT, this.queue, 1]);
        return;
      }
      if (message.offset !== upload.received || upload.received + data.length > upload.nbytes) {
        throw new ProtocolError(
          `a chunk of ${data.length} bytes at ${message.offset} does not continue upload ${upload.transfer}, ` +
            `which has ${upload.received} of ${upload.nbytes} bytes`,
        );
      }
      this.owed += 1;
      if (upload.place !== null && data.length) {
        const span = this.runtime.trace?.open(SPAN.UPLOAD, upload.number, 0, data.length);
        this.runtime.number = upload.number;
        try {
          this.runtime.write(upload.place.memory, upload.place.offset + message.offset, data);
        } finally {
          span?.close();
        }
      }
      upload.received += data.length;
      if (upload.received === upload.nbytes) this.endUpload(upload);
    }

    /**
     * The sender ends an upload early.
     * @param {number} transfer
     */
    abort(transfer) {
      if (this.upload?.transfer === transfer) this.endUpload(this.upload);
    }

    /** @param {Upload} upload */
    endUpload(upload) {
      this.upload = null;
      this.owner.done(upload.number);
    }

    /** The credit to give back once the device is through with what was written. */
    takeOwed() {
      const { owed } = this;
      this.owed = 0;
      return owed;
    }

    // -- downloads

    /**
     * @param {number} number
     * @param {number} transfer
     * @param {Place} place
     * @param {number} nbytes
     */
    begin(number, transfer, place, nbytes) {
      const progress = { started: 0, sent: 0, failed: false, chunks: [], early: new Map() };
      this.download = { number, transfer, place, nbytes, ...progress };
    }

    /** Asks the device for what the credit allows; returns whether no download holds the queue. */
    pump() {
      const { download } = this;
      if (download === null) return true;
      while (download.started < download.nbytes && !download.failed) {
        if (this.credit === 0) return false;
        const nbytes = Math.min(wire.CHUNK_BYTES, download.nbytes - download.started);
        this.credit -= 1;
        const chunk = this.send(download, download.started, nbytes);
        chunk.catch(() => {}); // told of when the download is over
        download.chunks.push(chunk);
        download.started += nbytes;
      }
      this.endDownload(download);
      return true;
    }

    /**
     * The reader wants no more of a download. Returns whether it is under way.
     * @param {number} transfer
     */
    stop(transfer) {
      const { download } = this;
      if (download === null || download.transfer !== transfer) return false;
      this.endDownload(download);
      return true;
    }

    /** @param {Download} download */
    endDownload(download) {
      this.download = null;
      this.owner.done(download.number);
      const sent = Promise.all(download.chunks).finally(() => {
        this.credit += download.early.size; // behind one that failed
        download.early.clear();
      });
      this.answers.barrier(download.number, sent);
    }

    /**
     * @param {Download} download
     * @param {number} offset
     * @param {number} nbytes
     */
    async send(download, offset, nbytes) {
      const { place } = download;
      const span = this.runtime.trace?.open(SPAN.DOWNLOAD, download.number, 0, nbytes);
      try {
        await this.runtime.download(place.memory, place.offset + offset, nbytes, (/** @type {Uint8Array} */ view) =>
          this.read(download, offset, view),
        );
      } catch (error) {
        download.failed = true;
        this.credit += 1;
        throw error;
      } finally {
        span?.close();
      }
    }

    /**
     * A chunk's bytes are there, for as long as this call lasts.
     * @param {Download} download
     * @param {number} offset
     * @param {Uint8Array} view
     */
    read(download, offset, view) {
      if (this.closed) return;
      if (offset !== download.sent) {
        download.early.set(offset, view.slice());
        return;
      }
      /** @type {Uint8Array | undefined} */
      let next = view;
      while (next !== undefined) {
        this.owner.sent(next.length);
        this.owner.reply([KIND.CHUNK, this.queue, download.transfer, download.sent], next, true);
        download.sent += next.length;
        const following = download.early.get(download.sent);
        download.early.delete(download.sent);
        next = following;
      }
    }
  }

  return { Transfers };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, transfers);
