'use strict';
// What this browser remembers of servers: which ones a person has allowed, under which name and secret each tab joins
// them, and the person's wishes. It shows nothing and connects to nothing.

const servers = (() => {
  const DEFAULT_PORT = 7667;
  const MAX_TABS = 64;
  /** Ports that no browser connects to (Fetch standard, "bad port"), of those that somebody might give a server. */
  const BLOCKED_PORTS = ['2049', '4045', '5060', '5061', '6000', '6566', '6665', '6666', '6667', '6668', '6669', '6679', '6697', '10080'];

  /**
   * @typedef {object} Server
   * @property {string} url `ws(s)://host:port`, perhaps with a proxy's path; what the node dials
   * @property {string} shown host and port, for people
   * @property {string | null} token
   */

  /**
   * Read what a person wrote or pasted: a host, `host:port`, or the page's or the server's URL, with or without a token.
   * @param {string} written
   * @returns {Server}
   * @throws {Error} with a text for that person
   */
  function parse(written) {
    const trimmed = written.trim();
    if (!trimmed) throw new Error('Write the server’s address, such as gpu-box:7667.');
    const scheme = /^([a-z]+):\/\//i.exec(trimmed)?.[1].toLowerCase();
    if (scheme !== undefined && !['ws', 'wss', 'http', 'https'].includes(scheme)) {
      throw new Error(`“${scheme}://” is no address of a server; write ws://, wss://, http:// or https://.`);
    }
    const secure = scheme === 'wss' || scheme === 'https';
    const rest = scheme === undefined ? trimmed : trimmed.slice(scheme.length + 3);
    /** @type {URL} */
    let url;
    try {
      // Parsed with a scheme that has no default port, which would hide a port that was written.
      url = new URL(`x://${rest}`);
      url = new URL(`${secure ? 'https' : 'http'}://${url.host}${url.pathname}${url.hash}`);
    } catch {
      throw new Error(`“${trimmed.split('#')[0]}” is no address; write host, host:port, or paste the page’s URL.`);
    }
    if (!url.hostname) throw new Error('The address has no host; write one such as gpu-box:7667.');
    if (url.username || rest.split(/[/#]/)[0].includes('@')) {
      throw new Error('A user name in the address is not supported; the token has a field of its own.');
    }
    // As everywhere in wsgrad, ws:// and wss:// without a port mean 7667; http and https keep the web's own.
    const writtenPort = /:(\d+)$/.exec(rest.split(/[/?#]/)[0])?.[1];
    const web = scheme === 'http' || scheme === 'https';
    const port = writtenPort ?? (web ? (secure ? '443' : '80') : String(DEFAULT_PORT));
    if (BLOCKED_PORTS.includes(port)) {
      throw new Error(`Browsers open no connection to port ${port}: start the server with another --port, such as 7667.`);
    }
    const path = url.pathname.replace(/\/(index\.html|status(\.html)?)?$/, '').replace(/\/+$/, '');
    const authority = `${url.hostname}:${port}`;
    const token = new URLSearchParams(url.hash.slice(1)).get('token');
    return { url: `${secure ? 'wss' : 'ws'}://${authority}${path}`, shown: authority + path, token };
  }

  /**
   * The server that this page came from.
   * @param {Location} location
   * @returns {Server}
   */
  function own(location) {
    const base = new URL('.', location.href);
    const path = base.pathname.replace(/\/+$/, '');
    return {
      url: `${base.protocol === 'https:' ? 'wss' : 'ws'}://${base.host}${path}`,
      shown: base.host + path,
      token: null,
    };
  }

  const wishes = ui.stored('localStorage', 'wsgrad.wishes');
  const known = ui.stored('localStorage', 'wsgrad.servers');
  const last = ui.stored('localStorage', 'wsgrad.last');

  /**
   * @typedef {object} Known
   * @property {number} since Unix seconds
   * @property {{name: string, secret: string, label?: string}[]} tabs one identity for each tab that was open at the same time
   */

  /** @returns {Record<string, Known>} */
  function all() {
    const found = known.get();
    return typeof found === 'object' && found !== null ? found : {};
  }

  /** Whether a person has allowed this server. @param {string} url */
  function met(url) {
    return url in all();
  }

  /** A person has allowed this server. @param {string} url */
  function meet(url) {
    known.set({ ...all(), [url]: all()[url] ?? { since: Math.floor(Date.now() / 1000), tabs: [] } });
  }

  /** Ask again next time, and join under a new name. @param {string} url */
  function forget(url) {
    const others = all();
    delete others[url];
    known.set(others);
    if (last.get()?.url === url) last.set(null);
  }

  /**
   * @typedef {object} Identity
   * @property {string | null} name
   * @property {string | null} secret
   * @property {string | null} label what this tab was last called there, by its person or an administrator
   * @property {(name: string, secret: string) => void} save
   * @property {(label: string) => void} call
   */

  /**
   * Who this tab is for a server. Each tab of a browser needs an identity of its own: with one secret they would take
   * each other's place for ever. A lock of the browser holds it as long as the tab lives, through crashes too.
   * @param {string} url
   * @returns {Promise<Identity>}
   */
  async function identity(url) {
    const index = await claim(url);
    const tab = ui.stored('sessionStorage', `wsgrad.identity ${url}`);
    const found = index === null ? tab.get() : all()[url]?.tabs[index];
    /** @param {{name?: string, secret?: string, label?: string}} change */
    const keep = (change) => {
      if (index === null) return tab.set({ ...tab.get(), ...change });
      const now = all();
      if (!(url in now)) return; // forgotten meanwhile, by another tab
      now[url].tabs[index] = { ...now[url].tabs[index], ...change };
      known.set(now);
    };
    /** @param {unknown} value */
    const text = (value) => (typeof value === 'string' && value ? value : null);
    return {
      name: text(found?.name),
      secret: text(found?.secret),
      label: text(found?.label),
      save: (name, secret) => keep({ name, secret }),
      call: (label) => keep({ label }),
    };
  }

  /** @type {Map<string, Promise<number | null>>} */
  const claims = new Map();

  /**
   * @param {string} url
   * @returns {Promise<number | null>} null where the browser has no locks
   */
  function claim(url) {
    let claimed = claims.get(url);
    if (!claimed) claims.set(url, (claimed = take(url)));
    return claimed;
  }

  /** @param {string} url @returns {Promise<number | null>} */
  async function take(url) {
    for (let index = 0; index < MAX_TABS; index++) {
      const held = await new Promise((resolve) => {
        const options = { ifAvailable: true };
        Promise.resolve(
          navigator.locks?.request(`wsgrad ${index} ${url}`, options, (lock) => {
            resolve(lock !== null);
            return lock && new Promise(() => {});
          }) ?? resolve(null),
        ).catch(() => resolve(null));
      });
      if (held === null) return null;
      if (held) return index;
    }
    return null;
  }

  /**
   * A name for a device that nobody has named yet, from what the browser says of itself.
   * @param {string} agent
   */
  function guessName(agent) {
    const systems = [
      [/iPhone/, 'iPhone'],
      [/iPad/, 'iPad'],
      [/Android/, 'Android'],
      [/CrOS/, 'Chromebook'],
      [/Mac OS X/, 'Mac'],
      [/Windows/, 'Windows'],
      [/Linux/, 'Linux'],
    ];
    const browsers = [
      [/Edg/, 'Edge'],
      [/Firefox|FxiOS/, 'Firefox'],
      [/Chrom|CriOS/, 'Chrome'],
      [/Safari/, 'Safari'],
    ];
    /** @param {(string | RegExp)[][]} table @param {string} otherwise */
    const first = (table, otherwise) => String(table.find(([pattern]) => agent.search(pattern) >= 0)?.[1] ?? otherwise);
    return `${first(browsers, 'Browser')} on ${first(systems, 'this device')}`;
  }

  return { parse, own, met, meet, forget, identity, guessName, wishes, last };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, servers);
