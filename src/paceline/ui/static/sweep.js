// A sweep's page: the best value over its trials, the objective over each parameter, and a table of the trials.

import { h, put } from "./dom.js";
import { listen } from "./live.js";
import { NONE, count, date, number, plural } from "./format.js";
import { compareLink, progressBar, runLink, spark } from "./overview.js";
import { poolLink } from "./pool.js";
import { card } from "./run_parts.js";
import { Scatter, soon } from "./svg_plots.js";

const AT_ONCE = 200; // rows of the table; more come as it is scrolled
const LOG_FROM = 20; // values that are spread over more than this factor are drawn on a logarithmic axis
const MOST_COMPARED = 12, MOST_BEST = 8, MOST_PLOTS = 40, MOST_POINTS = 2000;
const ORDER = ["running", "paused", "waiting", "finished", "pruned", "failed"];
const STATES = { lost: "its process is gone", elsewhere: "on another host", unreadable: "no state" };

export const sweepLink = (name) => `#/sweep/${name.split("/").map(encodeURIComponent).join("/")}`;
export const sweepState = (state) => h("span", { class: `state ${state}` }, STATES[state] ?? state);
export const countsText = (sweep) => Object.entries(sweep.counts).map(([state, num]) => `${count(num)} ${state}`).join("  ·  ");
const shown = (value) => (typeof value === "number" ? number(value) : value === null || value === undefined ? NONE : String(value));

