'use strict';
// How the page shows what it is told: state, adapter, figures, errors. It decides nothing and talks to no node.

const view = (() => {
  const MEMORY_STEPS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384].map((mebi) => mebi * 2 ** 20);
  const MAX_ERRORS = 20;

  /** @type {Record<string, {word: string, live?: boolean, pause?: boolean, leave?: boolean, join?: string}>} */
  const STATES = {
    starting: { word: 'Starting' },
    unsupported: { word: 'Not possible here' },
    broken: { word: 'Page incomplete' },
    asking: { word: 'Not joined' },
    consent: { word: 'Your decision' },
    connecting: { word: 'Connecting', live: true, leave: true },
    joined: { word: 'Ready', live: true, pause: true, leave: true },
    used: { word: 'In use', live: true, pause: true, leave: true },
    paused: { word: 'Paused', live: true, pause: true, leave: true },
    waiting: { word: 'Waiting', live: true, leave: true, join: 'Try now' },
    refused: { word: 'Refused' },
    kicked: { word: 'Removed', join: 'Join again' },
    left: { word: 'Not joined', join: 'Join again' },
  };

  /** @type {Record<string, string>} */
  const FEATURES = {
    f16: '16-bit floats',
    timestamps: 'timestamps',
    native_graphs: 'graphs',
  };

  /** @type {InstanceType<typeof plot.Plot>} */
  let launches;
  /** @type {InstanceType<typeof plot.Plot>} */
  let traffic;
  /** @type {{seconds: number, launches: number, bytesIn: number, bytesOut: number} | null} */
  let before = null;
  /** @type {{key: string, at: number, code: string, message: string, times: number}[]} */
  let errors = [];
  let serial = 0;
  let server = '';

  /** The plot of launches a second, in its place on either page. */
  function launchPlot() {
    return new plot.Plot(ui.byId('plot-launches'), {
      title: 'Launches a second',
      series: ['launches'],
      format: (value) => `${ui.count(value)}/s`,
      scale: ui.count,
    });
  }

  /** The plot of bytes a second. */
  function trafficPlot() {
    return new plot.Plot(ui.byId('plot-bytes'), {
      title: 'Bytes a second',
      series: ['in', 'out'],
      format: (value) => `${ui.bytes(value)}/s`,
      scale: ui.bytes,
      binary: true,
    });
  }

  function start() {
    launches = launchPlot();
    traffic = trafficPlot();
  }

  /** @param {string} name the server's, for people */
  function showServer(name) {
    server = name;
    for (const place of document.querySelectorAll('.server-name')) ui.text(place, name);
  }

  /**
   * @param {string} state
   * @param {{headline: string, detail?: string, todo?: (string | Node)[][], quiet?: boolean}} what
   */
  function showState(state, what) {
    const known = STATES[state];
    const had = document.activeElement;
    // Scripts that watch a tab go by this: whoever uses it, it has joined.
    document.body.dataset.state = state === 'used' ? 'joined' : state;
    document.body.toggleAttribute('data-used', state === 'used');
    ui.text(ui.byId('state-word'), known.word);
    ui.text(ui.byId('headline'), what.headline);
    ui.text(ui.byId('detail'), what.detail ?? '');
    const todo = ui.byId('todo');
    todo.replaceChildren(...(what.todo ?? []).map((parts) => ui.element('li', {}, ...parts)));
    ui.show(todo, Boolean(what.todo?.length));
    ui.show(ui.byId('live'), known.live ?? false);
    ui.show(ui.byId('pause'), known.pause ?? false);
    ui.text(ui.byId('pause'), state === 'paused' ? 'Resume' : 'Pause');
    ui.button('pause').classList.toggle('primary', state === 'paused');
    ui.show(ui.byId('leave'), known.leave ?? false);
    ui.show(ui.byId('join'), known.join !== undefined);
    if (known.join) ui.text(ui.byId('join'), known.join);
    ui.show(ui.byId('reload'), state === 'unsupported' || state === 'broken');
    ui.show(ui.byId('ask'), state === 'asking' || state === 'refused');
    ui.show(ui.byId('consent'), state === 'consent');
    document.title = `${known.word}${server ? ` · ${server}` : ''} · wsgrad`;
    if (!what.quiet) ui.announce(`${known.word}. ${what.headline} ${what.detail ?? ''}`);
    // Where the element with the focus has gone, the keyboard goes on at what has changed, not at the top of the page.
    if (had && had !== document.body && !had.checkVisibility()) ui.byId('headline').focus();
  }

  /** @param {string} id @param {'warn' | 'info'} kind @param {string | null} title null takes the note away @param {(string | Node)[]} body */
  function note(id, kind, title, ...body) {
    const notes = ui.byId('notes');
    const old = document.getElementById(`note-${id}`);
    if (title === null) {
      old?.remove();
      return;
    }
    const made = ui.element('div', { class: `note ${kind}`, id: `note-${id}` }, ui.element('strong', {}, title), ' ');
    made.append(...body);
    if (old?.textContent === made.textContent) return;
    if (old) old.replaceWith(made);
    else notes.append(made);
  }

  /** @param {{device: any, adapterName: string, features: string[], limits: Record<string, number>, software: boolean}} adapter */
  function showAdapter(adapter) {
    ui.text(ui.byId('adapter'), adapter.adapterName);
    ui.text(ui.byId('consent-adapter'), adapter.software ? 'this device’s processor' : adapter.adapterName);
    const words = Object.entries(FEATURES).filter(([key]) => adapter.device?.[key] === true);
    const features = ui.byId('features');
    features.replaceChildren(...words.map(([, word]) => ui.element('span', { class: 'chip good' }, word)));
    if (!words.length) ui.text(features, 'none beyond the basic ones');
    ui.byId('all-features').replaceChildren(...adapter.features.map((name) => ui.element('span', { class: 'chip' }, name)));
    const limits = Object.entries(adapter.limits).filter(([, value]) => typeof value === 'number');
    ui.byId('limits').replaceChildren(
      ...limits.flatMap(([name, value]) => [ui.element('dt', {}, spaced(name)), ui.element('dd', {}, limit(name, value))]),
    );
    note(
      'software',
      'warn',
      adapter.software ? 'This is a software adapter.' : null,
      `“${adapter.adapterName}” computes on the processor, correctly but slowly. If this device has a GPU: turn on ` +
        'graphics acceleration in the browser’s settings and restart it; ',
      ui.element('code', {}, 'chrome://gpu'),
      ' or ',
      ui.element('code', {}, 'about:support'),
      ' says why it isn’t used.',
    );
  }

  /** maxBufferSize → max buffer size. @param {string} name */
  function spaced(name) {
    return name.replace(/([A-Z])/g, (letter) => ` ${letter.toLowerCase()}`);
  }

  /** @param {string} name @param {number} value */
  function limit(name, value) {
    return /Size$/.test(name) && !/Workgroup(Size|s)/.test(name) && value >= 1024 ? ui.bytes(value) : value.toLocaleString();
  }

  /**
   * @typedef {object} Stats
   * @property {number} seconds
   * @property {number} launches
   * @property {number} bytesIn
   * @property {number} bytesOut
   * @property {number} memory
   * @property {number} cap
   * @property {{session: number, client: string, memory: number, launches: number, seconds: number}[]} sessions
   */

  /** @param {Stats} stats */
  function showStats(stats) {
    if (before && stats.seconds > before.seconds) {
      const over = stats.seconds - before.seconds;
      /** @param {number} now @param {number} then */
      const rate = (now, then) => Math.max(0, now - then) / over;
      launches.add(stats.seconds, [rate(stats.launches, before.launches)]);
      traffic.add(stats.seconds, [rate(stats.bytesIn, before.bytesIn), rate(stats.bytesOut, before.bytesOut)]);
    }
    before = stats;
    showMemory(stats.memory, stats.cap);
    showUsers(stats.sessions);
  }

  /** @param {Stats['sessions']} sessions */
  function showUsers(sessions) {
    ui.show(ui.byId('nobody'), !sessions.length);
    ui.show(ui.byId('users-box'), sessions.length > 0);
    ui.list(
      ui.byId('users'),
      sessions,
      (session) => String(session.session),
      (session) => {
        /** @param {string} name */
        const cell = (name) => ui.element('td', { class: 'number', 'data-name': name });
        const client = ui.element('th', { scope: 'row' }, session.client || `session ${session.session}`);
        return ui.element('tr', {}, client, cell('Memory'), cell('Launches'), cell('For'));
      },
      (row, session) => {
        ui.text(row.children[1], ui.bytes(session.memory));
        ui.text(row.children[2], ui.count(session.launches));
        ui.text(row.children[3], ui.span(session.seconds));
      },
    );
  }

  /** @param {number} used @param {number} cap */
  function showMemory(used, cap) {
    ui.text(ui.byId('memory-used'), ui.bytes(used));
    ui.text(ui.byId('memory-of'), cap ? `in use of ${ui.bytes(cap)}` : 'in use');
    const part = cap ? Math.min(100, (100 * used) / cap) : 0;
    const meter = ui.byId('memory-meter');
    meter.setAttribute('aria-valuenow', part.toFixed(0));
    meter.setAttribute('aria-valuetext', `${ui.bytes(used)} of ${ui.bytes(cap)}`);
    ui.byId('memory-bar').style.width = `${part}%`;
    meter.classList.toggle('full', part >= 90);
  }

  /** @param {{at: number, code: string, message: string}} error */
  function addError(error) {
    const last = errors[0];
    if (last && last.code === error.code && last.message === error.message) {
      last.times++;
      last.at = error.at;
    } else {
      errors = [{ ...error, key: String(serial++), times: 1 }, ...errors].slice(0, MAX_ERRORS);
    }
    showErrors(ui.byId('errors'), ui.byId('no-errors'), errors);
  }

  /**
   * @param {HTMLElement} host
   * @param {HTMLElement} none
   * @param {{key: string, at: number, code: string, message: string, times: number, where?: string}[]} shown
   */
  function showErrors(host, none, shown) {
    ui.show(none, !shown.length);
    ui.list(
      host,
      shown,
      (error) => error.key,
      (error) =>
        ui.element(
          'li',
          {},
          ui.element('p', {}, ui.element('time', {}), ' ', ui.words(error.code), ' ', ui.element('span', { class: 'times' })),
          ui.element(
            'details',
            {},
            ui.element('summary', {}, 'What it says'),
            ui.element('pre', { tabindex: '0' }, `${error.code}: ${error.message}`),
          ),
        ),
      (made, error) => {
        const time = made.querySelector('time');
        if (time) ui.text(time, ui.clock(error.at) + (error.where ? ` · ${error.where}` : ''));
        const times = made.querySelector('.times');
        if (times) ui.text(times, error.times > 1 ? `(${error.times} times)` : '');
      },
    );
  }

  /** The step of the memory slider that is nearest to a size. @param {number} nbytes */
  function memoryStep(nbytes) {
    let best = 0;
    MEMORY_STEPS.forEach((step, index) => {
      if (Math.abs(step - nbytes) < Math.abs(MEMORY_STEPS[best] - nbytes)) best = index;
    });
    return best;
  }

  return {
    MEMORY_STEPS, launchPlot, trafficPlot, start, showServer, showState, showAdapter, showStats, showUsers, showMemory, addError, showErrors, note, memoryStep,
  };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, view);
