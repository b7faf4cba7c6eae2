'use strict';
// Memory of one GPUDevice and the ways that bytes go in and out, to the byte. It knows no program of a client. A classic
// script for a page or a worker: it defines `gpuMemory`.

/**
 * What `allocate` gives: `size` is what the GPU buffer really has, and the bytes behind `nbytes` mean nothing.
 * @typedef {{id: number, buffer: GPUBuffer, nbytes: number, size: number}} GpuMemory
 */
/** @typedef {(view: Uint8Array) => void} GpuSend */
/** @typedef {{start: number, skip: number, nbytes: number, resolve: (data: Uint8Array) => void, reject: (error: unknown) => void}} GpuPageRead */
/** @typedef {{buffer: GPUBuffer, used: number, reads: GpuPageRead[]}} GpuPage */
/** @typedef {InstanceType<typeof gpuMemory.MemoryPool>} GpuMemoryPool */

const gpuMemory = (() => {
  const { GpuError, SLOT } = gpuQueue;
  const { words, wordBelow } = gpuCopy;
  /** Memory up to here is given without asking the device whether it has it: that costs a round trip. */
  const UNASKED_NBYTES = 256 * 1024;
  /** Writes up to here go along with the launches around them. */
  const SMALL_WRITE = 4 * SLOT;
  /** Reads up to here share a staging buffer. */
  const SMALL_READ = 4096;
  /** Before a download's bytes there is room for the head of a message. */
  const HEAD_ROOM = 64;
  const PAGE_NBYTES = 64 * 1024;

  class MemoryPool {
    /**
     * @param {GpuQueue} queue
     * @param {number | null} cap bytes that all buffers may take together.
     */
    constructor(queue, cap) {
      this.queue = queue;
      this.device = queue.device;
      this.cap = cap;
      this.usedBytes = 0;
      this.nextId = 1;
      this.copier = new gpuCopy.Copier(queue);
      /** Free staging buffers. */
      this.staging = new gpuCopy.Spares(queue);
      /** @type {{batch: object, page: GpuPage} | null} the open batch's shared staging buffer. */
      this.open = null;
      /** @type {Promise<unknown>} settles when the downloads so far have been sent. */
      this.downloads = Promise.resolve();
      this.flushSoon = new soon.Soon(() => this.queue.flush());
    }

    // -- memory

    /**
     * New zeroed memory.
     * @param {number} nbytes
     * @returns {Promise<GpuMemory>}
     */
    async allocate(nbytes) {
      const { device, cap, usedBytes } = this;
      if (cap !== null && usedBytes + nbytes > cap) {
        throw new GpuError('OutOfMemory', `${nbytes} bytes don't fit: ${usedBytes} of the device's ${cap} bytes are in use`, {
          nbytes,
          used: usedBytes,
          limit: cap,
        });
      }
      const size = Math.max(4, words(nbytes));
      if (size > device.limits.maxBufferSize) {
        const limit = device.limits.maxBufferSize;
        throw new GpuError('OutOfMemory', `${nbytes} bytes are more than one buffer of this GPU can have: ${limit}`, {
          nbytes,
          limit,
        });
      }
      this.usedBytes += nbytes;
      if (nbytes <= UNASKED_NBYTES) {
        this.queue.open();
        return { id: this.nextId++, buffer: device.createBuffer({ size, usage: gpuCopy.usage() }), nbytes, size };
      }
      device.pushErrorScope('validation');
      device.pushErrorScope('out-of-memory');
      const buffer = device.createBuffer({ size, usage: gpuCopy.usage() });
      const scopes = [device.popErrorScope(), device.popErrorScope()];
      const errors = await this.queue.answer(Promise.all(scopes.map((scope) => scope.catch(() => null))));
      const error = errors[0] ?? errors[1];
      if (!error && !this.queue.failure) return { id: this.nextId++, buffer, nbytes, size };
      this.usedBytes -= nbytes;
      buffer.destroy();
      if (this.queue.failure) throw this.queue.failure;
      throw new GpuError('OutOfMemory', `the GPU has no room for ${nbytes} bytes on top of ${this.usedBytes}`, {
        nbytes,
        used: this.usedBytes,
      });
    }

    /** @param {GpuMemory} memory */
    release(memory) {
      this.usedBytes -= memory.nbytes;
      this.queue.destroy(memory.buffer);
    }

    /** Wakes nobody any more; the buffers go with their device. */
    close() {
      this.flushSoon.close();
    }

    // -- in

    /**
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {Uint8Array} bytes
     */
    write(memory, offset, bytes) {
      const { queue } = this;
      const nbytes = bytes.length;
      if (!nbytes) return;
      if (nbytes <= SMALL_WRITE && (queue.batch?.encoder || offset % 4 || nbytes % 4)) {
        queue.reserve(2 + SMALL_WRITE / SLOT);
        queue.open();
        this.copier.copyBytes(memory.buffer, offset, queue.arena, queue.place(bytes), nbytes);
        return;
      }
      const head = Math.min(nbytes, -offset & 3);
      const body = wordBelow(nbytes - head);
      if (head) this.write(memory, offset, bytes.subarray(0, head));
      if (body < nbytes - head) this.write(memory, offset + head + body, bytes.subarray(head + body));
      if (!body) return;
      queue.flush();
      if (queue.failure) throw queue.failure;
      const { buffer, byteOffset } = bytes;
      this.device.queue.writeBuffer(memory.buffer, offset + head, buffer, byteOffset + head, body);
    }

    // -- out

    /**
     * The bytes as they are after everything before this call.
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     * @returns {Promise<Uint8Array>}
     */
    read(memory, offset, nbytes) {
      if (!nbytes) return Promise.resolve(new Uint8Array(0));
      const start = wordBelow(offset);
      const length = words(offset + nbytes) - start;
      if (length > SMALL_READ) {
        return this.readBack(memory, offset, nbytes, (view) => view.slice());
      }
      if (this.open && this.open.batch === this.queue.batch && this.open.page.used + length > PAGE_NBYTES) {
        this.queue.flush();
      }
      const page = this.page();
      this.queue.encoder().copyBufferToBuffer(memory.buffer, start, page.buffer, page.used, length);
      // Reads that nobody flushes for would wait for ever; those of one task still share a submission.
      this.flushSoon.ask();
      return new Promise((resolve, reject) => {
        page.reads.push({ start: page.used, skip: offset - start, nbytes, resolve, reject });
        page.used += length;
      });
    }

    /**
     * Calls `send` once with a view of the bytes that is good during the call; the calls come in the order of theirs. The
     * 64 bytes before the view may be written, for the head of a message.
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     * @param {GpuSend} send
     * @returns {Promise<void>}
     */
    download(memory, offset, nbytes, send) {
      return this.readBack(memory, offset, nbytes, send);
    }

    /**
     * @template T
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes
     * @param {(view: Uint8Array) => T} use
     * @returns {Promise<T>}
     */
    readBack(memory, offset, nbytes, use) {
      const { queue } = this;
      const start = wordBelow(offset);
      const length = words(offset + nbytes) - start;
      queue.open();
      const staging = this.stagingBuffer(HEAD_ROOM + length);
      queue.encoder().copyBufferToBuffer(memory.buffer, start, staging, HEAD_ROOM, length);
      /** @type {Promise<GpuSubmission>} */
      const submitted = new Promise((resolve) => queue.after(resolve));
      queue.flush();
      const before = this.downloads.catch(() => undefined);
      const mapped = staging.mapAsync(GPUMapMode.READ, 0, HEAD_ROOM + length).then(
        () => null,
        (error) => error,
      );
      const result = (async () => {
        try {
          const refused = await queue.answer(mapped);
          await queue.verify(await submitted);
          await before;
          if (refused) throw await this.whyNotMapped(refused);
          return use(new Uint8Array(staging.getMappedRange(0, HEAD_ROOM + length), HEAD_ROOM + offset - start, nbytes));
        } catch (error) {
          staging.destroy();
          throw error;
        } finally {
          if (staging.mapState === 'mapped') {
            staging.unmap();
            this.staging.keep(staging);
          }
        }
      })();
      this.downloads = result.catch(() => undefined);
      return result;
    }

    /**
     * @param {number} nbytes
     * @returns {GPUBuffer}
     */
    stagingBuffer(nbytes) {
      const size = Math.ceil(nbytes / PAGE_NBYTES) * PAGE_NBYTES;
      const kept = this.staging.take(size);
      if (kept) return kept;
      const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
      return this.device.createBuffer({ label: 'wsgrad staging', size, usage });
    }

    /** The staging buffer that the small reads of the open batch share. */
    page() {
      const batch = this.queue.open();
      if (this.open?.batch === batch) return this.open.page;
      /** @type {GpuPage} */
      const page = { buffer: this.stagingBuffer(PAGE_NBYTES), used: 0, reads: [] };
      this.open = { batch, page };
      this.queue.after((submission) => this.deliver(page, submission));
      return page;
    }

    /**
     * @param {GpuPage} page
     * @param {GpuSubmission} submission
     */
    async deliver({ buffer, used, reads }, submission) {
      try {
        const mapped = buffer.mapAsync(GPUMapMode.READ, 0, used);
        await Promise.all([this.queue.answer(mapped), this.queue.verify(submission)]);
        const data = new Uint8Array(buffer.getMappedRange(0, used)).slice();
        buffer.unmap();
        this.staging.keep(buffer);
        for (const { start, skip, nbytes, resolve } of reads) {
          resolve(data.subarray(start + skip, start + skip + nbytes));
        }
      } catch (error) {
        const why = error instanceof GpuError ? error : await this.whyNotMapped(error);
        for (const { reject } of reads) reject(why);
        buffer.destroy();
      }
    }

    /**
     * @param {unknown} error
     * @returns {Promise<Error>}
     */
    async whyNotMapped(error) {
      // A map fails before the browser says that the device is lost.
      await Promise.race([this.queue.lost, new Promise((resolve) => setTimeout(resolve, 1000))]);
      return this.queue.failure ?? new GpuError('DeviceError', `the GPU gave no bytes back: ${error}`);
    }
  }

  return { MemoryPool };
})();
