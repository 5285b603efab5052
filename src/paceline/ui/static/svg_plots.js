// Small drawings without time's axis of steps: points over a parameter or a trial's number, and shares over time.

import { h, put, svg } from "./dom.js";
import { brief, clock, date, number } from "./format.js";

const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 24, TICKS = 4, LABEL = 64; // pixels

/** A figure that is drawn anew when its width changes. */
export class Figure {
  constructor(title, { height = 170, wide = false } = {}) {
    this.height = height;
    this.about = h("span", { class: "value" });
    this.tools = h("span");
    this.canvas = h("div", { class: "canvas drawn", style: { "min-height": `${height}px` } });
    this.element = h("figure", { class: `chart ${wide ? "wide" : ""}` }, h("figcaption", null, h("span", { class: "title", title }, title), this.tools, this.about), this.canvas);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  close() { this.observer.disconnect(); }

  draw() {
    const width = this.canvas.clientWidth;
    if (width && this.content) put(this.canvas, this.content(width));
  }
}

/**
 * Points of value over x, which is a number or a word.
 * points: [{x, y, kind, text, href}]; line: [[x, y], ...], drawn through; isLog: {x, y}; isCounted: x is a whole number
 */
export class Scatter extends Figure {
  constructor(title, options = {}) {
    super(title, options);
    this.isLog = { x: false, y: false, ...options.isLog };
    this.isCounted = options.isCounted ?? false;
    const toggle = (axis) => h("button", { class: "plain toggle", title: `logarithmic ${axis} axis`, "aria-pressed": String(this.isLog[axis]), on: { click: (event) => {
      this.isLog[axis] = !this.isLog[axis];
      event.currentTarget.setAttribute("aria-pressed", String(this.isLog[axis]));
      this.draw();
    } } }, `log ${axis}`);
    put(this.tools, (options.canLog ?? []).map(toggle));
  }

  set({ points, line = [], about = "" }) {
    [this.points, this.line] = [points, line];
    put(this.about, about);
    this.content = (width) => this.drawing(width);
    this.draw();
  }

