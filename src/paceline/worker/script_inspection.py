"""Run a script up to its first loop in one process, without peers, to look at what it prepares: `inspect_script`.

The script's `paceline.run(train)` gives `train` a `InspectionWorker` in place of a worker. What it prepares is looked
at for the whole layout; what would need other workers is answered as if there were one; the first call that trains or
measures ends it. Models are made without the memory of their weights. Where the script does not stand that, because it
looks into them, it is run a second time with real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import config
from paceline.errors import PlanError, Reason
from paceline.parallel.check.memory_estimate import (
    MemoryEstimate,
    estimate_memory,
    optimizer_bytes_each,
    share_stepped_whole,
)
from paceline.parallel.check.model_check import check_model, is_too_large_to_run
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.check.remarks import Remark, remarks
from paceline.parallel.expert.find_experts import routed_experts
from paceline.parallel.fully_sharded.sharded_units import units_of
from paceline.parallel.meta.fake_weights import fake_weights, filled_weights, shapes_only
from paceline.parallel.meta.tensor_tree import tensors_in
from paceline.parallel.meta.traced_costs import trace_costs
from paceline.parallel.precision import convert
from paceline.parallel.sample_input import SampleInput, as_sample, guess_sample
from paceline.plan import CommandPlan, Job, Plan, read_plan
from paceline.planner.model_costs import ModelCosts
from paceline.worker.data.data_request import DataRequest, options_of, read_request

__all__ = ["InspectionReport", "InspectionWorker", "ScriptData", "inspect_script"]

T = TypeVar("T")
CPU = torch.device("cpu")
LARGE = 1 << 28  # parameters; a forward of more takes seconds
FEW = 2  # samples on which costs are counted
PACKAGE = "paceline"  # by name: its `run` is above this room


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScriptData:
    """What a script gives to its first `worker.batches`, under which plan."""

    request: DataRequest
    plan: Plan

    @classmethod
    def of(cls, plan: Plan, dataset: Any, options: Mapping[str, Any]) -> ScriptData:
        """Read the call's options, by either of their names; the plan has what a DataLoader says of its steps."""
        request = read_request(dataset, plan.batch, seed=plan.batch.seed, **options_of(options))
        return cls(request=request, plan=dataclasses.replace(plan, batch=request.within(plan.batch)))


@dataclasses.dataclass(kw_only=True, slots=True)
class InspectionReport:
    """What came of it: refusals of the plan and of all models, remarks, and what each worker would hold."""

    plan: Plan
    workers: int
    refusals: list[Reason] = dataclasses.field(default_factory=list[Reason])
    remarks: list[Remark] = dataclasses.field(default_factory=list[Remark])
    sizes: dict[str, list[MemoryEstimate]] = dataclasses.field(
        default_factory=dict[str, list[MemoryEstimate]]
    )  # by model
    costs: dict[str, ModelCosts] = dataclasses.field(default_factory=dict[str, ModelCosts])  # by model, of one sample
    prepared: dict[str, Any] = dataclasses.field(
        default_factory=dict[str, Any]
    )  # all that was given to `prepare`, by the names that checkpoints have
    not_counted: dict[str, str] = dataclasses.field(
        default_factory=dict[str, str]
    )  # why not on the script's data, by model; "": it has no stepper


def inspect_script(
    script: Path,
    *,
    args: Sequence[str],
    plan: CommandPlan,
    workers: int | None,
    rank: int | None = 0,
    at_data: Callable[[ScriptData], None] | None = None,
) -> InspectionReport:
    """Run `script` as far as it prepares, as worker `rank`, and return what was found.

    `plan` and `workers` are the command's, which count before the script's own. `rank` None: as the last worker, and
    not as the first one even where it is the only one, so that it does not do again what the first worker does.
    `at_data` is called with what the script gives to its first `worker.batches`, while all that the script holds is
    there. Raises PlanError where the script never calls paceline.run, and whatever it raises itself, with real weights.
    """
    run = functools.partial(_run, script, args, plan=plan, workers=workers, rank=rank, at_data=at_data)
    try:
        with fake_weights():
            return run(fill=filled_weights)
    except (PlanError, SyntaxError):
        raise
    except Exception as error:  # the user's code, which is run again: an error that stays comes out there
        found = run(fill=None)
        first = str(error).strip().partition("\n")[0]
        what = (
            f"its weights were made for this look, since without them the script raises {type(error).__name__}: {first}"
        )
        found.remarks.insert(0, Remark(module=script.name, what=what))
        return found


class _InspectionDone(BaseException):
    """All models of the script are prepared: it has been seen."""


