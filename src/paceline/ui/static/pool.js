// A pool's page: its devices and which run has them, the queue, and what was decided.

import { h, put } from "./dom.js";
import { ask, listen } from "./live.js";
import { NONE, clock, count, date, duration, number, plural } from "./format.js";
import { progressBar, runLink } from "./overview.js";
import { card } from "./run_parts.js";
import { Shares, mostOf, soon } from "./svg_plots.js";

const MOST_CELLS = 64; // devices of a node that are drawn one by one
const STATES = { stopped: "does not run" };
const MOST_ROWS = 300; // of runs that are not over, and of those that are
const LATE = "past its deadline";

export const poolLink = (name) => `#/pool/${name.split("/").map(encodeURIComponent).join("/")}`;

export function poolState(state) {
  return h("span", { class: `state ${state === "stopped" ? "lost" : state}` }, STATES[state] ?? state);
}

const CURVES = [0, 1, 2, 3, 4, 5, 7].map((place) => `var(--curve-${place})`), RED = "var(--curve-6)"; // it looks like a failure: the last
const pale = (tone) => `color-mix(in srgb, ${tone} 55%, var(--card))`;
const TONES = [...CURVES, ...CURVES.map(pale), RED, pale(RED)];

/** A number that a name always gives. */
function hashOf(name) {
  let found = 2166136261;
  for (const letter of name) found = Math.imul(found ^ letter.codePointAt(0), 16777619) >>> 0;
  return (found ^ (found >>> 15)) >>> 0;
}

/** Colors of runs: a name asks for the same one each time, and the next free one is for those that come later. */
export class Tones {
  constructor() { this.places = new Map(); }

  /** Have these runs told apart, as far as there are colors. Runs that are not among them give theirs to new ones. */
  show(names) {
    const shown = new Set(names), taken = new Set(names.filter((one) => this.places.has(one)).map((one) => this.places.get(one)));
    for (const one of this.places.keys()) if (!shown.has(one)) this.places.delete(one);
    for (const one of shown) {
      if (this.places.has(one)) continue;
      const num = CURVES.length, wanted = hashOf(one) % num;
      const order = [...TONES.keys()].map((place) => (place < 2 * num ? num * Math.floor(place / num) + ((wanted + place) % num) : place));
      const free = order.find((place) => !taken.has(place)) ?? wanted;
      this.places.set(one, free);
      taken.add(free);
    }
    return (name) => TONES[this.places.get(name) ?? hashOf(name) % CURVES.length];
  }
}

/** Devices side by side, each in the color of the run that has it; of many, shares of a bar. */
export function devicesBar(holders, slots, tones) {
  const held = holders.reduce((sum, one) => sum + one.devices, 0), whole = Math.max(slots, held, 1);
  const label = `${held} of ${slots} devices in use`;
  if (whole > MOST_CELLS) {
    return h("div", { class: "accounts", role: "img", "aria-label": label }, holders.map((one) =>
      h("span", { title: `${one.run}: ${one.devices}`, style: { width: `${(100 * one.devices) / whole}%`, background: tones(one.run) } })));
  }
  const cells = holders.flatMap((one) => Array.from({ length: one.devices }, (_, place) => [one, place]));
  return h("div", { class: "devices", role: "img", "aria-label": label, style: { "--num": String(whole) } },
    cells.map(([one]) => h("span", { title: one.run, style: { background: tones(one.run) } })), Array.from({ length: Math.max(0, whole - cells.length) }, () => h("span", { class: "free", title: "free" })));
}

