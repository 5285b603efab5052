"""`horovod.run(function, np=2)`: in a run, whose workers are there already, each calls the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import PlanError
from paceline.runs.open_worker import open_worker

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    num_proc: int | None = None,
    **others: Any,
) -> list[Any]:
    """Call the function on each worker of this run, and return what it returned on each; all workers call this.

    Where Horovod starts workers, here `paceline run --workers` has: raises PlanError if their number is another one.
    Other parameters of Horovod's `run` (hosts, SSH, MPI) are for a start, and have no effect.
    """
    worker, wanted = open_worker(ends_alone=True), np if num_proc is None else num_proc
    if wanted not in (None, worker.workers):
        raise PlanError(
            f"horovod.run(np={wanted}) would start {wanted} workers, and this run has {worker.workers}: start it with "
            f"paceline run --as horovod --workers {wanted}."
        )
    return worker.gather(func(*args, **(kwargs or {})))
