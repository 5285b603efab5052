"""How the console words a run's events: one line each, the same on a terminal and in a log.

People count epochs from 1, and so does everything here; files, endpoints and programs count them from 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.events import (
    AllReduceChosen,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    Regrouped,
    Reported,
    Restarted,
    ServerReplaced,
    SpikeSeen,
    StreamOpened,
    WeightsDiffer,
    WireJudged,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.files import local_path
from paceline.monitor.once import workers_text
from paceline.monitor.steps import OTHER, PHASES, Idle, Step
from paceline.monitor.summary import shares
from paceline.units import bytes_text, duration_text

__all__ = [
    "CAUSES",
    "SHORT",
    "Goal",
    "Interval",
    "closing_table",
    "differ_text",
    "ending_text",
    "event_line",
    "idle_texts",
    "judged_text",
    "number_text",
    "rate_text",
    "ready_line",
    "regrouped_text",
    "restarted_text",
    "shares_text",
    "spike_cause",
    "spike_text",
]

SHORT: dict[str, str] = dict(
    zip((*PHASES, OTHER), ("data", "compute", "comm", "optim", "recovery", "other"), strict=True)
)
MOST_IDLE = 8  # workers whose idle shares are told one by one
MOST_LEFT = 3  # that the closing table names
CAUSES = {  # by exit code
    75: "preempted",
    76: "too few workers were left",
    129: "the terminal was closed",
    130: "Ctrl-C",
    143: "SIGTERM",
}


class Goal:
    """How far a run is to go: the last step and the number of epochs, as far as they are known."""

    def __init__(self, max_steps: int | None) -> None:
        self.last_step = self._max_steps = max_steps
        self._epochs = 1

    def accept(self, opened: StreamOpened) -> None:
        known = [number for number in (self._max_steps, opened.last_step) if number is not None]
        self.last_step, self._epochs = min(known, default=None), opened.epochs

    def epoch_text(self, row: Step) -> str:
        """Return "epoch 2 of 8"; nothing where there is one epoch only."""
        last = max(self._epochs, row.epoch + 1)
        return f"epoch {row.epoch + 1} of {last}" if last > 1 else ""


class Interval:
    """Adds up the steps between two lines of progress."""

    def __init__(self) -> None:
        self.last: Step | None = None
        self._began: float | None = None  # commit before the first step of the interval
        self._num_steps = self._num_samples = 0
        self._seconds: dict[str, float] = {}
        self._idle = Idle()

    def add(self, row: Step) -> None:
        if self._began is None:
            self._began = row.time - row.seconds.get("total", 0.0)
        self.last = row
        self._num_steps += 1
        self._num_samples += row.num_samples
        for phase, seconds in row.seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self._idle.add(row)

    def restart(self) -> None:
        """Begin the next interval where this one ends."""
        if self.last is not None:
            self._began, self._num_steps, self._num_samples, self._seconds = self.last.time, 0, 0, {}
            self._idle = Idle()

    @property
    def samples_per_s(self) -> float | None:
        if self.last is None or self._began is None or self.last.time <= self._began:
            return None
        return self._num_samples / (self.last.time - self._began)

    @property
    def step_s(self) -> float | None:
        """The mean duration of its steps, commit to commit."""
        if self.last is None or self._began is None or not self._num_steps:
            return None
        return (self.last.time - self._began) / self._num_steps

    @property
    def shares(self) -> dict[str, float]:
        return shares(self._seconds)

    @property
    def idle(self) -> dict[int, float]:
        """Which share of its time each worker waited for the others."""
        return self._idle.shares

    def line(self, goal: Goal, *, with_speed: bool = True) -> str:
        """Return "step 120 of 400  epoch 1 of 3  loss 2.314  512 samples/s  data 1% compute 88% ...  idle 0:3% 1:9%".

        `with_speed=False` leaves out speed and shares: those of the first step say nothing about the others.
        """
        row = self.last
        if row is None:
            return ""
        parts = [f"step {row.step} of {goal.last_step}" if goal.last_step else f"step {row.step}", goal.epoch_text(row)]
        if row.loss is not None:
            parts.append(f"loss {number_text(row.loss)}")
        parts += [f"{name} {number_text(value)}" for name, value in row.metrics.items()]
        if with_speed and self.samples_per_s is not None:
            parts.append(f"{rate_text(self.samples_per_s)} samples/s")
        if with_speed and self.shares:
            parts.append(shares_text(self.shares))
        if with_speed and (idle := idle_texts(self.idle)):
            parts.append(f"idle {' '.join(idle)}")
        return "  ".join(part for part in parts if part)


def event_line(event: Event) -> str | None:
    """Return the line that an event deserves on the console, or None."""
    match event:
        case Evaluated(step=step, metrics=metrics, num_samples=num_samples, duration_s=duration_s):
            values = "  ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
            return f"step {step}  held out: {values}  ({num_samples:,} samples in {duration_text(duration_s)})"
        case Reported(step=step, metrics=metrics):
            return f"step {step}  " + "  ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
        case CheckpointSaved(step=step, num_bytes=num_bytes, stall_s=stall_s):
            return f"step {step}  checkpoint saved ({bytes_text(num_bytes)}; training waited {duration_text(stall_s)})"
        case CheckpointFailed(step=step, path=path, reason=reason):
            return f"step {step}  CHECKPOINT FAILED: {local_path(path)}: {reason}"
        case CheckpointSkipped(path=path, reason=reason):
            return f"checkpoint {local_path(path)} was passed over: {reason}"
        case WorkerLost(reason=reason):  # of one that was not at work yet: of the others `Regrouped` tells
            return f"{reason} before it had joined"
        case Regrouped(causes=causes, step=step) as regrouped:
            return f"{', '.join(causes)} after step {step}: {regrouped_text(regrouped)}"
        case Restarted() as restarted:
            return restarted_text(restarted)
        case ServerReplaced(lost=lost, by=by, step=step, took_s=took_s):
            return f"{lost} in step {step}: its mirror ({by}) took its place in {took_s:.2f} s, steps lost 0"
        case WorkerLeft(rank=worker, reason=reason, step=step, members=members):
            go_on = "1 worker goes on" if len(members) == 1 else f"{len(members)} workers go on"
            return f"worker {worker} has left ({reason}) after step {step}: {go_on}"
        case SpikeSeen() as spike:
            return spike_text(spike)
        case WeightsDiffer() as differ:
            return differ_text(differ)
        case AllReduceChosen() as chosen:
            return chosen_text(chosen)
        case WireJudged(kind=kind) as judged if kind != "none":
            return f"after step {judged.step}: {judged_text(judged)}"
        case WorkerJoined(rank=worker, step=step, after_s=after_s, pid=pid):
            who = f"worker {worker}" + (f" (pid {pid})" if pid is not None else "")
            return f"{who} joined at step {step}" + (f", {after_s:.2f} s after the loss" if after_s else "")
        case _:
            return None


def chosen_text(chosen: AllReduceChosen) -> str:
    """Return "all-reduce among 4 workers on 2 hosts: tree up to 64 KB, above ring (timed in 0.31 s)"."""
    runs: list[tuple[str, int]] = []  # an algorithm, and the largest size for which it was the best
    for size, name in sorted((int(size), name) for size, name in chosen.chosen.items()):
        name = "the back end's own" if name == "backend" else name
        if runs and runs[-1][0] == name:
            runs.pop()
        runs.append((name, size))
    ways = [f"{name} up to {bytes_text(size)}" for name, size in runs[:-1]] + [name for name, _ in runs[-1:]]
    told = ", above ".join(ways) if len(ways) < 3 else ", ".join(ways[:-1]) + f", above {ways[-1]}"
    hosts = f" on {chosen.hosts} hosts" if chosen.hosts > 1 else ""
    timed = f"timed in {duration_text(chosen.took_s)}" if chosen.took_s else "tried on sums of the run"
    return f"all-reduce among {chosen.members} workers{hosts}: {told} ({timed})"


def judged_text(judged: WireJudged) -> str:
    """Return "the link needs 3.00 ms of a 400 ms step: PowerSGD(rank=4) takes 12.0 ms for encoding, and costs 9.50 ms
    more than it saves. Raw() is faster here"."""
    step, encoding = duration_text(judged.step_s), duration_text(judged.encoding_s)
    if judged.kind == "memory":
        return (
            f"these workers share their host's memory, where {judged.wire} saves nothing: encoding takes {encoding} of "
            f"a {step} step. Raw() is faster here; codecs are for networks"
        )
    link = f"the link needs {duration_text(judged.link_s)} of a {step} step"
    if judged.kind == "pays":
        saves = f"{judged.wire} would save about {duration_text(judged.saved_s)} of it"
        return f"{link}: {saves} (encoding takes {encoding})"
    return (
        f"{link}: {judged.wire} takes {encoding} for encoding, and costs {duration_text(-judged.saved_s)} more than it "
        "saves. Raw() is faster here"
    )


