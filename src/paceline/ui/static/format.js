// Numbers, durations and dates as people read them.

export const NONE = "–";
const NAMES = { lr: "learning rate", grad_norm: "gradient norm", loss_scale: "loss scale (fp16)", overflows: "overflows in fp16" };

/** What a metric is called: those that each run has, by their names. */
export function metricTitle(name) {
  return NAMES[name] ?? name.replace(/^lr\/(\d+)$/, "learning rate, group $1");
}

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

export function brief(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

export function rate(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return value >= 99.95 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Number((seconds * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (size < 100) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Number((minutes / 1440).toPrecision(3))} days`;
}

export function bytes(value) {
  if (!value) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(value) / 10), units.length - 1);
  return `${Number((value / 1024 ** power).toPrecision(3))} ${units[power]}`;
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(digits)} %`;
}

export function date(seconds) {
  if (!seconds) return NONE;
  const when = new Date(1000 * seconds), now = new Date();
  const clock = when.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (when.toDateString() === now.toDateString()) return clock;
  const day = when.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return when.getFullYear() === now.getFullYear() ? `${day}, ${clock}` : `${day} ${when.getFullYear()}`;
}

export function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** The words of a state, and how long ago a running run took its last step. */
export function age(seconds) {
  return seconds < 1.5 ? "now" : `${duration(Math.round(seconds))} ago`;
}