export function pool(page, name, about) {
  const head = h("div", { class: "head" }), alerts = h("div", { class: "alerts" }), tiles = h("div", { class: "tiles" });
  const nodes = h("div", { class: "nodes" }), active = h("div", { class: "queue", role: "list" }), over = h("div", { class: "queue", role: "list" }), decisions = h("ol", { class: "events" });
  const said = h("p", { class: "note", role: "status" }), overTitle = h("summary");
  const overBox = h("details", null, overTitle, over), shares = new Shares("Devices of each run over time", { height: 190, wide: true });
  const rows = new Map(), further = h("p", { class: "note" }), later = soon(() => draw());
  const legend = h("p", { class: "legend small" }), colors = new Tones();
  let known = null, passed = 0;
  shares.element.append(legend);
  page.append(head, alerts, tiles, card("devices", "Devices", nodes), h("div", { class: "alone" }, shares.element), card("queue", "Queue", said, active, further, overBox), card("decisions", "What was decided", decisions));

  function draw() {
    const { runs, history } = known, now = Date.now() / 1000 - passed, most = mostOf(history, now).map(([one]) => one);
    const tones = colors.show([...new Set([...runs.filter((one) => one.devices).map((one) => one.name), ...most.filter((one) => one in history)])]);
    document.title = `${known.held} of ${known.slots} – ${name} – Paceline`;
    put(head, h("h1", null, name, " ", poolState(known.state)), h("p", { class: "program" }, h("code", null, known.path), known.host ? h("span", { class: "soft" }, `process ${known.pid} on ${known.host}`) : null));
    put(alerts, [
      known.problem || null,
      known.state === "stopped" && known.num_waiting + known.num_running ? `The pool does not run, so nothing is decided. To go on: paceline pool ${known.path}` : null,
    ].filter(Boolean).map((text) => h("p", { class: "alert warn" }, text)));
    put(tiles, [[`${count(known.held)} of ${count(known.slots)}`, "devices in use"], [count(known.num_running), "running"], [count(known.num_waiting), known.num_waiting === 1 ? "waits" : "wait"], [count(known.num_ended), "ended"]]
      .map(([value, label]) => h("div", { class: "tile" }, h("b", null, value), h("span", null, label))));
    put(nodes, known.nodes.map((node) => h("div", { class: "node" }, h("span", { class: node.is_here ? "" : "bad", title: node.name }, node.name, node.is_here ? null : " is not there"), devicesBar(node.holders, node.slots, tones),
      h("span", { class: "soft n" }, `${node.holders.reduce((sum, one) => sum + one.devices, 0)} of ${node.slots}`))));
    put(legend, most.map((one) => h("span", null, h("i", { style: { background: one in history ? tones(one) : "var(--strong)" } }), one)));
    const isOn = known.state === "running" || Object.values(history).some((changes) => changes.at(-1)?.[1] > 0); // else it ends with the last change
    shares.set({ history, slots: known.slots, now: isOn ? now : 0, tones });
    const live = runs.filter((one) => !one.is_over), ended = runs.filter((one) => one.is_over).sort((a, b) => (b.ended ?? 0) - (a.ended ?? 0));
    const names = new Set(runs.map((one) => one.name));
    for (const one of rows.keys()) if (!names.has(one)) rows.delete(one);
    arrange(active, live.slice(0, MOST_ROWS).map((one) => row(one, { tones, now })));
    put(further, live.length > MOST_ROWS ? `${count(live.length - MOST_ROWS)} more runs wait behind these` : "");
    if (!live.length) put(active, h("p", { class: "about" }, "No run waits. Queue one: paceline run --pool ", known.path, " SCRIPT"));
    overBox.hidden = !ended.length;
    put(overTitle, `${plural(ended.length, "run")} that ended`);
    arrange(over, ended.slice(0, MOST_ROWS).map((one) => row(one, { tones, now })));
    put(decisions, known.decisions.filter((one) => one.why || one.before !== one.after).reverse().map((one) => h("li", null, h("time", { title: date(one.time) }, clock(one.time)),
      h("span", null, one.why || `${one.run}: ${one.before} to ${one.after} replicas`, one.page ? h("a", { class: "soft", href: runLink(one.page), "aria-label": `the run ${one.run}` }, " →") : null))));
  }

  function row(run, look) {
    if (!rows.has(run.name)) rows.set(run.name, emptyRow(run.name, about.can_control ? cancel : null));
    fillRow(rows.get(run.name), run, look);
    return rows.get(run.name).element;
  }

  async function cancel(run) {
    put(said, `asking to take ${run} out`);
    try {
      const answer = await ask("api/pool/cancel", { method: "POST", headers: { "content-type": "application/json", "x-paceline-control": about.control }, body: JSON.stringify({ pool: name, name: run }) });
      put(said, answer.error ? h("span", { class: "bad" }, answer.error) : answer.says);
    } catch (error) { put(said, h("span", { class: "bad" }, error.message)); }
  }

  const close = listen(`api/pool/stream?pool=${encodeURIComponent(name)}`, (found) => {
    if (found.is_gone) { put(alerts, h("p", { class: "alert bad" }, "This pool's folder has been removed.")); return; }
    if (found.whole) known = { byName: new Map() };
    const { byName } = known;
    for (const one of found.runs) byName.set(one.name, one);
    known = { ...known, ...found };
    known.runs = known.names.map((one) => byName.get(one));
    passed = Date.now() / 1000 - found.now; // clocks of two machines differ
    later();
  });
  const timer = setInterval(() => { if (known) later(); }, 5000);
  return () => { close(); clearInterval(timer); later.end(); shares.close(); };
}