def restarted_text(restarted: Restarted) -> str:
    """Return "worker 2 (pid 4711) killed by signal 9 after step 812: all 4 workers start again at step 810 from this
    host's memory, 2 steps are done again, no disk read"."""
    num_again = max(0, restarted.at_step - restarted.step)
    again = f"{num_again} step{' is' if num_again == 1 else 's are'} done again"
    several = "both workers start" if restarted.workers == 2 else f"all {restarted.workers} workers start"
    who = several if restarted.workers > 1 else "the worker starts"
    came = f"after step {restarted.at_step}" if restarted.at_step else "before the first step"
    memory = "this host's memory" if restarted.hosts == 1 else "each host's own memory"
    if restarted.lent:
        lent = f"{'workers' if len(restarted.lent) > 1 else 'worker'} {', '.join(map(str, restarted.lent))}"
        memory = (
            "a neighbour's memory"
            if len(restarted.lent) == restarted.workers
            else f"{memory}, {lent} from a neighbour's"
        )
    how = {
        "memory": f"at step {restarted.step} from {memory}, {again}, no disk read",
        "disk": f"from the checkpoint of step {restarted.step} on disk: {again}",
    }.get(restarted.source, f"at the beginning, nothing was kept or saved: {again}")
    return f"{', '.join(restarted.causes)} {came}: {who} again {how}"


