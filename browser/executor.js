'use strict';
// Turns the messages of one queue into runtime calls, in order: the JavaScript of wsgrad/devices/executor.py. It knows no
// socket. Calls are made as messages come, without waiting for the device; `answers` tells the server once it is through.
// Defines `executor`.

const executor = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;
  /** @type {typeof answers} */
  const answering = typeof answers === 'undefined' ? module?.require('./answers.js') : answers;
  /** @type {typeof ranges} */
  const memory = typeof ranges === 'undefined' ? module?.require('./ranges.js') : ranges;
  /** @type {typeof transfers} */
  const transferring = typeof transfers === 'undefined' ? module?.require('./transfers.js') : transfers;
  /** @type {typeof replay} */
  const graphs = typeof replay === 'undefined' ? module?.require('./replay.js') : replay;
  /** @type {typeof trace} */
  const tracing = typeof trace === 'undefined' ? module?.require('./trace.js') : trace;
  /** @type {typeof soon} */
  const later = typeof soon === 'undefined' ? module?.require('./soon.js') : soon;
  const { KIND, COMMAND, ProtocolError, CommandError } = wire;
  const { SPAN } = tracing;

  const OVER = true;
  /** The task goes on when something comes: a chunk, credit. */
  const HELD = false;
  /** Buffers that are asked for together. */
  const AHEAD = 64;
  const NOTHING = new Uint8Array(0);
  const utf8 = new TextDecoder('utf-8', { fatal: true });
  /** @type {Record<number, string>} */
  const OPERATIONS = {
    [COMMAND.ALLOC]: 'alloc',
    [COMMAND.VIEW]: 'view',
    [COMMAND.WRITE]: 'write',
    [COMMAND.UPLOAD]: 'upload',
    [COMMAND.READ]: 'read',
    [COMMAND.DOWNLOAD]: 'download',
    [COMMAND.COPY]: 'copy',
    [COMMAND.FILL]: 'fill',
    [COMMAND.LAUNCH]: 'launch',
  };

  /**
   * A message that waits its turn, with what came beside it and how far it is.
   * @typedef {{
   *   message: any, bulk: Uint8Array, next: number, began: number, halts: Generator<any, void, void> | null,
   *   loading: Promise<void> | null, loaded: { ok: boolean, message: string } | null,
   * }} Task
   */

  /** Runs one queue on one runtime. */
  class Executor {
    /**
     * @param {number} queue the number that stands in every message
     * @param {any} runtime
     * @param {{
     *   reply: (array: unknown[], bulk?: Uint8Array | null, inPlace?: boolean) => void,
     *   broken: (error: any) => void,
     *   failed?: (code: string, message: string) => void,
     *   budget?: InstanceType<typeof ranges.Budget>,
     * }} owner `broken` is told that the server broke the protocol, `failed` what clients are told of failures
     */
    constructor(queue, runtime, owner) {
      this.queue = queue;
      this.runtime = runtime;
      this.owner = owner;
      this.stats = { launches: 0, bytesIn: 0, bytesOut: 0 };
      this.ranges = new memory.Ranges(runtime, owner.budget ?? new memory.Budget());
      this.graphs = new graphs.Graphs(runtime);
      this.answers = new answering.Answers(queue, runtime, {
        reply: (array, bulk, inPlace) => this.reply(array, bulk, inPlace),
        failed: (number) => this.reported(number),
        lost: (error) => this.lost(error),
        latest: () => this.latest,
      });
      this.transfers = new transferring.Transfers(queue, runtime, this.answers, {
        reply: (array, bulk, inPlace) => this.reply(array, bulk, inPlace),
        done: (number) => this.did(number),
        sent: (nbytes) => {
          this.stats.bytesOut += nbytes;
        },
      });
      /** @type {Task[]} */
      this.tasks = [];
      /** @type {number | null} The command whose failure stops the queue. */
      this.error = null;
      this.done = 0;
      /** Up to here something in `answers` acknowledges. */
      this.answered = 0;
      /** The last command that came. */
      this.latest = 0;
      /** @type {Map<number, Promise<void>>} Buffers asked for ahead of their turn, by their commands. */
      this.ahead = new Map();
      this.busy = false;
      this.held = false;
      this.closed = false;
      this.submitSoon = new later.Soon(() => this.guard(() => this.submit()));
    }

    /**
     * Runs one message, or keeps it until what comes before it has run.
     * @param {any} message
     * @param {Uint8Array | null} [bulk] stays as it is until the command has run
     */
    handle(message, bulk = null) {
      if (this.closed) return;
      this.guard(() => {
        this.take(message, bulk ?? NOTHING);
        this.work();
        // A read of what launches wrote mostly comes right behind them, and then shares their submission.
        if (message.kind === KIND.LAUNCHES) this.submitSoon.ask();
        else this.submit();
      });
    }

    /**
     * While its owner wants it, the device does nothing more; what comes meanwhile waits.
     * @param {boolean} held
     */
    hold(held) {
      this.held = held;
      if (!held) this.guard(() => this.advance());
    }

    /** Bytes of buffers. */
    get memoryUsed() {
      return this.ranges.used;
    }

    /**
     * The device is gone, with all that is on it.
     * @param {any} error
     */
    lost(error) {
      if (this.closed) return;
      const { acked, lastFailed } = this.answers;
      const { code, message, details } = answering.describe(error);
      const named = typeof details.number === 'number' ? details.number : 0;
      const number = Math.max(named <= this.latest ? named : 0, acked + 1, lastFailed + 1);
      delete details.number;
      // Without a program's name the server finds it, and puts the cause into a sentence.
      if (details.program === undefined) details.ended = message;
      this.reply([KIND.FAILED, this.queue, number <= this.latest ? number : 0, code, message, details]);
      this.close();
    }

    /** Frees everything that the queue holds. */
    close() {
      if (this.closed) return;
      this.closed = this.answers.over = this.transfers.closed = true;
      this.submitSoon.close();
      this.tasks = [];
      this.graphs.close();
      this.ranges.clear();
      this.runtime.close();
    }

    // -- order

    /**
     * @param {any} message
     * @param {Uint8Array} bulk
     */
    take(message, bulk) {
      /** @type {Task} */
      const task = { message, bulk, next: 0, began: 0, halts: null, loading: null, loaded: null };
      switch (message.kind) {
        case KIND.CREDIT:
          this.transfers.credit += message.slots;
          return;
        case KIND.ABORT:
          if (this.transfers.stop(message.transfer)) return;
          break;
        case KIND.CHUNK:
          this.stats.bytesIn += bulk.length;
          if (this.graphs.keep(message, bulk)) return;
          break;
        case KIND.PROFILE:
          this.profile(message);
          return;
        case KIND.GRAPH:
          this.graphs.add(message, bulk);
          return;
        case KIND.REPLAY:
          this.latest = message.number;
          this.graphs.announced(message);
          break;
        case KIND.FAIL:
          if (this.tasks.some(({ message: { kind, number } }) => kind === KIND.REPLAY && number === message.number)) {
            this.graphs.failures.set(message.number, message);
            return;
          }
          this.latest = Math.max(this.latest, message.number);
          break;
        case KIND.PROGRAM:
          this.latest = message.number;
          // No command before it can mean this program: only its turn has to be kept.
          task.loading = this.load(task);
          break;
        case KIND.BATCH:
          this.latest = message.first + message.commands.length - 1;
          break;
        case KIND.LAUNCHES:
          this.latest = message.first + message.count - 1;
          break;
      }
      this.tasks.push(task);
    }

    /**
     * The server wants the queue measured from now on, or no longer: what measured it sends its last once all is over.
     * @param {any} message
     */
    profile(message) {
      const before = this.runtime.trace;
      if (before) this.answers.add(this.done, null, () => before.end());
      else if (!message.on) this.reply(tracing.nothing(message), NOTHING);
      const reply = (/** @type {unknown[]} */ array, /** @type {Uint8Array} */ spans) => this.reply(array, spans);
      this.runtime.trace = message.on ? new tracing.DeviceTrace(this.queue, message.trace, reply) : null;
    }

    /** @param {() => void} work */
    guard(work) {
      try {
        work();
      } catch (error) {
        this.owner.broken(error);
      }
    }

    advance() {
      this.work();
      this.submit();
    }

    work() {
      while (!this.busy && !this.held && !this.closed) {
        if (!this.transfers.pump()) break;
        if (this.tasks.length === 0) break;
        const more = this.step(this.tasks[0]);
        if (more === HELD) break;
        if (more === OVER) this.tasks.shift();
        else {
          this.busy = true;
          void more.then(() => {
            this.busy = false;
            this.guard(() => this.advance());
          });
        }
      }
    }

    /** Gives the device what has come, and sees to it that the server is told when that is over. */
    submit() {
      if (this.closed) return;
      this.runtime.flush();
      this.runtime.trace?.settle();
      const owed = this.transfers.takeOwed();
      if (this.done > this.answered || owed) {
        this.answers.settle(this.done, owed);
        this.answered = this.done;
      }
    }

    /**
     * Works on the first task.
     * @param {Task} task
     * @returns {boolean | Promise<void>}
     */
    step(task) {
      const { message } = task;
      switch (message.kind) {
        case KIND.CHUNK:
          this.transfers.chunk(message, task.bulk);
          return OVER;
        case KIND.ABORT:
          this.transfers.abort(message.transfer);
          return OVER;
        case KIND.BATCH:
          return this.batch(task);
        case KIND.LAUNCHES:
          this.begin();
          if (this.error === null) this.launches(message, task.bulk);
          this.did(message.first + message.count - 1);
          return OVER;
        case KIND.PROGRAM:
          if (task.loaded === null) return /** @type {Promise<void>} */ (task.loading);
          this.begin();
          this.reply([KIND.COMPILED, this.queue, message.program, task.loaded.ok, task.loaded.message]);
          if (!task.loaded.ok) this.owner.failed?.('CompileError', task.loaded.message);
          this.did(message.number);
          return OVER;
        case KIND.FAIL:
          // The rest of an upload's bytes will not come, for this reason.
          if (this.transfers.upload?.number === message.number) this.transfers.upload = null;
          this.begin();
          if (this.error === null) this.fail(message.number, failureOf(message));
          this.did(message.number);
          return OVER;
        case KIND.REPLAY:
          return this.replay(task);
        case KIND.UNRECORD:
          this.graphs.forget(message.graph);
          return OVER;
      }
      throw new ProtocolError(`a message of kind ${message.kind} is not for a queue`);
    }

    /** Another command may start: an upload that a failure cut short ends here. */
    begin() {
      const { upload } = this.transfers;
      if (upload?.place) throw new ProtocolError(`a command came before upload ${upload.transfer} was whole`);
      this.transfers.upload = null;
    }

    /**
     * @param {Task} task
     * @returns {boolean | Promise<void>}
     */
    batch(task) {
      const { first, commands } = task.message;
      if (task.next === 0) this.begin();
      while (task.next < commands.length) {
        const number = first + task.next;
        const command = commands[task.next];
        wire.checkCommand(command);
        if (command[0] === COMMAND.ALLOC) {
          this.allocateAhead(task);
          task.next += 1;
          return this.allocate(number, command);
        }
        task.next += 1;
        if (this.error === null) this.attempt(number, command);
        else this.skip(number, command);
        if (!this.transfers.pump()) return HELD;
        if (this.transfers.upload === null) this.did(number);
      }
      return OVER;
    }

    // -- commands

    /**
     * @param {number} number
     * @param {any[]} command
     */
    attempt(number, command) {
      this.runtime.number = number; // for what the device finds out late
      try {
        this.run(number, command);
      } catch (error) {
        this.refused(number, command, error);
      }
    }

    /**
     * @param {number} number
     * @param {any[]} command
     */
    run(number, command) {
      const { runtime } = this;
      const [kind, first, second, third] = command;
      switch (kind) {
        case COMMAND.LAUNCH: {
          const [, program, grid, block, values, timed] = command;
          const seconds = runtime.launch(program, grid, block, values, number, timed);
          this.stats.launches += 1;
          if (timed) this.answers.result(number, seconds);
          return;
        }
        case COMMAND.READ: {
          const place = this.ranges.place(first, second, third);
          const span = runtime.trace?.open(SPAN.READ, number, 0, third);
          const data = third ? runtime.read(place.memory, place.offset, third) : Promise.resolve(NOTHING);
          if (span) void data.then(() => span.close(), () => span.close());
          this.answered = number;
          this.answers.read(number, data);
          return;
        }
        case COMMAND.WRITE: {
          const place = this.ranges.place(first, second, third.length);
          if (third.length) {
            this.measured(SPAN.WRITE, number, third.length, () => runtime.write(place.memory, place.offset, third));
          }
          return;
        }
        case COMMAND.FREE:
          this.ranges.free(first);
          return;
        case COMMAND.VIEW:
          this.ranges.view(first, second, third, command[4]);
          return;
        case COMMAND.UPLOAD: {
          const [, transfer, buffer, offset, nbytes] = command;
          const place = this.ranges.place(buffer, offset, nbytes);
          this.transfers.upload = nbytes ? { number, transfer, place, nbytes, received: 0 } : null;
          return;
        }
        case COMMAND.DOWNLOAD: {
          const [, transfer, buffer, offset, nbytes] = command;
          const place = this.ranges.place(buffer, offset, nbytes);
          const aborted = this.tasks.some(({ message }) => message.kind === KIND.ABORT && message.transfer === transfer);
          if (nbytes && !aborted) this.transfers.begin(number, transfer, place, nbytes);
          return;
        }
        case COMMAND.COPY: {
          const [, target, targetOffset, source, sourceOffset, nbytes] = command;
          const to = this.ranges.place(target, targetOffset, nbytes);
          const from = this.ranges.place(source, sourceOffset, nbytes);
          if (nbytes) {
            this.measured(SPAN.COPY, number, nbytes, () =>
              runtime.copy(to.memory, to.offset, from.memory, from.offset, nbytes),
            );
          }
          return;
        }
        case COMMAND.FILL: {
          const [, buffer, offset, nbytes, pattern] = command;
          if (![1, 2, 4, 8, 16].includes(pattern.length) || nbytes % pattern.length) {
            throw new CommandError('DeviceError', `a pattern of ${pattern.length} bytes can't fill ${nbytes} bytes`);
          }
          const place = this.ranges.place(buffer, offset, nbytes);
          if (nbytes) {
            this.measured(SPAN.FILL, number, nbytes, () => runtime.fill(place.memory, place.offset, nbytes, pattern));
          }
          return;
        }
        case COMMAND.DROP:
          runtime.drop(first);
          return;
        case COMMAND.CLEAR:
          return;
      }
    }

    /**
     * A command behind an error.
     * @param {number} number
     * @param {any[]} command
     */
    skip(number, command) {
      const [kind, first, , , nbytes] = command;
      switch (kind) {
        case COMMAND.FREE:
        case COMMAND.DROP:
          this.run(number, command);
          return;
        case COMMAND.VIEW:
          // The client holds an object for it, and goes on using that once it has raised the error.
          try {
            this.run(number, command);
          } catch {
            // Whoever uses it is told that it is not there.
          }
          return;
        case COMMAND.CLEAR:
          if (first === this.error) {
            this.error = null;
            this.answers.cleared();
          }
          return;
        case COMMAND.UPLOAD:
          if (nbytes) this.transfers.discard(number, first, nbytes);
      }
    }

    /**
     * Asks for the memory of this and the next commands: a device takes its time for each, but not in a row.
     * @param {Task} task
     */
    allocateAhead(task) {
      const { first, commands } = task.message;
      const end = Math.min(commands.length, task.next + AHEAD);
      for (let at = task.next; at < end && commands[at][0] === COMMAND.ALLOC; at++) {
        if (this.ahead.has(first + at)) continue;
        wire.checkCommand(commands[at]);
        const [, buffer, nbytes] = commands[at];
        const span = this.runtime.trace?.open(SPAN.ALLOC, first + at, 0, nbytes);
        const coming = this.ranges.alloc(buffer, nbytes).finally(() => span?.close());
        coming.catch(() => {}); // told of in its turn
        this.ahead.set(first + at, coming);
      }
    }

    /**
     * @param {number} number
     * @param {any[]} command
     */
    async allocate(number, command) {
      try {
        await this.ahead.get(number);
      } catch (error) {
        // Behind an error whoever uses it is told that it is not there.
        if (this.error === null && !this.closed) this.refused(number, command, error);
      }
      this.ahead.delete(number);
      this.did(number);
    }

    /**
     * @param {number} kind
     * @param {number} number
     * @param {number} nbytes
     * @param {() => void} work
     */
    measured(kind, number, nbytes, work) {
      const span = this.runtime.trace?.open(kind, number, 0, nbytes);
      try {
        work();
      } finally {
        span?.close();
      }
    }

    // -- programs and packed launches

    /**
     * @param {any} message
     * @param {Uint8Array} words
     */
    launches(message, words) {
      let failure;
      try {
        failure = this.runtime.launchPacked(words, message.first);
      } catch (error) {
        failure = { number: message.first, error, program: null };
      }
      this.stats.launches += failure ? failure.number - message.first : message.count;
      if (failure) this.fail(failure.number, failure.error, launchDetails(failure.program));
    }

    /** @param {Task} task */
    async load(task) {
      const { program, dialect, name, entry, signature, writes, alias, constants, number } = task.message;
      const span = this.runtime.trace?.open(SPAN.COMPILE, number, program);
      try {
        if (dialect !== 'wgsl') throw new CommandError('CompileError', `this device speaks wgsl, not ${dialect}`);
        const spec = { name, entry, signature, writes, alias, constants: Object.fromEntries(constants) };
        const warnings = await this.runtime.load(program, spec, utf8.decode(task.bulk));
        task.loaded = { ok: true, message: typeof warnings === 'string' ? warnings.slice(0, 16000) : '' };
      } catch (error) {
        task.loaded = { ok: false, message: answering.describe(error).message };
      }
      span?.close();
    }

    // -- graphs

    /**
     * Goes on with a replay.
     * @param {Task} task
     */
    replay(task) {
      const { message } = task;
      this.runtime.trace?.replaying(message.graph, message.number);
      if (task.halts === null) {
        this.begin();
        task.began = tracing.now();
        const graph = this.graphs.start(message);
        const lookup = this.ranges.place.bind(this.ranges);
        task.halts = graph.replay(lookup, this.ranges.frees, message.bindings, message.values, message.number);
        if (this.error === null) this.stats.launches += graph.part.launches;
      }
      if (this.error === null) {
        const of = { operation: 'replay', graph: message.graph };
        try {
          if (!this.runReplay(message, task.halts)) return HELD;
        } catch (error) {
          if (error instanceof ProtocolError) throw error;
          if (error instanceof graphs.ReplayFailure) {
            const details = error.program === null ? {} : launchDetails(error.program);
            this.fail(message.number, error.error, { ...of, step: error.step, ...details });
          } else this.fail(message.number, error, of);
        }
      }
      this.runtime.trace?.replaying(0, 0);
      this.runtime.trace?.replayed(task.began, message.graph, message.number);
      this.transfers.upload = null;
      const unused = this.graphs.over(message);
      if (unused) this.reply([KIND.CREDIT, this.queue, unused]);
      this.did(message.number);
      return OVER;
    }

    /**
     * Runs until the end, or until bytes or credit have to come first; whether that was the end.
     * @param {any} message
     * @param {Generator<any, void, void>} halts
     */
    runReplay(message, halts) {
      for (;;) {
        const failure = this.graphs.failures.get(message.number);
        if (failure !== undefined) throw failureOf(failure);
        while (this.transfers.upload !== null) {
          const kept = this.graphs.take(this.transfers.upload.transfer);
          if (kept === undefined) return HELD;
          this.transfers.chunk(kept.message, kept.data);
        }
        const { value: halt, done } = halts.next();
        if (done) return OVER;
        if (!halt.nbytes) continue;
        // Until the replay is over, what is done is what was done before it.
        const number = message.number - 1;
        const transfer = message.transfer + halt.place;
        if (halt.sends) {
          this.transfers.begin(number, transfer, halt.at, halt.nbytes);
          if (!this.transfers.pump()) return HELD;
        } else this.transfers.upload = { number, transfer, place: halt.at, nbytes: halt.nbytes, received: 0 };
      }
    }

    // -- answers and errors

    /**
     * @param {unknown[]} array
     * @param {Uint8Array | null} [bulk]
     * @param {boolean} [inPlace]
     */
    reply(array, bulk, inPlace) {
      if (array[0] === KIND.FAILED) this.owner.failed?.(String(array[3]), String(array[4]));
      this.owner.reply(array, bulk, inPlace);
    }

    /**
     * All up to there was given to the device. That never goes back, although a replay's transfers end before it.
     * @param {number} number
     */
    did(number) {
      this.done = Math.max(this.done, number);
    }

    /**
     * @param {number} number
     * @param {any[]} command
     * @param {any} error
     */
    refused(number, command, error) {
      if (error instanceof ProtocolError) throw error;
      const [kind, first, , , nbytes] = command;
      /** @type {Record<string, unknown>} */
      const details = { operation: OPERATIONS[kind] ?? 'command' };
      const program = kind === COMMAND.LAUNCH ? this.runtime.programName(first) : undefined;
      if (program) details.program = program;
      this.fail(number, error, details);
      if (kind === COMMAND.UPLOAD && nbytes) this.transfers.discard(number, first, nbytes);
    }

    /**
     * @param {number} number
     * @param {any} error
     * @param {Record<string, unknown>} [details]
     */
    fail(number, error, details = {}) {
      this.error = number;
      const { code, message, details: own } = answering.describe(error);
      this.answers.fail(number, new CommandError(code, message, { ...details, ...own, number: undefined }));
    }

    /**
     * The device found late that a command had failed: what came behind it should not have run.
     * @param {number} number
     */
    reported(number) {
      if (this.error !== null && this.error <= number) return;
      this.error = number;
      this.guard(() => this.advance());
    }
  }

  /** @param {string | null} program */
  function launchDetails(program) {
    return program === null || program === undefined ? { operation: 'launch' } : { operation: 'launch', program };
  }

  /**
   * What the server says a command failed with.
   * @param {any} message
   */
  function failureOf(message) {
    return new CommandError(message.code, message.message, Object.fromEntries(message.details));
  }

  return { Executor };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, executor);
