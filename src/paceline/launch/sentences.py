"""What the head says of hosts, workers and the next start, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.checkpoint.folder import find

__all__ = ["have_text", "leave_text", "more_text", "next_time"]


def next_time(run_dir: Path) -> str:
    """Say what the same command will do where the run has ended with too few workers, and nobody saved."""
    step = find(run_dir / "checkpoints").step
    if step:
        return f"run the same command again to go on from the newest checkpoint, of step {step}"
    return "nothing was saved; run the same command again to begin at step 1"


def more_text(replicas: int) -> str:
    """Return "2 more replicas"."""
    return f"{replicas} more replica{'s' if replicas > 1 else ''}"


def leave_text(workers: Sequence[int]) -> str:
    """Return "workers 1, 2 leave between two steps, ", the beginning of a sentence; "" where there are none."""
    if not workers:
        return ""
    who = f"worker {workers[0]} leaves" if len(workers) == 1 else f"workers {', '.join(map(str, workers))} leave"
    return f"{who} between two steps, "


def have_text(workers: Collection[int]) -> str:
    """Return "workers 1, 2 have", or "worker 1 has"."""
    names = ", ".join(map(str, sorted(workers)))
    return f"worker {names} has" if len(workers) == 1 else f"workers {names} have"
