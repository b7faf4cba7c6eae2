'use strict';
// A small live line plot as SVG: the last minute of one or two series, with a scale, and values under the pointer or by
// the arrow keys. It knows nothing of what it shows. Colours are the style sheet's, so they follow light and dark.

const plot = (() => {
  const SVG = 'http://www.w3.org/2000/svg';
  const WIDTH = 600;
  const HEIGHT = 150;
  const TOP = 8;

  /**
   * @param {string} tag
   * @param {Record<string, string | number>} attributes
   * @returns {SVGElement}
   */
  function shape(tag, attributes) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
    return made;
  }

  /**
   * The next value of the form 1, 2 or 5 times a power of `base` that is not below `value`.
   * @param {number} value
   * @param {boolean} binary steps for bytes: powers of two
   */
  function ceiling(value, binary) {
    if (binary) return 2 ** Math.ceil(Math.log2(Math.max(value, 1024)));
    const power = 10 ** Math.floor(Math.log10(Math.max(value, 10)));
    for (const step of [1, 2, 5]) if (step * power >= value) return step * power;
    return 10 * power;
  }

  /**
   * @typedef {object} Options
   * @property {string} title
   * @property {string[]} series names, one or two
   * @property {(value: number) => string} format
   * @property {boolean} [binary] the scale's steps are powers of two
   * @property {number} [seconds] how much is shown
   * @property {(value: number) => string} [scale] format of the scale's label
   */

  class Plot {
    /**
     * @param {HTMLElement} host is filled
     * @param {Options} options
     */
    constructor(host, options) {
      this.options = options;
      this.seconds = options.seconds ?? 60;
      /** @type {{at: number, values: number[]}[]} */
      this.points = [];
      /** @type {number | null} */
      this.chosen = null;
      this.described = 0;

      this.figures = options.series.map((name, index) => {
        const figure = ui.element('span', { class: `figure series-${index}` });
        const label = ui.element('span', { class: `series-name series-${index}` }, name);
        const box = ui.element('span', { class: 'figure-box' }, figure);
        if (options.series.length > 1) box.prepend(label); // one line needs no legend beside its title
        return { box, figure };
      });
      this.when = ui.element('span', { class: 'when' }, 'now');
      const head = ui.element('div', { class: 'plot-head' }, ui.element('h3', {}, options.title), this.when);
      const values = ui.element('div', { class: 'plot-values' }, ...this.figures.map((made) => made.box));

      this.svg = shape('svg', {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: 'none',
        class: 'plot-lines',
        role: 'img',
        tabindex: 0,
      });
      for (const part of [0, 0.5, 1]) {
        const y = TOP + (HEIGHT - TOP - 1) * part;
        this.svg.append(shape('line', { x1: 0, x2: WIDTH, y1: y, y2: y, class: 'grid' }));
      }
      this.areas = options.series.map((_, index) => shape('path', { class: `area series-${index}` }));
      this.lines = options.series.map((_, index) => shape('path', { class: `line series-${index}` }));
      this.cursor = shape('line', { y1: TOP, y2: HEIGHT, class: 'cursor', visibility: 'hidden' });
      this.svg.append(...this.areas, ...this.lines, this.cursor);
      this.top = ui.element('span', { class: 'scale-top', 'aria-hidden': 'true' });
      const axis = ui.element(
        'div',
        { class: 'axis', 'aria-hidden': 'true' },
        ui.element('span', {}, `${this.seconds} s ago`),
        ui.element('span', {}, 'now'),
      );
      const stage = ui.element('div', { class: 'plot-stage' }, this.top);
      stage.append(this.svg);
      host.classList.add('plot');
      host.append(head, values, stage, axis);

      this.svg.addEventListener('pointermove', (event) => this.point(/** @type {PointerEvent} */ (event)));
      this.svg.addEventListener('pointerleave', () => this.choose(null));
      this.svg.addEventListener('blur', () => this.choose(null));
      this.svg.addEventListener('keydown', (event) => this.key(/** @type {KeyboardEvent} */ (event)));
      this.draw();
    }

    /**
     * Add what was measured.
     * @param {number} at seconds, on any clock that only goes forward
     * @param {number[]} values one a series
     */
    add(at, values) {
      const last = this.points[this.points.length - 1];
      if (last && at <= last.at) return;
      this.points.push({ at, values });
      while (this.points.length > 2 && this.points[1].at < at - this.seconds) this.points.shift();
      this.draw();
    }

    /** Begin anew: other things are shown from now on. */
    clear() {
      this.points = [];
      this.choose(null);
    }

    draw() {
      const { points, options } = this;
      const end = points.length ? points[points.length - 1].at : 0;
      const most = points.reduce((top, point) => Math.max(top, ...point.values), 0);
      const top = ceiling(most * 1.05, options.binary ?? false); // a line at the very top would hide under the scale
      ui.text(this.top, (options.scale ?? options.format)(top));
      /** @param {number} at */
      const x = (at) => Math.round((WIDTH * (at - end + this.seconds)) / this.seconds);
      /** @param {number} value */
      const y = (value) => (TOP + (HEIGHT - TOP - 1) * (1 - value / top)).toFixed(1);
      options.series.forEach((_, series) => {
        const path = points.map((point) => `${x(point.at)} ${y(point.values[series])}`).join('L');
        this.lines[series].setAttribute('d', path && `M${path}`);
        this.areas[series].setAttribute('d', path && `M${x(points[0].at)} ${HEIGHT}L${path}L${x(end)} ${HEIGHT}Z`);
      });
      const point = this.nearest();
      ui.text(this.when, point && this.chosen !== null ? `${Math.round(end - point.at)} s ago` : 'now');
      this.figures.forEach(({ figure }, series) => ui.text(figure, point ? options.format(point.values[series]) : '–'));
      if (point && this.chosen !== null) {
        this.cursor.setAttribute('x1', String(x(point.at)));
        this.cursor.setAttribute('x2', String(x(point.at)));
      }
      this.cursor.setAttribute('visibility', this.chosen === null ? 'hidden' : 'visible');
      // A label that changes twice a second would be read out again and again where the plot has the focus.
      if (this.chosen !== null || !this.described || end - this.described >= 10) {
        this.described = end;
        this.svg.setAttribute('aria-label', this.describe(point, end, most));
      }
    }

    /**
     * @param {{at: number, values: number[]} | undefined} point
     * @param {number} end
     * @param {number} most
     */
    describe(point, end, most) {
      const { title, series, format } = this.options;
      if (!point) return `${title}: nothing measured yet`;
      const values = series.map((name, index) => `${name} ${format(point.values[index])}`).join(', ');
      const when = this.chosen === null ? 'now' : `${Math.round(end - point.at)} seconds ago`;
      return `${title}, ${when}: ${values}. Highest in the last ${this.seconds} seconds: ${format(most)}.`;
    }

    /** The point that is shown in figures. */
    nearest() {
      const { points, chosen } = this;
      if (chosen === null || !points.length) return points[points.length - 1];
      const at = points[points.length - 1].at - chosen;
      return points.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best));
    }

    /** @param {number | null} secondsAgo */
    choose(secondsAgo) {
      this.chosen = secondsAgo === null ? null : Math.min(Math.max(secondsAgo, 0), this.seconds);
      this.draw();
    }

    /** @param {PointerEvent} event */
    point(event) {
      const box = this.svg.getBoundingClientRect();
      this.choose(this.seconds * (1 - (event.clientX - box.left) / box.width));
    }

    /** @param {KeyboardEvent} event */
    key(event) {
      const steps = /** @type {Record<string, number>} */ ({ ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10 });
      if (event.key in steps) this.choose((this.chosen ?? 0) + steps[event.key]);
      else if (event.key === 'Home') this.choose(this.seconds);
      else if (event.key === 'End' || event.key === 'Escape') this.choose(null);
      else return;
      event.preventDefault();
    }
  }

  return { Plot, ceiling };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, plot);
