"""The command `paceline import`: read, compare with the script, show, write."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.checkpoint_dir import candidates
from paceline.checkpoint.export import write_weights
from paceline.compat.imports.fit import Fit, OptimizerFit, fit_checkpoint, fit_optimizer
from paceline.compat.imports.foreign import ForeignCheckpoint
from paceline.compat.imports.naming import Naming, likely_prefix
from paceline.compat.imports.readers import read_foreign
from paceline.compat.imports.report import fit_table, source_line
from paceline.compat.imports.write import write_checkpoint
from paceline.errors import CheckpointError, PlanError
from paceline.plan import CommandPlan
from paceline.units import bytes_text, shell_text
from paceline.worker.script_inspection import inspect_script

__all__ = ["import_checkpoint"]


def import_checkpoint(arguments: argparse.Namespace) -> int:
    """Do what the command's arguments say; returns its exit status: 1 where the checkpoint does not fit."""
    naming = Naming(arguments.prefix_strip, arguments.rename)
    if arguments.run_dir is not None:
        _require_new(arguments.run_dir)
    found = read_foreign(arguments.source)
    step: int = arguments.step if arguments.step is not None else found.step or 0
    print(source_line(found, step))
    if arguments.script is None:
        return _without_script(found, naming, arguments, step)
    prepared = _prepared(arguments.script, arguments.args)
    name, model = _model(prepared, arguments)
    fit = fit_checkpoint(found, model, naming)
    optimizers, schedulers = _others(found, prepared, naming, is_left_out=arguments.weights_only)
    anew = [key for key in prepared if key != name and key not in optimizers and key not in schedulers]
    for line in fit_table(fit, optimizers, schedulers, anew):
        print(line)
    if found.left_out:
        print(f"  not taken: {', '.join(found.left_out[:8])}")
    if not _is_accepted(fit, found, arguments):
        return 1
    if arguments.dry_run:
        return 0
    if arguments.out is not None:
        _write_weights(arguments.out, fit, step)
    if arguments.run_dir is not None:
        written = _write(arguments.run_dir, found, fit, name, optimizers, schedulers, step, prepared)
        print(f"written: {written}")
        command = shell_text("paceline", "run", str(arguments.script), "--run-dir", str(arguments.run_dir))
        print(f"begin with: {command}")
    return 0


def _require_new(run_dir: Path) -> None:
    if any(candidates(run_dir / "checkpoints")):
        raise PlanError(
            f"{run_dir} has checkpoints of its own, from which its run goes on. Name another --run-dir for the run "
            "that begins with what is imported."
        )


def _without_script(found: ForeignCheckpoint, naming: Naming, arguments: argparse.Namespace, step: int) -> int:
    tensors = naming.apply_all(found.tensors, ())
    size = sum(one.num_bytes for one in tensors.values())
    print(f"  {len(tensors):,} tensors, {bytes_text(size)}: {', '.join(list(tensors)[:6])}, ...")
    if arguments.out is not None and not arguments.dry_run:
        _write_weights(arguments.out, Fit(taken=tensors), step)
    return 0


def _write_weights(path: Path, fit: Fit, step: int) -> None:
    infos = {name: (fit.converted.get(name, one.dtype), one.shape) for name, one in fit.taken.items()}
    for written in write_weights(path, infos, fit.read, ties=fit.ties, step=step):
        print(f"written: {written}")


def _prepared(script: Path, args: str) -> dict[str, Any]:
    """What the script prepares, by name; it is run as far as its first loop, in this process, without peers."""
    if not script.is_file():
        raise PlanError(f"There is no file {script}. Name the script whose run is to begin with the checkpoint.")
    report = inspect_script(script, args=tuple(shlex.split(args)), plan=CommandPlan(), workers=1)
    return report.prepared


def _model(prepared: dict[str, Any], arguments: argparse.Namespace) -> tuple[str, nn.Module]:
    models = {name: one for name, one in prepared.items() if isinstance(one, nn.Module)}
    wanted = arguments.model or (next(iter(models)) if len(models) == 1 else None)
    if wanted not in models:
        listed = ", ".join(models) or "none"
        said = f"--model {wanted}" if wanted else "which of them gets the weights is not said"
        raise PlanError(
            f"{arguments.script} prepares the models {listed}; {said}. Give --model with one of these names."
        )
    return wanted, models[wanted]


def _others(
    found: ForeignCheckpoint, prepared: dict[str, Any], naming: Naming, *, is_left_out: bool
) -> tuple[dict[str, OptimizerFit], dict[str, Any]]:
    """The state of optimizers and schedulers, by the script's names, in the order in which both have them."""
    if is_left_out:
        return {}, {}
    models = {name: one for name, one in prepared.items() if isinstance(one, nn.Module)}
    optimizers = {name: one for name, one in prepared.items() if isinstance(one, Optimizer)}
    schedulers = [name for name, one in prepared.items() if isinstance(one, LRScheduler)]
    if found.optimizers and len(found.optimizers) != len(optimizers):
        raise PlanError(
            f"{found.source} has the state of {len(found.optimizers)} optimizers, and the script prepares "
            f"{len(optimizers)}. Have it prepare as many, or give --weights-only."
        )
    fits = {
        name: fit_optimizer(state, one, models, naming)
        for (name, one), state in zip(optimizers.items(), found.optimizers, strict=False)
    }
    return fits, dict(zip(schedulers, found.schedulers, strict=False))


def _is_accepted(fit: Fit, found: ForeignCheckpoint, arguments: argparse.Namespace) -> bool:
    """Whether it may be written; says why not, and what may help."""
    if not fit.is_whole:
        print("nothing is written: the script's model needs what is missing, in its own shapes")
        prefix = likely_prefix(list(found.tensors), [*fit.missing, *fit.taken])
        if prefix:
            print(f"most of these names are there behind {prefix!r}: try --prefix-strip {prefix}")
        return False
    if fit.unexpected and not arguments.leave_unexpected:
        print("nothing is written: the model has none of what is unexpected; --leave-unexpected passes over it")
        return False
    return True


def _write(
    run_dir: Path,
    found: ForeignCheckpoint,
    fit: Fit,
    model: str,
    optimizers: dict[str, OptimizerFit],
    schedulers: dict[str, Any],
    step: int,
    prepared: dict[str, Any],
) -> Path:
    """Write the checkpoint, as a run that had taken `step` steps would have."""
    tensors: dict[str, Tensor] = {f"{model}.{name}": fit.read(name) for name in fit.taken}
    for name, one in optimizers.items():
        for parameter, entries in one.tensors.items():
            for entry, value in entries.items():
                tensors[f"{name}.state.{parameter}.{entry}"] = value.read().detach().contiguous()
    extra = {name: {} for name in prepared if name == model}
    objects = {
        "optimizers": {name: {"groups": one.groups, "values": one.values} for name, one in optimizers.items()},
        "objects": schedulers,
        "extra": extra,
    }
    about = {"source": str(found.source), "kind": found.kind}
    state = {"run": objects, "streams": {}, "attempt": 0, "imported": about}
    ties = {f"{model}.{name}": f"{model}.{other}" for name, other in fit.ties.items()}
    try:
        return write_checkpoint(run_dir / "checkpoints", step, tensors, ties, state, {"imported": about})
    except CheckpointError as error:
        raise CheckpointError(f"{found.source} was not imported: {error}") from error