class InspectionWorker:
    """Stands where a script has its worker: looks at what is prepared, and ends the script where it would train.

    Public names are those of `Worker`.
    """

    def __init__(
        self,
        findings: InspectionReport,
        *,
        fill: Callable[[nn.Module], Any] | None,
        rank: int | None = 0,
        at_data: Callable[[ScriptData], None] | None = None,
    ) -> None:
        """`fill`: how a model without weights is made to run; None: it has them. `rank`: which worker it answers as;
        None: the last one. `at_data`: gets what the script reads, before the script is ended.
        """
        self.rank, self.step = findings.workers - 1 if rank is None else rank, 0
        self.is_first, self.device = rank == 0, CPU
        self._at_data = at_data
        self.plan, self.workers = findings.plan, findings.workers
        self._findings, self._fill = findings, fill
        self._models: dict[str, tuple[nn.Module, Any]] = {}  # by name, with its look
        self._samples: dict[str, SampleInput | None] = {}  # that the script has given, or that were guessed
        self._optimizers: list[Optimizer] = []
        self._forward: tuple[nn.Module, Callable[[Any], Any]] | None = None  # the stepper's, of a micro-batch

    def prepare(
        self, thing: T, *, name: str | None = None, buffers: Mapping[str, str] | None = None, **hints: Any
    ) -> T:
        """Look at a model, or note an optimizer; returns it unchanged. `hints`: those of `Worker.prepare`."""
        if isinstance(thing, nn.Module):
            self._look(thing, name, ModelHints(**hints))
        elif isinstance(thing, Optimizer):
            self._optimizers.append(thing)
        self._findings.prepared[name or self._free_name(thing)] = thing
        return thing

    def _free_name(self, thing: Any) -> str:
        """The name that checkpoints have for something that the script gives none (`StateRegistry.name_for`)."""
        kinds = {nn.Module: "model", Optimizer: "optimizer", torch.optim.lr_scheduler.LRScheduler: "scheduler"}
        kind = next((word for cls, word in kinds.items() if isinstance(thing, cls)), "object")
        names = (kind if number == 1 else f"{kind}_{number}" for number in itertools.count(1))
        return next(one for one in names if one not in self._findings.prepared)

    def stepper(
        self,
        model: Any,
        optimizer: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        forward: Callable[[Any, Any], Any] | None = None,
        **options: Any,
    ) -> Callable[[Any], NoReturn]:
        """Note the stepper's forward, and return what ends the script when it is called."""
        one = model[0] if isinstance(model, (list, tuple)) and len(model) == 1 else model
        if isinstance(one, nn.Module) and forward is not None:
            self._forward = one, functools.partial(forward, one)
        elif isinstance(one, nn.Module) and loss is not None:
            self._forward = one, lambda micro: loss(one(micro[0]), micro[1])
        if self.plan.layout.stages > 1 and not isinstance(model, nn.Module) and len(model) > 1:
            what = f"A stepper over {len(model)} models under Layout(stages=...): one pipeline is of one model."
            remedy = "Make a stepper for each, or one module of all that are trained together."
            self._findings.refusals.append(Reason(module="worker.stepper", what=what, remedy=remedy))
        return self._end

    def report(self, **metrics: Any) -> None:
        """Nothing is reported."""

    def save(self) -> None:
        """Nothing is saved."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's own, which is whole."""
        return model.state_dict()

    def restore(self, path: str | None = None) -> int:
        """Nothing is restored."""
        return 0

    def wait(self) -> None:
        """There are no peers to wait for."""

    def average(self, value: Tensor | float) -> Tensor:
        """Return the value as it is."""
        return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)

    def gather(self, value: T) -> list[T]:
        """Return the value as often as there are workers."""
        return [value] * self.workers

    def batches(self, dataset: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Count what a micro-batch of this data costs, and end the script."""
        data = ScriptData.of(self.plan, dataset, kwargs)
        if self._forward is not None:
            try:
                self._count(*self._forward, data.request.collate(_first(data.request.dataset)))
            except Exception as error:  # the user's code, without values
                self._findings.not_counted[self._name_of(self._forward[0])] = _first_line(error)
        if self._at_data is not None:
            self._at_data(data)
        self._end()

    def evaluate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End the script."""
        self._end()

    backward = clip_gradients = evaluate

    def _count(self, model: nn.Module, forward: Callable[[Any], Any], micro: Any) -> None:
        self._findings.costs[self._name_of(model)] = _costs(model, lambda fake: forward(fake(micro)), samples=FEW)

    def _name_of(self, model: nn.Module) -> str:
        return next(name for name, (other, _) in self._models.items() if other is model)

    def close(self) -> None:
        """The script has come to its end, or to its first loop: count what workers would hold."""
        for name, (model, look) in self._models.items():
            if name not in self._findings.costs:
                self._findings.not_counted.setdefault(name, "")
                try:
                    self._count_sample(name, model, self._samples.get(name))
                except Exception as error:  # as above
                    self._findings.not_counted[name] = self._findings.not_counted[name] or _first_line(error)
            each = optimizer_bytes_each(model, self._optimizers)
            if each is not None and name in self._findings.costs:
                whole = share_stepped_whole(model, self._optimizers)
                costs = dataclasses.replace(self._findings.costs[name], optimizer_bytes=each, stepped_whole=whole)
                self._findings.costs[name] = costs
            if look.errors:
                continue  # no worker holds any of it
            own = {id(one) for one in model.parameters()}
            optimizers = [
                one for one in self._optimizers if any(id(p) in own for g in one.param_groups for p in g["params"])
            ]
            self._findings.sizes[name] = estimate_memory(model, look, self.plan, optimizers)

    def _count_sample(self, name: str, model: nn.Module, sample: SampleInput | None) -> None:
        """Count on the sample that the script has given, or that was guessed, in place of its data."""
        if sample is None:
            return
        given = sample.args, dict(sample.kwargs)
        samples = next(int(one.shape[0]) for one in tensors_in(given) if one.dim())

        def run(fake: Callable[[Any], Any]) -> Any:
            args, kwargs = fake(given)
            return model(*args, **kwargs)

        self._findings.costs[name] = _costs(model, run, samples=samples)

    def _end(self, *_: Any) -> NoReturn:
        raise _InspectionDone

    def _look(self, model: nn.Module, name: str | None, hints: ModelHints) -> None:
        full = name or ("model" if not self._models else f"model_{len(self._models) + 1}")
        convert(model, self.plan.compute.precision)
        look = check_model(model, self.plan, device=CPU, hints=hints, fill=self._fill)
        self._findings.refusals += look.refusals
        given = as_sample(hints.sample) if hints.sample is not None else None
        fill = shapes_only if self._fill is not None and is_too_large_to_run(model) else self._fill
        with fill(model) if fill is not None else contextlib.nullcontext():
            known = look.sample
            if known is None and not look.errors and (fill is shapes_only or not _is_large(model)):
                with contextlib.suppress(PlanError):  # this layout needs none
                    known = given or guess_sample(model, size=1)
            if not look.errors or known is not None:
                self._findings.remarks += remarks(model, look, self.plan.layout, sample=known)
        self._models[full] = model, look
        if given is not None or known is not None:
            self._samples[full] = given or known


def _run(
    script: Path,
    args: Sequence[str],
    *,
    plan: CommandPlan,
    workers: int | None,
    rank: int | None,
    at_data: Callable[[ScriptData], None] | None,
    fill: Callable[[nn.Module], Any] | None,
) -> InspectionReport:
    """Run the script once, as `python script.py` would, with an `InspectionWorker`."""
    seen: list[InspectionReport] = []
    command_plan = plan

    def run(function: Callable[[Any], Any], *, plan: Plan | str | None = None, **job: Any) -> NoReturn:
        wanted = command_plan.over(None if plan is None else read_plan(plan))
        own = wanted.layout.workers if command_plan.whole is not None else None
        findings = _findings(wanted, workers or own or job.get("workers"))
        seen.append(findings)
        config.read(Job, {key: value for key, value in job.items() if value is not None})
        worker = InspectionWorker(findings, fill=fill, rank=rank, at_data=at_data)
        with contextlib.suppress(_InspectionDone):
            function(worker)
        worker.close()
        raise _InspectionDone

    with _run_replaced(run), _as_program(script, args), contextlib.suppress(_InspectionDone):
        runpy.run_path(str(script), run_name="__main__")
    if not seen:
        raise PlanError(
            f"{script} ended without calling paceline.run(...): there is nothing to look at. "
            'End the script with: if __name__ == "__main__": paceline.run(train)'
        )
    return seen[0]


def _costs(model: nn.Module, run: Callable[[Callable[[Any], Any]], Any], *, samples: int) -> ModelCosts:
    return trace_costs(model, run, samples=samples, units=units_of(model), experts=routed_experts(model))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _is_large(model: nn.Module) -> bool:
    """Whether one forward on a small input takes long, and the model is not run only to remark on it."""
    return sum(one.numel() for one in model.parameters()) > LARGE


def _first(dataset: Any) -> list[Any]:
    """The first few samples, repeated where there are fewer."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        found = [dataset[index % len(dataset)] for index in range(FEW)]
    else:
        found = list(itertools.islice(dataset, FEW))
    return [found[index % len(found)] for index in range(FEW)]


def _findings(plan: Plan, workers: int | None) -> InspectionReport:
    """The plan as it would be on so many workers, and every rule that it breaks."""
    count = workers or plan.layout.workers or plan.layout.workers_each
    findings = InspectionReport(plan=plan.resolve(count), workers=count)
    for rule in plan.check(workers=count):
        findings.refusals.append(Reason(module="plan", what=rule.says, remedy=rule.fix))
    return findings


@contextlib.contextmanager
def _run_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, `paceline.run` is another function."""
    package: Any = importlib.import_module(PACKAGE)
    former = package.run
    package.run = run
    try:
        yield
    finally:
        package.run = former


@contextlib.contextmanager
def _as_program(script: Path, args: Sequence[str]) -> Iterator[None]:
    """While it lasts, the process has the script's arguments and its folder; what it prints goes to stderr."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = argv, path
