"""Checks of a program against the command that is to start it, as far as its text tells; before anything starts."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PlanError
from paceline.plan.command_plan import CommandPlan
from paceline.plan.plan import Plan
from paceline.plan.program_text import ProgramText
from paceline.units import shell_text

__all__ = ["check_program", "require_fixed_replicas"]


def check_program(script: Path, plan: CommandPlan, *, run_as: str | None) -> None:
    """Raise PlanError where the program's text shows that workers would start in vain: it never becomes distributed, or
    it makes process groups of its own under a plan that cannot be theirs. `run_as`: `Job.run_as`."""
    if run_as is not None:
        return  # what stands in for the framework knows
    text = ProgramText.of(script)
    if text.uses_rpc and not text.runs_paceline:
        raise PlanError(
            f"{script} calls torch.distributed.rpc, whose agents find each other by MASTER_ADDR and MASTER_PORT, where "
            "nothing listens under paceline run. Start it as before: by torchrun, or by python where it starts its "
            "workers itself."
        )
    if text.is_never_distributed:
        raise PlanError(
            f"{script} trains in one process: it never calls paceline.run(train) or init_process_group(), and each "
            f"worker would do all of the work. Start it with {shell_text('python', str(script))}, or give it to "
            "workers: docs/tutorials/first-script.md, or DistributedDataParallel as torch has it "
            "(docs/how-to/bring-your-torch-program.md)."
        )
    if text.makes_groups and not text.runs_paceline and plan.whole is not None:
        require_fixed_replicas(plan.whole)


def require_fixed_replicas(plan: Plan) -> None:
    """Raise PlanError where the plan is no fixed number of replicas: torch's groups have fixed members, and a program
    that calls torch.distributed splits its model by itself."""
    layout = plan.layout
    if layout.is_elastic:
        raise PlanError(
            f"This program makes a process group of torch, whose members are fixed, and in this run ({plan}) workers "
            "come and go. Give a fixed number, such as --workers 2; --restart-lost begins again after a lost worker. "
            "A run that survives it is one of worker.prepare(...): docs/how-to/come-from-ddp.md."
        )
    if layout.workers_each > 1 or plan.is_local or plan.is_asynchronous or plan.compute.offload == "all":
        raise PlanError(
            f"The plan {plan} says how Paceline splits a model or sums gradients, and this program does that by itself "
            "(DistributedDataParallel, fully_shard, DTensor, its own calls). Leave the plan out, or give "
            "--plan replicas=N. For plans of Paceline: docs/how-to/come-from-ddp.md."
        )
