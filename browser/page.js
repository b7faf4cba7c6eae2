'use strict';
// The page's decisions: whether this tab can be a device, which server it joins, and what the person's buttons do. The
// node works in a worker where the page is served, else on the page; either way commands and events are the same.

(() => {
  const script = /** @type {HTMLScriptElement} */ (document.currentScript);
  const served = location.protocol !== 'file:';
  const out = ui.stored('sessionStorage', 'wsgrad.out');
  const held = ui.stored('sessionStorage', 'wsgrad.paused');

  /** @typedef {{command: (command: Record<string, unknown>) => void}} Handle */
  /** @type {Handle | null} */
  let handle = null;
  /** @type {Worker | null} */
  let worker = null;
  /** @type {ReturnType<typeof servers.parse> | null} */
  let server = null;
  /** @type {string | null} */
  let token = null;
  /** @type {Awaited<ReturnType<typeof servers.identity>> | null} */
  let identity = null;
  /** What happens when the adapter is known. @type {(() => void) | null} */
  let next = null;
  let state = 'starting';
  let label = '';
  let memory = 2 ** 30;
  let users = 0;
  let kind = 'browser';
  let retryAt = 0;
  let reason = '';
  /** @type {WakeLockSentinel | null} */
  let awake = null;

  // -- the node

  /** Open the node: in a worker if the page came from a server. */
  function openNode() {
    if (!served || typeof Worker === 'undefined') {
      openHere();
      return;
    }
    const made = new Worker('worker.js');
    worker = made;
    handle = { command: (command) => made.postMessage(command) };
    made.onmessage = ({ data }) => {
      // Some browsers have WebGPU on pages before they have it in workers.
      if (data.event === 'unsupported' && data.reason === 'no-webgpu' && 'gpu' in navigator) {
        made.terminate();
        worker = null;
        openHere();
      } else heard(data);
    };
    made.onerror = (event) => {
      event.preventDefault();
      if (state === 'starting') broken(event.message || 'worker.js could not be loaded');
      else failed(event.message || 'the worker failed');
    };
  }

  /** The node on the page itself, by the same scripts. */
  function openHere() {
    const names = (script.dataset.scripts ?? '').split(/\s+/).filter(Boolean);
    const loads = names.map(
      (name) =>
        new Promise((resolve, reject) => {
          const made = document.createElement('script');
          made.src = name;
          made.async = false;
          made.onload = () => resolve(null);
          made.onerror = () => reject(new Error(`${name} could not be loaded`));
          document.head.append(made);
        }),
    );
    Promise.all(loads).then(
      () => {
        handle = node.create(heard);
      },
      (error) => broken(error.message),
    );
  }

  /** @param {string} message */
  function broken(message) {
    enter('broken', {
      headline: 'A part of this page is missing.',
      detail: `${ui.sentence(message)} All scripts of the page must lie beside it; reload, or get the page again.`,
    });
  }

  /** Something in the page's own code went wrong; the person should see it too. @param {string} message */
  function failed(message) {
    view.addError({ at: Date.now() / 1000, code: 'PageError', message });
  }

  // -- states

  /** @param {string} name @param {Parameters<typeof view.showState>[1]} what */
  function enter(name, what) {
    state = name;
    view.showState(name === 'joined' && users ? 'used' : name, what);
    stayAwake();
  }

  /** @param {any} event an event of the node */
  function heard(event) {
    switch (event.event) {
      case 'adapter':
        kind = event.device?.kind ?? 'browser';
        view.showAdapter(event);
        if (state === 'starting') next?.();
        break;
      case 'unsupported':
        unsupported(event.reason, event.message ?? '');
        break;
      case 'state':
        changed(event);
        break;
      case 'stats':
        view.showStats(event);
        if (event.sessions.length !== users) {
          users = event.sessions.length;
          if (state === 'joined') showJoined(true);
        }
        break;
      case 'error':
        view.addError(event);
        break;
      case 'present':
        if (event.label && event.label !== label) {
          setLabel(event.label);
          identity?.call(label);
          view.note('present', 'info', 'Renamed.', `An administrator of the server named this device “${event.label}”.`);
        }
        if (event.memory) setMemory(event.memory);
        break;
    }
  }

  /** @param {string} reason @param {string} message */
  function unsupported(reason, message) {
    const port = location.port ? `:${location.port}` : '';
    /** @param {string} text */
    const code = (text) => ui.element('code', {}, text);
    if (reason === 'insecure') {
      enter('unsupported', {
        headline: 'This page was opened without https.',
        detail: 'Browsers offer the GPU only to pages over https, or from the same machine.',
        todo: [
          ['Start the server with ', code('wsgrad-serve --host 0.0.0.0 --tls'), ' and open the https address that it prints.'],
          ['If it has TLS already: ', ui.element('a', { href: `https://${location.host}/` }, `https://${location.host}/`)],
          ['On the server’s own machine ', code(`http://127.0.0.1${port}/`), ' works as well.'],
        ],
      });
    } else if (reason === 'no-webgpu') {
      enter('unsupported', {
        headline: 'This browser has no WebGPU.',
        detail: 'A tab works with the GPU through WebGPU, which this browser does not have or has turned off.',
        todo: [
          ['Use a current Chrome or Edge, Safari 26 or newer, or a current Firefox on Windows or macOS.'],
          ['Chrome on Linux may need ', code('chrome://flags/#enable-unsafe-webgpu'), ' turned on.'],
          ['Firefox on Linux needs ', code('dom.webgpu.enabled'), ' in ', code('about:config'), '.'],
        ],
      });
    } else {
      enter('unsupported', {
        headline: 'The browser found no GPU that it will use.',
        detail: ui.sentence(message),
        todo: [
          ['Turn on graphics acceleration in the browser’s settings, under System, and restart the browser.'],
          ['Update the graphics driver; ', code('chrome://gpu'), ' or ', code('about:support'), ' says what is wrong.'],
          ['If the GPU has just crashed, wait a minute and try again.'],
        ],
      });
    }
  }

  /** @param {any} event */
  function changed(event) {
    if (!server) return;
    const { shown } = server;
    if (event.name && event.secret) {
      identity?.save(event.name, event.secret);
      ui.text(ui.byId('device-id'), `${event.name}/${kind}/0`);
    }
    if (event.state !== 'joined' && event.state !== 'paused') {
      users = 0;
      view.showUsers([]);
    }
    switch (event.state) {
      case 'connecting':
        enter('connecting', { headline: `Joining ${shown}…` });
        break;
      case 'joined':
        held.set(null);
        view.note('present', 'info', null);
        state = 'joined';
        showJoined(false);
        break;
      case 'paused':
        held.set(true);
        enter('paused', {
          headline: 'Paused: no work runs here.',
          detail: ui.sentence(event.message) || 'What clients have sent waits until you resume. New ones are told that it is paused.',
        });
        break;
      case 'waiting':
        retryAt = Date.now() + 1000 * (event.retrySeconds ?? 0);
        enter('waiting', { headline: `No connection to ${shown}.`, detail: waitingDetail(event.message ?? '') });
        break;
      case 'refused':
        askAgain(event.message);
        break;
      case 'kicked':
        out.set('kicked');
        enter('kicked', {
          headline: `An administrator removed this tab from ${shown}.`,
          detail: ui.sentence(event.message) || 'It stays out until you press “Join again”.',
        });
        break;
      case 'left':
        enter('left', { headline: `You have left ${shown}.`, detail: 'Nothing of the server is left in this tab.' });
        break;
    }
    ui.text(ui.byId('connection'), connection(event.state));
  }

  /** @param {boolean} quiet */
  function showJoined(quiet) {
    const who = users ? `${ui.plural(users, 'client uses', 'clients use')} it now.` : 'Nobody uses it at the moment.';
    enter('joined', { headline: `Lending this GPU to ${server?.shown}`, detail: `As “${label}”. ${who}`, quiet });
  }

  /** @param {string} message */
  function waitingDetail(message) {
    reason = message;
    const seconds = Math.ceil((retryAt - Date.now()) / 1000);
    const again = seconds > 0 ? `Trying again by itself in ${seconds} s.` : 'Trying again…';
    return `${ui.sentence(message)} ${again}`.trim();
  }

  /** @param {string} name */
  function connection(name) {
    const near = /^ws:\/\/(localhost|127\.[\d.]+|\[::1\])[:/]/.test(server?.url ?? '');
    const secure = server?.url.startsWith('wss:') ? 'encrypted' : near ? 'stays on this machine' : 'not encrypted';
    const where = worker ? 'in a worker' : 'on this page';
    return name === 'joined' || name === 'paused' ? `${secure}, works ${where}` : `none (${name})`;
  }

  // -- which server, and may it

  /** @param {string} headline @param {string} detail */
  function ask(headline, detail, refused = false) {
    ui.show(ui.byId('server-field'), !served);
    ui.text(ui.byId('ask-title'), served ? 'Node token' : 'Which server?');
    ui.text(ui.byId('ask-lead'), '');
    ui.text(ui.byId('ask-error'), '');
    ui.input('token').value = '';
    enter(refused ? 'refused' : 'asking', { headline, detail });
    ui.input(served || server ? 'token' : 'server').focus();
  }

  /** @param {string} message */
  function askAgain(message) {
    ask(
      `${server?.shown} did not let this tab in.`,
      `${ui.sentence(message)} Tokens change when the server restarts, unless it was given one: open ` +
        'the address that it prints now, or enter its node token here.',
      true,
    );
  }

  /** @param {Event} event */
  function answered(event) {
    event.preventDefault();
    try {
      const written = ui.input('server').value;
      const found = served ? servers.own(location) : servers.parse(written);
      const given = ui.input('token').value.trim();
      const pasted = /#/.test(given) ? servers.parse(given).token : given;
      token = pasted || found.token;
      if (!token) throw new Error('The node token is needed: it stands behind #token= in the page’s address.');
      if (!/^[A-Za-z0-9._~+-]+$/.test(token)) throw new Error('That is no token: it has letters, digits, “-” and “_” only.');
      server = { ...found, token: null };
    } catch (error) {
      ui.text(ui.byId('ask-error'), error instanceof Error ? error.message : String(error));
      ui.input(served || ui.input('server').value ? 'token' : 'server').focus();
      return;
    }
    decide();
  }

  /** A server is known: ask the person, unless they have allowed this server before. */
  function decide() {
    if (!server) return;
    if (served && token) ui.stored('sessionStorage', 'wsgrad.token').set(token);
    view.showServer(server.shown);
    if (servers.met(server.url)) {
      void join();
      return;
    }
    ui.input('first-name').value = label;
    ui.input('first-memory').value = String(view.memoryStep(memory));
    showFirstMemory();
    enter('consent', {
      headline: `Lend this GPU to ${server.shown}?`,
      detail: 'You have not joined this server before, and nothing has been sent to it yet. Allow it if you know who runs it.',
    });
    ui.byId('headline').focus();
  }

  /** @param {Event} event */
  function allowed(event) {
    event.preventDefault();
    if (!server) return;
    servers.meet(server.url);
    setLabel(ui.input('first-name').value.trim() || label);
    setMemory(view.MEMORY_STEPS[Number(ui.input('first-memory').value)]);
    wish();
    void join();
  }

  async function join() {
    if (!server) return;
    const { url } = server;
    identity = await servers.identity(url);
    if (!token && !identity.secret) {
      askFirst();
      return;
    }
    if (identity.label) setLabel(identity.label);
    out.set(null);
    if (!served && token) servers.last.set({ url, token });
    handle?.command({
      do: 'start',
      url,
      token: token ?? identity.secret, // whoever has joined before comes in with their own secret as well
      name: identity.name ?? label,
      secret: identity.secret,
      label,
      memory,
      agent: servers.guessName(navigator.userAgent), // all that an administrator needs to know of the browser
    });
    if (held.get()) handle?.command({ do: 'pause' });
  }

  function askFirst() {
    if (served) ask('This page needs the server’s node token.', 'Open the address that wsgrad-serve prints, with its token.');
    else ask('Which server should this GPU work for?', 'Start one with wsgrad-serve; it prints address and node token.');
  }

  function begin() {
    const given = ui.takeToken('wsgrad.token');
    if (served) {
      server = servers.own(location);
      token = given;
    } else {
      const last = servers.last.get();
      if (typeof last?.url === 'string' && typeof last?.token === 'string') {
        server = servers.parse(last.url);
        token = last.token;
        ui.input('server').value = last.url;
      }
    }
    if (server) view.showServer(server.shown);
    if (!server || (!token && !servers.met(server.url))) askFirst();
    else if (out.get()) {
      const kicked = out.get() === 'kicked';
      const headline = kicked ? 'An administrator removed this tab from' : 'You have left';
      enter(kicked ? 'kicked' : 'left', { headline: `${headline} ${server?.shown}.`, detail: 'It joins when you say so.' });
    } else decide();
  }

  // -- what the person wishes

  /** @param {string} text */
  function setLabel(text) {
    label = text.slice(0, 60);
    ui.input('name').value = label;
    if (state === 'joined') showJoined(true);
  }

  /** @param {number} nbytes */
  function setMemory(nbytes) {
    memory = nbytes;
    ui.input('memory').value = String(view.memoryStep(nbytes));
    showMemoryWish();
  }

  function showMemoryWish() {
    const shown = ui.bytes(view.MEMORY_STEPS[Number(ui.input('memory').value)]);
    ui.text(ui.byId('memory-shown'), shown);
    ui.input('memory').setAttribute('aria-valuetext', shown);
  }

  function showFirstMemory() {
    const shown = ui.bytes(view.MEMORY_STEPS[Number(ui.input('first-memory').value)]);
    ui.text(ui.byId('first-memory-shown'), shown);
    ui.input('first-memory').setAttribute('aria-valuetext', shown);
  }

  function wish() {
    servers.wishes.set({ label, memory, awake: ui.input('awake').checked });
  }

  async function stayAwake() {
    const wanted = ui.input('awake').checked && ['joined', 'connecting', 'waiting'].includes(state);
    if (wanted && !awake && document.visibilityState === 'visible') {
      awake = (await navigator.wakeLock?.request('screen').catch(() => null)) ?? null;
      awake?.addEventListener('release', () => (awake = null));
    } else if (!wanted && awake) {
      await awake.release();
      awake = null;
    }
  }

  async function leave() {
    if (users) {
      const title = `Leave while ${ui.plural(users, 'client uses', 'clients use')} it?`;
      const body = 'What they have on this device is lost, and they are told so. To only hold their work, pause.';
      if ((await ui.confirm({ title, body, yes: 'Leave' })) === null) return;
    }
    out.set('left');
    held.set(null);
    handle?.command({ do: 'leave' });
  }

  async function forget() {
    if (!server) return;
    const title = `Forget ${server.shown}?`;
    const body = 'This tab leaves it. The next time it asks you again, and the device gets a new name there.';
    if ((await ui.confirm({ title, body, yes: 'Forget' })) === null) return;
    servers.forget(server.url);
    ui.stored('sessionStorage', 'wsgrad.token').set(null);
    token = null;
    out.set('left');
    handle?.command({ do: 'leave' });
  }

  function wire() {
    ui.byId('ask').addEventListener('submit', answered);
    ui.byId('consent').addEventListener('submit', allowed);
    ui.byId('not-now').addEventListener('click', () => {
      out.set('left');
      enter('left', { headline: `This tab has not joined ${server?.shown}.`, detail: 'Nothing was sent to it.' });
    });
    ui.byId('pause').addEventListener('click', () => {
      const paused = state === 'paused';
      held.set(paused ? null : true);
      handle?.command({ do: paused ? 'resume' : 'pause' });
    });
    ui.byId('leave').addEventListener('click', () => void leave());
    ui.byId('forget').addEventListener('click', () => void forget());
    ui.byId('join').addEventListener('click', () => (token || (server && servers.met(server.url)) ? decide() : askFirst()));
    ui.byId('reload').addEventListener('click', () => location.reload());
    ui.byId('name-form').addEventListener('submit', (event) => {
      event.preventDefault();
      const wanted = ui.input('name').value.trim();
      if (!wanted) {
        setLabel(label);
        return;
      }
      setLabel(wanted);
      identity?.call(label);
      wish();
      handle?.command({ do: 'label', label });
      ui.announce(`This device is now called ${label}.`);
    });
    ui.byId('memory').addEventListener('input', showMemoryWish);
    ui.byId('memory').addEventListener('change', () => {
      setMemory(view.MEMORY_STEPS[Number(ui.input('memory').value)]);
      wish();
      handle?.command({ do: 'memory', bytes: memory });
    });
    ui.byId('first-memory').addEventListener('input', showFirstMemory);
    ui.byId('awake').addEventListener('change', () => {
      wish();
      void stayAwake();
    });
    document.addEventListener('visibilitychange', () => void stayAwake());
    // The address may get a new token while the page stays: that loads nothing by itself.
    window.addEventListener('hashchange', () => {
      if (!new URLSearchParams(location.hash.slice(1)).get('token')) return;
      ui.takeToken('wsgrad.token');
      out.set(null);
      location.reload();
    });
    window.addEventListener('beforeunload', (event) => {
      if (users && state === 'joined') event.preventDefault();
    });
    window.addEventListener('error', (event) => failed(event.message));
    window.addEventListener('unhandledrejection', (event) => failed(String(event.reason)));
    setInterval(() => {
      if (state === 'waiting') ui.text(ui.byId('detail'), waitingDetail(reason));
    }, 1000);
  }

  function main() {
    const wished = servers.wishes.get() ?? {};
    label = typeof wished.label === 'string' && wished.label ? wished.label : servers.guessName(navigator.userAgent);
    const small = /** @type {any} */ (navigator).deviceMemory <= 4;
    ui.input('awake').checked = wished.awake === true;
    ui.show(ui.byId('awake-field'), 'wakeLock' in navigator);
    ui.show(ui.byId('status-link'), served);
    view.start();
    setLabel(label);
    setMemory(typeof wished.memory === 'number' ? wished.memory : small ? 2 ** 29 : 2 ** 30);
    wire();
    if (new URLSearchParams(location.hash.slice(1)).get('token')) out.set(null);
    if (!window.isSecureContext) {
      ui.takeToken('wsgrad.token');
      unsupported('insecure', '');
      return;
    }
    next = begin;
    openNode();
  }

  main();
})();
