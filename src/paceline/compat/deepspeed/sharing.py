"""The engines of a program that train: one has the run's steps for itself, several share them.

The second `initialize` with an optimizer has both engines share from then on. A run has one plan, so all engines have
the same ZeRO stage, precision and offload. Batch, clipping, schedule, counters and loss scale are each engine's own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.sharded_tensors import local_part
from paceline.compat.deepspeed.shared_steps import SharedSteps
from paceline.compat.deepspeed_files.config import DeepSpeedConfig
from paceline.errors import PlanError
from paceline.worker.stateful_member import loop_of
from paceline.worker.step.loss_scale import LossScale
from paceline.worker.worker import Worker

if TYPE_CHECKING:
    from paceline.compat.deepspeed.engine import DeepSpeedEngine

__all__ = [
    "add_engine",
    "forget_engines",
    "has_engines",
    "name_of_next",
    "note_originals",
    "others_unchanged",
    "require_shareable",
]

_engines: list[DeepSpeedEngine] = []  # of this process, in their order
_models: list[nn.Module] = []  # of these
_scales: list[LossScale] = []
_originals: list[weakref.ref[Parameter]] = []  # the models' parameters, as they were before `initialize`


def has_engines() -> bool:
    """Whether an engine trains in this process."""
    return bool(_engines)


def name_of_next(kind: str) -> str:
    """What something of the next engine that trains is called in checkpoints."""
    return f"{kind}_{len(_engines) + 1}" if _engines else kind


def require_shareable(model: nn.Module, settings: DeepSpeedConfig, *, is_pipeline: bool) -> None:
    """Raise PlanError where an engine that is about to be made cannot train beside the one or more that are there."""
    first = _engines[0]
    if is_pipeline or first.is_pipeline:
        raise PlanError(
            "initialize() made a second engine that trains, and one of them is a pipeline: its stages are on all "
            "workers of a replica, in lockstep. Train both models without PipelineModule, or in two runs."
        )
    if any(one.has_begun for one in _engines):
        raise PlanError(
            "initialize() made another engine that trains after the first step had begun: make all engines before it."
        )
    ours, theirs = (
        dataclasses.replace(one.plan, batch=first.settings.plan.batch) for one in (settings, first.settings)
    )
    if ours != theirs:
        raise PlanError(
            f"initialize() made another engine that trains, of the plan {ours}; the first one has {theirs}. A run has "
            "one plan: give both configurations the same zero_optimization, precision, offload and communication. "
            "Batch, clipping, optimizer and schedule may differ."
        )
    known = {id(one) for other in _models for one in other.parameters()}
    known |= {id(one) for held in _originals if (one := held()) is not None}
    tied = [name for name, one in model.named_parameters() if id(one) in known]
    if tied:
        raise PlanError(
            f"initialize() made another engine that trains, whose {tied[0]} is another engine's, too: a step of one "
            "would change weights of both. Give the shared part to one engine, or train both as one module."
        )


def note_originals(model: nn.Module) -> None:
    """Note the parameters of a model that will train, before a layout replaces them: another model may have them, too.

    They are not kept alive: what nothing else has needs no comparison, and may be as large as the model."""
    _originals.extend(weakref.ref(one) for one in model.parameters())


def add_engine(engine: DeepSpeedEngine, worker: Worker) -> None:
    """Note an engine that trains; from the second one on all share the run's steps."""
    number = len(_engines) + 1
    scale = loop_of(worker).executor.loss_scale
    if number > 1 and scale.is_used:
        scale = LossScale(worker.plan.compute)
        worker.prepare(scale, name=name_of_next("loss_scale"))
    worker.prepare(engine.counts, name=name_of_next("deepspeed_engine"))
    _engines.append(engine)
    _models.append(engine.module)
    _scales.append(scale)
    for place in () if number == 1 else (0, 1) if number == 2 else (number - 1,):
        one, name = _engines[place], f"train_{place + 1}" if place else "train"
        one.share_steps(
            SharedSteps(worker, one.module, one.settings.batch, name=name, scale=_scales[place], beside=_models)
        )


def forget_engines() -> None:
    """The program is over."""
    for held in (_engines, _models, _scales, _originals):
        held.clear()


@contextlib.contextmanager
def others_unchanged(engine: DeepSpeedEngine) -> Iterator[None]:
    """A checkpoint has the state of all engines: meanwhile it is loaded for one, and the others keep theirs."""
    kept = [_Kept(one, scale) for one, scale in zip(_engines, _scales, strict=True) if one is not engine]
    yield
    for one in kept:
        one.put_back()


class _Kept:
    """A copy of an engine's state on this worker."""

    def __init__(self, engine: DeepSpeedEngine, scale: LossScale) -> None:
        self._tensors = [(one, local_part(one.detach()).clone()) for one in _tensors_of(engine.module)]
        self._optimizer = engine.optimizer
        self._options: list[dict[str, Any]] = []
        self._state: dict[Tensor, Any] = {}
        if engine.optimizer is not None:
            self._options = [_without(group, "params") for group in engine.optimizer.param_groups]
            self._state = {one: copy.deepcopy(state) for one, state in engine.optimizer.state.items()}
        parts: list[Any] = [engine.counts, engine.lr_scheduler, scale]
        self._parts = [(one, copy.deepcopy(one.state_dict())) for one in parts if hasattr(one, "load_state_dict")]

    def put_back(self) -> None:
        with torch.no_grad():
            for one, kept in self._tensors:
                local_part(one).copy_(kept)
        if self._optimizer is not None:
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
                group.update(options)
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)
        for one, state in self._parts:
            one.load_state_dict(state)


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _without(group: dict[str, Any], name: str) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != name})
