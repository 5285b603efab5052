// Curves by uPlot. A curve has columns of steps with mean, least and most; the band is what the mean hides.

import uPlot from "./uPlot.esm.js";
import { h, put } from "./dom.js";
import { brief, count, duration, number } from "./format.js";

const open = new Set(); // charts on the page, to be drawn anew when the colours change
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => open.forEach((chart) => chart.rebuild()));

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const curveColor = (place) => color(`curve-${place % 8}`);

/** The columns of one curve, as the server adds to them. */
export class Curve {
  constructor() { this.width = 0; this.points = new Map(); this.sorted = null; }

  take({ width, whole, points }) {
    if (whole || width !== this.width) this.points.clear();
    this.width = width;
    for (const [column, step, mean, least = mean, most = mean] of points) this.points.set(column, [step, mean, least, most]);
    this.sorted = null;
  }

  /** Points [step, mean, least, most] by step. */
  all() {
    this.sorted ??= [...this.points.entries()].sort((a, b) => a[0] - b[0]).map(([, point]) => point);
    return this.sorted;
  }

  get last() { return this.all().at(-1); }

  /** The mean at a step, between its neighbors. */
  at(step) {
    const all = this.all();
    if (!all.length) return null;
    let low = 0, high = all.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (all[middle][0] <= step) low = middle; else high = middle; }
    const [a, b] = [all[low], all[high]], width = b[0] - a[0];
    return width ? a[1] + (b[1] - a[1]) * Math.min(1, Math.max(0, (step - a[0]) / width)) : a[1];
  }
}

export function curveOf(values) {
  const curve = new Curve();
  curve.take({ width: 1, whole: true, points: values.map(([step, value], place) => [place, step, value]) });
  return curve;
}

/**
 * A chart with one curve and its band, or with several lines.
 * options: title, about, height, isLog, canLog, isTime (x in seconds), color, unit(value), marks() -> [{x, label, text, kind}]
 */
export class Chart {
  constructor(options) {
    this.options = options;
    this.isLog = options.isLog ?? false;
    this.lines = [];
    this.value = h("span", { class: "value" });
    this.logButton = options.canLog ? h("button", { class: "plain toggle", title: "logarithmic axis", "aria-pressed": String(this.isLog),
      on: { click: () => this.setLog(!this.isLog) } }, "log") : null;
    this.isSmooth = this.isZoomed = false;
    this.smoothButton = options.canSmooth ? h("button", { class: "plain toggle", title: "moving average", "aria-pressed": "false",
      on: { click: () => this.setSmooth(!this.isSmooth) } }, "smooth") : null;
    this.canvas = h("div", { class: "canvas" });
    this.element = h("figure", { class: `chart ${options.class ?? ""}` },
      h("figcaption", { class: options.hasLegend ? "of-many" : "" }, h("span", { class: "title", title: options.title }, options.title), this.logButton, this.smoothButton, this.value), this.canvas);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
    this.element.chart = this; // for the console
    open.add(this);
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    open.delete(this);
  }

  setLog(isLog) {
    this.isLog = isLog;
    this.logButton?.setAttribute("aria-pressed", String(isLog));
    this.rebuild();
  }

  setSmooth(isSmooth) {
    this.isSmooth = isSmooth;
    this.smoothButton.setAttribute("aria-pressed", String(isSmooth));
    this.rebuild();
  }

  /** lines: [{name, color?, points: [[x, mean, least, most], ...]}] */
  set(lines) {
    const isSame = this.plot && lines.length === this.lines.length && lines.every((line, place) => line.name === this.lines[place].name);
    this.lines = lines;
    if (!isSame) { this.rebuild(); return; }
    this.plot.setData(this.data(), !this.isZoomed);
    if (this.isZoomed) this.plot.redraw();
    this.say(this.plot.cursor.idx);
  }

  /** Called when the range of x has been set: by new data, or by hand. What was chosen by hand stays. */
  ranged(plot) {
    const { min, max } = plot.scales.x, xs = plot.data[0];
    this.isZoomed = xs.length > 1 && (min > xs[0] || max < xs.at(-1));
  }

