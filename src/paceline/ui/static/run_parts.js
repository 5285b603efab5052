// Parts of a run's page that are no curves: where the time went, receipt, workers, timeline, incidents, attempts.

import { h, put, svg } from "./dom.js";
import { NONE, age, bytes, clock, count, date, duration, number, percent, plural } from "./format.js";

export const ACCOUNTS = ["compute", "optimizer", "other", "program", "data", "communication", "evaluation", "checkpoint", "start_up", "recovery", "repeated", "undone", "vacant", "idle", "down"];
const WORDS = { start_up: "start-up", communication: "waiting for others" };
const word = (name) => WORDS[name] ?? name;

/** What nobody has to look after: a worker that left on request, and a pause by the run's pool. */
export const isCalm = (incident) => ["left", "paused"].includes(incident.kind);

export function card(id, title, ...children) {
  return h("section", { class: "card", id }, h("h2", null, title), children);
}

export function table(heads, rows, name = "") {
  return h("div", { class: "scroll" }, h("table", { class: name }, h("thead", null, h("tr", null, heads.map(([title, kind]) => h("th", { class: kind }, title)))),
    h("tbody", null, rows.map((cells) => h("tr", { class: cells.kind }, cells.map((cell, place) => h("td", { class: heads[place][1] }, cell)))))));
}

function accountsBar(accounts, whole) {
  return h("div", { class: "accounts" }, ACCOUNTS.filter((name) => accounts[name] / whole > 0.0005).map((name) =>
    h("span", { class: `fill-${name}`, title: `${word(name)} ${duration(accounts[name])}, ${percent(accounts[name] / whole, 1)}`, style: { width: `${(100 * accounts[name]) / whole}%` } })));
}

/** Where every second went, with the share of each account, and how that changed. */
export function timeCard(report, { old = null, pool = null } = {}) {
  const whole = report.duration_s || 1, useful = new Set(report.useful);
  const shown = ACCOUNTS.filter((name) => report.wall_s[name] / whole > 0.0005);
  return card("time", "Where the time went",
    h("p", { class: "about" }, h("b", { class: "good" }, percent(report.goodput, 1)), ` goodput: the share of ${duration(report.duration_s)} in ${report.wall_s.program ? "which the program ran" : "useful steps"}`, old),
    accountsBar(report.wall_s, whole), stretches(report),
    h("ul", { class: "keys" }, shown.map((name) => h("li", null, h("span", { class: `key fill-${name}` }), h("span", { class: useful.has(name) ? "" : "soft" }, pool && name === "down" ? "down, and waiting in its pool" : word(name)),
      h("b", null, percent(report.wall_s[name] / whole, 1)), h("span", { class: "soft" }, duration(report.wall_s[name]))))));
}

/** From left to right as the run went on: the workers' time, stacked. */
function stretches(report) {
  const accounts = report.timeline?.accounts ?? {}, num = accounts.compute?.length ?? 0;
  if (num < 2) return null;
  const totals = Array.from({ length: num }, (_, place) => ACCOUNTS.reduce((sum, name) => sum + (accounts[name]?.[place] ?? 0), 0));
  const most = Math.max(...totals), below = new Array(num).fill(0), areas = [];
  for (const name of ACCOUNTS) {
    const values = accounts[name] ?? [];
    if (!values.some((value) => value > 0)) continue;
    const pieces = [];
    values.forEach((value, place) => {
      if (value > 0) pieces.push(`M${place} ${(100 * (1 - below[place] / most)).toFixed(2)}h1v${(-100 * value / most).toFixed(2)}h-1z`);
      below[place] += value;
    });
    areas.push(svg("path", { class: `area fill-${name}`, d: pieces.join("") }, svg("title", null, word(name))));
  }
  return svg("svg", { class: "stretches", viewBox: `0 0 ${num} 100`, preserveAspectRatio: "none", role: "img", "aria-label": "the workers' time as the run went on" }, areas);
}

/** What a step was predicted to take, beside what it took. */
export function receiptCard(report, root) {
  const found = report.receipt;
  if (!found) {
    const predicted = report.prediction?.predicted, text = report.receipt_missing.replace(/^none: /, "");
    return card("receipt", "Receipt", predicted ? h("p", null, "A step is predicted to take ", h("b", null, duration(predicted.step_s)), `, between ${duration(predicted.low_s)} and ${duration(predicted.high_s)} (80 %), with ${bytes(predicted.bytes)} in a worker.`) : null,
      h("p", { class: "about" }, text.charAt(0).toUpperCase() + text.slice(1)));
  }
  const told = { step: found.predicted_s, memory: found.predicted_bytes }, names = { step: "the whole step", memory: "memory of a worker" };
  const longest = Math.max(found.predicted_s, found.receipt.measured_s, found.receipt.predicted_s);
  const rows = report.receipt_rows.map(({ name, predicted, measured }) => {
    const before = told[name] ?? predicted, isMemory = name === "memory";
    return [names[name] ?? word(name), before, measured, isMemory ? Math.max(before, measured) : longest, isMemory ? bytes : duration];
  });
  return card("receipt", "Receipt",
    h("p", { class: "about" }, "Predicted for ", h("b", null, found.cluster.split("/").pop()), `, and the median of ${plural(found.steps, "step")}`),
    table([["", ""], ["predicted", "n"], ["measured", "n"], ["", "n"], ["", "wide"]], rows.map(([name, told, took, most, text]) => [name, told ? text(told) : NONE, text(took) === NONE ? "0" : text(took),
      told ? `${took >= told ? "+" : "−"}${Math.abs(100 * (took / told - 1)).toFixed(0)} %` : "",
      h("div", { class: "pair" }, h("span", { class: "told", style: { width: `${(100 * told) / most}%` } }), h("span", { class: "took", style: { width: `${(100 * took) / most}%` } }))])),
    found.blame ? h("p", { class: "about" }, found.blame.charAt(0).toUpperCase() + found.blame.slice(1)) : null);
}

