'use strict';
// Memory of one GPUDevice and every way that bytes go in, out and about, to the byte: WebGPU itself moves only words. It
// knows no program of a client. A classic script for a page or a worker: it defines `gpuMemory`.

/**
 * What `allocate` gives: `size` is what the GPU buffer really has, and the bytes behind `nbytes` mean nothing.
 * @typedef {{id: number, buffer: GPUBuffer, nbytes: number, size: number}} GpuMemory
 */
/** @typedef {(view: Uint8Array) => void} GpuSend */
/** @typedef {{start: number, skip: number, nbytes: number, resolve: (data: Uint8Array) => void, reject: (error: unknown) => void}} GpuPageRead */
/** @typedef {{buffer: GPUBuffer, used: number, reads: GpuPageRead[]}} GpuPage */
/** @typedef {{resource: GPUBufferBinding, skip: number}} GpuWindow */
/** @typedef {InstanceType<typeof gpuMemory.MemoryPool>} GpuMemoryPool */

const gpuMemory = (() => {
  const { GpuError, SLOT } = gpuQueue;
  const USAGE_NAMES = /** @type {const} */ (['STORAGE', 'UNIFORM', 'COPY_SRC', 'COPY_DST']);
  /** Memory up to here is given without asking the device whether it has it: that costs a round trip. */
  const UNASKED_NBYTES = 256 * 1024;
  /** Writes up to here go along with the launches around them. */
  const SMALL_WRITE = 4 * SLOT;
  /** Reads up to here share a staging buffer. */
  const SMALL_READ = 4096;
  /** Before a download's bytes there is room for the head of a message. */
  const HEAD_ROOM = 64;
  const PAGE_NBYTES = 64 * 1024;
  /** One dispatch of the byte kernels covers this much: their offsets are 32-bit and bindings have a limit. */
  const KERNEL_NBYTES = 64 * 1024 * 1024;
  /** Fills of more than twice this are copies of a filled temporary. */
  const FILL_NBYTES = 1024 * 1024;
  /** Temporaries and staging buffers that are kept for reuse. */
  const KEEP_NBYTES = 64 * 1024 * 1024;

  // Each invocation owns whole words of the target, so that edges are written without a race. `place` is source offset,
  // target offset, size.
  const BYTE_KERNELS = `
    struct Parameters { pattern: vec4<u32>, place: vec4<u32> }
    @group(0) @binding(0) var<storage, read_write> words: array<u32>;
    @group(0) @binding(1) var<uniform> parameters: Parameters;
    @group(0) @binding(2) var<storage, read> bytes: array<u32>;

    fn mask(word: u32) -> u32 {
      let low = max(word * 4u, parameters.place.y) - word * 4u;
      let high = min(word * 4u + 4u, parameters.place.y + parameters.place.z) - word * 4u;
      return (0xffffffffu >> (8u * (4u - high))) & (0xffffffffu << (8u * low));
    }

    fn put(word: u32, value: u32) {
      let kept = ~mask(word);
      if (kept == 0u) { words[word] = value; } else { words[word] = (words[word] & kept) | (value & ~kept); }
    }

    @compute @workgroup_size(64)
    fn copy(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
      let shift = 8u * ((parameters.place.x - parameters.place.y) & 3u);
      let end = (parameters.place.y + parameters.place.z + 3u) / 4u;
      for (var word = parameters.place.y / 4u + id.x; word < end; word += groups.x * 64u) {
        // The first byte of this word in the source, which for the very first word may lie before the source's start.
        let byte = word * 4u + parameters.place.x - parameters.place.y;
        let first = u32(i32(byte) >> 2u);
        if (shift == 0u) {
          put(word, bytes[first]);
        } else {
          let low = select(bytes[first], 0u, i32(byte) < 0);
          put(word, (low >> shift) | (bytes[first + 1u] << (32u - shift)));
        }
      }
    }

    @compute @workgroup_size(64)
    fn fill(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
      let end = (parameters.place.y + parameters.place.z + 3u) / 4u;
      for (var word = parameters.place.y / 4u + id.x; word < end; word += groups.x * 64u) {
        put(word, parameters.pattern[word & 3u]);
      }
    }`;

  /** @param {number} nbytes */
  const words = (nbytes) => Math.ceil(nbytes / 4) * 4;
  /** @param {number} at */
  const wordBelow = (at) => Math.floor(at / 4) * 4;

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
      this.usage = USAGE_NAMES.reduce((all, name) => all | GPUBufferUsage[name], 0);
      /** @type {Map<number, GPUBuffer[]>} free temporaries by size. */
      this.temporaries = new Map();
      /** @type {Map<number, GPUBuffer[]>} free staging buffers by size. */
      this.staging = new Map();
      this.keptBytes = 0;
      /** @type {{batch: object, page: GpuPage} | null} the open batch's shared staging buffer. */
      this.open = null;
      /** @type {Promise<unknown>} settles when the downloads so far have been sent. */
      this.downloads = Promise.resolve();
      /** @type {{layout: GPUBindGroupLayout, copy: GPUComputePipeline, fill: GPUComputePipeline, nothing: GPUBuffer} | null} */
      this.kernels = null;
      /** @type {MessageChannel | null} wakes this thread in a task of its own, to flush for reads nobody flushed for. */
      this.channel = null;
      this.flushAsked = false;
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
        return { id: this.nextId++, buffer: device.createBuffer({ size, usage: this.usage }), nbytes, size };
      }
      device.pushErrorScope('validation');
      device.pushErrorScope('out-of-memory');
      const buffer = device.createBuffer({ size, usage: this.usage });
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

    /**
     * A buffer for use until `giveBack`; commands that follow may get it again. What is in it is left from before.
     * @param {number} nbytes
     */
    temporary(nbytes) {
      const size = 2 ** Math.ceil(Math.log2(Math.max(256, words(nbytes))));
      const kept = this.temporaries.get(size)?.pop();
      if (kept) {
        this.keptBytes -= size;
        return kept;
      }
      this.queue.open();
      const fitting = Math.min(size, this.device.limits.maxBufferSize);
      return this.device.createBuffer({ label: 'wsgrad temporary', size: fitting, usage: this.usage });
    }

    /** @param {GPUBuffer} buffer */
    giveBack(buffer) {
      this.keep(this.temporaries, buffer);
    }

    /**
     * @param {Map<number, GPUBuffer[]>} pool
     * @param {GPUBuffer} buffer
     */
    keep(pool, buffer) {
      if (this.keptBytes + buffer.size > KEEP_NBYTES) {
        this.queue.destroy(buffer);
        return;
      }
      this.keptBytes += buffer.size;
      const same = pool.get(buffer.size);
      if (same) same.push(buffer);
      else pool.set(buffer.size, [buffer]);
    }

    /** Wakes nobody any more; the buffers go with their device. */
    close() {
      this.channel?.port1.close();
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
        this.copyBytes(memory.buffer, offset, queue.arena, queue.place(bytes), nbytes);
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
      this.flushSoon();
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
            this.keep(this.staging, staging);
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
      const kept = this.staging.get(size)?.pop();
      if (kept) {
        this.keptBytes -= size;
        return kept;
      }
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
        this.keep(this.staging, buffer);
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

    /** Reads that nobody flushes for would wait for ever; those of one task still share a submission. */
    flushSoon() {
      if (this.flushAsked) return;
      this.flushAsked = true;
      let { channel } = this;
      if (!channel) {
        channel = this.channel = new MessageChannel();
        channel.port1.onmessage = () => {
          this.flushAsked = false;
          this.queue.flush();
        };
      }
      channel.port2.postMessage(null);
    }

    // -- about

    /**
     * @param {GpuMemory} target
     * @param {number} targetOffset
     * @param {GpuMemory} source
     * @param {number} sourceOffset
     * @param {number} nbytes
     */
    copy(target, targetOffset, source, sourceOffset, nbytes) {
      if (!nbytes || (target === source && targetOffset === sourceOffset)) return;
      if (target !== source) {
        this.copyBytes(target.buffer, targetOffset, source.buffer, sourceOffset, nbytes);
        return;
      }
      const { buffer } = target;
      const size = Math.min(nbytes, KERNEL_NBYTES);
      const temporary = this.temporary(size + 4);
      for (let done = 0; done < nbytes; done += size) {
        const piece = Math.min(size, nbytes - done);
        // What overlaps is moved from the end that is overwritten last.
        const from = targetOffset < sourceOffset ? done : nbytes - done - piece;
        // Words of source and temporary coincide, so that most of it is a plain copy.
        const at = (sourceOffset + from) % 4;
        this.copyBytes(temporary, at, buffer, sourceOffset + from, piece);
        this.copyBytes(buffer, targetOffset + from, temporary, at, piece);
      }
      this.giveBack(temporary);
    }

    /**
     * Copies bytes between different GPU buffers.
     * @param {GPUBuffer} target
     * @param {number} targetOffset
     * @param {GPUBuffer} source
     * @param {number} sourceOffset
     * @param {number} nbytes
     */
    copyBytes(target, targetOffset, source, sourceOffset, nbytes) {
      if ((targetOffset - sourceOffset) % 4) {
        this.copyByKernel(target, targetOffset, source, sourceOffset, nbytes);
        return;
      }
      const head = Math.min(nbytes, -targetOffset & 3);
      const body = wordBelow(nbytes - head);
      const tail = nbytes - head - body;
      if (head) this.copyByKernel(target, targetOffset, source, sourceOffset, head);
      if (tail) this.copyByKernel(target, targetOffset + head + body, source, sourceOffset + head + body, tail);
      if (body) {
        this.queue.encoder().copyBufferToBuffer(source, sourceOffset + head, target, targetOffset + head, body);
      }
    }

    /**
     * @param {GpuMemory} memory
     * @param {number} offset
     * @param {number} nbytes may end inside of the pattern.
     * @param {Uint8Array} pattern 1, 2, 4, 8 or 16 bytes.
     */
    fill(memory, offset, nbytes, pattern) {
      const { buffer } = memory;
      if (!nbytes) return;
      if (offset % 4 === 0 && nbytes % 4 === 0 && pattern.every((byte) => byte === 0)) {
        this.queue.encoder().clearBuffer(buffer, offset, nbytes);
        return;
      }
      if (nbytes > 2 * FILL_NBYTES) {
        // Copying is much faster than a kernel.
        const head = -offset & 15;
        const body = wordBelow(nbytes - head);
        const temporary = this.temporary(FILL_NBYTES);
        const begun = { ...memory, buffer: temporary };
        this.fill(begun, 0, FILL_NBYTES, pattern.map((_, i) => pattern[(i + head) % pattern.length]));
        for (let at = head; at < head + body; at += FILL_NBYTES) {
          const piece = Math.min(FILL_NBYTES, head + body - at);
          this.queue.encoder().copyBufferToBuffer(temporary, 0, buffer, offset + at, piece);
        }
        this.giveBack(temporary);
        this.fill(memory, offset, head, pattern);
        const done = head + body;
        const rest = pattern.map((_, i) => pattern[(i + done) % pattern.length]);
        this.fill(memory, offset + done, nbytes - done, rest);
        return;
      }
      const turned = new Uint8Array(16);
      const shift = pattern.length - (offset % pattern.length);
      for (let i = 0; i < 16; i++) turned[i] = pattern[(i + shift) % pattern.length];
      for (let at = 0; at < nbytes; at += KERNEL_NBYTES) {
        const piece = Math.min(KERNEL_NBYTES, nbytes - at);
        const window = windowOf(buffer, offset + at, piece);
        this.runKernel('fill', turned, window, [0, window.skip, piece], null);
      }
    }

    /**
     * @param {GPUBuffer} target
     * @param {number} targetOffset
     * @param {GPUBuffer} source
     * @param {number} sourceOffset
     * @param {number} nbytes
     */
    copyByKernel(target, targetOffset, source, sourceOffset, nbytes) {
      for (let at = 0; at < nbytes; at += KERNEL_NBYTES) {
        const piece = Math.min(KERNEL_NBYTES, nbytes - at);
        const into = windowOf(target, targetOffset + at, piece);
        const from = windowOf(source, sourceOffset + at, piece);
        this.runKernel('copy', new Uint8Array(16), into, [from.skip, into.skip, piece], from);
      }
    }

    /**
     * @param {'copy' | 'fill'} name
     * @param {Uint8Array} pattern
     * @param {GpuWindow} target
     * @param {[number, number, number]} place
     * @param {GpuWindow | null} source
     */
    runKernel(name, pattern, target, place, source) {
      const { queue, device } = this;
      // A slot more may be needed by what called this, whose own slot must not be flushed away: see `write`.
      if (source?.resource.buffer !== queue.arena) queue.reserve(1);
      queue.open();
      const kernels = this.loadKernels();
      const parameters = new Uint8Array(32);
      parameters.set(pattern);
      new Uint32Array(parameters.buffer, 16, 3).set(place);
      const at = queue.place(parameters);
      const group = device.createBindGroup({
        layout: kernels.layout,
        entries: [
          { binding: 0, resource: target.resource },
          { binding: 1, resource: { buffer: queue.arena, offset: at, size: 32 } },
          // A fill has no source, but the layout has one.
          { binding: 2, resource: source?.resource ?? { buffer: kernels.nothing } },
        ],
      });
      const pass = queue.pass();
      pass.setPipeline(kernels[name]);
      queue.open().pipeline = kernels[name];
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(Math.min(1024, Math.ceil(place[2] / 256) + 1));
    }

    loadKernels() {
      if (this.kernels) return this.kernels;
      const { device } = this;
      const module = device.createShaderModule({ label: 'wsgrad bytes', code: BYTE_KERNELS });
      const visibility = GPUShaderStage.COMPUTE;
      const layout = device.createBindGroupLayout({
        entries: [
          { binding: 0, visibility, buffer: { type: 'storage' } },
          { binding: 1, visibility, buffer: { type: 'uniform' } },
          { binding: 2, visibility, buffer: { type: 'read-only-storage' } },
        ],
      });
      const layouts = device.createPipelineLayout({ bindGroupLayouts: [layout] });
      const [copy, fill] = ['copy', 'fill'].map((entryPoint) =>
        device.createComputePipeline({ layout: layouts, compute: { module, entryPoint } }),
      );
      const nothing = device.createBuffer({ size: 4, usage: GPUBufferUsage.STORAGE });
      return (this.kernels = { layout, copy, fill, nothing });
    }
  }

  /**
   * The smallest range of a buffer that can be bound and holds some bytes; they begin `skip` bytes into it.
   * @param {GPUBuffer} buffer
   * @param {number} offset
   * @param {number} nbytes
   * @returns {GpuWindow}
   */
  function windowOf(buffer, offset, nbytes) {
    const start = Math.floor(offset / SLOT) * SLOT;
    return { resource: { buffer, offset: start, size: words(offset + nbytes) - start }, skip: offset - start };
  }

  return { MemoryPool, words };
})();
