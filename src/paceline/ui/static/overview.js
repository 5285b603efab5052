// The overview: pools and sweeps, and a row for each run, sorted, filtered, and changed in place as the runs go on.

import { h, put, svg } from "./dom.js";
import { listen } from "./live.js";
import { NONE, count, date, duration, number, plural, rate } from "./format.js";
import { poolBox } from "./pool.js";
import { sweepBox } from "./sweep.js";
import { emptySweepRow, fillSweepRow, sweepAsRun } from "./sweep_rows.js";

const TRIALS = "trials"; // a filter beside those of states
const AT_ONCE = 150; // rows; more come as the page is scrolled
const LOG_FROM = 12; // a loss that falls by more than this factor is drawn on a logarithmic axis
const STATES = ["running", "starting", "waiting", "failed", "lost", "stopped", "pruned", "finished", "unreadable"];
const WORDS = { waiting: "waits", starting: "starts" };
const COLUMNS = [
  ["name", "Run", (run) => run.name, "text"],
  ["state", "State", (run) => STATES.indexOf(stateOf(run)), "number"],
  ["progress", "Progress", (run) => (run.last_step ? run.step / run.last_step : -1), "number"],
  ["left", "Time left", (run) => run.left_s ?? Infinity, "number"],
  ["loss", "Loss", (run) => run.loss ?? Infinity, "number"],
  ["speed", "Samples/s", (run) => -(run.samples_per_s ?? -1), "number"],
  ["workers", "Workers", (run) => -run.workers, "number"],
  ["plan", "Plan", (run) => run.plan, "text"],
  ["started", "Started", (run) => -run.started, "number"],
];
const SORTS = Object.fromEntries(COLUMNS.map(([key, , of, kind]) => [key, [of, kind]]));

export const runLink = (name) => `#/run/${name.split("/").map(encodeURIComponent).join("/")}`;
export const compareLink = (names) => `#/compare/${names.map(encodeURIComponent).join("/")}`;

/** The state that is shown: what a pool or a sweep says of a run that its own record only knows to be stopped. */
export const stateOf = (run) => run.place?.state || run.state;

export function stateBadge(run, hasPool = false) {
  const elsewhere = run.state === "running" && !run.is_checked ? "on another host, says its record" : null, state = stateOf(run);
  const where = hasPool && WORDS[state] && run.place.pool ? ` in pool ${run.place.pool}` : "";
  return h("span", { class: `state ${state}`, title: elsewhere }, `${WORDS[state] ?? state}${where}`);
}

export function progressBar(run) {
  const share = run.last_step ? Math.min(1, run.step / run.last_step) : run.state === "finished" ? 1 : 0;
  return h("span", { class: `bar ${run.state}`, role: "img", "aria-label": `${Math.round(100 * share)} %` },
    h("span", { style: { width: `${(100 * share).toFixed(1)}%` } }));
}

