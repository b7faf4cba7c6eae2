'use strict';
// Copies and fills between GPU buffers to the byte: WebGPU itself moves only words, and nothing within one buffer. It owns
// no memory of a client. A classic script for a page or a worker: it defines `gpuCopy`.

/** @typedef {{resource: GPUBufferBinding, skip: number}} GpuWindow */
/** @typedef {InstanceType<typeof gpuCopy.Copier>} GpuCopier */
/** @typedef {InstanceType<typeof gpuCopy.Spares>} GpuSpares */

const gpuCopy = (() => {
  const { SLOT } = gpuQueue;
  /** One dispatch of the byte kernels covers this much: their offsets are 32-bit and bindings have a limit. */
  const KERNEL_NBYTES = 64 * 1024 * 1024;
  /** Fills of more than twice this are copies of a filled temporary. */
  const FILL_NBYTES = 1024 * 1024;
  /** Buffers of one kind that are kept for reuse. */
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

  /** What memory is used for; a function, because a page without WebGPU loads this too. */
  const usage = () =>
    GPUBufferUsage.STORAGE | GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;

  /** Buffers that wait for their next use. */
  class Spares {
    /** @param {GpuQueue} queue */
    constructor(queue) {
      this.queue = queue;
      /** @type {Map<number, GPUBuffer[]>} by size. */
      this.free = new Map();
      this.keptBytes = 0;
    }

    /**
     * One of exactly this size, if there is one.
     * @param {number} size
     */
    take(size) {
      const kept = this.free.get(size)?.pop();
      if (kept) this.keptBytes -= size;
      return kept;
    }

    /** @param {GPUBuffer} buffer */
    keep(buffer) {
      if (this.keptBytes + buffer.size > KEEP_NBYTES) {
        this.queue.destroy(buffer);
        return;
      }
      this.keptBytes += buffer.size;
      const same = this.free.get(buffer.size);
      if (same) same.push(buffer);
      else this.free.set(buffer.size, [buffer]);
    }
  }

  class Copier {
    /** @param {GpuQueue} queue */
    constructor(queue) {
      this.queue = queue;
      this.device = queue.device;
      this.spares = new Spares(queue);
      /** @type {{layout: GPUBindGroupLayout, copy: GPUComputePipeline, fill: GPUComputePipeline, nothing: GPUBuffer} | null} */
      this.kernels = null;
    }

    /**
     * A buffer for use until `giveBack`; commands that follow may get it again. What is in it is left from before.
     * @param {number} nbytes
     */
    temporary(nbytes) {
      const size = 2 ** Math.ceil(Math.log2(Math.max(256, words(nbytes))));
      const kept = this.spares.take(size);
      if (kept) return kept;
      this.queue.open();
      const fitting = Math.min(size, this.device.limits.maxBufferSize);
      return this.device.createBuffer({ label: 'wsgrad temporary', size: fitting, usage: usage() });
    }

    /** @param {GPUBuffer} buffer */
    giveBack(buffer) {
      this.spares.keep(buffer);
    }

    /**
     * Copies bytes between ranges that may be of one buffer, and overlap.
     * @param {GPUBuffer} target
     * @param {number} targetOffset
     * @param {GPUBuffer} source
     * @param {number} sourceOffset
     * @param {number} nbytes
     */
    copy(target, targetOffset, source, sourceOffset, nbytes) {
      if (!nbytes || (target === source && targetOffset === sourceOffset)) return;
      if (target !== source) {
        this.copyBytes(target, targetOffset, source, sourceOffset, nbytes);
        return;
      }
      const size = Math.min(nbytes, KERNEL_NBYTES);
      const temporary = this.temporary(size + 4);
      for (let done = 0; done < nbytes; done += size) {
        const piece = Math.min(size, nbytes - done);
        // What overlaps is moved from the end that is overwritten last.
        const from = targetOffset < sourceOffset ? done : nbytes - done - piece;
        // Words of source and temporary coincide, so that most of it is a plain copy.
        const at = (sourceOffset + from) % 4;
        this.copyBytes(temporary, at, source, sourceOffset + from, piece);
        this.copyBytes(target, targetOffset + from, temporary, at, piece);
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
     * Repeats a pattern over a range.
     * @param {GPUBuffer} buffer
     * @param {number} offset
     * @param {number} nbytes may end inside of the pattern.
     * @param {Uint8Array} pattern 1, 2, 4, 8 or 16 bytes.
     */
    fill(buffer, offset, nbytes, pattern) {
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
        this.fill(temporary, 0, FILL_NBYTES, pattern.map((_, i) => pattern[(i + head) % pattern.length]));
        for (let at = head; at < head + body; at += FILL_NBYTES) {
          const piece = Math.min(FILL_NBYTES, head + body - at);
          this.queue.encoder().copyBufferToBuffer(temporary, 0, buffer, offset + at, piece);
        }
        this.giveBack(temporary);
        this.fill(buffer, offset, head, pattern);
        const done = head + body;
        const rest = pattern.map((_, i) => pattern[(i + done) % pattern.length]);
        this.fill(buffer, offset + done, nbytes - done, rest);
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

  return { Copier, Spares, usage, words, wordBelow };
})();