  drawing(width) {
    const height = this.height, words = wordsOf(this.points.map((one) => one.x));
    const placed = words ? this.points.map((one) => ({ ...one, x: words.indexOf(String(one.x)) })) : this.points;
    const isLogX = this.isLog.x && !words && placed.every((one) => one.x > 0), isLogY = this.isLog.y && placed.every((one) => one.y > 0);
    const known = placed.filter((one) => Number.isFinite(one.x) && Number.isFinite(one.y));
    if (!known.length) return h("p", { class: "about" }, "no value yet");
    const x = words ? axisOf([-0.5, words.length - 0.5], false, LEFT, width - RIGHT, false) : axisOf(known.map((one) => one.x), isLogX, LEFT, width - RIGHT);
    const y = axisOf(known.map((one) => one.y), isLogY, height - BOTTOM, TOP);
    const counted = (tick) => !this.isCounted || Number.isInteger(tick);
    const few = words || this.isCounted ? null : fewOf(known.map((one) => one.x));
    const across = words ? words.map((word, place) => [place, word]) : few ? apart(few, x).map((value) => [value, brief(value)]) : ticksOf(x, isLogX, Math.max(2, Math.floor(width / LABEL) - 1)).filter(counted).map((tick) => [tick, brief(tick)]);
    const room = words ? (width - LEFT - RIGHT) / words.length / 6.2 : Infinity; // characters of a label
    const up = ticksOf(y, isLogY, TICKS);
    return svg("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" },
      up.map((tick) => [svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y.at(tick), y2: y.at(tick) }), svg("text", { class: "tick up", x: LEFT - 7, y: y.at(tick) + 4 }, brief(tick))]),
      across.map(([tick, text]) => [svg("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: TOP, y2: height - BOTTOM }), svg("text", { class: "tick", x: x.at(tick), y: height - 7 }, shortened(text, room), svg("title", null, text))]),
      this.line.length ? svg("polyline", { class: "through", points: this.line.map(([a, b]) => `${x.at(a).toFixed(1)},${y.at(b).toFixed(1)}`).join(" ") }) : null,
      known.map((one) => {
        const dot = svg("circle", { class: `dot ${one.kind}`, cx: x.at(one.x).toFixed(1), cy: y.at(one.y).toFixed(1), r: one.kind.includes("best") ? 5.5 : 3.6 }, svg("title", null, one.text));
        return one.href ? svg("a", { href: one.href }, dot) : dot;
      }));
  }
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, Math.floor(most) - 1))}…` : text);

/** The words of an axis, in order; null where all are numbers. */
function wordsOf(values) {
  if (values.every((value) => typeof value === "number")) return null;
  return [...new Set(values.map(String))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

const MOST_VALUES = 6, OFTEN = 3, TICK_ROOM = 30; // pixels

/** The values of an axis where they are few, and each comes often: choices, not places of a range. Else null. */
export function fewOf(values) {
  const found = [...new Set(values)].sort((a, b) => a - b);
  return found.length <= MOST_VALUES && values.length >= OFTEN * found.length ? found : null;
}

/** Values whose ticks do not lie over each other. */
function apart(values, axis) {
  let last = -Infinity;
  return values.filter((value) => {
    const isFree = axis.at(value) - last >= TICK_ROOM;
    if (isFree) last = axis.at(value);
    return isFree;
  });
}

function axisOf(values, isLog, from, to, hasRoom = true) {
  const scaled = (value) => (isLog ? Math.log10(value) : value);
  let low = Math.min(...values.map(scaled)), high = Math.max(...values.map(scaled));
  const room = hasRoom ? (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5 : 0;
  [low, high] = [low - room, high + room];
  return { low, high, at: (value) => from + ((scaled(value) - low) / (high - low)) * (to - from) };
}

/** Round values on an axis: of a logarithmic one, powers of ten where there are two, else as on any axis. */
function ticksOf({ low, high }, isLog, most) {
  if (isLog) {
    const stride = Math.max(1, Math.ceil((high - low) / most)), powers = [];
    for (let power = Math.ceil(low); power <= high; power += stride) powers.push(10 ** power);
    if (powers.length > 1) return powers;
    return ticksOf({ low: 10 ** low, high: 10 ** high }, false, most).filter((tick) => tick > 0);
  }
  const rough = (high - low) / most, size = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= rough);
  const ticks = [];
  for (let place = Math.ceil(low / stride); place <= high / stride + 1e-9; place += 1) ticks.push(Number((place * stride).toPrecision(12)) + 0);
  return ticks;
}

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400].concat([2, 5, 10, 20, 50, 100, 200, 500, 1000].map((days) => days * 86_400));

/** Round times of day between two, in seconds. */
function timesOf(from, to, most) {
  const stride = TIMES.find((one) => (to - from) / one <= most) ?? to - from;
  const midnight = 60 * new Date(1000 * from).getTimezoneOffset(), times = [];
  for (let place = Math.ceil((from - midnight) / stride); place * stride + midnight <= to; place += 1) times.push(place * stride + midnight);
  return times;
}

/** How many devices each run had over time, one over the other; runs that had few are one. history: {run: [[time, devices], ...]} */
export class Shares extends Figure {
  set({ history, slots, now, tones, about = "" }) {
    put(this.about, about);
    this.content = (width) => this.drawing(width, mostOf(history, now), { history, slots, now, tones });
    this.draw();
  }

  drawing(width, runs, { history, slots, now, tones }) {
    const height = this.height;
    if (!runs.length) return h("p", { class: "about" }, "nothing was decided yet");
    const times = [...new Set(runs.flatMap(([, changes]) => changes.map(([time]) => time)))].sort((a, b) => a - b);
    const from = times[0], to = Math.max(now, times.at(-1), from + 1);
    const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - RIGHT);
    const columns = columnsOf(runs, times.filter((time, place) => place + 1 === times.length || x(times[place + 1]) - x(time) >= NARROWEST), to);
    const most = Math.max(slots, ...columns.map(({ held }) => held.reduce((sum, devices) => sum + devices, 0))) || 1;
    const y = (devices) => height - BOTTOM - (devices / most) * (height - BOTTOM - TOP);
    const boxes = runs.flatMap(([run], place) => stretchesOf(columns, place).map(({ since, until, below, devices }) =>
      svg("rect", { x: x(since).toFixed(2), width: Math.max(0.4, x(until) - x(since)).toFixed(2), y: y(below + devices).toFixed(2), height: (y(below) - y(below + devices)).toFixed(2), style: { fill: run in history ? tones(run) : "var(--strong)" } },
        svg("title", null, `${run}: ${number(devices)} from ${clock(since)} to ${clock(until)}`))));
    const up = ticksOf({ low: 0, high: most }, false, Math.min(TICKS, most)).filter(Number.isInteger), isDays = to - from > 86_400;
    const across = timesOf(from, to, Math.max(2, Math.floor((width - LEFT) / (isDays ? 120 : 80))));
    return svg("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "devices of each run over time" },
      up.map((tick) => [svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }), svg("text", { class: "tick up", x: LEFT - 7, y: y(tick) + 4 }, brief(tick))]), boxes,
      across.map((time) => svg("text", { class: `tick ${x(time) < LEFT + HALF ? "first" : x(time) > width - RIGHT - HALF ? "last" : ""}`, x: x(time), y: height - 7 }, isDays ? date(time) : clock(time).slice(0, to - from > 600 ? 5 : 8))));
  }
}

const MOST_RUNS = 16, NARROWEST = 1, HALF = 24; // pixels of a column; of half a time

/** Runs by their first change: those that have devices now or had most device-seconds, and the sum of the others as "n more". */
export function mostOf(history, now) {
  const runs = Object.entries(history).filter(([, changes]) => changes.length);
  if (runs.length <= MOST_RUNS) return runs;
  const had = ([, changes]) => changes.reduce((sum, [time, devices], place) => sum + devices * Math.max(0, (changes[place + 1]?.[0] ?? now) - time), 0);
  const has = ([, changes]) => changes.at(-1)[1] > 0;
  const kept = new Set(runs.map((one) => [had(one), one]).sort(([a, one], [b, other]) => has(other) - has(one) || b - a).slice(0, MOST_RUNS - 1).map(([, one]) => one));
  const steps = runs.filter((one) => !kept.has(one)).flatMap(([, changes]) => changes.map(([time, devices], place) => [time, devices - (changes[place - 1]?.[1] ?? 0)]));
  let sum = 0;
  return [...runs.filter((one) => kept.has(one)), [`${runs.length - kept.size} more`, steps.sort((a, b) => a[0] - b[0]).map(([time, more]) => [time, (sum += more)])]];
}

/** Between two moments each run has the same number of devices. */
function columnsOf(runs, times, to) {
  const places = runs.map(() => 0);
  return times.map((time, place) => {
    const held = runs.map(([, changes], run) => {
      while (places[run] < changes.length && changes[places[run]][0] <= time) places[run] += 1;
      return places[run] ? changes[places[run] - 1][1] : 0;
    });
    return { since: time, until: times[place + 1] ?? to, held };
  });
}

/** Where one run is drawn: columns beside each other that are alike are one box. */
function stretchesOf(columns, run) {
  const found = [];
  for (const { since, until, held } of columns) {
    const devices = held[run], below = held.slice(0, run).reduce((sum, one) => sum + one, 0), last = found.at(-1);
    if (!devices) continue;
    if (last && last.until === since && last.below === below && last.devices === devices) last.until = until;
    else found.push({ since, until, below, devices });
  }
  return found;
}

const SHARE = 10; // a drawing that took so long waits so many times as long

/** A function that calls `draw` now, or after a while where drawing takes long, so that the page stays quick. */
export function soon(draw) {
  let timer = null, isStale = false;
  const later = () => {
    isStale = true;
    if (timer !== null) return;
    const began = performance.now();
    isStale = false;
    draw();
    timer = setTimeout(() => { timer = null; if (isStale) later(); }, SHARE * (performance.now() - began));
  };
  later.end = () => clearTimeout(timer);
  return later;
}