export function incidentsCard(report) {
  const list = report.incidents;
  if (!list.length) return null;
  const first = report.num_incidents - list.length;
  return card("incidents", "Incidents", table([["", ""], ["at", "n"], ["what happened", ""], ["cost", "wide"]],
    list.map((one, place) => [h("span", { class: `number ${isCalm(one) ? "calm" : ""}` }, String(first + place + 1)), clock(one.began), one.text, h("span", { class: "soft" }, one.cost)])));
}

export function attemptsCard(report) {
  if (report.attempts.length < 2) return null;
  return card("attempts", "Attempts", table([["", ""], ["state", ""], ["began", ""], ["took", "n"], ["steps", "n"]],
    report.attempts.map((one) => [String(one.attempt), h("span", { class: `state ${one.state}` }, one.state), date(one.began), duration(one.duration_s), one.first_step === null ? NONE : `${count(one.first_step)} to ${count(one.last_step)}`])));
}

const SHOWN_STAYS = 48; // places

/** A bar for each process that held a worker's place; the time between attempts is left out. */
export function timeline(report) {
  const stays = report.presence ?? [], attempts = report.attempts;
  if (!stays.length || !attempts.length) return null;
  const elapsed = (when) => attempts.reduce((sum, one) => sum + Math.min(Math.max(when - one.began, 0), one.duration_s), 0);
  const whole = attempts.reduce((sum, one) => sum + one.duration_s, 0) || 1;
  const places = [...new Set(stays.map((stay) => stay.worker))].slice(0, SHOWN_STAYS);
  const rows = places.map((worker) => h("div", { class: "lane" }, h("span", { class: "who" }, String(worker)), h("div", { class: "track" },
    stays.filter((stay) => stay.worker === worker).map((stay) => {
      const [began, ready, ended] = [stay.began, stay.ready, stay.ended].map((when) => (100 * elapsed(when)) / whole);
      const text = `worker ${stay.worker} on ${stay.host} (pid ${stay.pid}), attempt ${stay.attempt}: ${duration(stay.ended - stay.began)}, ${stay.end}`;
      return [h("span", { class: "starting", title: `${text}; ready after ${duration(stay.ready - stay.began)}`, style: { left: `${began}%`, width: `${Math.max(0, ready - began)}%` } }),
        h("span", { class: `stay ${stay.end}`, title: text, style: { left: `${ready}%`, width: `${Math.max(0.15, ended - ready)}%` } })];
    }))));
  return h("div", { class: "lanes" }, rows, h("div", { class: "lane scale" }, h("span", { class: "who" }), h("div", { class: "track" }, h("span", null, "0 s"), h("span", null, duration(whole)))),
    stays.length && places.length < new Set(stays.map((stay) => stay.worker)).size ? h("p", { class: "about" }, `the first ${SHOWN_STAYS} places`) : null);
}

const LONG_S = 5; // a wait that is worth a color

export function workersTable(workers) {
  return table([["worker", ""], ["state", ""], ["step", "n"], ["now", "now"], ["idle", "n"], ["last event", "n"], ["host", ""], ["device", ""], ["pid", "n"]],
    workers.map((one) => [String(one.rank), h("span", { class: `state ${one.state}` }, one.state), count(one.step), doing(one), one.idle === null ? NONE : percent(one.idle),
      one.age_s === null ? NONE : age(Math.max(0, one.age_s)), one.host || NONE, one.device || NONE, one.pid ? String(one.pid) : NONE]), "workers");
}

/** The tasks of another framework's program, which takes its steps by itself. */
export function tasksTable(workers) {
  return table([["task", ""], ["state", ""], ["up", "n"], ["cores", "n"], ["memory", "n"], ["restarts", "n"], ["host", ""], ["device", ""], ["pid", "n"]],
    workers.map((one) => [one.name, [h("span", { class: `state ${one.state}` }, one.state), ...(one.still_s ? [` still for ${duration(one.still_s)} `, h("code", null, one.place)] : [])], one.up_s === null ? NONE : duration(one.up_s), one.cores === null ? NONE : number(one.cores),
      one.memory_bytes === null ? NONE : bytes(one.memory_bytes), count(one.restarts), one.host || NONE, one.device || NONE, one.pid ? String(one.pid) : NONE]), "workers");
}

function doing(one) {
  if (!one.phase) return NONE;
  const line = one.line ? h("code", null, one.line) : null;
  if (one.waits_for) return [h("span", { class: one.waited_s > LONG_S ? "bad" : "" }, `waits for ${one.waits_for}, ${duration(one.waited_s)}`), " ", line];
  return [`${one.phase}, ${duration(one.phase_s)}`, " ", line];
}

export function facts(list) {
  return h("dl", { class: "facts" }, list.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

export function measuresTable(evaluations) {
  return table([["evaluation", ""], ["last", "n"], ["least", "n"], ["most", "n"], ["values", "n"]], Object.entries(evaluations).map(([name, points]) => {
    const values = points.map(([, value]) => value);
    return [name, h("b", null, number(values.at(-1))), number(Math.min(...values)), number(Math.max(...values)), count(values.length)];
  }));
}

export function eventsList(element, events) {
  put(element, events.slice(-120).reverse().map((one) => h("li", { class: one.kind }, h("time", null, clock(one.time)), h("span", null, one.text))));
}
