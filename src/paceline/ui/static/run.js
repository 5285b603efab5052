// A run's page: everything that the report shows, while it happens.

import { h, numberOf, put } from "./dom.js";
import { ask, listen } from "./live.js";
import { Chart, Curve, color, curveOf } from "./charts.js";
import { NONE, count, date, duration, metricTitle, number, percent, plural, rate } from "./format.js";
import { progressBar, stateBadge } from "./overview.js";
import { poolLink } from "./pool.js";
import { sweepLink } from "./sweep.js";
import { attemptsCard, card, eventsList, facts, incidentsCard, isCalm, measuresTable, receiptCard, tasksTable, timeCard, timeline, workersTable } from "./run_parts.js";
import { logsCard } from "./logs.js";

const FIRST = ["lr", "learning_rate", "grad_norm", "gradient_norm", "loss_scale", "overflows"]; // reported names that come first
const NAMES = { samples_per_s: "samples per second", noise_scale: "gradient noise scale, samples", wire_ratio: "bytes sent, of those without compression" };
const PHASES = [["compute", "phase-compute"], ["communication", "phase-communication"], ["optimizer", "phase-optimizer"], ["data", "phase-data"], ["other", "soft"], ["recovery", "bad"]];
const WORDS = { communication: "waiting" };
const LOG_FROM = 12;
const MOST_CHARTS = 60;

