"""`paceline.fits`: whether a plan's workers have the memory for a model, before anything is allocated."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.host_memory import memory_limit_bytes
from paceline.parallel.check.memory_estimate import estimate_memory, optimizer_bytes_each, share_stepped_whole
from paceline.parallel.check.model_check import check_model, is_too_large_to_run
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.expert.find_experts import routed_experts
from paceline.parallel.fully_sharded.sharded_units import units_of
from paceline.parallel.meta.fake_weights import filled_weights, shapes_only
from paceline.parallel.meta.tensor_tree import tensors_in
from paceline.parallel.meta.traced_costs import trace_costs
from paceline.parallel.sample_input import SampleInput, as_sample, guess_sample
from paceline.plan import Plan, read_plan
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.constants import built_in
from paceline.planner.memory import MEMORY_PARTS, MemoryPrediction, Verdict
from paceline.planner.model_costs import ModelCosts
from paceline.planner.named_cluster import cluster_named
from paceline.planner.search import price, remedy
from paceline.units import gigabytes_text

__all__ = ["Fits", "fits"]

CPU = torch.device("cpu")
CPU_RUNTIME = 0.4e9  # bytes of a process that has imported torch
VERDICTS: dict[Verdict, str] = {
    "fits": "yes",
    "unsure": "maybe: the estimate is too close to say",
    "does not fit": "no",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fits:
    """The answer of `paceline.fits`: true only where the plan surely fits. Printed, it is a table of bytes by part.

    `memory`: bytes of the fullest worker. `available`: bytes that each worker has. `remedy`: what would fit, "" where
    the plan does.
    """

    verdict: Verdict
    plan: Plan
    workers: int
    memory: MemoryPrediction
    available: float
    remedy: str

    def __bool__(self) -> bool:
        return self.verdict == "fits"

    def __str__(self) -> str:
        lines = [
            f"fits     {VERDICTS[self.verdict]}",
            f"plan     {self.plan}, {self.workers} {'worker' if self.workers == 1 else 'workers'}",
            f"memory   {gigabytes_text(self.memory.peak)} of {gigabytes_text(self.available)} GB on the fullest worker",
        ]
        for name, value in sorted(self.memory.parts.items(), key=lambda part: -part[1]):
            if value > 0:
                lines.append(f"         {gigabytes_text(value):>6} GB  {MEMORY_PARTS[name]}")
        return "\n".join([*lines, *([f"remedy   {self.remedy}"] if self.remedy else [])])


def fits(
    model: nn.Module,
    plan: Plan | str = "default",
    *,
    cluster: str | None = None,
    workers: int | None = None,
    sample: Any = None,
    optimizer: Optimizer | None = None,
) -> Fits:
    """Say whether the workers of a plan have the memory for a model's step. Nothing runs on values, or on a device.

    The model may be on the meta device. One forward is followed without values for what it keeps for backward;
    weights, gradients and optimizer state are counted as the plan splits them.

    Example::

        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.ReLU(), torch.nn.Linear(16384, 4096))
        found = paceline.fits(model, "shard=8+batch(size=64)", cluster="h100x8-ib", sample=torch.zeros(2, 4096))
        print(found if found else found.remedy)

    :param plan: a Plan or its text.
    :param cluster: of the planner's catalogue, or a TOML file like it; None: this machine, whose accelerators, or whose
        memory for processes, the workers share.
    :param workers: those of the plan if None, or of one replica.
    :param sample: input of the model, as of `worker.prepare`; None: a small one is guessed, and costs little memory.
    :param optimizer: whose state is counted exactly; None: Adam in mixed precision, 16 bytes a trained
        parameter in all.
    :return: an answer that is true where it surely fits.
    :raises PlanError: the plan breaks a rule, the model cannot be cut so, or no input is known.
    """
    wanted = read_plan(plan)
    count = workers or wanted.layout.workers or wanted.layout.workers_each
    wanted.require(workers=count)
    resolved = wanted.resolve(count)
    where = _this_machine(count) if cluster is None else cluster_named(cluster, count).cluster
    checked = check_model(
        model,
        resolved,
        device=CPU,
        hints=ModelHints(sample=sample),
        fill=filled_weights if _is_meta(model) else None,
    )
    if checked.refusals:
        first = checked.refusals[0]
        raise PlanError(f"{first.module}: {first.what} {first.remedy}")
    state = None
    if optimizer is not None:
        state = (
            max((one.peak or 0 for one in estimate_memory(model, checked, resolved, [optimizer])), default=0) or None
        )
    costs = _costs(model, None if sample is None else as_sample(sample))
    each = None if optimizer is None else optimizer_bytes_each(model, [optimizer])
    if each is not None:
        whole = 0.0 if optimizer is None else share_stepped_whole(model, [optimizer])
        costs = dataclasses.replace(costs, optimizer_bytes=each, stepped_whole=whole)
    calibration = built_in()
    found = price(resolved, costs, where, calibration, workers=count, state=state)
    advice = "" if found.fits == "fits" else remedy(resolved, costs, where, calibration, workers=count)
    return Fits(
        verdict=found.fits,
        plan=resolved,
        workers=count,
        memory=found.memory,
        available=where.device.memory,
        remedy=advice,
    )


def _costs(model: nn.Module, sample: SampleInput | None) -> ModelCosts:
    with _weights(model):
        known = sample or guess_sample(model, size=1)
    given = known.args, dict(known.kwargs)
    samples = next((int(one.shape[0]) for one in tensors_in(given) if one.dim()), 1)

    def run(fake: Callable[[Any], Any]) -> Any:
        args, kwargs = fake(given)
        return model(*args, **kwargs)

    return trace_costs(model, run, samples=samples, units=units_of(model), experts=routed_experts(model))


@contextlib.contextmanager
def _weights(model: nn.Module) -> Iterator[None]:
    fill = shapes_only if is_too_large_to_run(model) else filled_weights
    with fill(model) if _is_meta(model) else contextlib.nullcontext():
        yield


def _is_meta(model: nn.Module) -> bool:
    return any(one.is_meta for one in model.parameters())


def _this_machine(workers: int) -> Cluster:
    """A cluster of this host's memory; its rates are of no interest here."""
    device = catalogue().device("a100-80gb")
    if torch.cuda.is_available():
        there = torch.cuda.device_count()
        if workers > there:
            raise PlanError(
                f"{workers} workers, and this machine has {there} accelerators: name a cluster, as cluster='h100x8-ib'."
            )
        memory, runtime = float(torch.cuda.get_device_properties(0).total_memory), device.runtime
    else:
        memory, runtime = (memory_limit_bytes() or device.memory) / workers, CPU_RUNTIME
        device = dataclasses.replace(device, name="the CPU", is_synchronous=True)
    device = dataclasses.replace(device, memory=memory, runtime=runtime)
    return Cluster(device=device, hosts=1, devices_per_host=workers, network=device.network)
