'use strict';
// Collects GPU work into submissions and watches them: errors, time, a lost device. It knows no command of ours and no
// buffer of a client. A classic script for a page or a worker: it defines `gpuQueue`.

/** @typedef {'OutOfMemory' | 'CompileError' | 'LaunchError' | 'DeviceLost' | 'Timeout' | 'DeviceError' | 'LimitExceeded'} GpuCode */
/**
 * How long launches of one program and about one size take; NaN until one has run by itself.
 * @typedef {{seconds: number, program: string}} GpuEstimate
 */
/**
 * Commands that are being collected. `first` is the number of the client's command that it begins with.
 * @typedef {{
 *   encoder: GPUCommandEncoder | null, pass: GPUComputePassEncoder | null, pipeline: GPUComputePipeline | null,
 *   launches: Map<GpuEstimate, number>, count: number, seconds: number, first: number,
 *   doomed: GPUBuffer[], before: ((encoder: GPUCommandEncoder) => void)[], after: ((submission: GpuSubmission) => unknown)[],
 * }} GpuBatch
 */
/**
 * Commands that the device has; `done` settles, without an error, when they are over, `checked` when their errors are known.
 * @typedef {{
 *   launches: Map<GpuEstimate, number>, seconds: number, first: number, at: number, startedAt: number, doneAt: number,
 *   checked: Promise<void>, done: Promise<void>,
 * }} GpuSubmission
 */
/** @typedef {InstanceType<typeof gpuQueue.Queue>} GpuQueue */