export function run(page, name, about) {
  const curves = new Map(), charts = new Map(), state = { summary: null, about: null, report: null, evaluations: {}, groups: [], place: null, reading: null, readingSince: 0, byTime: false };
  const head = h("div", { class: "head" }), tiles = h("div", { class: "tiles" }), alerts = h("div", { class: "alerts" });
  const grid = h("div", { class: "charts" }), workers = h("div"), lanes = h("div"), evaluations = h("div");
  const events = h("ol", { class: "events" }), plan = h("div"), time = h("div", { class: "columns" }), after = h("div");
  const remark = h("p", { class: "note" }), axis = axisSwitch((byTime) => { state.byTime = byTime; drawCurves(true); });
  const logs = logsCard(name), old = h("span", { class: "note old", role: "status" });
  put(time, card("time", "Where the time went", h("p", { class: "about" }, "being read")), card("receipt", "Receipt", h("p", { class: "about" }, "being read")));
  const sections = [["curves", "Curves"], ["workers", "Workers"], ["time", "Time"], ["receipt", "Receipt"], ["events", "Events"], ["plan", "Plan"], ["logs", "Logs"]];
  const nav = h("nav", { class: "jump" }, sections.map(([id, title]) => h("button", { class: "plain", on: { click: () => document.getElementById(id)?.scrollIntoView({ behavior: "smooth" }) } }, title)), axis);
  const control = about.can_control ? controls(name, about.control) : null;
  page.append(head, alerts, tiles, nav,
    h("section", { id: "curves" }, remark, grid, evaluations),
    card("workers", "Workers", workers, lanes), time, after,
    h("div", { class: "columns" }, card("events", "What happened", events), card("plan", "Plan and job", plan)), logs.element);

  const marks = () => (state.report?.incidents ?? []).map((one, place) => ({ step: one.at_step ?? one.step, label: String((state.report.num_incidents - state.report.incidents.length) + place + 1), text: one.text, kind: isCalm(one) ? "calm" : "incident" }))
    .map((mark) => ({ ...mark, x: place(mark.step) ?? -1 }));

  function place(step) {
    if (!state.byTime) return step;
    const times = curves.get("time"), first = times?.all()[0]?.[1];
    const when = times?.at(step);
    return when === null || when === undefined ? null : when - first;
  }

  function chart(key, options) {
    let made = charts.get(key);
    if (!made) {
      made = new Chart({ sync: "run", marks, ...options });
      charts.set(key, made);
      const order = [...charts.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
      const next = order.slice(order.indexOf(key) + 1).find((one) => charts.get(one).element.isConnected);
      grid.insertBefore(made.element, next ? charts.get(next).element : null);
    }
    made.options.isTime = state.byTime;
    return made;
  }

  function drawCurves(isNew = false) {
    for (const [key, curve] of [...curves, ...Object.entries(state.evaluations).map(([one, points]) => [`eval/${one}`, curveOf(points)])]) {
      if (key === "time" || key.startsWith("seconds/") || rank(key) > 90 || (charts.size >= MOST_CHARTS && !charts.has(key))) continue;
      const points = curve.all();
      if (points.length < 2 || (key === "wire_ratio" && points.every((one) => one[1] === 1))) continue; // 1: nothing is compressed
      const made = chart(key, chartOptions(key, points));
      const placed = state.byTime ? points.map(([step, ...rest]) => [place(step), ...rest]).filter(([x]) => x !== null) : points;
      if (isNew) made.lines = [];
      made.set([{ name: key, points: placed }]);
    }
    drawPhases(isNew);
  }

  /** The phases of a step, in one chart. */
  function drawPhases(isNew) {
    const lines = PHASES.flatMap(([phase, tone]) => {
      const points = curves.get(`seconds/${phase}`)?.all() ?? [];
      if (points.length < 2) return [];
      return [{ name: WORDS[phase] ?? phase, color: color(tone), points: state.byTime ? points.map(([step, ...rest]) => [place(step), ...rest]) : points }];
    });
    if (!lines.length) return;
    const made = chart("seconds", { title: "a step, by phase", class: "double", unit: duration, isSmall: true, hasLegend: true, hasNames: true });
    if (isNew) made.lines = [];
    made.set(lines);
  }

  const timer = setInterval(() => { drawHead(); drawReading(); }, 1000);

  function drawHead() {
    const { summary, about: known } = state;
    if (!summary) return;
    document.title = `${summary.last_step ? `${Math.floor((100 * summary.step) / summary.last_step)} % – ` : ""}${name.split("/").pop()} – Paceline`;
    const epoch = summary.epoch !== null && known?.epochs > 1 ? `epoch ${summary.epoch + 1} of ${known.epochs}` : null;
    const since = Date.now() / 1000 - summary.at, waits = ["waiting", "starting"].includes(state.place?.state);
    const words = [known?.tasks, known?.tasks && !summary.step ? null : summary.last_step ? `step ${count(summary.step)} of ${count(summary.last_step)}` : `step ${count(summary.step)}`, epoch,
      summary.state === "running" && summary.left_s ? `${duration(summary.left_s)} left` : null,
      waits && summary.ended ? `ended ${date(summary.ended)}` : summary.state !== "running" && summary.ended ? `took ${duration(summary.ended - summary.began)}` : `for ${duration(Date.now() / 1000 - summary.began)}`,
      summary.state === "running" && summary.at && since > 5 ? `${known?.tasks ? "last numbers" : "last step"} ${duration(Math.round(since))} ago` : null].filter(Boolean);
    const title = h("h1", null, name, " ", stateBadge({ ...summary, place: state.place }, true));
    put(head, title, h("p", { class: "program" }, summary.program || NONE, h("span", { class: "soft" }, `started ${date(summary.began)}`), known?.host ? h("span", { class: "soft" }, `on ${known.host}`) : null, state.groups.map(groupLink)),
      known?.tasks ? null : h("p", { class: "plan-line" }, h("code", null, summary.plan || NONE)), h("div", { class: "progress" }, known?.tasks ? null : progressBar(summary), h("span", null, words.join("  ·  "))), control?.element);
    if (control) control.show(summary.state === "running", !known?.tasks);
  }

  function drawTiles() {
    const { summary, about: known, report } = state, noise = curves.get("noise_scale")?.last;
    if (!summary) return;
    const first = summary.first_loss ?? null, best = Object.entries(state.evaluations)[0];
    const incidents = report ? report.incidents.filter((one) => !isCalm(one)).length : null;
    const hasSteps = !known?.tasks; // otherwise they are another framework's, which may tell its losses
    put(tiles, [
      (hasSteps || summary.loss !== null) && [number(summary.loss), first === null ? "loss" : `loss, from ${number(first)}`],
      best ? [number(best[1].at(-1)[1]), best[0]] : null,
      hasSteps && [rate(summary.samples_per_s), "samples per second"],
      hasSteps && [duration(summary.step_s), "a step"],
      [known ? `${count(summary.state === "running" ? known.members : summary.workers)}` : count(summary.workers), summary.state === "running" && known && known.members < summary.workers ? `of ${summary.workers} workers` : hasSteps ? "workers" : "tasks"],
      report?.goodput !== undefined ? [percent(report.goodput, 1), "goodput", "good"] : null,
      noise ? [count(Math.round(noise[1])), "noise scale, samples"] : null,
      incidents !== null ? [count(incidents), incidents === 1 ? "incident" : "incidents", incidents ? "bad" : ""] : null,
    ].filter(Boolean).map(([value, label, kind]) => h("div", { class: `tile ${kind ?? ""}` }, h("b", null, value), h("span", null, label))));
  }

  function drawAlerts() {
    const { summary, about: known, report } = state;
    put(alerts, [
      known?.error || summary?.problem ? ["bad", known?.error || summary.problem] : null,
      known?.stands_still ? ["bad", known.tasks ? "No task has used a processor or written anything for a while. Look below at where they stand." : "No step for far longer than one takes. Look below at what the workers do."] : null,
      known?.warning && summary?.state === "running" ? ["warn", known.warning] : null,
      summary?.num_broken ? ["warn", `${plural(summary.num_broken, "step")} without a finite loss`] : null,
      report?.problem ? ["warn", report.problem] : null,
      ...(known?.left_out ?? []).map((text) => ["warn", text]),
    ].filter(Boolean).map(([kind, text]) => h("p", { class: `alert ${kind}` }, text)));
  }

  /** How old the account is, while another one is made. */
  function drawReading() {
    const { reading } = state, isOn = state.report && reading?.is_on && reading.age_s !== null;
    time.dataset.reading = isOn ? "on" : "";
    put(old, isOn ? `as it was ${duration(Math.round(reading.age_s + Date.now() / 1000 - state.readingSince))} ago; being read again` : "");
  }

  function drawReport() {
    const report = state.report;
    if (!report || report.problem) { drawAlerts(); time.replaceChildren(); return; }
    put(time, timeCard(report, { old, pool: state.place?.pool }), state.about?.tasks ? null : receiptCard(report));
    put(after, incidentsCard(report), attemptsCard(report));
    put(lanes, timeline(report));
    drawCurves();
    for (const one of charts.values()) one.plot?.redraw(false);
  }

  function drawPlan() {
    const known = state.about;
    if (!known?.job) return;
    const isOther = known.asked && known.asked !== known.plan;
    put(plan, facts([["plan", known.tasks ? null : h("code", null, known.plan || NONE)], ["asked for", isOther ? h("code", null, known.asked) : null], ["directory", h("code", null, known.run_dir)],
      ...Object.entries(known.job).map(([one, value]) => [one.replaceAll("_", " "), value]), ["attempts", known.num_attempts > 1 ? count(known.num_attempts) : null],
      ["exit code", known.exit_code ? String(known.exit_code) : null], ["supervisor", `${known.pid} on ${known.host}`], ["metrics", known.metrics_url]]),
      Object.keys(known.parts).length ? h("details", null, h("summary", null, "every value of the plan"), facts(Object.entries(known.parts))) : null);
  }

  const close = listen(`api/run/stream?run=${encodeURIComponent(name)}`, (found) => {
    if (found.is_gone) { put(alerts, h("p", { class: "alert bad" }, "This run's directory has been removed.")); return; }
    for (const part of ["summary", "about", "report", "evaluations", "groups", "place", "reading"]) if (found[part]) state[part] = found[part];
    if (found.curves) {
      if (found.curves.whole) curves.clear();
      for (const [key, change] of Object.entries(found.curves.series)) {
        if (!curves.has(key)) curves.set(key, new Curve());
        curves.get(key).take(change);
      }
      put(remark, found.curves.is_exact ? (curves.size ? "" : state.about?.tasks ? "the program's steps are its own: what it writes for TensorBoard appears here" : "no step yet") : "some of the steps; reading the rest");
    }
    if (found.summary || found.groups || found.place) drawHead();
    if (found.curves || found.evaluations) drawCurves();
    if (found.summary || found.report || found.evaluations || found.about) drawTiles();
    if (found.summary || found.about) drawAlerts();
    if (found.about) { drawHead(); drawPlan(); }
    if (found.reading) state.readingSince = Date.now() / 1000;
    if (found.report || (found.place && state.report)) drawReport();
    if (found.reading) drawReading();
    if (found.evaluations && Object.keys(found.evaluations).length) put(evaluations, card("evaluations", "Evaluations", measuresTable(found.evaluations)));
    if (found.workers) put(workers, found.workers.length ? (state.about?.tasks ? tasksTable : workersTable)(found.workers) : h("p", { class: "about" }, "no worker has started yet"));
    if (found.events) eventsList(events, found.events);
    if (found.logs) logs.changed(found.logs);
  });
  return () => { close(); clearInterval(timer); logs.close(); for (const one of charts.values()) one.close(); };
}

/** The pool or the sweep that the run belongs to. */
function groupLink(group) {
  const link = group.kind === "pool" ? poolLink(group.name) : sweepLink(group.name);
  return h("a", { class: "link", href: link }, group.kind === "pool" ? `pool ${group.name}` : `trial ${group.number} of ${group.name}`);
}

/** Loss, evaluations, what was reported, speed, and the phases of a step; more than 90: not shown. */
function rank(key) {
  if (key === "loss") return 0;
  if (key.startsWith("eval/")) return 1;
  const place = key.startsWith("metric/") ? FIRST.indexOf(key.slice(7)) : -1;
  if (place >= 0) return 2 + place;
  if (key.startsWith("metric/lr/")) return 2.5;
  if (key.startsWith("metric/")) return 10;
  if (key === "samples_per_s") return 20;
  if (key === "noise_scale") return 21;
  return key === "seconds" ? 30 : key === "wire_ratio" ? 40 : 99;
}

function chartOptions(key, points) {
  if (key === "loss") {
    const least = Math.min(...points.map((one) => one[2])), most = Math.max(...points.map((one) => one[1]));
    return { title: "loss", height: 300, class: "wide", canLog: true, canSmooth: true, isLog: least > 0 && most / least > LOG_FROM };
  }
  const [kind, ...rest] = key.split("/"), own = rest.join("/");
  if (kind === "eval") return { title: `${own}, evaluated`, color: "good", isSmall: true, canLog: true };
  if (kind === "metric") return { title: metricTitle(own), isSmall: true, canLog: true, canSmooth: true };
  return { title: NAMES[key] ?? key, color: key === "samples_per_s" ? "good" : "accent", isSmall: true, unit: key === "samples_per_s" ? rate : undefined };
}

export function axisSwitch(choose) {
  const buttons = [["steps", false], ["time", true]].map(([title, byTime]) => h("button", { class: "plain toggle", "aria-pressed": String(!byTime), on: { click: () => {
    buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.textContent === title)));
    choose(byTime);
  } } }, title));
  return h("div", { class: "switch", role: "group", "aria-label": "axis" }, buttons);
}