/** The loss in a strip of 120 by 24. */
export function spark(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return h("span", { class: "spark" });
  let low = Math.min(...known), high = Math.max(...known);
  const isLog = low > 0 && high / low > LOG_FROM, scaled = (value) => (isLog ? Math.log(value) : value);
  [low, high] = [scaled(low), scaled(high)];
  const points = values.flatMap((value, place) => value === null ? [] :
    [`${(120 * place / (values.length - 1)).toFixed(1)},${(22 - 20 * (scaled(value) - low) / (high - low || 1)).toFixed(1)}`]);
  return svg("svg", { class: "spark", viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polyline", { points: points.join(" ") }));
}

export function overview(page, about) {
  const runs = new Map(), rows = new Map(), chosen = new Set(), opened = new Set(), sweepRows = new Map();
  let sweeps = [];
  let sort = "", isDown = false, text = "", state = "", shown = AT_ONCE, waiting = 0, isCut = false, isReady = false;
  const list = h("div", { class: "rows", role: "list" }), more = h("div", { class: "more" });
  const heads = COLUMNS.map(([key, title]) => h("button", { class: `head of-${key}`, on: { click: () => order(key) } }, title));
  const filter = h("input", { type: "search", placeholder: "Filter by name, script or plan", "aria-label": "Filter",
    on: { input: () => { text = filter.value.trim().toLowerCase(); shown = AT_ONCE; draw(); } } });
  const chips = h("div", { class: "chips" }), picked = h("div", { class: "picked", hidden: true }), note = h("p", { class: "note" });
  const table = h("section", { class: "runs" }, h("div", { class: "row heads" }, h("span"), heads), list);
  const empty = h("div", { class: "empty", hidden: true }), groups = h("div", { class: "groups", hidden: true });
  page.append(groups, h("div", { class: "tools" }, filter, chips), note, table, empty, more, picked);

  function order(key) {
    isDown = sort === key ? !isDown : false;
    if (sort === key && !isDown) sort = ""; else sort = key;
    draw();
  }

  function compareRuns(a, b) {
    if (sort) {
      const [of, kind] = SORTS[sort], first = of(a), second = of(b);
      const by = kind === "text" ? String(first).localeCompare(String(second), "en", { numeric: true }) : first - second || 0;
      if (by) return isDown ? -by : by;
    }
    return (b.state === "running") - (a.state === "running") || b.started - a.started || a.name.localeCompare(b.name);
  }

  function matches(run) {
    return (!state || (state === TRIALS ? Boolean(trialOf(run)) : stateOf(run) === state)) && (!text || `${run.name} ${run.program} ${run.plan} ${stateOf(run)}`.toLowerCase().includes(text));
  }

  /** The sweep whose trial a run is. */
  const trialOf = (run) => (run.place?.sweep && sweeps.some((one) => one.name === run.place.sweep) ? run.place.sweep : null);

  /** The rows in their order. Without a filter each sweep is one, and its trials come behind it where it is open. */
  function arranged(found) {
    if (state || text) return found.sort(compareRuns);
    const trials = new Map();
    for (const run of found) if (trialOf(run)) trials.set(trialOf(run), [...(trials.get(trialOf(run)) ?? []), run]);
    const folded = sweeps.filter((one) => trials.has(one.name)).map((one) => sweepAsRun(one, trials.get(one.name)));
    return [...found.filter((run) => !trialOf(run)), ...folded].sort(compareRuns)
      .flatMap((one) => (one.sweep && opened.has(one.name) ? [one, ...trials.get(one.name).sort(compareRuns)] : [one]));
  }

  function sweepRow(found) {
    const { name } = found;
    if (!sweepRows.has(name)) sweepRows.set(name, emptySweepRow(COLUMNS.map(([key]) => key), () => { if (!opened.delete(name)) opened.add(name); draw(); }));
    fillSweepRow(sweepRows.get(name), found, opened.has(name));
    return sweepRows.get(name).element;
  }

  function row(run) {
    if (run.sweep) return sweepRow(run);
    let made = rows.get(run.name);
    if (!made) {
      const box = h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, on: { change: () => pick(run.name, box.checked) } });
      made = { cells: Object.fromEntries(COLUMNS.map(([key]) => [key, h("span", { class: `cell of-${key}` })])), run: null, box };
      made.element = h("div", { class: "row", role: "listitem" }, h("label", { class: "cell of-box" }, box), Object.values(made.cells));
      rows.set(run.name, made);
    }
    if (made.run !== run) {
      made.run = run;
      fillRow(made.cells, run);
    }
    return made.element;
  }

  function pick(name, isOn) {
    if (isOn) chosen.add(name); else chosen.delete(name);
    drawPicked();
  }

  function drawPicked() {
    picked.hidden = !chosen.size;
    put(picked, h("span", null, `${plural(chosen.size, "run")} chosen`),
      chosen.size > 1 && chosen.size <= 12 ? h("a", { class: "button", href: compareLink([...chosen]) }, "Compare") : h("span", { class: "soft" }, chosen.size > 12 ? "12 at most" : "choose one more"),
      h("button", { class: "plain", on: { click: () => { for (const name of chosen) { const one = rows.get(name); if (one) one.box.checked = false; } chosen.clear(); drawPicked(); } } }, "Clear"));
  }

  function draw() {
    const all = [...runs.values()], found = arranged(all.filter(matches));
    heads.forEach((head, place) => {
      const isOn = COLUMNS[place][0] === sort;
      head.dataset.order = isOn ? (isDown ? "down" : "up") : "";
    });
    const wanted = found.slice(0, shown).map(row);
    const present = list.children;
    wanted.forEach((element, place) => { if (present[place] !== element) list.insertBefore(element, present[place] ?? null); });
    while (list.children.length > wanted.length) list.lastChild.remove();
    const counts = STATES.map((one) => [one, all.filter((run) => stateOf(run) === one).length]).filter(([, num]) => num), trials = all.filter(trialOf).length;
    put(chips, [["", all.length], ...(counts.length > 1 ? counts : []), ...(trials ? [[TRIALS, trials]] : [])].map(([one, num]) => h("button", { class: `chip ${one}`, "aria-pressed": String(state === one),
      on: { click: () => { state = one; shown = AT_ONCE; draw(); } } }, WORDS[one] ?? (one || "all"), h("b", null, count(num)))));
    more.hidden = found.length <= shown;
    put(more, `${count(found.length - shown)} more`);
    put(note, [waiting ? `reading ${count(waiting)} more runs` : "", isCut ? "only the first 10,000 runs are shown" : ""].filter(Boolean).join(", "));
    table.hidden = !found.length;
    empty.hidden = found.length > 0 || !isReady || waiting > 0;
    if (!all.length) put(empty, h("h2", null, "No runs yet"), h("p", null, "Runs of this folder appear here as soon as they start:"), h("pre", null, "paceline run train.py --workers 2"), h("p", { class: "soft" }, about.root));
    else put(empty, h("h2", null, "No run matches"), h("button", { class: "plain", on: { click: () => { filter.value = text = state = ""; draw(); } } }, "Show all"));
    const running = all.filter((run) => run.state === "running").length;
    document.title = running ? `${running} running – Paceline` : "Paceline";
  }

  const watcher = new IntersectionObserver((entries) => { if (entries.some((one) => one.isIntersecting)) { shown += AT_ONCE; draw(); } });
  watcher.observe(more);

  const close = listen("api/runs/stream", (found) => {
    if (found.whole) runs.clear();
    for (const run of found.runs) runs.set(run.name, run);
    for (const name of found.gone) { runs.delete(name); rows.delete(name); chosen.delete(name); }
    if (found.pools) {
      sweeps = found.sweeps;
      groups.hidden = !found.pools.length && !found.sweeps.length;
      put(groups, found.pools.map(poolBox), found.sweeps.map(sweepBox));
    }
    [waiting, isCut, isReady] = [found.num_waiting, found.is_cut, true];
    draw();
    drawPicked();
  });
  return () => { watcher.disconnect(); close(); };
}

