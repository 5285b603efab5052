// Some runs, one over the other, and what differs between them.

import { h, put } from "./dom.js";
import { ask } from "./live.js";
import { Chart, Curve, curveColor, curveOf } from "./charts.js";
import { count, duration, metricTitle, number, rate } from "./format.js";
import { runLink, stateBadge } from "./overview.js";
import { axisSwitch } from "./run.js";
import { card, table } from "./run_parts.js";

const EVERY_MS = 3000; // while one of them runs
const SHOWN = { samples_per_s: rate, step_s: duration, duration_s: duration };
const NAMES = { first_loss: "first loss", loss: "last loss", samples_per_s: "samples per second", step_s: "a step", duration_s: "took" };
const TITLES = { loss: "loss", samples_per_s: "samples per second", noise_scale: "gradient noise scale" };

export function compare(page, names) {
  const legend = h("div", { class: "legend" }), grid = h("div", { class: "charts" }), differing = h("div"), charts = new Map();
  let byTime = false, everything = false, found = null, timer = null, isClosed = false;
  const all = h("label", { class: "check" }, h("input", { type: "checkbox", on: { change: (event) => { everything = event.target.checked; drawFacts(); } } }), "also what is the same");
  page.append(h("div", { class: "head" }, h("h1", null, "Compare")), legend,
    h("div", { class: "bar-line" }, h("p", { class: "note" }), axisSwitch((isOn) => { byTime = isOn; drawCurves(true); })), grid, card("facts", "What differs", all, differing));

  function curvesOf(one) {
    const curves = new Map();
    for (const [key, change] of Object.entries(one.curves.series)) { const curve = new Curve(); curve.take({ ...change, whole: true }); curves.set(key, curve); }
    for (const [key, points] of Object.entries(one.evaluations)) curves.set(`eval/${key}`, curveOf(points));
    return curves;
  }

  function drawCurves(isNew = false) {
    if (!found) return;
    const known = found.runs.map(curvesOf);
    const keys = [...new Set(known.flatMap((one) => [...one.keys()]))].filter((key) => key in TITLES || key.startsWith("eval/") || key.startsWith("metric/"));
    keys.sort((a, b) => order(a) - order(b) || a.localeCompare(b));
    for (const key of keys.slice(0, 40)) {
      const lines = known.flatMap((curves, place) => {
        const points = curves.get(key)?.all() ?? [], times = curves.get("time"), first = times?.all()[0]?.[1];
        if (!points.length) return [];
        return [{ name: found.runs[place].name, color: curveColor(place), points: byTime ? points.map(([step, ...rest]) => [times.at(step) - first, ...rest]) : points }];
      });
      if (!charts.has(key)) {
        const own = key.slice(key.indexOf("/") + 1), title = TITLES[key] ?? (key.startsWith("eval/") ? `${own}, evaluated` : metricTitle(own));
        const made = new Chart({ title, height: key === "loss" ? 320 : 170, class: key === "loss" ? "wide" : "", canLog: true, canSmooth: true, hasLegend: true, sync: "compare", isLog: key === "loss" && isSteep(lines) });
        charts.set(key, made);
        grid.append(made.element);
      }
      const made = charts.get(key);
      made.options.isTime = byTime;
      if (isNew) made.lines = [];
      made.set(lines);
    }
  }

  function drawFacts() {
    if (!found) return;
    const rows = found.facts.filter((row) => everything || row.differs);
    const shown = (row, value) => (value === null ? h("span", { class: "soft" }, "–") : SHOWN[row.name] ? SHOWN[row.name](value) : typeof value === "number" ? (row.name === "step" ? count(value) : number(value)) : row.group === "plan" ? h("code", null, String(value)) : String(value));
    let group = null;
    const lines = rows.flatMap((row) => {
      const cells = [NAMES[row.name] ?? row.name.replaceAll("_", " "), ...row.values.map((value) => shown(row, value))];
      if (row.group === group) return [cells];
      group = row.group;
      const title = [row.group, ...row.values.map(() => "")];
      title.kind = "first";
      return [title, cells];
    });
    put(differing, rows.length ? table([["", "fact"], ...found.runs.map((run) => [run.name, "each"])], lines, "compared") : h("p", { class: "about" }, "nothing"));
  }

  async function load() {
    const query = new URLSearchParams(names.map((name) => ["run", name]));
    try {
      const answer = await ask(`api/compare?${query}`);
      if (isClosed) return;
      found = answer;
      put(legend, found.runs.map((run, place) => h("a", { href: runLink(run.name) }, h("i", { style: { background: curveColor(place) } }), run.name, stateBadge(run.summary))));
      drawCurves();
      drawFacts();
      const goesOn = found.runs.some((run) => run.summary.state === "running" || !run.curves.is_exact);
      if (goesOn) timer = setTimeout(again, EVERY_MS);
    } catch (error) { if (!isClosed) put(legend, h("p", { class: "alert bad" }, error.message)); }
  }

  function again() { if (document.visibilityState === "visible") load(); else timer = setTimeout(again, EVERY_MS); }

  load();
  return () => { isClosed = true; clearTimeout(timer); for (const one of charts.values()) one.close(); };
}

const order = (key) => (key === "loss" ? 0 : key.startsWith("eval/") ? 1 : key.startsWith("metric/") ? 2 : 3);

function isSteep(lines) {
  const values = lines.flatMap((line) => line.points.map((one) => one[1]));
  const least = Math.min(...values);
  return least > 0 && Math.max(...values) / least > 12;
}