/** Put elements in their order, and leave those alone that are in their places. */
function arrange(list, wanted) {
  wanted.forEach((element, place) => { if (list.children[place] !== element) list.insertBefore(element, list.children[place] ?? null); });
  while (list.children.length > wanted.length) list.lastChild.remove();
}

const CELLS = ["name", "state", "replicas", "progress", "terms"];

function emptyRow(name, cancel) {
  const cells = Object.fromEntries(CELLS.map((key) => [key, h("div", { class: `of-${key}` })])), key = h("i"), button = cancel ? cancelButton(name, cancel) : h("span");
  return { key, cells, button, element: h("div", { class: "queued", role: "listitem" }, key, Object.values(cells), button) };
}

function fillRow({ key, cells, button }, run, { tones, now }) {
  const goal = run.last_step ? `${count(run.step)} of ${count(run.last_step)}` : run.step ? `step ${count(run.step)}` : NONE;
  key.className = run.devices ? "" : "none";
  key.style.background = run.devices ? tones(run.name) : "";
  const told = JSON.stringify([run.page, run.why, run.phase, run.ended]);
  if (cells.name.dataset.told !== told) { // a link that has the focus keeps it
    cells.name.dataset.told = told;
    put(cells.name, run.page ? h("a", { href: runLink(run.page), title: run.name }, run.name) : h("b", { title: run.name }, run.name), h("small", null, run.why || (run.phase === "waiting" ? "is queued" : "")));
  }
  put(cells.state, h("span", { class: `state ${run.phase}` }, run.phase === "leaving" ? "saves" : run.phase), h("small", null, whenText(run, now)));
  put(cells.replicas, h("b", null, run.is_over ? NONE : count(run.replicas)), h("small", null, `of ${run.least === run.most ? "" : `${count(run.least)} to `}${plural(run.most, "replica")}`, run.workers_each > 1 ? `, ${run.workers_each} workers each` : ""));
  put(cells.progress, run.last_step ? progressBar({ ...run, state: run.phase === "leaving" ? "running" : run.phase }) : null, h("small", null, goal, run.left_s ? `, ${duration(run.left_s)} left` : ""));
  put(cells.terms, terms(run, now));
  button.style.visibility = run.is_over ? "hidden" : "";
}

/** How long it has been so. */
function whenText(run, now) {
  if (run.is_over) return run.ended ? `${date(run.ended)}${run.exit_code ? `, exit status ${run.exit_code}` : ""}` : "";
  return `for ${duration(Math.max(0, Math.round(now - run.since)))}`;
}

function terms(run, now) {
  const priority = run.priority === 1 ? null : h("span", null, `priority ${number(run.priority)}`);
  if (!run.deadline) return priority ?? "";
  const left = run.deadline - (run.ended ?? now);
  return [priority, h("small", { class: left < 0 ? "bad" : "", title: date(run.deadline) }, left < 0 ? LATE : run.is_over ? "in time" : `due in ${duration(left)}`)];
}

function cancelButton(run, cancel) {
  const calm = () => { delete button.dataset.sure; put(button, "Cancel"); };
  const button = h("button", { class: "button quiet", title: `take ${run} out of the pool: it saves, and its files stay`, on: { click: () => {
    if (button.dataset.sure) { calm(); cancel(run); return; }
    button.dataset.sure = "yes";
    put(button, "Sure?");
    setTimeout(calm, 4000);
  } } }, "Cancel");
  return button;
}

/** A pool on the overview. */
export function poolBox(pool) {
  const tones = new Tones().show(pool.holders.map((one) => one.run));
  const counts = [["running", pool.num_running], [pool.num_waiting === 1 ? "waits" : "wait", pool.num_waiting], ["ended", pool.num_ended]].filter(([, num]) => num);
  return h("a", { class: "group", href: poolLink(pool.name) }, h("span", { class: "of-title" }, h("small", null, "pool"), h("b", { title: pool.name }, pool.name), poolState(pool.state)),
    h("span", { class: "of-value" }, h("b", null, `${count(pool.held)} of ${count(pool.slots)}`), h("small", null, "devices in use")), devicesBar(pool.holders, pool.slots, tones),
    h("small", { class: "of-counts" }, counts.map(([word, num]) => `${count(num)} ${word}`).join("  ·  ") || "no runs"));
}