def regrouped_text(regrouped: Regrouped) -> str:
    """Return "detected in 0.01 s, regrouped in 0.03 s; 3 workers go on, steps lost 0, samples repeated 0"."""
    count, lost = len(regrouped.members) // regrouped.workers_each, regrouped.steps_lost
    noun = "worker" if regrouped.workers_each == 1 else "replica"
    what = "for others" if regrouped.holds else "on"
    verb = "wait" if regrouped.holds else "go"
    who = f"1 {noun} {verb}{'s' if regrouped.holds else 'es'}" if count == 1 else f"{count} {noun}s {verb}"
    source = "" if regrouped.workers_each == 1 else "; state from a living replica"
    repeated = "0" if not lost else "those of 1 step" if lost == 1 else f"those of {lost} steps"
    return (
        f"detected in {regrouped.detected_s:.2f} s, regrouped in {regrouped.regrouped_s:.2f} s; "
        f"{who} {what}, steps lost {lost}, samples repeated {repeated}{source}"
    )


def spike_text(spike: SpikeSeen) -> str:
    """Return "step 812  loss 47.3, expected at most 3.1: ..." with what is done about it."""
    first = 0 if spike.to_step is None else spike.to_step + 1
    steps = f"step {first} is" if first == spike.step else f"steps {first}-{spike.step} are"
    done = {
        "skip": "no worker takes the step, its samples count as used",
        "rollback": f"rolled back to step {spike.to_step}; {steps} undone, the samples are not used again",
    }
    return f"step {spike.step}  SPIKE: {spike_cause(spike)}: {done.get(spike.action, 'the run stops')}"


def spike_cause(spike: SpikeSeen) -> str:
    """Return "loss 47.3, expected at most 3.1", "the loss is nan" or "loss 2.1, but gradients are not finite"."""
    loss = number_text(spike.loss)
    if spike.expected is not None:
        return f"loss {loss}, expected at most {number_text(spike.expected)}"
    return f"loss {loss}, but gradients are not finite" if math.isfinite(spike.loss) else f"the loss is {loss}"


def differ_text(differ: WeightsDiffer) -> str:
    """Return whose weights differ, where, since when, and from whom they got the others'."""
    who = ", ".join(differ.who)
    since = f"since a step after {differ.since_step}, first in {differ.first}"
    if differ.source is None:
        return f"step {differ.step}  WEIGHTS DIFFER {since}, and no majority says whose are right: {who}"
    others = f"those of {differ.num_alike} others" if differ.num_alike > 1 else "the others'"
    return f"step {differ.step}  WEIGHTS DIFFER from {others} {since}: {who}; healed from worker {differ.source}"


def ready_line(started: Collection[WorkerStarted]) -> str:
    """Return "2 workers on cpu, ready in 1.90 s  plan replicas=2", from what the workers of this host said.

    A worker is ready when it is in its group, and so are all of them then: also those of other hosts.
    """
    first = next(iter(started))
    devices = ", ".join(sorted({event.device.partition(":")[0] for event in started}))
    workers = "1 worker" if first.workers == 1 else f"{first.workers} workers"
    where = (
        f"on {devices}"
        if len(started) == first.workers
        else f"({len(started)} of them here on {first.host}: {devices})"
    )
    return f"{workers} {where}, ready in {duration_text(max(event.startup_s for event in started))}  plan {first.plan}"


