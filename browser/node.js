'use strict';
// A tab as a node of a server: joins, comes back by itself to what it had if that is soon, gives each session a device of
// its own, and tells the page how it goes. It shows nothing; `node.create` is used by a page directly or through worker.js. Defines `node`.

const node = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;
  /** @type {typeof executor} */
  const executing = typeof executor === 'undefined' ? module?.require('./executor.js') : executor;
  /** @type {typeof answers} */
  const answering = typeof answers === 'undefined' ? module?.require('./answers.js') : answers;
  /** @type {typeof ranges} */
  const memory = typeof ranges === 'undefined' ? module?.require('./ranges.js') : ranges;
  /** @type {typeof trace} */
  const tracing = typeof trace === 'undefined' ? module?.require('./trace.js') : trace;
  /** @type {typeof connection} */
  const connecting = typeof connection === 'undefined' ? module?.require('./connection.js') : connection;
  /** @type {typeof link} */
  const linking = typeof link === 'undefined' ? module?.require('./link.js') : link;
  const { KIND, ProtocolError } = wire;

  const STATS_MILLISECONDS = 500;
  /** The pause before the first try to come back; each later one is longer. */
  const FIRST_RETRY_SECONDS = 0.5;
  const LAST_RETRY_SECONDS = 30;
  const RETRY_GROWTH = 1.7;
  /** The longest pause while there is something to come back to. */
  const AWAY_RETRY_SECONDS = 2;
  /** Close codes after which the server may still have what this tab had there. */
  const PASSING_CODES = [1001, 1005, 1006, 1011, 1012, 1013];
  /** So often a server that is there may refuse a node that it has let in before: it may be starting. */
  const MAX_REFUSALS = 3;
  const REFUSED_CODE = 1008;
  /** What a server says where another page has taken this one's place; to come back would be to fight with it. */
  const REPLACED = /joined again/;
  /** What it says where a page's first words came too late, as after a sleep: they may be in time the next time. */
  const LATE = /^no Join came/;

  /**
   * A queue on this tab's device.
   * @typedef {{
   *   queue: number, session: number, client: string, began: number, closed: boolean, runtime: any,
   *   executor: InstanceType<typeof executing.Executor> | null,
   * }} Attached
   */
  /** @typedef {(event: Record<string, any>) => void} Emit */
  /**
   * @typedef {{
   *   url: string, token: string | null, name: string, secret: string | null, label: string, memory: number, agent: string,
   * }} Start
   */

  class TabNode {
    /** @param {Emit} emit */
    constructor(emit) {
      this.emit = emit;
      /** @type {Start | null} What to come back with; null while the tab stays out. */
      this.wanted = null;
      /** @type {InstanceType<typeof connecting.Connection> | null} */
      this.connection = null;
      this.joined = false;
      /** What is on its way between server and tab, while the tab is joined and for a while after a drop; else null. */
      /** @type {InstanceType<typeof linking.Link> | null} */
      this.link = null;
      /** What the server calls this joining, to come back to it. */
      this.stay = null;
      /** How long the server waits for a tab that is away. */
      this.graceSeconds = 0;
      /** Whether the server has not been told how the tab shows itself. */
      this.presentDue = false;
      this.paused = false;
      this.retries = 0;
      this.refusals = 0;
      /** Whether to show the server the secret instead of a token, which may have been changed meanwhile. */
      this.bySecret = false;
      /** @type {ReturnType<typeof setTimeout> | undefined} */
      this.retryTimer = undefined;
      /** @type {ReturnType<typeof setTimeout> | undefined} */
      this.graceTimer = undefined;
      /** @type {ReturnType<typeof setInterval> | undefined} */
      this.statsTimer = undefined;
      /** @type {Map<number, Attached>} */
      this.attached = new Map();
      this.budget = new memory.Budget();
      this.totals = { launches: 0, bytesIn: 0, bytesOut: 0 };
      this.began = performance.now();
      /** @type {Promise<any>} */
      this.adapter = this.describe();
    }

    /** @param {any} command */
    command(command) {
      switch (command.do) {
        case 'start':
          void this.start(command);
          return;
        case 'pause':
        case 'resume':
          this.present({ paused: command.do === 'pause' });
          return;
        case 'leave':
          this.leave('left', 'this tab has left');
          return;
        case 'label':
          this.present({ label: command.label });
          return;
        case 'memory':
          this.present({ memory: command.bytes });
          return;
      }
    }

    // -- the device

    async describe() {
      await null; // whoever made this node has it before it hears of it
      try {
        const described = await gpu.describeAdapter();
        this.emit({ event: 'adapter', ...described });
        return described;
      } catch (error) {
        const { message, details } = answering.describe(error);
        this.emit({ event: 'unsupported', reason: details.reason ?? 'no-adapter', message });
        return null;
      }
    }

    // -- joining and coming back

    /** @param {Start} start */
    async start(start) {
      this.stop();
      this.wanted = { ...start, label: start.label ?? '', memory: start.memory ?? 0 };
      this.budget.cap = this.wanted.memory;
      this.retries = this.refusals = 0;
      this.bySecret = false;
      const { wanted } = this;
      const first = await this.adapter;
      if (this.wanted !== wanted) return; // another command came meanwhile
      if (first === null) this.adapter = this.describe(); // what was missing may have come
      void this.connect();
    }

    async connect() {
      const { wanted } = this;
      if (wanted === null) return;
      this.state('connecting');
      const described = await this.adapter;
      if (this.wanted !== wanted || this.connection !== null) return;
      if (described === null) {
        this.leave('left', 'there is no device to lend');
        return;
      }
      try {
        const token = (this.bySecret ? wanted.secret : wanted.token) ?? wanted.secret ?? '';
        this.connection = new connecting.Connection(wanted.url, token, {
          opened: () => this.join(wanted, described.device),
          received: (message, bulk) => this.received(message, bulk),
          ended: (ending) => void this.ended(ending),
        });
      } catch (error) {
        this.leave('refused', answering.describe(error).message); // an address or token that can't be
      }
    }

    /**
     * @param {Start} wanted
     * @param {any} device
     */
    join(wanted, device) {
      const described = { ...device, label: wanted.label || wanted.name };
      if (this.paused) described.paused = true;
      if (wanted.memory) described.memory = Math.min(wanted.memory, described.memory ?? wanted.memory);
      const agent = wanted.agent ?? 'wsgrad tab';
      const received = this.link?.received ?? null;
      const stay = received === null ? null : this.stay;
      this.connection?.send([KIND.JOIN, wire.VERSION, agent, wanted.name, wanted.secret, [described], received, stay]);
    }

    /** @param {{ opened: boolean, code: number, reason: string }} ending */
    async ended({ opened, code, reason }) {
      const { wanted, joined } = this;
      const late = code === REFUSED_CODE && LATE.test(reason);
      this.disconnected();
      if (opened && !((late || PASSING_CODES.includes(code)) && this.graceSeconds)) this.forget();
      else if (joined) this.graceTimer = setTimeout(() => this.forget(), this.graceSeconds * 1000);
      if (wanted === null) return;
      if (code === REFUSED_CODE && !late && (!joined || REPLACED.test(reason))) {
        this.leave(joined ? 'kicked' : 'refused', reason || 'the server sent this tab away');
        return;
      }
      let message = reason || 'the connection ended';
      if (!opened) {
        message = 'the server can not be reached';
        if (await connecting.reachable(wanted.url)) {
          message = 'the server refuses the token, or pages from this address';
          this.refusals += 1;
          this.bySecret = !this.bySecret;
          const limit = wanted.secret === null ? 1 : MAX_REFUSALS;
          if (this.wanted === wanted && this.refusals >= limit) {
            this.leave('refused', message);
            return;
          }
        }
        if (this.wanted !== wanted) return;
      }
      const longest = this.attached.size ? AWAY_RETRY_SECONDS : LAST_RETRY_SECONDS;
      const seconds = Math.min(longest, FIRST_RETRY_SECONDS * RETRY_GROWTH ** this.retries);
      this.retries += 1;
      const retrySeconds = seconds * (0.75 + Math.random() / 2); // tabs of one server do not all come at once
      this.state('waiting', { message, retrySeconds });
      this.retryTimer = setTimeout(() => void this.connect(), retrySeconds * 1000);
    }

    /**
     * Stays out until it is started again.
     * @param {string} state
     * @param {string} message
     */
    leave(state, message) {
      if (this.joined) this.connection?.send([KIND.BYE]);
      this.stop();
      this.wanted = null;
      this.state(state, { message });
    }

    stop() {
      clearTimeout(this.retryTimer);
      this.connection?.close();
      this.disconnected();
      this.forget();
    }

    /** The connection is over; what sessions have here may be wanted again. */
    disconnected() {
      if (this.connection !== null) {
        this.totals.bytesIn += this.connection.bytesIn;
        this.totals.bytesOut += this.connection.bytesOut;
      }
      clearInterval(this.statsTimer);
      this.connection = null;
      this.joined = false;
    }

    /** All that sessions had here goes. */
    forget() {
      clearTimeout(this.graceTimer);
      this.link = null;
      for (const queue of [...this.attached.keys()]) this.detach(queue);
    }

    /**
     * Sends the server a message of a queue, or keeps it until it is there again.
     * @param {unknown[]} array
     * @param {Uint8Array | null} [bulk]
     * @param {boolean} [inPlace]
     */
    push(array, bulk = null, inPlace = false) {
      const { link: kept, connection: open } = this;
      if (kept === null) return;
      const bytes = wire.encode(array, bulk, inPlace);
      kept.keep(bytes);
      if (this.joined) open?.sendBytes(bytes);
      if (!kept.overfull) return;
      if (open === null) this.forget();
      else open.broken(new ProtocolError(`the server has not seen ${kept.keptBytes} bytes`));
    }

    // -- what the server says

    /**
     * @param {any} message
     * @param {Uint8Array | null} bulk
     */
    received(message, bulk) {
      if (message.kind >= linking.FIRST_NUMBERED) {
        if (this.link === null) throw new ProtocolError(`a message of kind ${message.kind} before Joined`);
        if (this.link.noteReceived(bulk?.length ?? 0)) this.connection?.send([KIND.SEEN, this.link.received]);
      }
      switch (message.kind) {
        case KIND.JOINED:
          this.welcome(message);
          return;
        case KIND.REFUSED:
          this.leave(message.code === 'Kicked' ? 'kicked' : 'refused', message.message);
          return;
        case KIND.CLOCK:
          this.connection?.send([KIND.TIME, message.token, tracing.now()]);
          return;
        case KIND.SEEN:
          this.link?.seen(message.count);
          return;
        case KIND.BYE:
          return; // the close comes after it
        case KIND.PRESENT:
          this.presented(message);
          return;
        case KIND.ATTACH:
          void this.attach(message);
          return;
        case KIND.CLOSE:
          this.detach(message.queue);
          return;
      }
      const attached = this.attached.get(message.queue);
      if (attached === undefined || attached.executor === null) {
        throw new ProtocolError(`a message of kind ${message.kind} for queue ${message.queue}, which is not attached`);
      }
      attached.executor.handle(message, bulk);
    }

    /** @param {any} message */
    welcome(message) {
      const { wanted } = this;
      if (wanted === null) return;
      if (message.version !== wire.VERSION) {
        const spoken = `the server speaks version ${message.version} of the protocol, this page version ${wire.VERSION}`;
        this.leave('refused', `${spoken}: reload the page`);
        return;
      }
      wanted.name = message.name;
      wanted.secret = message.secret;
      this.joined = true;
      this.retries = this.refusals = 0;
      const grace = message.info.get('grace');
      this.graceSeconds = typeof grace === 'number' && grace > 0 ? grace : 0;
      clearTimeout(this.graceTimer);
      if (message.received === null) {
        this.forget(); // the server knows nothing of it any more
        this.link = new linking.Link();
        this.stay = message.info.get('stay') ?? null;
        this.presentDue = wanted.label !== '' || wanted.memory > 0 || this.paused;
      } else if (this.link === null) throw new ProtocolError('the server goes on with what has ended here');
      else for (const bytes of this.link.resume(message.received)) this.connection?.sendBytes(bytes);
      if (this.presentDue) this.sendPresent(wanted);
      this.state(this.paused ? 'paused' : 'joined');
      clearInterval(this.statsTimer);
      this.statsTimer = setInterval(() => this.stats(), STATS_MILLISECONDS);
      this.stats();
    }

    // -- how it shows itself

    /** @param {{ label?: string, memory?: number, paused?: boolean }} change */
    present({ label, memory: bytes, paused }) {
      const { wanted } = this;
      if (paused !== undefined) this.pause(paused);
      if (wanted === null) return;
      if (label !== undefined) wanted.label = label;
      if (bytes !== undefined) this.budget.cap = wanted.memory = bytes;
      this.presentDue = true;
      if (!this.joined) return;
      this.sendPresent(wanted);
      if (paused !== undefined) this.state(paused ? 'paused' : 'joined');
    }

    /** @param {Start} wanted */
    sendPresent(wanted) {
      this.presentDue = false;
      this.connection?.send([KIND.PRESENT, wanted.label, this.paused, wanted.memory]);
    }

    /**
     * An administrator has set it.
     * @param {any} message
     */
    presented({ label, paused, memory: bytes }) {
      const { wanted } = this;
      if (wanted === null) return;
      wanted.label = label;
      this.budget.cap = wanted.memory = bytes;
      this.emit({ event: 'present', label, paused, memory: bytes });
      if (paused !== this.paused) {
        this.pause(paused);
        this.state(paused ? 'paused' : 'joined');
      }
    }

    /** @param {boolean} paused */
    pause(paused) {
      this.paused = paused;
      for (const { executor: running } of this.attached.values()) running?.hold(paused);
    }

    // -- sessions

    /** @param {any} message */
    async attach({ queue, session, device, options }) {
      if (this.attached.has(queue)) throw new ProtocolError(`queue ${queue} is attached already`);
      const { link: asked } = this;
      const client = options.get('client');
      /** @type {Attached} */
      const attached = {
        queue,
        session,
        client: typeof client === 'string' ? client : '',
        began: performance.now(),
        closed: false,
        runtime: null,
        executor: null,
      };
      this.attached.set(queue, attached);
      try {
        if (device !== 0) throw new wire.CommandError('DeviceError', `there is no device ${device} here`);
        // The server may not have heard of it yet.
        if (this.paused) throw new wire.CommandError('DeviceError', 'this tab is paused by its owner');
        const limit = (/** @type {string} */ key) => {
          const value = options.get(key);
          return typeof value === 'number' && value > 0 ? value : undefined;
        };
        const runtime = await gpu.GpuRuntime.open({
          memory: limit('memory'),
          launchSeconds: limit('launch_seconds'),
        });
        if (attached.closed || this.link !== asked) {
          runtime.close();
          return;
        }
        attached.runtime = runtime;
        this.ready(attached, runtime);
      } catch (error) {
        if (attached.closed || this.link !== asked) return;
        this.attached.delete(queue);
        const { code, message, details } = answering.describe(error);
        this.failed(queue, code, message);
        this.push([KIND.FAILED, queue, 0, code, message, details]);
      }
    }

    /**
     * @param {Attached} attached
     * @param {any} runtime
     */
    ready(attached, runtime) {
      const { queue } = attached;
      const running = new executing.Executor(queue, runtime, {
        budget: this.budget,
        reply: (array, bulk, inPlace) => this.push(array, bulk, inPlace),
        broken: (error) => this.broken(error),
        failed: (code, message) => this.failed(queue, code, message),
      });
      attached.executor = running;
      if (this.paused) running.hold(true);
      runtime.lost.then((/** @type {any} */ error) => running.lost(error));
      this.push([KIND.RESULT, queue, 0, runtime.describe()]);
    }

    /**
     * The server has broken the protocol.
     * @param {any} error
     */
    broken(error) {
      if (this.connection === null) this.forget();
      else this.connection.broken(error);
    }

    /** @param {number} queue */
    detach(queue) {
      const attached = this.attached.get(queue);
      if (attached === undefined) return;
      this.attached.delete(queue);
      attached.closed = true;
      if (attached.executor === null) return;
      this.totals.launches += attached.executor.stats.launches;
      attached.executor.close();
    }

    // -- what the page is told

    /**
     * @param {string} state
     * @param {Record<string, any>} [more]
     */
    state(state, more = {}) {
      const { name, secret } = this.wanted ?? { name: null, secret: null };
      this.emit({ event: 'state', state, message: '', name, secret, retrySeconds: 0, ...more });
    }

    /**
     * @param {number} queue
     * @param {string} code
     * @param {string} message
     */
    failed(queue, code, message) {
      const client = this.attached.get(queue)?.client ?? '';
      this.emit({ event: 'error', at: Date.now() / 1000, code, message, client });
    }

    stats() {
      const now = performance.now();
      const sessions = [...this.attached.values()].map(({ session, client, began, executor: running }) => ({
        session,
        client,
        memory: running?.memoryUsed ?? 0,
        launches: running?.stats.launches ?? 0,
        seconds: (now - began) / 1000,
      }));
      this.emit({
        event: 'stats',
        seconds: (now - this.began) / 1000,
        launches: sessions.reduce((sum, { launches }) => sum + launches, this.totals.launches),
        bytesIn: this.totals.bytesIn + (this.connection?.bytesIn ?? 0),
        bytesOut: this.totals.bytesOut + (this.connection?.bytesOut ?? 0),
        memory: this.budget.used,
        cap: this.budget.cap,
        sessions,
      });
    }
  }

  /**
   * A node that waits for commands and tells what happens; it begins by telling what device there is.
   * @param {Emit} emit
   */
  function create(emit) {
    const made = new TabNode(emit);
    return { command: (/** @type {any} */ command) => made.command(command) };
  }

  return { create };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, node);
