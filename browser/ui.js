'use strict';
// What the two pages share: elements made of text, figures as a person reads them, storage that may be missing, and the
// token from the address. It knows neither page. What comes from a server becomes text here, never HTML.

const ui = (() => {
  /**
   * The element with an id that the page's HTML has.
   * @param {string} id
   * @returns {HTMLElement}
   */
  function byId(id) {
    const found = document.getElementById(id);
    if (!found) throw new Error(`the page has no #${id}`);
    return found;
  }

  /** @param {string} id @returns {HTMLInputElement} */
  function input(id) {
    return /** @type {HTMLInputElement} */ (byId(id));
  }

  /** @param {string} id @returns {HTMLButtonElement} */
  function button(id) {
    return /** @type {HTMLButtonElement} */ (byId(id));
  }

  /**
   * A new element. Strings become text nodes.
   * @param {string} tag
   * @param {Record<string, string>} [attributes]
   * @param {...(Node | string)} children
   * @returns {HTMLElement}
   */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /**
   * Set an element's text, and only where it changes: screen readers and selections notice every change.
   * @param {Element} target
   * @param {string} text
   */
  function text(target, text) {
    if (target.textContent !== text) target.textContent = text;
  }

  /** @param {Element} target @param {boolean} shown */
  function show(target, shown) {
    target.toggleAttribute('hidden', !shown);
  }

  /**
   * Bring a list of elements up to date without touching the ones that stay, so that focus and open details survive.
   * @template T
   * @param {Element} parent
   * @param {T[]} items
   * @param {(item: T) => string} keyOf
   * @param {(item: T) => HTMLElement} make
   * @param {(made: HTMLElement, item: T) => void} update
   */
  function list(parent, items, keyOf, make, update) {
    /** @type {Map<string, HTMLElement>} */
    const old = new Map();
    for (const child of parent.children) {
      if (child instanceof HTMLElement && child.dataset.key !== undefined) old.set(child.dataset.key, child);
    }
    /** @type {Element | null} */
    let before = parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      let made = old.get(key);
      if (made) old.delete(key);
      else {
        made = make(item);
        made.dataset.key = key;
      }
      if (made === before) before = before.nextElementSibling;
      else parent.insertBefore(made, before);
      update(made, item);
    }
    for (const gone of old.values()) gone.remove();
  }

  const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

  /**
   * A number of bytes: 1,5 GiB in the reader's language.
   * @param {number} nbytes
   */
  function bytes(nbytes) {
    let value = Math.max(0, nbytes);
    let unit = 0;
    while (value >= 1000 && unit < UNITS.length - 1) {
      value /= 1024;
      unit++;
    }
    const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
    return `${value.toLocaleString(undefined, { maximumFractionDigits: digits })}\u00a0${UNITS[unit]}`;
  }

  /**
   * A count, short where it is large: 12.3 k.
   * @param {number} value
   */
  function count(value) {
    const steps = [
      [1e9, '\u00a0G'],
      [1e6, '\u00a0M'],
      [1e4, '\u00a0k'],
    ];
    for (const [limit, suffix] of steps) {
      if (value >= Number(limit)) {
        const divisor = limit === 1e4 ? 1e3 : Number(limit);
        const short = value / divisor;
        return short.toLocaleString(undefined, { maximumFractionDigits: short >= 100 ? 0 : 1 }) + suffix;
      }
    }
    return value.toLocaleString(undefined, { maximumFractionDigits: value < 10 ? 1 : 0 });
  }

  /**
   * A time span: 42 s, 3 min, 2 h 05 min, 3 days.
   * @param {number} seconds
   */
  function span(seconds) {
    const whole = Math.max(0, Math.floor(seconds));
    if (whole < 60) return `${whole}\u00a0s`;
    const minutes = Math.floor(whole / 60);
    if (minutes < 60) return `${minutes}\u00a0min`;
    const hours = Math.floor(minutes / 60);
    if (hours < 48) return `${hours}\u00a0h\u00a0${String(minutes % 60).padStart(2, '0')}\u00a0min`;
    return `${Math.floor(hours / 24)}\u00a0days`;
  }

  /**
   * The time of day of a moment in Unix seconds.
   * @param {number} at
   */
  function clock(at) {
    return new Date(at * 1000).toLocaleTimeString(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit' });
  }

  /** @param {number} number @param {string} one @param {string} [many] */
  function plural(number, one, many = `${one}s`) {
    return `${number.toLocaleString()} ${number === 1 ? one : many}`;
  }

  /**
   * A message of a server or a node as a sentence; nothing where there is none.
   * @param {string | undefined} message
   */
  function sentence(message) {
    const trimmed = message?.trim() ?? '';
    if (!trimmed) return '';
    return trimmed[0].toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? '' : '.');
  }

  /** @type {Record<string, string>} */
  const WORDS = {
    OutOfMemory: 'A program wanted more memory than this device has left.',
    CompileError: 'A program that was sent here does not compile. Its author has been told; nothing is wrong here.',
    LaunchError: 'A program was started in a way the device does not allow. Its author has been told.',
    DeviceLost: 'The GPU was reset or taken away, by its driver or by the browser. What was on it is gone.',
    Timeout: 'A program ran longer than it may and was stopped.',
    DeviceError: 'The device could not do what was asked.',
    LimitExceeded: 'Something went over a limit and was refused.',
    ProtocolError: 'Page and server do not understand each other. If one of them is newer, reload the page.',
    ConnectionLost: 'The connection to the server broke.',
    Unauthorized: 'The server did not accept the token.',
  };

  /**
   * What an error's code means, for somebody who has never seen it.
   * @param {string} code
   */
  function words(code) {
    return WORDS[code] ?? 'Something went wrong.';
  }

  /**
   * A value kept as JSON in `localStorage` or `sessionStorage`; where a browser forbids them it lives as long as the page.
   * @param {'localStorage' | 'sessionStorage'} where
   * @param {string} key
   */
  function stored(where, key) {
    /** @type {unknown} */
    let kept = null;
    return {
      /** @returns {any} */
      get() {
        try {
          const found = window[where].getItem(key);
          return found === null ? kept : JSON.parse(found);
        } catch {
          return kept;
        }
      },
      /** @param {unknown} value */
      set(value) {
        kept = value;
        try {
          if (value === null) window[where].removeItem(key);
          else window[where].setItem(key, JSON.stringify(value));
        } catch {
          // Private windows and blocked cookies: it is remembered until the page goes.
        }
      },
    };
  }

  /**
   * Take `#token=…` out of the address, so that no bookmark, screenshot or history entry holds it; the tab keeps it.
   * @param {string} key where the tab keeps it
   * @returns {string | null} the token of the address, else the one kept
   */
  function takeToken(key) {
    const kept = stored('sessionStorage', key);
    const token = new URLSearchParams(location.hash.slice(1)).get('token');
    if (token !== null) {
      history.replaceState(null, '', location.pathname + location.search);
      if (token) kept.set(token);
    }
    const value = token || kept.get();
    return typeof value === 'string' && value ? value : null;
  }

  /**
   * Ask before something that can't be undone. Resolves with whether the person said yes.
   * @param {{title: string, body: string, yes: string, input?: string, only?: boolean}} what with `input`, a text to be
   *   edited; with `only`, there is nothing to decide
   * @returns {Promise<string | null>} the text (or '') where they said yes, null where not
   */
  function confirm(what) {
    const dialog = /** @type {HTMLDialogElement} */ (byId('dialog'));
    const field = input('dialog-input');
    text(byId('dialog-title'), what.title);
    text(byId('dialog-body'), what.body);
    text(byId('dialog-yes'), what.yes);
    show(byId('dialog-field'), what.input !== undefined);
    field.value = what.input ?? '';
    button('dialog-yes').classList.toggle('danger', what.input === undefined && !what.only);
    show(button('dialog-no'), !what.only);
    return new Promise((resolve) => {
      const ends = new AbortController();
      /** @param {string | null} answer */
      const end = (answer) => {
        ends.abort();
        dialog.close();
        resolve(answer);
      };
      const { signal } = ends;
      button('dialog-yes').addEventListener('click', () => end(field.value), { signal });
      button('dialog-no').addEventListener('click', () => end(null), { signal });
      dialog.addEventListener('close', () => end(null), { signal });
      field.addEventListener('keydown', (event) => event.key === 'Enter' && end(field.value), { signal });
      dialog.showModal();
      (what.input !== undefined ? field : button(what.only ? 'dialog-yes' : 'dialog-no')).focus();
    });
  }

  /**
   * Tell screen readers something, once.
   * @param {string} message
   */
  function announce(message) {
    text(byId('announce'), message);
  }

  return {
    byId, input, button, element, text, show, list, bytes, count, span, clock, plural, sentence, words, stored, takeToken, confirm,
    announce,
  };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, ui);