/** Stop and resize, as the commands do; each asks once more. */
function controls(name, secret) {
  const said = h("span", { class: "soft", role: "status" });
  const send = async (what, body) => {
    put(said, "asking");
    try {
      const answer = await ask(`api/run/${what}`, { method: "POST", headers: { "content-type": "application/json", "x-paceline-control": secret }, body: JSON.stringify({ run: name, ...body }) });
      put(said, answer.error ? h("span", { class: "bad" }, answer.error) : answer.says);
    } catch (error) { put(said, h("span", { class: "bad" }, error.message)); }
  };
  const replicas = h("input", { type: "number", min: "1", step: "1", placeholder: "replicas", "aria-label": "replicas" });
  const resize = h("button", { class: "button quiet", on: { click: () => { const num = numberOf(replicas); if (num) send("resize", { replicas: num }); else replicas.focus(); } } }, "Resize");
  const stop = h("button", { class: "button quiet", on: { click: () => {
    if (stop.dataset.sure) { delete stop.dataset.sure; put(stop, "Stop"); send("stop", {}); return; }
    stop.dataset.sure = "yes";
    put(stop, "Stop: sure?");
    setTimeout(() => { delete stop.dataset.sure; put(stop, "Stop"); }, 4000);
  } } }, "Stop");
  const buttons = h("span", { class: "buttons" }, stop, replicas, resize);
  return { element: h("div", { class: "control" }, buttons, said), show: (isOn, mayResize) => { buttons.hidden = !isOn; replicas.hidden = resize.hidden = !mayResize; } };
}