def closing_table(facts: Mapping[str, Any], *, is_head: bool = True) -> str:
    """Return the summary of an attempt (the contents of summary.json) as a small table, each row "what  value".

    `is_head`: the facts are those of the whole run; other hosts know of checkpoints only what was saved there.
    """
    took = duration_text(facts["duration_s"])
    title = f"{ending_text(facts)}, " + (f"after {took}" if facts["state"] == "finished" else f"{took} after its start")
    rows: list[tuple[str, str]] = []
    if _was_finished_already(facts):
        ends, step = facts.get("max_steps"), facts["step"]
        further = "more epochs in the script"
        if ends is not None and ends <= step:
            further = f"--max-steps beyond {step} (it is {ends} now)"
        rows.append(("to train on", f"{further}; or --fresh, to start over"))
    if facts["steps"]:
        rows.append(("samples/s", _speed_text(facts)))
        rows.append(("communication", f"{facts['share_communication'] or 0:.1%} of the steps' time"))
    if facts["startup_s"] is not None:
        first = (
            ""
            if facts["first_commit_s"] is None
            else f" (first step committed after {duration_text(facts['first_commit_s'])})"
        )
        rows.append(("start-up", duration_text(facts["startup_s"]) + first))
    if facts["steps"]:
        rows.append(("steps", _steps_text(facts)))
        if facts["last_loss"] is not None:
            first = "" if facts["first_loss"] is None else f"{number_text(facts['first_loss'])} -> "
            rows.append(("loss", first + number_text(facts["last_loss"])))
    if facts["workers_lost"] or facts.get("begun_again") or facts.get("servers_replaced"):
        rows.append(("incidents", _incidents_text(facts)))
    if facts.get("left"):
        rows.append(("left", _left_text(facts["left"])))
    if facts["evaluation"]:
        values = "  ".join(f"{name} {number_text(value)}" for name, value in facts["evaluation"].items())
        rows.append(("held out", f"{values} (step {facts['evaluation_step']})"))
    if facts["peak_memory_bytes"]:
        state = facts.get("state_bytes")
        of_it = f", {bytes_text(state)} of it parameters and optimizer state" if state else ""
        rows.append(("peak memory", f"{bytes_text(facts['peak_memory_bytes'])} in one worker{of_it}"))
        all_states = facts.get("states_bytes") or [0]
        if all_states[-1] > 1.01 * all_states[0]:
            rows.append(("state", f"{bytes_text(all_states[0])} to {bytes_text(all_states[-1])} in each worker"))
    if facts.get("wire_ratio") not in (None, 1.0):
        sent = bytes_text(facts["num_wire_bytes"])
        rows.append(("wire", f"{sent} between replicas, {facts['wire_ratio']:.3g} of what gradients are"))
    if facts.get("noise_scale"):
        rows.append(("noise scale", _noise_text(facts["noise_scale"], facts["batch_size"])))
    if facts.get("wire_judged"):
        rows.append(("wire advice", judged_text(WireJudged(**facts["wire_judged"]))))
    unsaved = facts.get("steps_unsaved", 0)
    if facts["checkpoints_saved"]:
        after = f" ({_steps_are(unsaved, 'after it ')} lost)" if unsaved and is_head else ""
        rows.append(("checkpoint", local_path(facts["checkpoint"]) + after))
    elif facts["steps"] and facts["state"] != "finished":
        none = f"none of this attempt, {_steps_are(unsaved)} lost: --save-every STEPS would have left one"
        rows.append(
            ("checkpoint", none if is_head else "none by this host's workers: the head's table tells of others")
        )
    if facts["checkpoints_failed"]:
        rows.append(("failed saves", str(facts["checkpoints_failed"])))
    rows += [("logs", local_path(facts["log_dir"])), ("run", local_path(facts["run_dir"]))]
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _noise_text(samples: float, batch_size: int) -> str:
    """What the gradients' noise says about larger batches; two digits, which is more than it is worth."""
    digits = max(0, len(str(round(samples))) - 2)
    about = f"about {_counted(max(1, int(round(samples, -digits))), 'sample')}; the batch is {batch_size:,}"
    if samples > batch_size:
        return f"{about}: larger ones, on more workers, pay up to about that size"
    return f"{about}: still larger ones, on more workers, would hardly save steps"


