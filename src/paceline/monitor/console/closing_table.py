"""The table that closes a run on the console: how it ended, its steps, losses and incidents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.events import (
    WireJudged,
)
from paceline.monitor.console.event_lines import EXIT_CAUSES, wire_cost_text
from paceline.monitor.console.progress import number_text, rate_text
from paceline.monitor.records.run_files import local_path
from paceline.units import bytes_text, duration_text, shell_text, workers_text

__all__ = ["MOST_LEFT", "closing_table", "ending_text"]

MOST_LEFT = 3  # that the closing table names


def closing_table(facts: Mapping[str, Any], *, is_head: bool = True, more: Sequence[tuple[str, str]] = ()) -> str:
    """Return the summary of an attempt (the contents of summary.json) as a small table, each row "what  value".

    `is_head`: the facts are those of the whole run; other hosts know of checkpoints only what was saved
    there. `more`: rows that come last but for the places of files.
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
    if facts["steps"] and facts["samples"]:
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
    incidents = ("begun_again", "servers_replaced", "micro_halved_to", "tasks_lost")
    if facts["workers_lost"] or any(map(facts.get, incidents)):
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
        rows.append(("wire advice", wire_cost_text(WireJudged(**facts["wire_judged"]))))
    unsaved = facts.get("steps_unsaved", 0)
    if facts["checkpoints_saved"]:
        after = f" ({_steps_are(unsaved, 'after it ')} lost)" if unsaved and is_head else ""
        rows.append(("checkpoint", local_path(facts["checkpoint"]) + after))
    elif facts["steps"] and not facts["samples"]:
        rows.append(("checkpoint", "as the program saves by itself"))
    elif facts["steps"] and facts["state"] != "finished":
        none = f"none of this attempt is complete, {_steps_are(unsaved)} lost: --save-every STEPS saves more often"
        rows.append(
            ("checkpoint", none if is_head else "none by this host's workers: the first host's table has the others")
        )
    if facts["checkpoints_failed"]:
        rows.append(("failed saves", str(facts["checkpoints_failed"])))
    rows += more
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
    cause = EXIT_CAUSES.get(facts["exit_code"])
    if cause and facts["state"] == "failed":  # by no fault of the program's
        cause += ": it can go on"
    if facts.get("tasks"):  # of another framework, whose steps are not known
        return str(facts["state"]) + (f" ({cause})" if cause else "")
    where = "at" if facts["state"] == "finished" else "after"
    return f"{facts['state']} {where} step {facts['step']}" + (f" ({cause})" if cause else "")


def _was_finished_already(facts: Mapping[str, Any]) -> bool:
    """Whether the run went on from its own end."""
    return facts["state"] == "finished" and facts["resumed_from_step"] > 0 and not facts["steps"]


def _speed_text(facts: Mapping[str, Any]) -> str:
    overall, median = facts["samples_per_s"], facts["samples_per_s_median"]
    if overall is None:
        return "not known"
    return rate_text(overall) + (f" (median of the steps {rate_text(median)})" if median else "")


def _steps_text(facts: Mapping[str, Any]) -> str:
    dropped = facts.get("dropped_samples")
    late = f", {dropped:,} of them too late" if dropped else ""
    text = f"{facts['steps']:,}"
    if facts["samples"]:
        text += f" ({facts['samples']:,} samples{late})"
    if facts["resumed_from_step"]:
        text += f", continued after step {facts['resumed_from_step']}"
    if facts["skipped_steps"]:
        text += f", {facts['skipped_steps']} of them skipped{_overflow_text(facts)}"
    if facts.get("undone_steps"):
        text += f", {facts['undone_steps']:,} undone by a rollback"
    return text


def _overflow_text(facts: Mapping[str, Any]) -> str:
    """In fp16: how many steps of all attempts were skipped because they overflowed, which is not broken."""
    count = facts["metrics"].get("overflows")
    is_scaled = "precision=fp16" in (facts["plan"] or "") and isinstance(count, (int, float))
    return f" (in fp16 {count:,.0f} overflowed so far)" if is_scaled else ""


def _steps_are(count: int, which: str = "") -> str:
    return f"1 step {which}is" if count == 1 else f"{count:,} steps {which}are"


def _incidents_text(facts: Mapping[str, Any]) -> str:
    parts: list[str] = []
    micro = facts.get("micro_halved_to")
    if micro is not None:
        parts.append(f"out of memory, so micro-batches have {_counted(micro, 'sample')}")
    if (again := facts.get("begun_again")) and (micro is None or again["lost"]):
        steps = again["at_step"] - again["step"]
        begun = f"again from {again['source']} after step {again['step']}" if again["step"] else "anew"
        lost = workers_text(again["lost"]) if again["lost"] else "a parameter server"
        if again["source"] == "program":
            parts.append(f"{_task_names(facts['tasks'], again['lost'])} lost: all tasks began again")
        else:
            parts.append(f"{lost} lost: all began {begun}, {_counted(steps, 'step')} done again")
    if alone := facts.get("tasks_lost"):
        parts.append(f"{_counted(alone, 'task')} lost, started again while the others went on")
    if servers := facts.get("servers_replaced"):
        parts.append(f"{_counted(servers, 'parameter server')} lost, replaced by mirrors, 0 steps lost")
    if lost := facts["workers_lost"]:
        saves_itself = facts["steps"] and not facts["samples"]  # what it has saved is not known
        steps = facts["steps_lost"] + (0 if saves_itself else facts.get("steps_unsaved", 0))
        parts.append(f"{_counted(lost, 'worker')} lost, {facts['workers_joined']} taken in again")
        parts[-1] += f", {_counted(steps, 'step')} lost"
    return f"{'; '.join(parts)} (more: paceline report {shell_text(local_path(facts['run_dir']))})"


def _task_names(names: Sequence[str], ranks: Sequence[int]) -> str:
    return ", ".join(names[rank] if rank < len(names) else f"worker {rank}" for rank in ranks)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _left_text(left: Sequence[Mapping[str, Any]]) -> str:
    """Return "worker 2 after step 61 (SIGTERM), ..."; of many only the newest."""
    texts = [f"worker {one['worker']} after step {one['step']} ({one['reason']})" for one in left]
    earlier = len(texts) - MOST_LEFT
    return ", ".join(texts[-MOST_LEFT:]) + (f", and {earlier} earlier" if earlier > 0 else "")
