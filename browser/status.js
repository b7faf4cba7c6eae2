'use strict';
// The status page: asks the server once a second what goes on and shows it; counters become rates here.

(() => {
  const TOKEN = 'wsgrad.status-token';
  const POLL_SECONDS = 1;
  const HIDDEN_SECONDS = 10;
  const MAX_WAIT_SECONDS = 30;
  const ANSWER_SECONDS = 10;

  /**
   * @typedef {{memory?: number, launches?: number, bytes_in?: number, bytes_out?: number, sessions?: number}} Totals
   * @typedef {Record<string, any> & {totals?: Totals}} Row
   * @typedef {{launches: number, in: number, out: number}} Rates
   */

  /** @type {string | null} */
  let token = null;
  /** @type {any} */
  let last = null;
  /** @type {Map<string, Rates>} */
  let rates = new Map();
  let tookAt = 0;
  let failures = 0;
  let scope = '';
  let timer = 0;
  let reading = false;
  /** @type {Record<'launches' | 'traffic' | 'memory', InstanceType<typeof plot.Plot>>} */
  let plots;

  // -- asking

  /** Ask now, and then again and again. */
  async function poll() {
    clearTimeout(timer);
    if (!token || reading) return;
    const asked = token;
    reading = true;
    let wait = document.visibilityState === 'visible' ? POLL_SECONDS : HIDDEN_SECONDS;
    try {
      const answer = await fetch('status.json', {
        headers: { Authorization: `Bearer ${asked}` },
        cache: 'no-store',
        signal: AbortSignal.timeout(ANSWER_SECONDS * 1000),
      });
      if (asked !== token) return;
      if (answer.status === 401 || answer.status === 403) {
        const why = (await answer.text()).trim();
        forget();
        ask(`The server did not take this token: ${why}.`);
        return;
      }
      if (!answer.ok) throw new Error(`it answered ${answer.status}`);
      const document = await answer.json();
      if (asked !== token) return;
      failures = 0;
      took(document);
    } catch (error) {
      if (asked !== token) return;
      failures++;
      wait = Math.min(POLL_SECONDS * 2 ** failures, MAX_WAIT_SECONDS);
      lost(error, wait);
    } finally {
      reading = false;
      clearTimeout(timer);
      if (token) timer = setTimeout(() => void poll(), wait * 1000);
    }
  }

  /** @param {unknown} error @param {number} wait */
  function lost(error, wait) {
    // "Failed to fetch" tells nobody anything.
    const why = error instanceof TypeError || error instanceof DOMException ? '' : `: ${String(error)}`;
    const from = last ? `What is shown is from ${ui.clock(tookAt)}. ` : '';
    state('waiting', 'No answer', 'The server does not answer.', `${from}Trying again in ${wait} s${why}.`);
  }

  /** @param {string} error */
  function ask(error) {
    state('asking', 'Token needed', 'This page shows what a server does.', '');
    ui.show(ui.byId('status'), false);
    ui.show(ui.byId('ask'), true);
    ui.text(ui.byId('ask-error'), error);
    ui.input('token').value = '';
    ui.input('token').focus();
  }

  function forget() {
    token = null;
    last = null;
    rates = new Map();
    ui.stored('sessionStorage', TOKEN).set(null);
    for (const drawn of Object.values(plots)) drawn.clear();
  }

  /** @param {string} given */
  function use(given) {
    token = given;
    ui.stored('sessionStorage', TOKEN).set(given);
    ui.show(ui.byId('ask'), false);
    void poll();
  }

  // -- showing

  /** @param {string} name @param {string} word @param {string} headline @param {string} detail */
  function state(name, word, headline, detail) {
    if (document.body.dataset.state !== name) ui.announce(`${word}. ${headline}`);
    document.body.dataset.state = name;
    ui.text(ui.byId('state-word'), word);
    ui.text(ui.byId('headline'), headline);
    ui.text(ui.byId('detail'), detail);
    ui.show(ui.byId('sign-out'), token !== null);
    ui.show(ui.byId('rotate'), token !== null && last?.role === 'admin');
    document.title = `${word} · ${last?.name ?? 'wsgrad'} status`;
  }

  /** @param {any} now a document of /status.json */
  function took(now) {
    const before = last;
    const restarted = before && (before.pid !== now.pid || now.uptime_seconds < before.uptime_seconds);
    last = now;
    tookAt = Date.now() / 1000;
    if (restarted) for (const drawn of Object.values(plots)) drawn.clear();
    if (before && !restarted && now.uptime_seconds > before.uptime_seconds) {
      count(before, now);
      draw();
    }
    const devices = ui.plural(now.devices.length, 'device');
    const sessions = ui.plural(now.sessions.length, 'session');
    const role = now.role === 'admin' ? 'You have the admin token.' : 'You have the client token.';
    const detail = `${now.server}, up for ${ui.span(now.uptime_seconds)}. ${devices}, ${sessions}. ${role}`;
    state('joined', 'Running', now.name, detail);
    ui.show(ui.byId('ask'), false);
    ui.show(ui.byId('status'), true);
    showScope(now);
    showDevices(now);
    showSessions(now);
    showInvitation(now);
    view.showErrors(ui.byId('errors'), ui.byId('no-errors'), errorsOf(now));
  }

  /** The errors of a document, the newest first. A repeated one moves its time on and stays the same. @param {any} now */
  function errorsOf(now) {
    /** @type {Map<string, number>} */
    const seen = new Map();
    const errors = (now.errors ?? []).map((/** @type {Row} */ error) => {
      const what = JSON.stringify([error.device, error.session, error.code, error.message]);
      const times = (seen.get(what) ?? 0) + 1;
      seen.set(what, times);
      const where = [error.device, error.session && `session ${error.session}`].filter(Boolean).join(', ');
      return { key: `${times} ${what}`, at: error.time, code: error.code, message: error.message, times: 1, where };
    });
    return errors.reverse();
  }

  /** The rates between two documents, by what they are of. @param {any} before @param {any} now */
  function count(before, now) {
    const seconds = now.uptime_seconds - before.uptime_seconds;
    /** @type {Map<string, Rates>} */
    const counted = new Map();
    /** @param {string} key @param {Totals | undefined} then @param {Totals | undefined} totals */
    const one = (key, then, totals) => {
      /** @param {'launches' | 'bytes_in' | 'bytes_out'} name */
      const rate = (name) => Math.max(0, (totals?.[name] ?? 0) - (then?.[name] ?? 0)) / seconds;
      counted.set(key, { launches: rate('launches'), in: rate('bytes_in'), out: rate('bytes_out') });
    };
    one('', before.totals, now.totals);
    for (const [kind, key] of [['devices', 'id'], ['sessions', 'session']]) {
      const old = new Map(before[kind].map((/** @type {Row} */ row) => [row[key], row]));
      // What was not there before counts from zero: everything it has done happened since.
      for (const row of now[kind]) one(`${kind} ${row[key]}`, old.get(row[key])?.totals, row.totals);
    }
    rates = counted;
  }

  function draw() {
    const chosen = scope ? last.devices.find((/** @type {Row} */ device) => device.id === scope) : last;
    const rate = rates.get(scope ? `devices ${scope}` : '') ?? { launches: 0, in: 0, out: 0 };
    plots.launches.add(last.uptime_seconds, [rate.launches]);
    plots.traffic.add(last.uptime_seconds, [rate.in, rate.out]);
    plots.memory.add(last.uptime_seconds, [chosen?.totals?.memory ?? 0]);
  }

  /** @param {any} now */
  function showScope(now) {
    const select = ui.byId('scope');
    const items = [{ id: '', label: 'the whole server' }, ...now.devices];
    ui.list(
      select,
      items,
      (device) => device.id,
      (device) => ui.element('option', { value: device.id }),
      (option, device) => ui.text(option, device.label || device.id),
    );
    if (scope && !items.some((device) => device.id === scope)) {
      scope = '';
      for (const drawn of Object.values(plots)) drawn.clear();
    }
    /** @type {HTMLSelectElement} */ (select).value = scope;
  }

  /** @param {any} now */
  function showDevices(now) {
    /** @type {Row[]} */
    const nodes = now.nodes ?? [];
    const dialled = new Set(nodes.map((node) => node.name));
    const own = now.devices.filter((/** @type {Row} */ device) => !dialled.has(device.node));
    /** @type {Row[]} */
    const groups = [
      ...(own.length ? [{ name: '', label: 'This machine', devices: own }] : []),
      ...nodes.map((node) => ({
        ...node,
        devices: now.devices.filter((/** @type {Row} */ device) => device.node === node.name),
      })),
    ];
    ui.show(ui.byId('no-devices'), !groups.length);
    ui.list(ui.byId('nodes'), groups, (node) => `${node.name} ${now.role}`, makeNode, updateNode);
  }

  /** @param {Row} node */
  function makeNode(node) {
    const made = ui.element('section', { class: 'node' });
    const head = ui.element('div', { class: 'node-head' }, ui.element('h3', {}), ui.element('span', { class: 'chips' }));
    head.append(ui.element('span', { class: 'hint' }));
    made.append(head);
    const actions = ui.element('div', { class: 'actions' });
    if (node.name && last.role === 'admin') {
      for (const action of ['rename', 'pause', 'resume', 'kick', 'revoke']) {
        const kind = action === 'kick' || action === 'revoke' ? 'small danger' : 'small';
        const button = ui.element('button', { type: 'button', class: kind, 'data-action': action });
        button.append(admin.ACTIONS[action].button);
        button.addEventListener('click', () => void act(action, node.name));
        actions.append(button);
      }
    }
    const table = ui.element('table', { class: 'aligned' });
    const names = ['Device', 'Kind', 'Memory', 'Launches/s', 'In', 'Out', 'Sessions'].map((name, index) =>
      ui.element('th', { scope: 'col', class: index < 2 ? '' : 'number' }, name),
    );
    table.append(ui.element('thead', {}, ui.element('tr', {}, ...names)), ui.element('tbody', {}));
    made.append(ui.element('div', { class: 'table-box' }, table), actions);
    return made;
  }

  /** @param {HTMLElement} made @param {Row} node */
  function updateNode(made, node) {
    const name = node.label || node.name;
    const [title, chips, who] = made.querySelectorAll('.node-head > *');
    ui.text(title, name);
    ui.text(who, [node.label && node.name, node.agent, node.peer].filter(Boolean).join(' · '));
    chip(chips, 'paused', node.paused === true, 'warn');
    for (const button of made.querySelectorAll('button')) {
      const action = button.dataset.action ?? '';
      button.setAttribute('aria-label', `${admin.ACTIONS[action].button} ${name}`);
      if (action === 'pause') ui.show(button, node.paused !== true);
      if (action === 'resume') ui.show(button, node.paused === true);
    }
    const body = made.querySelector('tbody');
    if (!body) return;
    ui.list(
      body,
      node.devices,
      (/** @type {Row} */ device) => device.id,
      () => {
        const cells = ['Kind', 'Memory', 'Launches/s', 'In', 'Out', 'Sessions'].map((column, index) =>
          ui.element('td', { class: index ? 'number' : '', 'data-name': column }),
        );
        const title = ui.element('th', { scope: 'row' }, ui.element('span', {}), ui.element('code', { class: 'id' }));
        return ui.element('tr', {}, title, ...cells);
      },
      (row, /** @type {Row} */ device) => {
        const [title, kind, memory, launches, received, sent, sessions] = row.children;
        const rate = rates.get(`devices ${device.id}`) ?? { launches: 0, in: 0, out: 0 };
        const own = device.label && device.label !== device.id && device.label !== name ? device.label : '';
        ui.text(title.children[0], own);
        ui.text(title.children[1], device.id);
        const model = device.adapter || device.cpu || '';
        ui.text(kind, [device.kind, device.software && 'software', model].filter(Boolean).join(', '));
        const cap = device.memory ? ` of ${ui.bytes(device.memory)}` : '';
        ui.text(memory, ui.bytes(device.totals?.memory ?? 0) + cap);
        ui.text(launches, ui.count(rate.launches));
        ui.text(received, `${ui.bytes(rate.in)}/s`);
        ui.text(sent, `${ui.bytes(rate.out)}/s`);
        ui.text(sessions, String(device.totals?.sessions ?? device.sessions ?? 0));
      },
    );
  }

  /** @param {Element} host @param {string} word @param {boolean} shown @param {string} kind */
  function chip(host, word, shown, kind) {
    const found = [...host.children].find((made) => made.textContent === word);
    if (shown && !found) host.append(ui.element('span', { class: `chip ${kind}` }, word));
    if (!shown) found?.remove();
  }

  /** @param {any} now */
  function showSessions(now) {
    ui.show(ui.byId('no-sessions'), !now.sessions.length);
    ui.show(ui.byId('sessions-box'), now.sessions.length > 0);
    /** @type {Map<string, string>} */
    const labels = new Map(now.devices.map((/** @type {Row} */ device) => [device.id, device.label || device.id]));
    ui.list(
      ui.byId('sessions'),
      now.sessions,
      (/** @type {Row} */ session) => String(session.session),
      (/** @type {Row} */ session) => {
        const cells = ['Devices', 'Memory', 'Launches/s', 'For'].map((column, index) =>
          ui.element('td', { class: index ? 'number' : '', 'data-name': column }),
        );
        return ui.element('tr', {}, ui.element('th', { scope: 'row' }, session.client || `session ${session.session}`), ...cells);
      },
      (row, /** @type {Row} */ session) => {
        const [client, devices, memory, launches, age] = row.children;
        const name = session.client || `session ${session.session}`;
        ui.text(client, session.connected === false ? `${name} (away; may come back)` : name);
        const used = (session.devices ?? []).map((/** @type {string} */ id) => labels.get(id) ?? id);
        ui.text(devices, [...new Set(used)].join(', ') || 'none');
        ui.text(memory, ui.bytes(session.totals?.memory ?? 0));
        ui.text(launches, ui.count(rates.get(`sessions ${session.session}`)?.launches ?? 0));
        ui.text(age, ui.span(session.seconds ?? 0));
      },
    );
  }

  /** @param {any} now */
  function showInvitation(now) {
    const image = /** @type {HTMLImageElement} */ (ui.byId('qr'));
    const code = typeof now.qr === 'string' && now.qr.startsWith('data:image/svg+xml') ? now.qr : '';
    if (code && image.getAttribute('src') !== code) image.src = code;
    ui.show(image, code !== '');
    ui.text(ui.byId('page-url'), now.page_url ?? '');
    ui.show(ui.button('copy'), Boolean(now.join_url) && 'clipboard' in navigator);
    /** @type {string} */
    let how;
    if (!now.page_url) how = 'This server listens on its own machine only: --host 0.0.0.0 --tls lets phones and other machines in.';
    else if (code) how = 'Point a phone’s camera at the code. It holds the node token: whoever sees it may lend a device.';
    else if (now.role === 'admin') how = 'Open this address with the node token, #token=…, on any device with a GPU.';
    else how = 'Open this address with the node token, #token=…, which wsgrad-serve prints; the admin token shows its QR code here.';
    ui.text(ui.byId('add-how'), how);
  }

  // -- the administrator

  /** @param {string} action @param {string} name */
  async function act(action, name) {
    const node = (last?.nodes ?? []).find((/** @type {Row} */ found) => found.name === name);
    if (!token || !node) return;
    try {
      const done = await admin.act(token, action, node);
      if (!done) return;
      ui.announce(done.said);
      fresh(done.tokens);
      void poll();
    } catch (error) {
      problem(error);
    }
  }

  async function rotate() {
    if (!token) return;
    try {
      const tokens = await admin.rotate(token);
      if (!tokens) return;
      fresh(tokens);
    } catch (error) {
      problem(error);
    }
  }

  /** @param {Record<string, unknown>} tokens */
  function fresh(tokens) {
    const names = ['client', 'node', 'admin'].filter((name) => typeof tokens[name] === 'string');
    if (!names.length) return;
    ui.byId('fresh-tokens').replaceChildren(
      ...names.flatMap((name) => [
        ui.element('dt', {}, name),
        ui.element('dd', {}, ui.element('code', {}, String(tokens[name]))),
      ]),
    );
    ui.show(ui.byId('fresh'), true);
    ui.byId('fresh-title').focus();
  }

  /** @param {unknown} error */
  function problem(error) {
    const why = error instanceof TypeError ? 'The server does not answer.' : String(error instanceof Error ? error.message : error);
    void ui.confirm({ title: 'That did not work', body: why, yes: 'OK', only: true });
  }

  function main() {
    plots = {
      launches: view.launchPlot(),
      traffic: view.trafficPlot(),
      memory: new plot.Plot(ui.byId('plot-memory'), {
        title: 'Memory',
        series: ['in use'],
        format: ui.bytes,
        binary: true,
      }),
    };
    ui.byId('ask').addEventListener('submit', (event) => {
      event.preventDefault();
      const given = ui.input('token').value.trim().replace(/^.*[#&]token=([^&]*).*$/, '$1');
      if (/^[A-Za-z0-9._~+-]+$/.test(given)) use(given);
      else ui.text(ui.byId('ask-error'), 'That is no token: it has letters, digits, “-” and “_” only.');
    });
    ui.byId('sign-out').addEventListener('click', () => {
      forget();
      ask('');
    });
    ui.byId('rotate').addEventListener('click', () => void rotate());
    ui.byId('fresh-done').addEventListener('click', () => {
      ui.byId('fresh-tokens').replaceChildren();
      ui.show(ui.byId('fresh'), false);
      ui.byId('headline').focus();
    });
    ui.byId('copy').addEventListener('click', () => {
      navigator.clipboard.writeText(last.join_url).then(
        () => ui.announce('The address was copied.'),
        (error) => problem(error),
      );
    });
    ui.byId('scope').addEventListener('change', () => {
      scope = /** @type {HTMLSelectElement} */ (ui.byId('scope')).value;
      for (const drawn of Object.values(plots)) drawn.clear();
      if (last) draw();
    });
    document.addEventListener('visibilitychange', () => document.visibilityState === 'visible' && void poll());
    window.addEventListener('hashchange', () => {
      if (new URLSearchParams(location.hash.slice(1)).get('token')) location.reload();
    });
    const given = ui.takeToken(TOKEN);
    if (given) use(given);
    else ask('');
  }

  main();
})();