const gpuQueue = (() => {
  /** Scalars and small bytes travel in slots of this many bytes: no device asks for a larger alignment. */
  const SLOT = 256;
  const SLOTS = 1024;
  /** Launches of one submission: enough to hide its cost, few enough for the device to start early. */
  const MAX_LAUNCHES = 256;
  /** What one submission should take at most, so that others get the device and a launch that hangs is told from many. */
  const BATCH_SECONDS = 0.25;
  /** How long a submission that seems to hang is given after all: a machine that slept wakes its timers first. */
  const GRACE_MILLISECONDS = 1000;

  /** What went wrong with the device, by the name that it has on the wire. */
  class GpuError extends Error {
    /**
     * @param {GpuCode} code
     * @param {string} message
     * @param {Record<string, unknown>} [details]
     */
    constructor(code, message, details = {}) {
      super(message);
      this.name = 'GpuError';
      this.code = code;
      this.details = details;
    }
  }

  class Queue {
    /**
     * @param {GPUDevice} device
     * @param {number} launchSeconds a launch that takes longer ends the device.
     */
    constructor(device, launchSeconds) {
      this.device = device;
      /** The number of the client's command that is being run, for errors that come late. */
      this.number = 0;
      /** @type {GpuError | null} why the device is gone. */
      this.failure = null;
      /** @type {(reason: {code: GpuCode, message: string, details: object}) => void} */
      this.resolveLost = () => {};
      /** Settles once, when the device is gone. */
      this.lost = new Promise((resolve) => (this.resolveLost = resolve));
      /** Slots of the open batch: uniforms of launches, parameters and bytes of copies. */
      this.arena = device.createBuffer({
        label: 'wsgrad slots',
        size: SLOT * SLOTS,
        usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST,
      });
      this.launchSeconds = launchSeconds;
      this.shadow = new Uint8Array(SLOT * SLOTS);
      this.shadowWords = new Uint32Array(this.shadow.buffer);
      this.usedSlots = 0;
      /** @type {Map<number, number>} the slots of the batch that hold one word, by the word. */
      this.wordSlots = new Map();
      /** @type {GpuBatch | null} */
      this.batch = null;
      /** @type {GpuSubmission[]} */
      this.inFlight = [];
      /** @type {GpuError[]} what went wrong after it was submitted and nobody has been told yet. */
      this.unreported = [];
      /** @type {Set<(error: Error) => void>} who waits for an answer of the device. */
      this.waiting = new Set();
      /** @type {Promise<unknown>} settles when what follows the submissions so far is over; it never rejects. */
      this.afterwards = Promise.resolve();
      this.lastDoneAt = 0;
      /** @type {ReturnType<typeof setTimeout> | undefined} */
      this.watch = undefined;
      device.lost.then((info) => this.deviceLost(info));
      device.onuncapturederror = (event) => {
        event.preventDefault?.();
        this.unreported.push(translated(event.error, { number: this.number }));
      };
    }

    // -- collecting

    /** The batch that commands go into. */
    open() {
      if (this.batch) return this.batch;
      if (this.failure) throw this.failure;
      this.device.pushErrorScope('out-of-memory');
      this.device.pushErrorScope('validation');
      this.batch = {
        encoder: null,
        pass: null,
        pipeline: null,
        launches: new Map(),
        count: 0,
        seconds: 0,
        first: this.number,
        doomed: [],
        before: [],
        after: [],
      };
      return this.batch;
    }

    /** The encoder for a command that is not in a pass. */
    encoder() {
      const batch = this.open();
      this.endPass(batch);
      return this.encoderOf(batch);
    }

    /** The pass for a launch. */
    pass() {
      const batch = this.open();
      return (batch.pass ??= this.encoderOf(batch).beginComputePass());
    }

    /** @param {GpuBatch} batch */
    encoderOf(batch) {
      if (!batch.encoder) {
        batch.encoder = this.device.createCommandEncoder();
        batch.first = this.number;
      }
      return batch.encoder;
    }

    /**
     * A pass of its own, for one launch.
     * @param {GPUComputePassDescriptor} descriptor
     */
    ownPass(descriptor) {
      const pass = this.encoder().beginComputePass(descriptor);
      this.open().pass = pass;
      return pass;
    }

    /** @param {GpuBatch} batch */
    endPass(batch) {
      batch.pass?.end();
      batch.pass = batch.pipeline = null;
    }

    /**
     * Makes sure of free slots; call it before anything that depends on one another is encoded.
     * @param {number} count
     */
    reserve(count) {
      if (this.usedSlots + count > SLOTS) this.flush();
    }

    /**
     * The place in the arena of bytes that the batch's commands will find there.
     * @param {Uint8Array} bytes
     */
    place(bytes) {
      const at = this.usedSlots * SLOT;
      this.shadow.set(bytes, at);
      this.usedSlots += Math.ceil(bytes.length / SLOT);
      return at;
    }

    /**
     * The slot that holds one word: a scalar. Equal ones of a batch share it.
     * @param {number} word
     */
    wordSlot(word) {
      const known = this.wordSlots.get(word);
      if (known !== undefined) return known;
      const slot = this.usedSlots++;
      this.shadowWords[(slot * SLOT) / 4] = word;
      this.wordSlots.set(word, slot);
      return slot;
    }

    /**
     * Call it before a launch is encoded: one of unknown length gets a submission of its own, so that a hang has a name
     * and many long launches are not taken for one.
     * @param {GpuEstimate} estimate
     */
    admit(estimate) {
      if (Number.isNaN(estimate.seconds) && this.batch?.count) this.flush();
    }

    /**
     * Call it after a launch was encoded.
     * @param {GpuEstimate} estimate
     * @param {number} [most] launches of a batch.
     */
    launched(estimate, most = MAX_LAUNCHES) {
      const batch = this.open();
      batch.launches.set(estimate, (batch.launches.get(estimate) ?? 0) + 1);
      batch.count += 1;
      batch.seconds += estimate.seconds;
      // NaN, for an estimate that there is not yet, is not below the bound either.
      if (batch.count >= most || !(batch.seconds < Math.min(BATCH_SECONDS, this.launchSeconds / 8))) this.flush();
    }

    /**
     * Destroys a buffer as soon as no command that is still being collected can use it.
     * @param {GPUBuffer} buffer
     */
    destroy(buffer) {
      if (this.batch) this.batch.doomed.push(buffer);
      else buffer.destroy();
    }

    /**
     * Encodes something at the end of the open batch.
     * @param {(encoder: GPUCommandEncoder) => void} callback
     */
    before(callback) {
      this.open().before.push(callback);
    }

    /**
     * Runs something right after the open batch was submitted; `settled` waits for it.
     * @param {(submission: GpuSubmission) => unknown} callback
     */
    after(callback) {
      this.open().after.push(callback);
    }

    // -- submitting

    /** Gives the device what was collected. */
    flush() {
      const { batch, device } = this;
      if (!batch) return;
      this.endPass(batch);
      this.batch = null;
      if (batch.encoder) {
        for (const callback of batch.before) callback(batch.encoder);
        if (this.usedSlots) device.queue.writeBuffer(this.arena, 0, this.shadow, 0, this.usedSlots * SLOT);
        device.queue.submit([batch.encoder.finish()]);
      }
      this.usedSlots = 0;
      this.wordSlots.clear();
      const scopes = [device.popErrorScope(), device.popErrorScope()];
      for (const buffer of batch.doomed) buffer.destroy();
      const over = batch.encoder ? device.queue.onSubmittedWorkDone() : Promise.resolve();
      /** @type {GpuSubmission} */
      const submission = {
        launches: batch.launches,
        seconds: batch.seconds,
        first: batch.first,
        at: performance.now(),
        startedAt: 0,
        doneAt: 0,
        checked: Promise.resolve(),
        done: Promise.resolve(),
      };
      submission.checked = this.check(submission, scopes);
      submission.done = this.settle(submission, over);
      this.inFlight.push(submission);
      if (this.inFlight.length === 1) this.watchOver();
      this.afterwards = Promise.all([this.afterwards, ...batch.after.map((callback) => callback(submission))]);
    }

    /** Waits until all work so far is over; throws what went wrong since it last threw. */
    async settled() {
      this.flush();
      await this.answer(this.inFlight[this.inFlight.length - 1]?.done);
      await this.answer(this.afterwards);
      this.throwUnreported();
    }

    /**
     * Waits until the errors of a submission and of those before it are known, and throws the first that nobody was told.
     * @param {GpuSubmission} submission
     */
    async verify(submission) {
      await this.answer(submission.checked);
      this.throwUnreported();
    }

    /**
     * What a promise gives, unless the device is lost before: one that hangs answers nothing any more.
     * @template T
     * @param {Promise<T> | T} promise
     * @returns {Promise<T>}
     */
    answer(promise) {
      return new Promise((resolve, reject) => {
        if (this.failure) return reject(this.failure);
        this.waiting.add(reject);
        Promise.resolve(promise)
          .then(resolve, reject)
          .finally(() => this.waiting.delete(reject));
      });
    }

    throwUnreported() {
      if (this.failure) throw this.failure;
      const [error] = this.unreported;
      this.unreported.length = 0;
      if (error) throw error;
    }

    /**
     * @param {GpuSubmission} submission
     * @param {Promise<GPUError | null>[]} scopes
     */
    async check(submission, scopes) {
      // A lost device may refuse to tell; why it was lost is told elsewhere.
      const errors = await Promise.all(scopes.map((scope) => scope.catch(() => null)));
      // Without memory for a buffer everything that uses it is invalid as well: the shortage is the cause.
      const found = errors[1] ?? errors[0];
      if (!found || this.failure) return;
      this.unreported.push(translated(found, namesOf(submission).details));
    }

    /**
     * @param {GpuSubmission} submission
     * @param {Promise<unknown>} over
     */
    async settle(submission, over) {
      await over.catch(() => undefined);
      submission.doneAt = performance.now();
      submission.startedAt = Math.max(submission.at, this.lastDoneAt);
      this.lastDoneAt = submission.doneAt;
      await submission.checked;
      this.inFlight = this.inFlight.filter((other) => other !== submission);
      this.learn(submission);
      this.watchOver();
    }

    /**
     * Corrects the estimates of what ran.
     * @param {GpuSubmission} submission
     */
    learn({ launches, startedAt, doneAt, seconds: expected }) {
      const seconds = Math.max(1e-6, (doneAt - startedAt) / 1000);
      const factor = Math.min(4, Math.max(0.25, seconds / expected));
      for (const [estimate, count] of launches) {
        if (Number.isNaN(estimate.seconds)) estimate.seconds = seconds / count;
        else if (Number.isNaN(factor)) estimate.seconds = Math.min(estimate.seconds, seconds / count);
        else estimate.seconds *= factor;
      }
    }

    // -- watching

    /** Sets the timer for the oldest submission that is not over. */
    watchOver() {
      clearTimeout(this.watch);
      const [oldest] = this.inFlight;
      if (!oldest || this.failure) return;
      const deadline = Math.max(oldest.at, this.lastDoneAt) + this.launchSeconds * 1000;
      this.watch = setTimeout(() => {
        this.watch = setTimeout(() => this.hung(oldest), GRACE_MILLISECONDS);
      }, deadline - performance.now());
    }

    /** @param {GpuSubmission} submission */
    hung(submission) {
      if (this.inFlight[0] !== submission) return;
      const { text, details } = namesOf(submission);
      const message = `a launch of ${text || 'a copy'} ran longer than ${this.launchSeconds} s`;
      this.fail(new GpuError('Timeout', message, { ...details, seconds: this.launchSeconds }));
      this.device.destroy();
    }

    /** @param {GPUDeviceLostInfo} info */
    deviceLost(info) {
      const [running] = this.inFlight;
      const { text, details } = running ? namesOf(running) : { text: '', details: {} };
      const during = text && ` while ${text} ran`;
      const why = info.message ? `: ${info.message.slice(0, 300)}` : '';
      this.fail(new GpuError('DeviceLost', `the browser lost the GPU device${during}${why}`, details));
    }

    /** @param {GpuError} error */
    fail(error) {
      if (this.failure) return;
      this.failure = error;
      this.batch = null;
      clearTimeout(this.watch);
      for (const reject of this.waiting) reject(error);
      this.waiting.clear();
      this.resolveLost({ code: error.code, message: error.message, details: error.details });
    }

    /** Gives everything back to the browser. */
    close() {
      this.fail(new GpuError('DeviceLost', 'the device was closed'));
      this.device.destroy();
    }
  }

  /**
   * The programs of a submission for people, and what an error's details say of it.
   * @param {GpuSubmission} submission
   */
  function namesOf({ launches, first }) {
    const names = [...new Set([...launches.keys()].map(({ program }) => program))];
    const quoted = names.slice(0, 3).map((name) => `'${name}'`);
    if (names.length > 3) quoted.push(`${names.length - 3} more`);
    const details = { number: first, ...(names.length === 1 ? { program: names[0] } : {}) };
    return { text: quoted.join(' or '), details };
  }

  /**
   * @param {GPUError} error
   * @param {{number: number, program?: string}} details
   */
  function translated(error, details) {
    const memory = typeof GPUOutOfMemoryError !== 'undefined' && error instanceof GPUOutOfMemoryError;
    const message = error.message.slice(0, 1000);
    if (memory) return new GpuError('OutOfMemory', `the GPU has no memory left: ${message}`, details);
    const code = details.program === undefined ? 'DeviceError' : 'LaunchError';
    return new GpuError(code, `the GPU refused the work: ${message}`, details);
  }

  return { GpuError, Queue, SLOT, SLOTS };
})();
