"""The console's line for each event of a run; the same on a terminal and in a log.

The console counts epochs from 1, as people do. Files, endpoints and programs count them from 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from paceline.events import (
    AllReduceChosen,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    MicroBatchHalved,
    Regrouped,
    Reported,
    Restarted,
    ServerReplaced,
    SpikeSeen,
    TaskLost,
    TaskStarted,
    UploadDone,
    UploadFailed,
    WeightsDiffer,
    WireJudged,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.console.progress import number_text
from paceline.monitor.records.run_files import local_path
from paceline.units import bytes_text, duration_text, printable, workers_text

__all__ = [
    "EXIT_CAUSES",
    "divergence_text",
    "event_line",
    "halved_text",
    "ready_line",
    "regrouped_text",
    "restarted_text",
    "spike_cause",
    "spike_text",
    "wire_cost_text",
]

MESSAGE_WIDTH = 120  # of an error
EXIT_CAUSES = {  # by exit code
    75: "preempted",
    76: "too few workers were left",
    129: "the terminal was closed",
    130: "Ctrl-C",
    143: "SIGTERM",
}


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
        case UploadDone(step=step, path=path, num_sent_bytes=sent, upload_s=upload_s):
            return f"step {step}  checkpoint uploaded to {path} ({bytes_text(sent)} in {duration_text(upload_s)})"
        case UploadFailed(step=step, reason=reason):
            return f"step {step}  UPLOAD FAILED, training goes on: {reason}"
        case CheckpointSkipped(path=path, reason=reason):
            return f"checkpoint {local_path(path)} was passed over: {reason}"
        case WorkerLost(reason=reason):  # of one that was not at work yet: members are reported by `Regrouped`
            return f"{reason} before it had joined"
        case Regrouped(causes=causes, step=step) as regrouped:
            return f"{', '.join(causes)} after step {step}: {regrouped_text(regrouped)}"
        case Restarted() as restarted:
            return restarted_text(restarted)
        case TaskLost(reason=reason):
            return f"{reason}: it is started again, and the others go on"
        case TaskStarted(name=name, pid=pid, restarts=restarts) if restarts:
            return f"{name} (pid {pid}) was started again"
        case ServerReplaced(lost=lost, by=by, step=step, took_s=took_s):
            return f"{lost} in step {step}: its mirror ({by}) took its place in {took_s:.2f} s, steps lost 0"
        case WorkerLeft(rank=worker, reason=reason, step=step, members=members):
            go_on = "1 worker goes on" if len(members) == 1 else f"{len(members)} workers go on"
            return f"worker {worker} has left ({reason}) after step {step}: {go_on}"
        case SpikeSeen() as spike:
            return spike_text(spike)
        case MicroBatchHalved() as halved:
            return halved_text(halved)
        case WeightsDiffer() as differ:
            return divergence_text(differ)
        case AllReduceChosen() as chosen:
            return allreduce_text(chosen)
        case WireJudged(kind=kind) as judged if kind != "none":
            return f"after step {judged.step}: {wire_cost_text(judged)}"
        case WorkerJoined(rank=worker, step=step, after_s=after_s, pid=pid):
            subject = f"worker {worker}" + (f" (pid {pid})" if pid is not None else "")
            return f"{subject} joined at step {step}" + (f", {after_s:.2f} s after the loss" if after_s else "")
        case _:
            return None


def allreduce_text(chosen: AllReduceChosen) -> str:
    """Return "all-reduce among 4 workers on 2 hosts: tree up to 64 KB, above ring (timed in 0.31 s)"."""
    runs: list[tuple[str, int]] = []  # an algorithm, and the largest size for which it was the best
    for size, name in sorted((int(size), name) for size, name in chosen.chosen.items()):
        name = "the back end's own" if name == "backend" else name
        if runs and runs[-1][0] == name:
            runs.pop()
        runs.append((name, size))
    ways = [f"{name} up to {bytes_text(size)}" for name, size in runs[:-1]] + [name for name, _ in runs[-1:]]
    listed = ", above ".join(ways) if len(ways) < 3 else ", ".join(ways[:-1]) + f", above {ways[-1]}"
    hosts = f" on {chosen.hosts} hosts" if chosen.hosts > 1 else ""
    timed = f"timed in {duration_text(chosen.took_s)}" if chosen.took_s else "tried on sums of the run"
    return f"all-reduce among {chosen.members} workers{hosts}: {listed} ({timed})"


def wire_cost_text(judged: WireJudged) -> str:
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


def halved_text(halved: MicroBatchHalved) -> str:
    """Return "worker 1 ran out of memory in step 3 (can't allocate memory): the step runs again with micro-batches of 4
    samples, not 8, on all workers"."""
    error = f" ({printable(halved.message)[:MESSAGE_WIDTH]})" if halved.message else ""
    subject = workers_text(halved.workers) if halved.workers else "a worker that was lost then"
    return (
        f"{subject} ran out of memory in step {halved.step}{error}: the step runs again with "
        f"{_micro_text(halved.after)}, not {halved.before}, on all workers"
    )


