"""The world that an Accelerate program sees: a number of processes, which the workers of the run stand for.

The program's batch size is that of one process. So the number of processes is part of what is computed, and it is kept:
in a checkpoint, and where fewer workers run the same processes' batches.
"""

from __future__ import annotations

from typing import Any

from paceline import environment
from paceline.errors import PlanError
from paceline.plan import ParameterServer, Plan
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["ProgramWorld", "require_possible"]


class ProgramWorld:
    """This worker's place among those that run different batches, and how many processes the program is to see."""

    def __init__(self, worker: Worker, *, kept: int | None) -> None:
        """`kept`: the number of processes that a checkpoint has. Raises PlanError where there are more workers."""
        parts = parts_of(worker)
        group, axes = parts.place.group, parts.place.axes
        self.index, self.size = axes.share_of(group)
        self.num_same = group.size // self.size  # workers in a row that run the same batches
        self.processes = environment.world_processes() or kept or self.size
        self._group, self._worker, self._executor = group, worker, parts.executor
        if self.processes < self.size:
            raise PlanError(
                f"the program's world has {self.processes} processes, and {self.size} workers are to run their "
                f"batches: {self.size - self.processes} would have none. Use --workers "
                f"{self.processes * self.num_same}, or {environment.PROCESSES}={self.size} for a world of {self.size} "
                "processes, with a larger global batch."
            )

    def require_same(self, saved: int | None) -> None:
        """Raise PlanError where a state is of another world, and nobody has said that this one is to be another: what
        the program has computed from the number of processes would not fit."""
        if saved in (None, self.processes) or environment.world_processes() is not None:
            return
        fits = f"{environment.PROCESSES}={saved} keeps it, on any number of workers up to {saved}" if saved else ""
        raise PlanError(
            f"the state was saved in a world of {saved} processes, and this one has {self.processes}: its steps would "
            f"have other samples. {fits}; {environment.PROCESSES}={self.processes} goes on with the new world."
        )

    def everywhere(self, value: Any) -> list[Any]:
        """The values of the workers that run different batches, in their order; an operation of all workers.

        Inside of a step all workers are at the same micro-batch, so it may be called there, too.
        """
        found = self._group.gather_objects(value) if self._executor.under_way else self._worker.gather(value)
        return found[:: self.num_same]

    def wait(self) -> None:
        """Return when all workers have called this."""
        if self._executor.under_way:
            self._group.barrier()
        else:
            self._worker.wait()


def require_possible(plan: Plan) -> None:
    """Raise PlanError for plans under which a loop of Accelerate cannot take steps."""
    if plan.layout.stages > 1:
        raise PlanError(
            f"an Accelerate program under Layout(stages={plan.layout.stages}): its loop runs a batch's forward and "
            "backward one after the other, and stages need those of all micro-batches at once. Use replicas, shard or "
            "tensor, or worker.stepper(model, optim, loss): docs/how-to/come-from-accelerate.md."
        )
    if isinstance(plan.sync, ParameterServer):
        raise PlanError(
            "an Accelerate program under ParameterServer(...): optimizers run on the servers, so optimizer.step() of "
            "the program has nothing to do. Use sync=AllReduce(), or worker.stepper(model, optim, loss): "
            "docs/how-to/come-from-accelerate.md."
        )
    if plan.layout.is_elastic:
        raise PlanError(
            f"an Accelerate program under an elastic layout ({plan.layout}): a worker that joins later runs the "
            "program from its first line, and its loops cannot be at the others' epoch. Use a fixed number, such as "
            "replicas=2: a lost worker then ends the attempt, and the run goes on from its last checkpoint."
        )