  data() {
    const clean = (value) => (this.isLog && value <= 0 ? null : value);
    if (this.lines.length === 1) {
      const points = this.isSmooth ? smoothed(this.lines[0].points) : this.lines[0].points;
      return [points.map((one) => one[0]), ...[1, 2, 3].map((place) => points.map((one) => clean(one[place])))];
    }
    if (!this.lines.length) return [[], []];
    const shown = this.lines.map((line) => (this.isSmooth ? smoothed(line.points) : line.points));
    return uPlot.join(shown.map((points) => [points.map((one) => one[0]), points.map((one) => clean(one[1]))]));
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    this.isZoomed = false;
    const width = this.canvas.clientWidth;
    if (!width || !this.lines.length) return;
    this.plot = new uPlot(this.describe(width), this.data(), this.canvas);
    this.say(null);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: this.options.height ?? 150 });
    else this.rebuild();
  }

  describe(width) {
    const line = color("line"), soft = color("soft"), isBand = this.lines.length === 1;
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const few = (plot, place) => plot.data[0].length < 40 || plot.data[place].filter((value) => value !== null && value !== undefined).length < 3;
    const series = isBand
      ? [{ stroke: this.tone(0), width: 1.5, points: { show: few, size: 4, fill: this.tone(0) } }, { stroke: this.isSmooth ? this.tone(0) + "50" : null, width: 1, points: { show: false } }, { stroke: null, points: { show: false } }]
      : this.lines.map((one, place) => ({ stroke: this.tone(place), width: 1.5, spanGaps: true, points: { show: few, size: 4, fill: this.tone(place) } }));
    return {
      width, height: this.options.height ?? 150, legend: { show: false }, padding: [8, 14, 0, 0],
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1, range: this.isLog ? undefined : (_, low, high) => spread(low, high) } },
      series: [{}, ...series], bands: isBand ? [{ series: [3, 2], fill: this.tone(0) + "2e" }] : [],
      cursor: { sync: { key: this.options.sync ?? "steps" }, drag: { x: true, y: false, dist: 6 }, y: false, points: { size: 7 } },
      axes: [
        { stroke: soft, font, size: 26, gap: 4, ticks: { show: false }, grid: { stroke: line, width: 1 }, space: 70,
          values: (_, ticks) => ticks.map((tick) => (this.options.isTime ? duration(tick) : brief(tick))) },
        { stroke: soft, font, size: 50, gap: 6, ticks: { show: false }, grid: { stroke: line, width: 1 }, space: 30,
          values: (_, ticks) => ticks.map((tick) => (tick === null || tick === undefined ? "" : this.options.unit ? this.options.unit(tick) : brief(tick))) },
      ],
      hooks: { setScale: [(plot, key) => { if (key === "x") this.ranged(plot); }], setCursor: [(plot) => this.say(plot.cursor.idx)], draw: [(plot) => this.mark(plot)] },
    };
  }

  tone(place) { return this.lines[place]?.color ?? color(this.options.color ?? "accent"); }

  /** The value under the pointer, or else the last one. */
  say(index) {
    if (!this.plot) return;
    const shown = this.options.unit ?? number;
    if (this.lines.length !== 1) {
      if (this.options.hasLegend) put(this.value, this.lines.map((line, place) => {
        const value = index === null || index === undefined ? line.points.at(-1)?.[1] : this.plot.data[place + 1][index];
        return h("span", { style: { color: this.tone(place) }, title: line.name }, this.options.hasNames ? `${line.name} ` : null, h("b", null, value === null || value === undefined ? "" : shown(value)));
      }));
      return;
    }
    const points = this.lines[0].points, point = points[index ?? points.length - 1];
    if (!point) { put(this.value); return; }
    const [x, mean, least, most] = point;
    const near = index === null || index === undefined ? null : this.nearMark(x);
    const where = this.options.isTime ? duration(x) : `step ${count(Math.round(x))}`;
    put(this.value, near ? h("span", { class: "bad" }, near.text) : index === null || index === undefined ? null : h("span", { class: "soft" }, where),
      h("b", null, shown(mean)), most > least && index !== null && index !== undefined ? h("span", { class: "soft" }, `${shown(least)} to ${shown(most)}`) : null);
  }

  nearMark(x) {
    const { min, max } = this.plot.scales.x, reach = (max - min) * 0.008;
    return (this.options.marks?.() ?? []).find((mark) => Math.abs(mark.x - x) <= reach);
  }

  /** Incidents: a dashed line, and a number where there is room. */
  mark(plot) {
    const marks = this.options.marks?.() ?? [], { ctx, bbox } = plot, ratio = devicePixelRatio;
    const isNumbered = marks.length <= 24;
    ctx.save();
    for (const mark of marks) {
      const x = plot.valToPos(mark.x, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      const tone = color(mark.kind === "incident" ? "bad" : "soft");
      ctx.globalAlpha = isNumbered ? 0.8 : 0.35;
      ctx.strokeStyle = tone;
      ctx.lineWidth = ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (!isNumbered || this.options.isSmall) continue;
      ctx.globalAlpha = 1;
      ctx.setLineDash([]);
      ctx.fillStyle = tone;
      ctx.beginPath();
      ctx.arc(x, bbox.top + 7 * ratio, 7 * ratio, 0, 2 * Math.PI);
      ctx.fill();
      ctx.fillStyle = color("card");
      ctx.font = `600 ${9.5 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.fillText(mark.label, x, bbox.top + 7.5 * ratio);
    }
    ctx.restore();
  }
}

const SMOOTH_OVER = 30; // so many stretches of a curve are told apart when it is smooth

/** The moving average of a curve, exponentially weighted by steps; least and most stay. */
function smoothed(points) {
  if (points.length < 3) return points;
  const reach = (points.at(-1)[0] - points[0][0]) / SMOOTH_OVER || 1;
  let total = 0, weight = 0, before = points[0][0];
  return points.map(([x, mean, least, most]) => {
    const kept = Math.exp(-(x - before) / reach);
    [total, weight, before] = [total * kept + mean, weight * kept + 1, x];
    return [x, total / weight, least, most];
  });
}

/** A range with some room; a curve that is level stands in the middle. */
function spread(low, high) {
  if (low === null || low === undefined || high === null || high === undefined) return [0, 1];
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; return [low - room, high + room]; }
  const room = (high - low) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
