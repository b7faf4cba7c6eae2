'use strict';
// What a node in a browser says and hears on the wire: kinds, a strict check of the server's messages, their bytes. It
// knows neither sockets nor devices; wsgrad/transport/protocol.cddl is the schema. A classic script: it defines
// `messages`, and Node gets the same from `require`.

const messages = (() => {
  /** @type {typeof cbor} */
  const wire = typeof cbor === 'undefined' ? module?.require('./cbor.js') : cbor;

  const VERSION = 1;
  const SUBPROTOCOL = 'wsgrad.v1';
  /** The most bytes that one chunk of a transfer carries. */
  const CHUNK_BYTES = 1 << 20;
  /** Chunks per queue and direction that may be on their way. */
  const SLOTS = 4;
  /** The most bytes of a message's array; all but its bulk. */
  const MAX_HEAD = 1 << 16;
  /** The most bytes of a message's bulk. */
  const MAX_BULK = 1 << 20;
  const MAX_TEXT = 1 << 15;
  const MAX_ROOM = 1 << 10;

  const KIND = Object.freeze({
    JOIN: 2,
    JOINED: 3,
    REFUSED: 4,
    PING: 5,
    PONG: 6,
    SEEN: 7,
    BYE: 8,
    CLOCK: 10,
    TIME: 11,
    PRESENT: 12,
    BATCH: 16,
    LAUNCHES: 17,
    PROGRAM: 18,
    CHUNK: 19,
    ABORT: 20,
    CREDIT: 21,
    CLOSE: 24,
    ACK: 32,
    RESULT: 33,
    READ_DATA: 34,
    FAILED: 35,
    COMPILED: 36,
    ATTACH: 48,
    FAIL: 51,
    GRAPH: 52,
    REPLAY: 53,
    UNRECORD: 54,
    PROFILE: 55,
    SPANS: 56,
  });

  const COMMAND = Object.freeze({
    ALLOC: 1,
    FREE: 2,
    VIEW: 3,
    WRITE: 4,
    UPLOAD: 5,
    READ: 6,
    DOWNLOAD: 7,
    COPY: 8,
    FILL: 9,
    LAUNCH: 10,
    DROP: 11,
    CLEAR: 12,
  });

  /** The peer broke the protocol; the connection is not worth keeping. */
  class ProtocolError extends Error {
    /**
     * @param {string} message
     */
    constructor(message) {
      super(message);
      this.name = 'ProtocolError';
      this.code = 'ProtocolError';
    }
  }

  /** A command can't be run, with the code and the details that its client is told. */
  class CommandError extends Error {
    /**
     * @param {string} code
     * @param {string} message
     * @param {Record<string, unknown>} [details]
     */
    constructor(code, message, details = {}) {
      super(message);
      this.name = code;
      this.code = code;
      this.details = details;
    }
  }

  /** @typedef {(value: any) => boolean} Check */
  /**
   * A message: its `kind` and its fields by name.
   * @typedef {{ kind: number, [field: string]: any }} Message
   */

  /** @type {Check} */
  const u32 = (value) => Number.isInteger(value) && value >= 0 && value <= 0xffffffff;
  /** @type {Check} */
  const u53 = (value) => Number.isSafeInteger(value) && value >= 0;
  /** @type {Check} */
  const count = (value) => value === null || u53(value);
  /** @type {Check} */
  const text = (value) => typeof value === 'string' && value.length <= MAX_TEXT;
  /** @type {Check} */
  const bool = (value) => typeof value === 'boolean';
  /** @type {Check} */
  const data = (value) => value instanceof Uint8Array;
  /** @type {Check} */
  const list = (value) => Array.isArray(value);
  /** @type {Check} */
  const map = (value) => value instanceof Map && [...value.keys()].every((key) => typeof key === 'string');
  /** @type {Check} */
  const arrays = (value) => list(value) && value.every((/** @type {any} */ item) => list(item) && item.length > 0);
  /** @type {Check} */
  const dims = (value) => value === null || (list(value) && value.length >= 1 && value.length <= 3 && value.every(u32));
  /** @type {Check} */
  const indices = (value) =>
    value === null || (list(value) && value.length <= 64 && value.every((/** @type {any} */ i) => u32(i) && i < 64));

  /**
   * The messages that a server sends to a node, with their fields.
   * @type {Map<number, [string, Record<string, Check>]>}
   */
  const TABLE = new Map([
    [KIND.JOINED, ['Joined', { version: u32, name: text, secret: text, info: map, received: count }]],
    [KIND.REFUSED, ['Refused', { code: text, message: text }]],
    [KIND.PING, ['Ping', { token: u32 }]],
    [KIND.PONG, ['Pong', { token: u32 }]],
    [KIND.SEEN, ['Seen', { count: u53 }]],
    [KIND.BYE, ['Bye', {}]],
    [KIND.CLOCK, ['Clock', { token: u32 }]],
    [KIND.PRESENT, ['Present', { label: text, paused: bool, memory: u53 }]],
    [KIND.BATCH, ['Batch', { queue: u32, first: u53, commands: arrays }]],
    [KIND.LAUNCHES, ['Launches', { queue: u32, first: u53, count: u32 }]],
    [
      KIND.PROGRAM,
      [
        'Program',
        {
          queue: u32,
          number: u53,
          program: u32,
          dialect: text,
          name: text,
          entry: text,
          signature: text,
          writes: indices,
          alias: bool,
          constants: map,
        },
      ],
    ],
    [KIND.CHUNK, ['Chunk', { queue: u32, transfer: u32, offset: u53 }]],
    [KIND.ABORT, ['Abort', { queue: u32, transfer: u32 }]],
    [KIND.CREDIT, ['Credit', { queue: u32, slots: u32 }]],
    [KIND.CLOSE, ['Close', { queue: u32 }]],
    [KIND.ATTACH, ['Attach', { queue: u32, session: u32, device: u32, options: map }]],
    [KIND.FAIL, ['Fail', { queue: u32, number: u53, code: text, message: text, details: map }]],
    [KIND.GRAPH, ['Graph', { queue: u32, graph: u32, offset: u53, total: u53 }]],
    [
      KIND.REPLAY,
      ['Replay', { queue: u32, number: u53, graph: u32, transfer: u32, bindings: arrays, values: list }],
    ],
    [KIND.UNRECORD, ['Unrecord', { queue: u32, graph: u32 }]],
    [KIND.PROFILE, ['Profile', { queue: u32, trace: u32, on: bool }]],
  ]);
  /** @type {Map<number, { name: string, fields: [string, Check][] }>} */
  const FROM_SERVER = new Map([...TABLE].map(([kind, [name, fields]]) => [kind, { name, fields: Object.entries(fields) }]));

  /**
   * The commands of a batch.
   * @type {Map<number, [string, Check[]]>}
   */
  const COMMANDS = new Map([
    [COMMAND.ALLOC, ['Alloc', [u32, u53]]],
    [COMMAND.FREE, ['Free', [u32]]],
    [COMMAND.VIEW, ['View', [u32, u32, u53, u53]]],
    [COMMAND.WRITE, ['Write', [u32, u53, data]]],
    [COMMAND.UPLOAD, ['Upload', [u32, u32, u53, u53]]],
    [COMMAND.READ, ['Read', [u32, u53, u53]]],
    [COMMAND.DOWNLOAD, ['Download', [u32, u32, u53, u53]]],
    [COMMAND.COPY, ['Copy', [u32, u53, u32, u53, u53]]],
    [COMMAND.FILL, ['Fill', [u32, u53, u53, data]]],
    [COMMAND.LAUNCH, ['Launch', [u32, dims, dims, list, bool]]],
    [COMMAND.DROP, ['Drop', [u32]]],
    [COMMAND.CLEAR, ['Clear', [u53]]],
  ]);

  /** @type {Set<number>} */
  const BULK_KINDS = new Set([KIND.LAUNCHES, KIND.PROGRAM, KIND.CHUNK, KIND.GRAPH]);

  /**
   * Checks an array that the server sent and names its fields.
   * @param {unknown} array
   * @returns {Message}
   * @throws {ProtocolError}
   */
  function parse(array) {
    if (!Array.isArray(array) || array.length === 0) throw new ProtocolError('a message must begin with an array');
    const entry = FROM_SERVER.get(array[0]);
    if (entry === undefined) throw new ProtocolError(`a message of kind ${show(array[0])} is not for a node in a tab`);
    const { name, fields } = entry;
    if (array.length !== fields.length + 1) {
      throw new ProtocolError(`message ${name} has ${array.length - 1} fields, not ${fields.length}`);
    }
    /** @type {Message} */
    const message = { kind: array[0] };
    for (let i = 0; i < fields.length; i++) {
      const [field, check] = fields[i];
      if (!check(array[i + 1])) throw new ProtocolError(`message ${name}: ${field} can't be ${show(array[i + 1])}`);
      message[field] = array[i + 1];
    }
    return message;
  }

  /**
   * Checks one item of a batch, which is used as the array that it is.
   * @param {any[]} array
   * @throws {ProtocolError}
   */
  function checkCommand(array) {
    const entry = COMMANDS.get(array[0]);
    if (entry === undefined) throw new ProtocolError(`a command of kind ${show(array[0])} is not for a node`);
    const [name, checks] = entry;
    if (array.length !== checks.length + 1) {
      throw new ProtocolError(`command ${name} has ${array.length - 1} fields, not ${checks.length}`);
    }
    for (let i = 0; i < checks.length; i++) {
      if (!checks[i](array[i + 1])) throw new ProtocolError(`command ${name}: a field can't be ${show(array[i + 1])}`);
    }
  }

  /**
   * Takes one WebSocket message apart. Its bulk is a view into the message, not a copy.
   * @param {ArrayBuffer} received
   * @returns {{ message: Message, bulk: Uint8Array | null }}
   * @throws {ProtocolError}
   */
  function receive(received) {
    const bytes = new Uint8Array(received);
    let head;
    try {
      head = wire.decodeFirst(bytes);
    } catch (error) {
      if (error instanceof wire.CborError) throw new ProtocolError(error.message);
      throw error;
    }
    if (head.end > MAX_HEAD) throw new ProtocolError(`a message's array of ${head.end} bytes`);
    const message = parse(head.value);
    if (BULK_KINDS.has(message.kind)) return { message, bulk: bulkOf(bytes, head.end) };
    if (head.end !== bytes.length) throw new ProtocolError('bytes follow a message');
    return { message, bulk: null };
  }

  /**
   * @param {Uint8Array} bytes
   * @param {number} start
   */
  function bulkOf(bytes, start) {
    if (start >= bytes.length) throw new ProtocolError('a message without its bulk');
    const info = bytes[start] & 31;
    if (bytes[start] >> 5 !== 2 || info > 27) throw new ProtocolError('a bulk that is no byte string');
    let payload = start + 1;
    let nbytes = info;
    if (info > 23) {
      const width = 1 << (info - 24);
      if (payload + width > bytes.length) throw new ProtocolError("a message that ends inside its bulk's head");
      nbytes = 0;
      for (let i = 0; i < width; i++) nbytes = nbytes * 256 + bytes[payload + i];
      payload += width;
    }
    if (nbytes > MAX_BULK) throw new ProtocolError(`a bulk of ${nbytes} bytes, over the limit of ${MAX_BULK}`);
    if (payload + nbytes !== bytes.length) throw new ProtocolError('a message that does not end where its bulk does');
    return bytes.subarray(payload);
  }

  /** Where large messages are put together. */
  let scratch = new Uint8Array(0);

  /**
   * The bytes of a whole message. They are good until the next call: to be sent at once.
   * @param {unknown[]} array
   * @param {Uint8Array | null} [bulk]
   * @param {boolean} [inPlace] whether the head may be written over what lies before the bulk, so that nothing is copied
   * @returns {Uint8Array}
   */
  function encode(array, bulk = null, inPlace = false) {
    const head = wire.encode(array);
    if (bulk === null) return head;
    const bulkHead = wire.bytesHead(bulk.length);
    const before = head.length + bulkHead.length;
    /** @type {Uint8Array} */
    let whole;
    if (inPlace && bulk.byteOffset >= before) {
      whole = new Uint8Array(bulk.buffer, bulk.byteOffset - before, before + bulk.length);
    } else {
      if (scratch.length < before + bulk.length) scratch = new Uint8Array(before + bulk.length + MAX_ROOM);
      whole = scratch.subarray(0, before + bulk.length);
      whole.set(bulk, before);
    }
    whole.set(head);
    whole.set(bulkHead, head.length);
    return whole;
  }

  /** @param {unknown} value */
  function show(value) {
    return String(value).slice(0, 40);
  }

  return {
    VERSION,
    SUBPROTOCOL,
    CHUNK_BYTES,
    SLOTS,
    MAX_BULK,
    KIND,
    COMMAND,
    ProtocolError,
    CommandError,
    parse,
    checkCommand,
    receive,
    encode,
  };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, messages);