def _micro_text(samples: int) -> str:
    return f"micro-batches of {samples} sample{'s' if samples > 1 else ''}"


def restarted_text(restarted: Restarted) -> str:
    """Return "worker 2 (pid 4711) killed by signal 9 after step 812: all 4 workers start again at step 810 from this
    host's memory, 2 steps are done again, no disk read"."""
    num_again = max(0, restarted.at_step - restarted.step)
    again = f"{num_again} step{' is' if num_again == 1 else 's are'} done again"
    several = "both workers start" if restarted.workers == 2 else f"all {restarted.workers} workers start"
    subject = several if restarted.workers > 1 else "the worker starts"
    if restarted.source == "program":
        noun = "all start" if restarted.workers > 1 else "it starts"
        return f"{', '.join(restarted.causes)}: {noun} again, and the program goes on from what it has saved"
    came = f"after step {restarted.at_step}" if restarted.at_step else "before the first step"
    memory = "this host's memory" if restarted.hosts == 1 else "each host's own memory"
    if restarted.lent:
        lent = f"{'workers' if len(restarted.lent) > 1 else 'worker'} {', '.join(map(str, restarted.lent))}"
        memory = (
            "a neighbor's memory" if len(restarted.lent) == restarted.workers else f"{memory}, {lent} from a neighbor's"
        )
    how = {
        "memory": f"at step {restarted.step} from {memory}, {again}, no disk read",
        "disk": f"from the checkpoint of step {restarted.step} on disk: {again}",
    }.get(restarted.source, f"at the beginning, nothing was kept or saved: {again}")
    if restarted.micro is not None:
        return f"{', '.join(restarted.causes)}: {subject} again with {_micro_text(restarted.micro)}, {how}"
    return f"{', '.join(restarted.causes)} {came}: {subject} again {how}"


def regrouped_text(regrouped: Regrouped) -> str:
    """Return "detected in 0.01 s, regrouped in 0.03 s; 3 workers go on, steps lost 0, samples repeated 0"."""
    count, lost = len(regrouped.members) // regrouped.workers_each, regrouped.steps_lost
    noun = "worker" if regrouped.workers_each == 1 else "replica"
    what = "for others" if regrouped.holds else "on"
    verb = "wait" if regrouped.holds else "go"
    subject = f"1 {noun} {verb}{'s' if regrouped.holds else 'es'}" if count == 1 else f"{count} {noun}s {verb}"
    source = "" if regrouped.workers_each == 1 else "; state from a living replica"
    repeated = "0" if not lost else "those of 1 step" if lost == 1 else f"those of {lost} steps"
    return (
        f"detected in {regrouped.detected_s:.2f} s, regrouped in {regrouped.regrouped_s:.2f} s; "
        f"{subject} {what}, steps lost {lost}, samples repeated {repeated}{source}"
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


def divergence_text(differ: WeightsDiffer) -> str:
    """Return which workers' weights differ, where, since when, and from which worker they were restored."""
    names = ", ".join(differ.who)
    since = f"since a step after {differ.since_step}, first in {differ.first}"
    if differ.source is None:
        return f"step {differ.step}  WEIGHTS DIFFER {since}, and no majority says whose are right: {names}"
    others = f"those of {differ.num_alike} others" if differ.num_alike > 1 else "the others'"
    return f"step {differ.step}  WEIGHTS DIFFER from {others} {since}: {names}; healed from worker {differ.source}"


def ready_line(started: Collection[WorkerStarted], *, tasks: str = "") -> str:
    """Return "2 workers on cpu, ready in 1.90 s  plan replicas=2", from what the workers of this host said.

    A worker is ready when it is in its group, and so are all of them then: also those of other hosts. `tasks`: of
    another framework's program, which begins now.
    """
    first = next(iter(started))
    devices = ", ".join(sorted({event.device.partition(":")[0] for event in started}))
    workers = "1 worker" if first.workers == 1 else f"{first.workers} workers"
    where = (
        f"on {devices}"
        if len(started) == first.workers
        else f"({len(started)} of them here on {first.host}: {devices})"
    )
    if tasks:
        return f"{tasks} {where}, started in {duration_text(max(event.startup_s for event in started))}"
    return f"{workers} {where}, ready in {duration_text(max(event.startup_s for event in started))}  plan {first.plan}"
