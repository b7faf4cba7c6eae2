'use strict';
// The CBOR of the wire (RFC 8949, the strict subset of wsgrad/transport/cbor.py) for a page or a worker; it knows no
// message. A classic script: it defines `cbor`, and Node gets the same functions from `require`.

const cbor = (() => {
  /** More items than this, counting keys, values and containers, are refused. */
  const MAX_ITEMS = 16 * 1024;
  /** Deeper nesting of containers that hold something is refused. */
  const MAX_DEPTH = 16;

  // A byte order mark at the start of a text is part of the text, not to be swallowed.
  const decoder = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });
  const encoder = new TextEncoder();

  /** Something is outside the subset, over a limit, or truncated. */
  class CborError extends Error {
    /** @param {string} message */
    constructor(message) {
      super(message);
      this.name = 'CborError';
    }
  }

  /** A number that is encoded as a float even where it is whole. */
  class Float {
    /** @param {number} value */
    constructor(value) {
      this.value = value;
    }
  }

  /**
   * A decoded value. Integers beyond 2^53 are BigInts; byte strings are views into the decoded data, not copies.
   * @typedef {number | bigint | string | boolean | null | Uint8Array | unknown[] | ValueMap} Value
   */
  /** @typedef {Map<number | bigint | string, unknown>} ValueMap */

  class Reader {
    /**
     * @param {Uint8Array} data
     * @param {number} start
     * @param {number} maxItems
     * @param {number} maxDepth
     */
    constructor(data, start, maxItems, maxDepth) {
      this.data = data;
      this.view = new DataView(data.buffer, data.byteOffset, data.byteLength);
      this.position = start;
      this.items = maxItems - 1;
      this.depth = maxDepth;
    }

    /**
     * Moves over bytes and returns where they began.
     * @param {number} nbytes
     */
    take(nbytes) {
      const start = this.position;
      if (nbytes > this.data.length - start) throw new CborError('an item is truncated');
      this.position = start + nbytes;
      return start;
    }

    /** @returns {Value} */
    next() {
      const byte = this.data[this.take(1)];
      const major = byte >> 5;
      const info = byte & 31;
      if (major === 7) return this.simple(byte);
      if (major === 6) throw new CborError('tags are not allowed');
      if (info === 31) throw new CborError('items of indefinite length are not allowed');
      if (info > 27) throw new CborError('an initial byte is reserved');
      let n = info;
      if (info === 24) n = this.view.getUint8(this.take(1));
      else if (info === 25) n = this.view.getUint16(this.take(2));
      else if (info === 26) n = this.view.getUint32(this.take(4));
      else if (info === 27) {
        const big = this.view.getBigUint64(this.take(8));
        if (major === 1 && big >> 63n) throw new CborError('an integer does not fit 64 bits');
        n = Number(big);
        if (major === 0 && !Number.isSafeInteger(n)) return big;
        if (major === 1 && !Number.isSafeInteger(-1 - n)) return -1n - big;
      }
      if (major === 0) return n;
      if (major === 1) return -1 - n;
      if (major < 4) {
        const start = this.take(n);
        const bytes = this.data.subarray(start, start + n);
        return major === 2 ? bytes : text(bytes);
      }
      this.items -= major === 4 ? n : 2 * n;
      if (this.items < 0) throw new CborError('too many items');
      if (n === 0) return major === 4 ? [] : new Map();
      if (this.depth === 0) throw new CborError('nested too deeply');
      this.depth -= 1;
      const container = major === 4 ? this.array(n) : this.map(n);
      this.depth += 1;
      return container;
    }

    /** @param {number} n */
    array(n) {
      /** @type {unknown[]} */
      const array = [];
      for (let i = 0; i < n; i++) array.push(this.next());
      return array;
    }

    /** @param {number} n */
    map(n) {
      /** @type {ValueMap} */
      const map = new Map();
      for (let i = 0; i < n; i++) {
        // By its first byte: a float that happens to be whole is no integer key.
        const major = this.data[this.position] >> 5;
        if (major !== 0 && major !== 1 && major !== 3 && this.position < this.data.length) {
          throw new CborError("a map's key is neither an integer nor a text");
        }
        const key = /** @type {number | bigint | string} */ (this.next());
        if (map.has(key)) throw new CborError('a map holds a key twice');
        map.set(key, this.next());
      }
      return map;
    }

    /** @param {number} byte */
    simple(byte) {
      switch (byte) {
        case 0xf4:
          return false;
        case 0xf5:
          return true;
        case 0xf6:
          return null;
        case 0xf9:
          return half(this.view.getUint16(this.take(2)));
        case 0xfa:
          return this.view.getFloat32(this.take(4));
        case 0xfb:
          return this.view.getFloat64(this.take(8));
      }
      throw new CborError('a simple value or break is not allowed');
    }
  }

  /** @param {Uint8Array} bytes */
  function text(bytes) {
    try {
      return decoder.decode(bytes);
    } catch {
      throw new CborError('a text is not valid UTF-8');
    }
  }

  /**
   * The value of a 16-bit float.
   * @param {number} bits
   */
  function half(bits) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return exponent ? sign * 2 ** (exponent - 25) * (1024 + fraction) : sign * 2 ** -24 * fraction;
  }

  class Writer {
    constructor() {
      this.data = new Uint8Array(256);
      this.view = new DataView(this.data.buffer);
      this.length = 0;
    }

    /**
     * Makes room for bytes and returns where they go.
     * @param {number} nbytes
     */
    add(nbytes) {
      const start = this.length;
      this.length += nbytes;
      if (this.length > this.data.length) {
        const larger = new Uint8Array(Math.max(2 * this.data.length, this.length));
        larger.set(this.data.subarray(0, start));
        this.data = larger;
        this.view = new DataView(larger.buffer);
      }
      return start;
    }

    /**
     * @param {number} major
     * @param {number | bigint} n
     */
    head(major, n) {
      const first = major << 5;
      const start = this.add(n < 24 ? 1 : n < 0x100 ? 2 : n < 0x10000 ? 3 : n < 0x100000000 ? 5 : 9);
      if (n < 24) {
        this.data[start] = first | Number(n);
        return;
      }
      if (n < 0x100) {
        this.data[start] = first | 24;
        this.data[start + 1] = Number(n);
      } else if (n < 0x10000) {
        this.data[start] = first | 25;
        this.view.setUint16(start + 1, Number(n));
      } else if (n < 0x100000000) {
        this.data[start] = first | 26;
        this.view.setUint32(start + 1, Number(n));
      } else {
        this.data[start] = first | 27;
        this.view.setBigUint64(start + 1, BigInt(n));
      }
    }

    /** @param {number} value */
    float(value) {
      if (!Number.isFinite(value)) {
        // Three bytes for what has no digits, as Python's encoder writes it.
        const start = this.add(3);
        this.data[start] = 0xf9;
        this.view.setUint16(start + 1, Number.isNaN(value) ? 0x7e00 : value > 0 ? 0x7c00 : 0xfc00);
        return;
      }
      const start = this.add(9);
      this.data[start] = 0xfb;
      this.view.setFloat64(start + 1, value);
    }

    /** @param {Uint8Array} bytes */
    bytes(bytes) {
      const start = this.add(bytes.length); // may replace `data`
      this.data.set(bytes, start);
    }

    /** @param {unknown} value */
    put(value) {
      if (typeof value === 'number') {
        if (!Number.isSafeInteger(value) || Object.is(value, -0)) this.float(value);
        else if (value < 0) this.head(1, -1 - value);
        else this.head(0, value);
      } else if (typeof value === 'string') {
        const bytes = encoder.encode(value);
        this.head(3, bytes.length);
        this.bytes(bytes);
      } else if (typeof value === 'boolean') this.head(7, value ? 21 : 20);
      else if (value === null || value === undefined) this.head(7, 22);
      else if (typeof value === 'bigint') {
        if (value >= 1n << 64n || value < -(1n << 63n)) throw new CborError('an integer does not fit 64 bits');
        if (value < 0n) this.head(1, -1n - value);
        else this.head(0, value);
      } else if (value instanceof Float) this.float(value.value);
      else if (value instanceof Uint8Array) {
        this.head(2, value.length);
        this.bytes(value);
      } else if (Array.isArray(value)) {
        this.head(4, value.length);
        for (const item of value) this.put(item);
      } else if (value instanceof Map) this.entries([...value]);
      else if (typeof value === 'object' && Object.getPrototypeOf(value) === Object.prototype) {
        this.entries(Object.entries(value));
      } else throw new CborError('a value has no form in CBOR');
    }

    /** @param {[unknown, unknown][]} entries */
    entries(entries) {
      this.head(5, entries.length);
      for (const [key, value] of entries) {
        if (typeof key !== 'string' && typeof key !== 'bigint' && !Number.isSafeInteger(key)) {
          throw new CborError("a map's key is neither an integer nor a text");
        }
        this.put(key);
        this.put(value);
      }
    }
  }

  /**
   * Decodes the item that begins at `start`.
   * @param {Uint8Array} data
   * @param {number} [start]
   * @param {{ maxItems?: number, maxDepth?: number }} [limits]
   * @returns {{ value: Value, end: number }} `end` is the offset behind the item
   * @throws {CborError}
   */
  function decodeFirst(data, start = 0, { maxItems = MAX_ITEMS, maxDepth = MAX_DEPTH } = {}) {
    const reader = new Reader(data, start, maxItems, maxDepth);
    const value = reader.next();
    return { value, end: reader.position };
  }

  /**
   * Decodes exactly one item with nothing behind it.
   * @param {Uint8Array} data
   * @param {{ maxItems?: number, maxDepth?: number }} [limits]
   * @returns {Value}
   * @throws {CborError}
   */
  function decode(data, limits) {
    const { value, end } = decodeFirst(data, 0, limits);
    if (end !== data.length) throw new CborError('bytes follow the last item');
    return value;
  }

  /**
   * Encodes one item; a plain object becomes a map with text keys.
   * @param {unknown} value
   * @returns {Uint8Array}
   * @throws {CborError}
   */
  function encode(value) {
    const writer = new Writer();
    writer.put(value);
    return writer.data.subarray(0, writer.length);
  }

  /**
   * The head of a byte string of `nbytes` bytes in its shortest form; the payload itself follows it.
   * @param {number} nbytes
   */
  function bytesHead(nbytes) {
    const writer = new Writer();
    writer.head(2, nbytes);
    return writer.data.subarray(0, writer.length);
  }

  return { MAX_ITEMS, MAX_DEPTH, CborError, Float, decode, decodeFirst, encode, bytesHead };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, cbor);