function fillRow(cells, run) {
  put(cells.name, h("a", { href: runLink(run.name), title: run.name }, run.name), h("small", { title: run.program }, run.problem || run.program || NONE));
  cells.name.classList.toggle("wrong", Boolean(run.problem));
  put(cells.state, stateBadge(run), WORDS[stateOf(run)] && run.place.pool ? h("small", { title: run.place.pool }, `in pool ${run.place.pool.split("/").pop()}`) : null);
  const goal = run.last_step ? `${count(run.step)} of ${count(run.last_step)}` : run.step ? `step ${count(run.step)}` : NONE;
  put(cells.progress, run.last_step ? progressBar(run) : null, h("small", null, goal));
  const took = run.ended && !WORDS[stateOf(run)] ? `took ${duration(run.ended - run.began)}` : NONE;
  put(cells.left, run.state === "running" ? h("b", null, duration(run.left_s)) : h("span", { class: "soft" }, took));
  put(cells.loss, h("b", null, number(run.loss)), spark(run.spark));
  put(cells.speed, rate(run.samples_per_s));
  put(cells.workers, run.workers ? count(run.workers) : NONE, run.hosts > 1 ? h("small", null, `${run.hosts} hosts`) : null);
  put(cells.plan, h("code", { title: run.plan }, run.plan || NONE));
  put(cells.started, date(run.started), run.attempt > 1 ? h("small", null, `attempt ${run.attempt}`) : null);
}
