'use strict';
// Reads from WGSL source what a launch needs to know: bindings, entry points, overrides; it checks no other syntax. The
// twin of wsgrad/graph/wgsl.py. A classic script: it defines `wgsl`, and Node gets the same functions from `require`.

/**
 * A buffer of `@group(0)`: `index` is its `@binding`, which is the argument's place; `type` is written without blanks.
 * @typedef {{index: number, space: 'storage' | 'uniform', access: 'read' | 'read_write', type: string, name: string}} WgslBinding
 */
/** @typedef {{name: string, stage: string, workgroupSize: string[]}} WgslEntryPoint */
/** @typedef {{name: string, id: number | null, type: string | null, hasDefault: boolean}} WgslOverride */
/** @typedef {{bindings: WgslBinding[], entryPoints: WgslEntryPoint[], overrides: WgslOverride[]}} WgslModule */
/** @typedef {{text: string, start: number}} WgslToken */

const wgsl = (() => {
  // WGSL's blanks and line breaks, which are not JavaScript's.
  const LINE_BREAK = /\r\n|[\n\v\f\r\x85\u2028\u2029]/gu;
  const BREAKS = '\n\v\f\r\x85\u2028\u2029';
  const TOKEN =
    /[ \t\n\v\f\r\x85\u200e\u200f\u2028\u2029]+|([\p{L}\p{Nl}\p{No}_][\p{L}\p{N}_]*|[.]?[0-9](?:[eEpP][+-]|[\p{L}\p{N}_.])*|.)/gsu;
  const INTEGER = /^(?:0|[1-9][0-9]{0,9}|0[xX][0-9a-fA-F]{1,8})[iu]?$/;
  /** @type {Record<string, string>} */
  const OPEN = { '(': ')', '[': ']', '{': '}' };
  const CLOSE = new Set(Object.values(OPEN));
  const STAGES = ['compute', 'vertex', 'fragment'];

  /** A source that is no program of ours; the message begins with line and column where there is one place. */
  class WgslError extends Error {
    /** @param {string} message */
    constructor(message) {
      super(message);
      this.name = 'WgslError';
    }
  }

  /**
   * The source with blanks for its comments, every other character and line in its place. Block comments nest; one that
   * is not closed reaches to the end.
   * @param {string} source
   */
  function withoutComments(source) {
    let result = '';
    let at = 0;
    const comment = /\/\*|\/\//g;
    for (;;) {
      comment.lastIndex = at;
      const opened = comment.exec(source);
      if (!opened) return result + source.slice(at);
      const start = opened.index;
      let end;
      if (opened[0] === '//') {
        LINE_BREAK.lastIndex = start;
        end = LINE_BREAK.exec(source)?.index ?? source.length;
      } else {
        end = blockEnd(source, comment.lastIndex);
      }
      result += source.slice(at, start);
      for (const character of source.slice(start, end)) {
        result += BREAKS.includes(character) ? character : ' '.repeat(character.length);
      }
      at = end;
    }
  }

  /**
   * @param {string} source
   * @param {number} at
   */
  function blockEnd(source, at) {
    const part = /\/\*|\*\//g;
    part.lastIndex = at;
    for (let depth = 1; depth; ) {
      const found = part.exec(source);
      if (!found) return source.length;
      depth += found[0] === '/*' ? 1 : -1;
    }
    return part.lastIndex;
  }

  /**
   * @param {string} text
   * @returns {WgslToken[]}
   */
  function tokens(text) {
    const found = [];
    for (const match of text.matchAll(TOKEN)) {
      if (match[1] !== undefined) found.push({ text: match[1], start: match.index });
    }
    return found;
  }

  /** @param {string} text */
  const short = (text) => [...text].slice(0, 60).join('');

  /** Goes once over the declarations of a module; what it does not know it skips. */
  class Reader {
    /** @param {string} source */
    constructor(source) {
      this.source = source;
      this.tokens = tokens(withoutComments(source));
      this.at = 0;
      /** @type {Map<string, {name: WgslToken, values: WgslToken[]}>} */
      this.attributes = new Map();
      /** @type {Map<number, WgslBinding>} */
      this.bindings = new Map();
      /** @type {WgslEntryPoint[]} */
      this.entryPoints = [];
      /** @type {WgslOverride[]} */
      this.overrides = [];
    }

    /** @returns {WgslModule} */
    module() {
      for (let token = this.next(); token; token = this.next()) {
        if (token.text === '@') {
          this.attribute();
          continue;
        }
        if (token.text === 'var') this.readVar(token);
        else if (token.text === 'fn') this.readFunction();
        else if (token.text === 'override') this.readOverride();
        else if (token.text !== ';') this.skipDeclaration(token);
        this.attributes = new Map();
      }
      const bindings = [...this.bindings.values()].sort((a, b) => a.index - b.index);
      bindings.forEach(({ index }, expected) => {
        if (index !== expected) {
          throw new WgslError(
            `there is a @binding(${index}) but no @binding(${expected}): argument i is @binding(i), without gaps`,
          );
        }
      });
      return { bindings, entryPoints: this.entryPoints, overrides: this.overrides };
    }

    // -- declarations

    attribute() {
      const name = this.next();
      if (!name) return;
      /** @type {WgslToken[]} */
      let values = [];
      if (this.peek() === '(') {
        this.next();
        values = this.until(')');
      }
      this.attributes.set(name.text, { name, values });
    }

    /** @param {WgslToken} keyword */
    readVar(keyword) {
      /** @type {string[]} */
      let template = [];
      if (this.peek() === '<') {
        this.next();
        template = this.until('>').flatMap(({ text }) => (text === ',' ? [] : [text]));
      }
      const name = this.next();
      const rest = this.until(';');
      if (!name) return;
      const space = template.length ? template[0] : 'handle';
      const bound = space === 'storage' || space === 'uniform';
      const shown = short(name.text);
      if (!this.attributes.has('group') && !this.attributes.has('binding')) {
        if (bound) this.refuse(name, `var<${space}> ${shown} has neither @group nor @binding`);
        return;
      }
      const group = this.number('group', name);
      const index = this.number('binding', name);
      if (group !== 0) {
        this.refuse(name, `${shown} is in @group(${group}); a program's arguments are all in @group(0)`);
      }
      if (!bound) {
        this.refuse(
          name,
          `${shown} is neither var<storage> nor var<uniform>; a program takes only buffers and scalars`,
        );
      }
      const access = template.length > 1 ? template[1] : 'read';
      if (access !== 'read' && !(space === 'storage' && access === 'read_write')) {
        this.refuse(name, `var<${short(space)}, ${short(access)}> ${shown}: there is no such access`);
      }
      const other = this.bindings.get(index);
      if (other) this.refuse(name, `${shown} has @binding(${index}), which ${short(other.name)} has already`);
      const type = rest.length && rest[0].text === ':' ? joined(rest.slice(1)) : '';
      this.bindings.set(index, {
        index,
        space: /** @type {'storage' | 'uniform'} */ (space),
        access: /** @type {'read' | 'read_write'} */ (access),
        type,
        name: name.text,
      });
    }

    /**
     * @param {string} key
     * @param {WgslToken} name
     */
    number(key, name) {
      const attribute = this.attributes.get(key);
      if (!attribute) {
        const other = key === 'group' ? 'binding' : 'group';
        return this.refuse(name, `${short(name.text)} has @${other} but no @${key}`);
      }
      const text = joined(attribute.values).replace(/,$/, '');
      if (!INTEGER.test(text)) {
        this.refuse(attribute.name, `@${key}(${short(text)}) of ${short(name.text)} is not written as a whole number`);
      }
      return Number(text.replace(/[iu]$/, ''));
    }

    readFunction() {
      const name = this.next();
      let token = this.next();
      for (; token && token.text !== '{'; token = this.next()) {
        if (token.text === '(' || token.text === '[') this.until(OPEN[token.text]);
      }
      if (token) this.until('}');
      const stage = STAGES.find((one) => this.attributes.has(one));
      if (name && stage) {
        const size = this.attributes.get('workgroup_size')?.values ?? [];
        this.entryPoints.push({ name: name.text, stage, workgroupSize: split(size) });
      }
    }

    readOverride() {
      const name = this.next();
      const rest = this.until(';').map(({ text }) => text);
      if (!name) return;
      const found = rest.indexOf('=');
      const equals = found < 0 ? rest.length : found;
      const type = rest[0] === ':' ? rest.slice(1, equals).join('') : null;
      const id = this.attributes.has('id') ? this.number('id', name) : null;
      this.overrides.push({ name: name.text, id, type, hasDefault: equals < rest.length });
    }

    /** @param {WgslToken | undefined} token */
    skipDeclaration(token) {
      for (; token && token.text !== ';'; token = this.next()) {
        if (token.text in OPEN) {
          this.until(OPEN[token.text]);
          if (token.text === '{') return;
        }
      }
    }

    // -- tokens

    /** @returns {WgslToken | undefined} */
    next() {
      return this.tokens[this.at++];
    }

    peek() {
      return this.tokens[this.at]?.text;
    }

    /**
     * What comes before the token `end` outside of inner brackets, which is taken too.
     * @param {string} end
     */
    until(end) {
      const found = [];
      const inner = [];
      for (let token = this.next(); token; token = this.next()) {
        if (!inner.length && token.text === end) break;
        if (inner.length && token.text === inner[inner.length - 1]) inner.pop();
        else if (token.text in OPEN) inner.push(OPEN[token.text]);
        found.push(token);
      }
      return found;
    }

    /**
     * @param {WgslToken} token
     * @param {string} message
     * @returns {never}
     */
    refuse(token, message) {
      let line = 1;
      let start = 0;
      LINE_BREAK.lastIndex = 0; // a search for the end of a comment has left it elsewhere
      for (const found of this.source.slice(0, token.start).matchAll(LINE_BREAK)) {
        line += 1;
        start = found.index + found[0].length;
      }
      throw new WgslError(`${line}:${[...this.source.slice(start, token.start)].length + 1}: ${message}`);
    }
  }

  /** @param {WgslToken[]} list */
  const joined = (list) => list.map(({ text }) => text).join('');

  /**
   * The texts between the commas that are outside of brackets.
   * @param {WgslToken[]} list
   */
  function split(list) {
    const parts = [''];
    let depth = 0;
    for (const { text } of list) {
      depth += Number(text in OPEN) - Number(CLOSE.has(text));
      if (text === ',' && !depth) parts.push('');
      else parts[parts.length - 1] += text;
    }
    return parts.filter(Boolean);
  }

  /**
   * What was read of a source, its bindings in the order of their index, without gaps; throws `WgslError`.
   * @param {string} source
   */
  const parseModule = (source) => new Reader(source).module();

  return { WgslError, parseModule, withoutComments, tokens };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, wgsl);
