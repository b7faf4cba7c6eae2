'use strict';
// One WebSocket to a server, from its opening to its end: heartbeats and silence, whole messages in and out. It knows no
// device and does not come back by itself. Defines `connection`.

const connection = (() => {
  /** @type {typeof messages} */
  const wire = typeof messages === 'undefined' ? module?.require('./messages.js') : messages;
  const { KIND } = wire;

  const ROUTE = '/v1/node';
  /** After so much silence a heartbeat is sent. */
  const PING_MILLISECONDS = 5000;
  /** After so much silence the connection is over. */
  const DEAD_MILLISECONDS = 15000;
  const TICK_MILLISECONDS = 1000;
  /** A tick that comes so late says that the page was frozen, or its machine asleep: the silence was ours. */
  const LATE_MILLISECONDS = 3000;
  /** A browser may end a connection only with codes of an application's own. */
  const BROKEN_CODE = 4002;

  /**
   * @typedef {{ opened: boolean, code: number, reason: string }} Ending
   * `opened` says whether the handshake had succeeded, `code` is the WebSocket's
   */

  class Connection {
    /**
     * @param {string} url of the server, as `ws://host:port` or `wss://host:port/prefix`
     * @param {string} token
     * @param {{
     *   opened: () => void,
     *   received: (message: any, bulk: Uint8Array | null) => void,
     *   ended: (ending: Ending) => void,
     * }} owner
     */
    constructor(url, token, owner) {
      this.owner = owner;
      this.opened = false;
      this.over = false;
      this.bytesIn = 0;
      this.bytesOut = 0;
      const now = performance.now();
      this.receivedAt = now;
      this.sentAt = now;
      this.tickedAt = now;
      this.token = 0;
      this.socket = new WebSocket(url + ROUTE, [wire.SUBPROTOCOL, `wsgrad.token.${token}`]);
      this.socket.binaryType = 'arraybuffer';
      this.socket.onopen = () => {
        if (this.over) return;
        this.opened = true;
        this.receivedAt = performance.now();
        this.owner.opened();
      };
      this.socket.onmessage = (event) => this.receive(event.data);
      this.socket.onclose = (event) => this.end(event.code, event.reason);
      this.timer = setInterval(() => this.tick(), TICK_MILLISECONDS);
    }

    /**
     * Sends a message; the bytes are no longer needed when this returns.
     * @param {Uint8Array} bytes
     */
    sendBytes(bytes) {
      if (this.over || !this.opened) return;
      this.socket.send(/** @type {Uint8Array<ArrayBuffer>} */ (bytes));
      this.bytesOut += bytes.length;
      this.sentAt = performance.now();
    }

    /** @param {unknown[]} array */
    send(array) {
      this.sendBytes(wire.encode(array));
    }

    /** Ends the connection after what was sent, without a word to the owner. */
    close() {
      this.finish();
      this.socket.close(1000);
    }

    /**
     * The server broke the protocol.
     * @param {any} error
     */
    broken(error) {
      if (this.over) return;
      const reason = String(error?.message ?? error);
      this.socket.close(BROKEN_CODE, shortened(reason));
      this.end(BROKEN_CODE, reason);
    }

    /** @param {unknown} data */
    receive(data) {
      if (this.over) return;
      this.receivedAt = performance.now();
      try {
        if (!(data instanceof ArrayBuffer)) throw new wire.ProtocolError('a text message');
        this.bytesIn += data.byteLength;
        const { message, bulk } = wire.receive(data);
        // Here and not by a timer: those of a hidden page come late.
        if (message.kind === KIND.PING) this.send([KIND.PONG, message.token]);
        else if (message.kind !== KIND.PONG) this.owner.received(message, bulk);
      } catch (error) {
        this.broken(error);
      }
    }

    tick() {
      const now = performance.now();
      if (now - this.tickedAt > LATE_MILLISECONDS) this.receivedAt = Math.max(this.receivedAt, now - TICK_MILLISECONDS);
      this.tickedAt = now;
      const silence = now - this.receivedAt;
      if (silence > DEAD_MILLISECONDS) {
        this.socket.close(BROKEN_CODE, 'silence');
        this.end(1006, `nothing was received for ${DEAD_MILLISECONDS / 1000} s`);
      } else if (this.opened && silence > PING_MILLISECONDS && now - this.sentAt > PING_MILLISECONDS) {
        this.token = (this.token + 1) >>> 0;
        this.send([KIND.PING, this.token]);
      }
    }

    /**
     * @param {number} code
     * @param {string} reason
     */
    end(code, reason) {
      if (this.over) return;
      this.finish();
      this.owner.ended({ opened: this.opened, code, reason });
    }

    finish() {
      this.over = true;
      clearInterval(this.timer);
    }
  }

  /**
   * A close frame has room for 123 bytes of reason.
   * @param {string} reason
   */
  function shortened(reason) {
    return reason.replace(/[^ -~]/g, '?').slice(0, 120);
  }

  /**
   * Whether a server answers at all where a WebSocket was refused: a browser doesn't tell a page why that was.
   * @param {string} url as for `Connection`
   */
  async function reachable(url) {
    try {
      await fetch(`${url.replace(/^ws/, 'http')}/healthz`, {
        mode: 'no-cors',
        cache: 'no-store',
        credentials: 'omit',
        signal: AbortSignal.timeout(DEAD_MILLISECONDS),
      });
      return true;
    } catch {
      return false;
    }
  }

  return { Connection, reachable };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, connection);