def ending_text(facts: Mapping[str, Any]) -> str:
    """Return "finished at step 400" or "stopped after step 120 (Ctrl-C)"."""
    if _was_finished_already(facts):
        return f"finished already at step {facts['step']}, nothing was left to do"
    cause = CAUSES.get(facts["exit_code"])
    if cause and facts["state"] == "failed":  # by no fault of the program's
        cause += ": run the same command again to go on"
    where = "at" if facts["state"] == "finished" else "after"
    return f"{facts['state']} {where} step {facts['step']}" + (f" ({cause})" if cause else "")


def _was_finished_already(facts: Mapping[str, Any]) -> bool:
    """Whether the run went on from its own end."""
    return facts["state"] == "finished" and facts["resumed_from_step"] > 0 and not facts["steps"]


def shares_text(parts: Mapping[str, float]) -> str:
    """Return "data 1% compute 88% comm 8% optim 2% other 1%"."""
    return " ".join(f"{SHORT[phase]} {share:.0%}" for phase, share in parts.items())


def idle_texts(idle: Mapping[int, float]) -> list[str]:
    """Return ["0:12%", "1:3%"], by worker; of many only who waited least and most. Nothing for one worker alone."""
    if len(idle) < 2:
        return []
    if len(idle) <= MOST_IDLE:
        return [f"{worker}:{share:.0%}" for worker, share in idle.items()]
    least, most = min(idle, key=lambda worker: idle[worker]), max(idle, key=lambda worker: idle[worker])
    return [f"{idle[least]:.0%} (worker {least})", "to", f"{idle[most]:.0%} (worker {most})"]


def number_text(value: float | None) -> str:
    """Return a number with four significant digits; "nan" for None, which is what JSON makes of it."""
    if value is None or math.isnan(value):
        return "nan"
    value = float(value)  # a user may report a whole number
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.4g}"


def rate_text(value: float) -> str:
    """Return a rate with about three significant digits and thousands separated: "512", "12,345", "3.25"."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _speed_text(facts: Mapping[str, Any]) -> str:
    overall, median = facts["samples_per_s"], facts["samples_per_s_median"]
    if overall is None:
        return "not known"
    return rate_text(overall) + (f" (median of the steps {rate_text(median)})" if median else "")


def _steps_text(facts: Mapping[str, Any]) -> str:
    dropped = facts.get("dropped_samples")
    late = f", {dropped:,} of them too late" if dropped else ""
    text = f"{facts['steps']:,} ({facts['samples']:,} samples{late})"
    if facts["resumed_from_step"]:
        text += f", continued after step {facts['resumed_from_step']}"
    if facts["skipped_steps"]:
        text += f", {facts['skipped_steps']} of them skipped"
    if facts.get("undone_steps"):
        text += f", {facts['undone_steps']:,} undone by a rollback"
    return text


def _steps_are(count: int, which: str = "") -> str:
    return f"1 step {which}is" if count == 1 else f"{count:,} steps {which}are"


def _incidents_text(facts: Mapping[str, Any]) -> str:
    told: list[str] = []
    if again := facts.get("begun_again"):
        steps = again["at_step"] - again["step"]
        begun = f"again from {again['source']} after step {again['step']}" if again["step"] else "anew"
        lost = workers_text(again["lost"]) if again["lost"] else "a parameter server"
        told.append(f"{lost} lost: all began {begun}, {_counted(steps, 'step')} done again")
    if servers := facts.get("servers_replaced"):
        told.append(f"{_counted(servers, 'parameter server')} lost, replaced by mirrors, 0 steps lost")
    if lost := facts["workers_lost"]:
        steps = facts["steps_lost"] + facts.get("steps_unsaved", 0)
        told.append(f"{_counted(lost, 'worker')} lost, {facts['workers_joined']} taken in again")
        told[-1] += f", {_counted(steps, 'step')} lost"
    return f"{'; '.join(told)} (more: paceline report {local_path(facts['run_dir'])})"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _left_text(left: Sequence[Mapping[str, Any]]) -> str:
    """Return "worker 2 after step 61 (SIGTERM), ..."; of many only the newest."""
    texts = [f"worker {one['worker']} after step {one['step']} ({one['reason']})" for one in left]
    earlier = len(texts) - MOST_LEFT
    return ", ".join(texts[-MOST_LEFT:]) + (f", and {earlier} earlier" if earlier > 0 else "")