export function sweep(page, name) {
  const head = h("div", { class: "head" }), alerts = h("div", { class: "alerts" }), tiles = h("div", { class: "tiles" }), plots = h("div", { class: "charts" });
  const history = new Scatter("Best value over trials", { height: 220, wide: true, canLog: ["y"], isCounted: true }), charts = new Map(), trials = new Map(), chosen = new Set();
  const table = h("table", { class: "trials" }), more = h("p", { class: "more" }), picked = h("div", { class: "picked", hidden: true }), best = h("a", { class: "button quiet" });
  let study = null, sort = "value", isDown = false, rows = AT_ONCE, names = [];
  const later = soon(() => draw());
  plots.append(history.element);
  page.append(head, alerts, tiles, h("div", { class: "alone" }, plots), card("trials", "Trials", h("div", { class: "tools" }, best), h("div", { class: "scroll" }, table), more), picked);

  const sign = () => (study.direction === "maximize" ? -1 : 1);
  const isDone = (trial) => trial.state === "finished" && trial.value !== null;
  const ranked = () => [...trials.values()].filter(isDone).sort((a, b) => sign() * (a.value - b.value) || a.number - b.number);
  const textOf = (trial) => `trial ${trial.number}, ${trial.state}: ${shown(trial.value)}\n${Object.entries(trial.parameters).map(([key, value]) => `${key} ${shown(value)}`).join("\n")}`;
  const pointOf = (trial, x) => ({ x, y: trial.value, kind: `${trial.state}${trial.number === study.best ? " best" : ""}`, text: textOf(trial), href: trial.page ? runLink(trial.page) : null });

  function draw() {
    const all = [...trials.values()].sort((a, b) => a.number - b.number), valued = all.filter((one) => one.value !== null);
    names = [...new Set(all.flatMap((one) => Object.keys(one.parameters)))];
    document.title = `${study.title} – Paceline`;
    put(head, h("h1", null, study.title, " ", sweepState(study.state)),
      h("p", { class: "program" }, h("span", null, `${study.direction} `, h("code", null, study.objective)), study.started ? h("span", { class: "soft" }, `started ${date(study.started)}`) : null, study.pool_page ? h("a", { class: "link", href: poolLink(study.pool_page) }, `pool ${study.pool_page}`) : null),
      h("p", { class: "plan-line" }, h("code", null, study.path)));
    put(alerts, [study.problem || null, study.state === "lost" ? "The sweep's process is gone. Started again, it goes on with the trials that it has." : null].filter(Boolean).map((text) => h("p", { class: "alert warn" }, text)));
    drawTiles(all);
    drawPlots(valued);
    drawTable(all);
  }

  function drawTiles(all) {
    const winner = study.best === null ? null : trials.get(study.best);
    const ended = all.filter((one) => ["finished", "pruned", "failed"].includes(one.state)).length;
    put(tiles, [[shown(winner?.value), winner ? `best ${study.objective}, trial ${winner.number}` : `no ${study.objective} yet`, "good"],
      [study.wanted ? `${count(ended)} of ${count(study.wanted)}` : count(ended), "trials done"],
      ...["running", "paused", "waiting", "pruned", "failed"].filter((state) => study.counts[state]).map((state) => [count(study.counts[state]), state, state === "failed" ? "bad" : ""])]
      .map(([value, label, kind]) => h("div", { class: `tile ${kind ?? ""}` }, h("b", null, value), h("span", { title: label }, label))));
  }

  function drawPlots(valued) {
    let least = null;
    const done = valued.filter(isDone), line = done.flatMap((one) => {
      const before = least;
      least = least === null || sign() * (one.value - least) < 0 ? one.value : least;
      return before !== null && before !== least ? [[one.number, before], [one.number, least]] : [[one.number, least]];
    });
    const drawn = thinned(valued, study.best);
    history.set({ points: drawn.map((one) => pointOf(one, one.number)), line, about: drawn.length < valued.length ? `${count(drawn.length)} of ${plural(valued.length, "value")}` : plural(valued.length, "value") });
    const varied = names.filter((one) => new Set(valued.map((trial) => JSON.stringify(trial.parameters[one] ?? null))).size > 1);
    for (const one of varied.slice(0, MOST_PLOTS)) {
      const points = drawn.filter((trial) => trial.parameters[one] !== undefined && trial.parameters[one] !== null).map((trial) => pointOf(trial, trial.parameters[one]));
      if (!charts.has(one)) {
        charts.set(one, new Scatter(`${study.objective} over ${one}`, { isLog: { x: study.log ? study.log.includes(one) : isWide(points.map((point) => point.x)) }, canLog: points.every((point) => typeof point.x === "number") ? ["x"] : [] }));
        plots.append(charts.get(one).element);
      }
      charts.get(one).set({ points });
    }
  }

  function valueOf(trial, key) {
    if (key === "number" || key === "step") return trial[key];
    if (key === "state") return ORDER.indexOf(trial.state);
    if (key === "value") return trial.value === null ? null : sign() * trial.value + (isDone(trial) ? 0 : 1e-12);
    return trial.parameters[key.slice(2)] ?? null;
  }

  function compareTrials(a, b) {
    if (sort === "value" && isDone(a) !== isDone(b)) return isDone(b) - isDone(a); // values of trials that go on are no results
    const [first, second] = [valueOf(a, sort), valueOf(b, sort)];
    if ((first === null) !== (second === null)) return first === null ? 1 : -1;
    const by = typeof first === "number" && typeof second === "number" ? first - second : String(first).localeCompare(String(second), "en", { numeric: true });
    return (isDown ? -by : by) || a.number - b.number;
  }

  function drawTable(all) {
    const arrow = (key) => (sort !== key ? "" : isDown === (key === "value" && sign() < 0) ? "up" : "down");
    const columns = [["number", "trial", "n"], ["state", "state", ""], ["value", study.objective, "n"], ...names.map((one) => [`p/${one}`, one, "n"]), ["step", "step", "n"]];
    const sorted = [...all].sort(compareTrials), heads = columns.map(([key, title, kind]) => h("th", { class: kind, "aria-sort": { up: "ascending", down: "descending" }[arrow(key)] },
      h("button", { class: "head", "data-order": arrow(key), on: { click: () => { isDown = sort === key ? !isDown : false; sort = key; draw(); } } }, title)));
    put(table, h("thead", null, h("tr", null, h("th"), heads, h("th"))), h("tbody", null, sorted.slice(0, rows).map((trial) => row(trial))));
    put(more, sorted.length > rows ? h("button", { class: "plain", on: { click: () => { rows += AT_ONCE; drawTable(all); } } }, `${count(sorted.length - rows)} more`) : "");
    more.hidden = sorted.length <= rows;
    const top = ranked().filter((one) => one.page).slice(0, MOST_BEST);
    best.hidden = top.length < 2;
    best.href = compareLink(top.map((one) => one.page));
    put(best, `Compare the ${top.length} best`);
    drawPicked();
  }

  function row(trial) {
    const isBest = trial.number === study.best, box = trial.page ? h("input", { type: "checkbox", "aria-label": `compare trial ${trial.number}`, on: { change: () => { if (box.checked) chosen.add(trial.page); else chosen.delete(trial.page); drawPicked(); } } }) : null;
    if (box) box.checked = chosen.has(trial.page);
    return h("tr", { class: isBest ? "best" : "" }, h("td", null, box), h("td", { class: "n" }, trial.page ? h("a", { href: runLink(trial.page) }, String(trial.number)) : String(trial.number)),
      h("td", { title: trial.why }, h("span", { class: `state ${trial.state}` }, trial.state), isBest ? h("span", { class: "mark" }, "best") : null),
      h("td", { class: `n ${isDone(trial) ? "" : "soft"}` }, isBest ? h("b", null, shown(trial.value)) : shown(trial.value)), names.map((one) => h("td", { class: "n" }, shown(trial.parameters[one]))),
      h("td", { class: "n" }, trial.last_step ? `${count(trial.step)} of ${count(trial.last_step)}` : count(trial.step)), h("td", { class: "why" }, trial.state === "running" && trial.last_step ? progressBar(trial) : trial.why ? h("small", { title: trial.why }, trial.why) : ""));
  }

  function drawPicked() {
    picked.hidden = !chosen.size;
    const isFine = chosen.size > 1 && chosen.size <= MOST_COMPARED;
    put(picked, h("span", null, `${plural(chosen.size, "trial")} chosen`), isFine ? h("a", { class: "button", href: compareLink([...chosen]) }, "Compare") : h("span", { class: "soft" }, chosen.size > 1 ? `${MOST_COMPARED} at most` : "choose one more"),
      h("button", { class: "plain", on: { click: () => { chosen.clear(); draw(); } } }, "Clear"));
  }

  const close = listen(`api/sweep/stream?sweep=${encodeURIComponent(name)}`, (found) => {
    if (found.is_gone) { put(alerts, h("p", { class: "alert bad" }, "This sweep's folder has been removed.")); return; }
    if (found.whole) trials.clear();
    study = found.study;
    for (const trial of found.trials) trials.set(trial.number, trial);
    later();
  });
  return () => { close(); later.end(); history.close(); for (const one of charts.values()) one.close(); };
}

/** Evenly spread trials where there are too many to draw, and the best one. */
function thinned(trials, best) {
  const stride = Math.ceil(trials.length / MOST_POINTS);
  return stride < 2 ? trials : trials.filter((trial, place) => place % stride === 0 || trial.number === best);
}

function isWide(values) {
  if (!values.length || !values.every((value) => typeof value === "number" && value > 0)) return false;
  return Math.max(...values) / Math.min(...values) > LOG_FROM;
}

/** Sweeps and pools on the overview: a box for each. */
export function sweepBox(sweep) {
  return h("a", { class: "group", href: sweepLink(sweep.name) }, h("span", { class: "of-title" }, h("small", null, "sweep"), h("b", { title: sweep.name }, sweep.name), sweepState(sweep.state)),
    h("span", { class: "of-value" }, h("b", { class: sweep.best === null ? "soft" : "" }, shown(sweep.value)), h("small", null, sweep.best === null ? sweep.objective : `best ${sweep.objective}, trial ${sweep.best}`)), spark(sweep.values),
    h("small", { class: "of-counts" }, `${countsText(sweep) || "no trial yet"}${sweep.wanted ? `  ·  of ${count(sweep.wanted)}` : ""}`));
}
