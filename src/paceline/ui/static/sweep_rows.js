// Sweeps in the table of runs: the trials of each are one row, which opens on a click.

import { h, put } from "./dom.js";
import { NONE, count, date, number, plural } from "./format.js";
import { progressBar, spark } from "./overview.js";
import { sweepLink, sweepState } from "./sweep.js";

const ENDED = ["finished", "pruned", "failed"];

/** A sweep as a run has it, so that it is sorted among them. trials: runs of its trials that are known. */
export function sweepAsRun(sweep, trials) {
  const done = ENDED.reduce((sum, state) => sum + (sweep.counts[state] ?? 0), 0), all = Object.values(sweep.counts).reduce((sum, num) => sum + num, 0);
  return { name: sweep.name, sweep, state: sweep.state, step: done, last_step: sweep.wanted ?? all, left_s: null, loss: null, samples_per_s: null,
    workers: trials.reduce((sum, one) => sum + (one.state === "running" ? one.workers : 0), 0), plan: "", started: Math.max(...trials.map((one) => one.started)), num: trials.length };
}

/** The row of a sweep; `toggle` opens and closes it. */
export function emptySweepRow(columns, toggle) {
  const cells = Object.fromEntries(columns.map((key) => [key, h("span", { class: `cell of-${key}` })]));
  const button = h("button", { class: "plain fold", on: { click: toggle } }), link = h("a");
  const small = h("small");
  cells.name.append(link, small);
  return { cells, button, link, small, element: h("div", { class: "row of-sweep", role: "listitem" }, h("span", { class: "cell of-box" }, button), Object.values(cells)) };
}

export function fillSweepRow({ cells, button, link, small }, { sweep, num, step, last_step: last, started, state, workers }, isOpen) {
  put(button, isOpen ? "▾" : "▸");
  button.setAttribute("aria-expanded", String(isOpen));
  button.setAttribute("aria-label", `${isOpen ? "hide" : "show"} the runs of ${sweep.name}`);
  link.href = sweepLink(sweep.name);
  put(link, sweep.name);
  put(small, `sweep, ${plural(num, "run")} ${isOpen ? "below" : "inside"}`);
  put(cells.state, sweepState(state));
  put(cells.progress, last ? progressBar({ step, last_step: last, state }) : null, h("small", null, `${count(step)} of ${plural(last, "trial")}`));
  put(cells.left, h("span", { class: "soft" }, NONE));
  put(cells.loss, h("b", { title: sweep.best === null ? null : `best ${sweep.objective}, trial ${sweep.best}` }, number(sweep.value)), spark(sweep.values));
  put(cells.speed, NONE);
  put(cells.workers, workers ? count(workers) : NONE);
  put(cells.plan, h("small", null, sweep.best === null ? sweep.objective : `best ${sweep.objective}: trial ${sweep.best}`));
  put(cells.started, date(started));
}
