'use strict';
// Compiles one WGSL program, with its layout and what its arguments must be; it runs nothing. A classic script for a page
// or a worker: it defines `gpuProgram`.

/**
 * What the client said of a program.
 * @typedef {{
 *   name: string, entry: string, signature: string, writes: number[] | null, alias: boolean,
 *   constants?: Map<string, number | boolean> | Record<string, number | boolean> | null,
 * }} GpuProgramSpec
 */
/**
 * A binding of a program: `least` is how small a range may be, null where that was not to be found out.
 * @typedef {WgslBinding & {scalar: boolean, written: boolean, least: number | null}} GpuArgument
 */
/** @typedef {InstanceType<typeof gpuProgram.Program>} GpuProgram */

const gpuProgram = (() => {
  const { GpuError } = gpuQueue;
  /** @type {Record<string, [number, number]>} alignment and size of the scalars that memory can hold. */
  const SCALARS = { f32: [4, 4], i32: [4, 4], u32: [4, 4], f16: [2, 2] };
  /** @type {Record<string, string>} */
  const SUFFIXES = { f: 'f32', i: 'i32', u: 'u32', h: 'f16' };
  const MAX_ERROR = 8000;

  let serial = 0;

  /** A compiled program, or the error that each launch of it raises. */
  class Program {
    /** @param {GpuProgramSpec} spec */
    constructor(spec) {
      this.serial = ++serial;
      this.name = spec.name;
      this.signature = spec.signature;
      this.alias = spec.alias;
      /** @type {InstanceType<typeof gpuQueue.GpuError> | null} why it can't be launched. */
      this.failure = null;
      /** @type {GpuArgument[]} */
      this.arguments = [];
      /** @type {GPUComputePipeline | null} */
      this.pipeline = null;
      /** @type {GPUBindGroupLayout | null} */
      this.layout = null;
      this.scalars = 0;
      /** Whether a launch can turn out invalid only on the device: then it gets a submission of its own. */
      this.unsure = false;
      /** @type {Map<number, GpuEstimate>} by the size of the grid, in powers of two. */
      this.estimates = new Map();
    }

    /**
     * @param {number} groups workgroups of a launch.
     * @returns {GpuEstimate}
     */
    estimate(groups) {
      const size = 32 - Math.clz32(groups);
      let estimate = this.estimates.get(size);
      if (!estimate) this.estimates.set(size, (estimate = { seconds: NaN, program: this.name }));
      return estimate;
    }
  }

  /**
   * Compiles a source; whatever is wrong with it is the program's `failure`. Returns the compiler's warnings.
   * @param {GPUDevice} device
   * @param {Program} program
   * @param {GpuProgramSpec} spec
   * @param {string} source
   * @returns {Promise<string>}
   */
  async function compile(device, program, spec, source) {
    try {
      return await compileNow(device, program, spec, source);
    } catch (error) {
      program.failure =
        error instanceof GpuError
          ? error
          : new GpuError('CompileError', error instanceof Error ? error.message : String(error));
      if (program.failure.code === 'CompileError') throw program.failure;
      return '';
    }
  }

  /**
   * @param {GPUDevice} device
   * @param {Program} program
   * @param {GpuProgramSpec} spec
   * @param {string} source
   */
  async function compileNow(device, program, spec, source) {
    // The scopes are popped before anything else can push one.
    device.pushErrorScope('validation');
    const module = device.createShaderModule({ label: spec.name, code: source });
    const refused = device.popErrorScope();
    const [{ messages }, refusal] = await Promise.all([module.getCompilationInfo(), refused]);
    const errors = messages.filter(({ type }) => type === 'error');
    if (errors.length || refusal) {
      throw new GpuError('CompileError', errors.map(located).join('\n').slice(0, MAX_ERROR) || refusal?.message || '');
    }
    const { bindings, entryPoints, overrides } = wgsl.parseModule(source);
    if (!entryPoints.some(({ name, stage }) => name === spec.entry && stage === 'compute')) {
      const names = entryPoints.flatMap(({ name, stage }) => (stage === 'compute' ? [name] : []));
      throw new GpuError('CompileError', `there is no @compute function ${spec.entry}, but: ${names.join(', ') || 'none'}`);
    }
    checkLimits(device, bindings);
    const kinds = kindsOf(spec, bindings);
    const sizes = new Sizes(source);
    program.arguments = bindings.map((binding) => ({
      ...binding,
      scalar: spec.signature[binding.index] !== 'p',
      written: binding.access === 'read_write' && (spec.writes === null || spec.writes.includes(binding.index)),
      least: sizes.least(binding.type),
    }));
    program.scalars = program.arguments.filter(({ scalar }) => scalar).length;
    program.unsure = program.arguments.some(({ least }) => least === null);
    program.layout = device.createBindGroupLayout({
      entries: bindings.map(({ index, space, access }) => ({
        binding: index,
        visibility: GPUShaderStage.COMPUTE,
        buffer: {
          type: space === 'uniform' ? 'uniform' : access === 'read' ? 'read-only-storage' : 'storage',
        },
      })),
    });
    const layout = device.createPipelineLayout({ bindGroupLayouts: [program.layout] });
    const compute = { module, entryPoint: spec.entry, constants: constantsOf(spec.constants, overrides) };
    program.pipeline = await device.createComputePipelineAsync({ label: spec.name, layout, compute });
    if (kinds) throw kinds;
    return messages.map(located).join('\n').slice(0, MAX_ERROR);
  }

  /** @param {GPUCompilationMessage} message */
  function located({ type, message, lineNum, linePos }) {
    return lineNum ? `${lineNum}:${linePos}: ${type}: ${message}` : `${type}: ${message}`;
  }

  /**
   * The values as a pipeline takes them: a constant with an `@id` goes by that alone.
   * @param {GpuProgramSpec['constants']} constants
   * @param {WgslOverride[]} overrides
   */
  function constantsOf(constants, overrides) {
    const entries = constants instanceof Map ? [...constants] : Object.entries(constants ?? {});
    const keys = new Map(overrides.map(({ name, id }) => [name, String(id ?? name)]));
    return Object.fromEntries(entries.map(([name, value]) => [keys.get(name) ?? name, Number(value)]));
  }

  /**
   * @param {GPUDevice} device
   * @param {WgslBinding[]} bindings
   */
  function checkLimits({ limits }, bindings) {
    const storage = bindings.filter(({ space }) => space === 'storage').length;
    /** @type {[number, number, string][]} */
    const checks = [
      [storage, limits.maxStorageBuffersPerShaderStage, 'storage buffers'],
      [bindings.length - storage, limits.maxUniformBuffersPerShaderStage, 'uniforms, which scalars are too,'],
      [bindings.length, limits.maxBindingsPerBindGroup, 'bindings'],
    ];
    for (const [count, limit, what] of checks) {
      if (count > limit) {
        throw new GpuError('CompileError', `the program has ${count} ${what} but this GPU allows ${limit}`, { count, limit });
      }
    }
  }

  /**
   * What is wrong with the arguments that launches give, if the source takes others.
   * @param {GpuProgramSpec} spec
   * @param {WgslBinding[]} bindings
   */
  function kindsOf({ name, signature }, bindings) {
    const refuse = (/** @type {string} */ message) => new GpuError('LaunchError', message);
    if (signature.includes('x')) return refuse(`'${name}' takes INDEX, which is for programs in C; WGSL has its own indices`);
    if (signature.length !== bindings.length) {
      return refuse(`'${name}' takes ${bindings.length} arguments, one a binding, not ${signature.length}`);
    }
    for (const { index, space, name: binding } of bindings) {
      const letter = signature[index];
      if ('qQd'.includes(letter)) {
        return refuse(`argument ${index} of '${name}' is a 64-bit number, which WGSL does not have; give a 32-bit one`);
      }
      if (letter !== 'p' && space !== 'uniform') {
        return refuse(`argument ${index} of '${name}' is a number, but ${binding} is a var<storage>: give a buffer`);
      }
    }
    return null;
  }

  /** How much memory the types of a source take; it knows only what programs usually bind. */
  class Sizes {
    /** @param {string} source */
    constructor(source) {
      const list = wgsl.tokens(wgsl.withoutComments(source)).map(({ text }) => text);
      /** @type {Map<string, string[]>} the tokens of structures' members, aliases and constants by name. */
      this.declared = new Map();
      for (let at = 0, depth = 0; at < list.length; at++) {
        if (list[at] === '{') depth += 1;
        else if (list[at] === '}') depth -= 1;
        else if (!depth && ['struct', 'alias', 'const'].includes(list[at])) {
          const end = list.indexOf(list[at] === 'struct' ? '}' : ';', at);
          if (end < 0) break;
          this.declared.set(list[at + 1], list.slice(at, end));
          at = end;
        }
      }
    }

    /**
     * The least that a range of a type must have: one element where the number of elements is open.
     * @param {string} type
     * @returns {number | null}
     */
    least(type) {
      const layout = this.layout(wgsl.tokens(type).map(({ text }) => text), 0);
      return layout ? Math.ceil(layout[1] / 4) * 4 : null;
    }

    /**
     * @param {string[]} type
     * @param {number} depth
     * @returns {[number, number] | null} alignment and size.
     */
    layout(type, depth) {
      const [name, ...rest] = type;
      if (depth > 16 || name === undefined) return null;
      if (!rest.length && name in SCALARS) return SCALARS[name];
      const inner = rest.length > 2 ? parts(rest.slice(1, -1)) : [];
      if (name === 'atomic') return inner.length === 1 ? this.layout(inner[0], depth + 1) : null;
      const short = /^(?:vec([234])|mat([234])x([234]))([fiuh])?$/.exec(name);
      if (short) {
        const [, size, columns, rows, suffix] = short;
        const element = suffix ? SCALARS[SUFFIXES[suffix]] : inner.length === 1 && this.layout(inner[0], depth + 1);
        if (!element) return null;
        const count = Number(size ?? rows);
        const align = element[1] * (count === 2 ? 2 : 4);
        return size ? [align, element[1] * count] : [align, align * Number(columns)];
      }
      if (name === 'array') {
        const element = inner.length ? this.layout(inner[0], depth + 1) : null;
        const count = inner.length > 1 ? this.count(inner[1]) : 1;
        if (!element || count === null) return null;
        return [element[0], count * roundUp(element[0], element[1])];
      }
      const declared = rest.length ? undefined : this.declared.get(name);
      if (declared?.[0] === 'alias') return this.layout(declared.slice(3), depth + 1);
      return declared?.[0] === 'struct' ? this.structure(declared.slice(3), depth + 1) : null;
    }

    /**
     * @param {string[]} members
     * @param {number} depth
     * @returns {[number, number] | null}
     */
    structure(members, depth) {
      let align = 1;
      let end = 0;
      for (const member of parts(members)) {
        const colon = member.indexOf(':');
        const layout = this.layout(member.slice(colon + 1), depth);
        const given = ['align', 'size'].map((key) => {
          const at = member.indexOf(key);
          return at > 0 && at < colon && member[at - 1] === '@' ? this.count(member.slice(at + 2, member.indexOf(')', at))) : 0;
        });
        if (!layout || given.includes(null)) return null;
        const own = given[0] || layout[0];
        align = Math.max(align, own);
        end = roundUp(own, end) + (given[1] || layout[1]);
      }
      return end ? [align, roundUp(align, end)] : null;
    }

    /**
     * A number, or a constant that is one.
     * @param {string[]} tokens
     * @returns {number | null}
     */
    count(tokens) {
      const texts = tokens.filter((text) => text !== ',');
      if (texts.length !== 1) return null;
      const declared = this.declared.get(texts[0]);
      const text = declared?.[0] === 'const' ? declared.slice(declared.indexOf('=') + 1).join('') : texts[0];
      return /^(?:\d+|0[xX][0-9a-fA-F]+)[iu]?$/.test(text) ? Number(text.replace(/[iu]$/, '')) : null;
    }
  }

  /**
   * @param {number} align
   * @param {number} value
   */
  const roundUp = (align, value) => Math.ceil(value / align) * align;

  /**
   * What stands between the commas that are outside of brackets.
   * @param {string[]} tokens
   */
  function parts(tokens) {
    /** @type {string[][]} */
    const found = [[]];
    let depth = 0;
    for (const text of tokens) {
      if ('<([{'.includes(text)) depth += 1;
      else if ('>)]}'.includes(text)) depth -= 1;
      if (text === ',' && !depth) found.push([]);
      else found[found.length - 1].push(text);
    }
    return found.filter((part) => part.length);
  }

  return { Program, compile, Sizes };
})();
