"""Words an audit for the screen: a line for each epoch, and one for each range of samples that was lost or repeated.

People count epochs from 1, and so does everything here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paceline.monitor.audit import AuditResult
from paceline.monitor.audit_epoch import EpochAudit, Missing, Repeated, Undone
from paceline.monitor.files import local_path

__all__ = ["report"]

MOST_STEPS = 20  # skipped ones that are named


def report(result: AuditResult) -> str:
    """Return the audit as text."""
    attempts = "1 attempt" if result.num_attempts == 1 else f"{result.num_attempts} attempts"
    lines = [f"audit of {local_path(result.run_dir)}, {attempts}"]
    for _, alike in itertools.groupby(result.epochs, key=_kind):
        lines += _epochs_lines(list(alike))
    lines += [f"  note: {note}" for note in result.notes]
    lines += [f"  PROBLEM: {problem}" for problem in result.problems]
    num_finished = sum(epoch.state in ("exact", "continued") for epoch in result.epochs)
    match result.verdict:
        case "clean":
            finished = f"{num_finished} finished epoch{'s' * (num_finished != 1)}"
            lines.append(f"clean: {finished}, no sample was lost and none was used twice")
        case "nothing to prove yet":
            lines.append("nothing to prove yet: no finished epoch")
        case _:
            lines.append("NOT clean: see above")
    return "\n".join(lines)


def _kind(epoch: EpochAudit) -> tuple[object, ...]:
    """Equal for neighbours that one line can tell of."""
    is_plain = epoch.state == "exact" and not (epoch.skipped_steps or epoch.num_dropped or epoch.undone)
    return (epoch.stream, epoch.num_samples, epoch.is_permutation) if is_plain else (epoch.stream, epoch.epoch, "alone")


def _epochs_lines(epochs: list[EpochAudit]) -> Iterator[str]:
    first, last = epochs[0], epochs[-1]
    if len(epochs) == 1:
        yield from _epoch_lines(first)
        return
    tried = ", by orders that are permutations" if first.is_permutation else ""
    name = f"  {first.stream}, epochs {first.epoch + 1}-{last.epoch + 1} (steps {first.first_step}-{last.last_step}): "
    yield f"{name}in each, each of {first.num_samples:,} samples was used exactly once{tried}"


def _epoch_lines(epoch: EpochAudit) -> Iterator[str]:
    name = f"  {epoch.stream}, epoch {epoch.epoch + 1} (steps {epoch.first_step}-{epoch.last_step}): "
    if epoch.state == "exact":
        tried = ", by an order that is a permutation" if epoch.is_permutation else ""
        yield f"{name}each of {epoch.num_samples:,} samples was used exactly once{tried}"
    elif epoch.state == "continued":
        yield (
            f"{name}each of {epoch.num_used:,} samples from position {epoch.begins_at:,} on was used exactly once; "
            "those before were another run's"
        )
    elif epoch.state == "unfinished" and not epoch.num_samples:
        yield f"{name}{epoch.num_used:,} samples of an iterable were used{_since(epoch)}, each once, none left out"
    elif epoch.state == "unfinished":
        used = f"{epoch.num_used:,} of {epoch.num_samples:,} samples were used{_since(epoch)}, each once"
        yield f"{name}unfinished; {used}"
    else:
        yield f"{name}BROKEN: {'; '.join(epoch.says)}"
    if epoch.skipped_steps:
        steps = ", ".join(map(str, epoch.skipped_steps[:MOST_STEPS]))
        yield f"    skipped (samples used, weights unchanged): step{'s' * (len(epoch.skipped_steps) > 1)} {steps}"
    if epoch.num_dropped:
        yield f"    dropped (too late for their steps, which were taken without them): {epoch.num_dropped:,} samples"
    for undone in epoch.undone:
        first, last = undone.first_step, undone.last_step
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        yield f"    undone    {_positions(undone)}, by a rollback of {steps} to step {undone.to_step}: not used again"
    for gap in epoch.missing:
        yield f"    missing   {_positions(gap)}, {_between(gap)}"
    for twice in epoch.repeated:
        by = " and ".join(
            f"step {step} (worker {worker})" for step, worker in zip(twice.steps, twice.workers, strict=True)
        )
        yield f"    repeated  {_positions(twice)}, by {by}"


def _since(epoch: EpochAudit) -> str:
    return f" from position {epoch.begins_at:,} on" if epoch.begins_at else ""


def _positions(found: Missing | Repeated | Undone) -> str:
    count = found.stop - found.start
    more = ", ..." if count > len(found.samples) else ""
    which = f"position {found.start:,}" if count == 1 else f"positions {found.start:,}-{found.stop - 1:,}"
    if not found.samples:  # of an iterable: nobody can say which they are
        return which
    return f"{which} ({count:,} sample{'s' * (count > 1)}: {', '.join(map(str, found.samples))}{more})"


def _between(gap: Missing) -> str:
    if gap.after_step is None and gap.before_step is None:
        return "in no step"
    if gap.after_step == gap.before_step:
        return f"within step {gap.after_step}"
    if gap.before_step is None:
        return f"after step {gap.after_step}"
    if gap.after_step is None:
        return f"before step {gap.before_step}"
    return f"between steps {gap.after_step} and {gap.before_step}"
