"""Stages of ordinary models, one after the other in one process: the same losses and gradients as the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import stage_models
from paceline.parallel.model_units import find_units, seeded_units
from paceline.parallel.pipeline.stage_partition import StagePartition, keep_stages, partition_units, route
from paceline.parallel.pipeline.stage_replay import StageOutput, StageReplayer
from paceline.parallel.pipeline.tape import Tape
from paceline.parallel.pipeline.tape_recorder import record
from stage_models import Case

CPU = torch.device("cpu")
NUM_STAGES = 3


def whole(case: Case, micro: Any, seed: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The oracle: loss, gradients and buffers of one process."""
    with seeded_units(find_units(case.model), *seed):
        loss = case.forward(micro)
    loss.backward()
    gradients = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(case.model.named_buffers())


def in_stages(name: str, tape: Tape, cut: StagePartition, place: int, seed: tuple[int, ...]) -> tuple[Tensor, Any, Any]:
    """Loss, summed gradients and buffers of models that have only their own stage's weights."""
    cases = [stage_models.make(name) for _ in cut.stages]
    way = route(tape, cut)
    arrived: dict[int, Tensor] = {}
    parts: list[tuple[dict[int, Tensor], StageOutput]] = []
    for stage, case in enumerate(cases):
        keep_stages(case.model, cut, [stage])
        micro, units = case.micros[place], find_units(case.model)
        received = {n: t.detach().requires_grad_(tape.values[n].has_gradient) for n, t in arrived.items()}
        replayer = StageReplayer(case.model, units, device=CPU)
        part = replayer.replay(case.forward, micro, tape=tape, route=way, stage=stage, received=received, seed=seed)
        parts.append((received, part))
        arrived = part.values
    parts[-1][1].result.backward()
    for stage in reversed(range(len(cases) - 1)):
        numbers = way.with_gradient[stage]
        torch.autograd.backward(
            [parts[stage][1].values[n] for n in numbers], [parts[stage + 1][0][n].grad for n in numbers]
        )
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for stage, case in enumerate(cases):
        for key, parameter in case.model.named_parameters():
            if stage in cut.parameters[key] and parameter.grad is not None:
                gradients[key] = gradients[key] + parameter.grad if key in gradients else parameter.grad
            assert parameter.is_meta == (stage not in cut.parameters[key])
        buffers |= {key: b for key, b in case.model.named_buffers() if stage in cut.buffers[key]}
    return parts[-1][1].result.detach(), gradients, buffers


@pytest.mark.parametrize("name", [*stage_models.PLAIN, *stage_models.HUGGING_FACE])
def test_stages_have_the_loss_gradients_and_buffers_of_one_process(name: str) -> None:
    for place in (0, 2):  # the last micro-batch is smaller
        case = stage_models.make(name)
        before = copy.deepcopy(case.model.state_dict())
        tape = record(case.model, case.forward, case.micros[place], units=find_units(case.model), device=CPU)
        after = case.model.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        cut = partition_units(case.model, tape, units=find_units(case.model), num_stages=NUM_STAGES)
        loss, gradients, buffers = whole(case, case.micros[place], (7, place))
        staged_loss, staged_gradients, staged_buffers = in_stages(name, tape, cut, place, (7, place))
        assert torch.equal(staged_loss, loss)
        assert staged_gradients.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(staged_gradients[key], gradient, rtol=1e-12, atol=1e-14, msg=key)
        for key, buffer in buffers.items():
            assert torch.equal(staged_buffers[key], buffer), key


def test_views_of_parameters_are_recorded_without_gradients_too() -> None:
    case = stage_models.make("views")
    case.model.eval()
    with torch.no_grad():
        tape = record(case.model, case.forward, case.micros[0], units=find_units(case.model), device=CPU)
    assert not any(value.has_gradient for value in tape.values)


@pytest.mark.parametrize("name", ["checkpoints", "reentrant_checkpoints"])
def test_units_that_the_user_checkpoints_run_again_in_backward(name: str) -> None:
    case = stage_models.make(name)
    units = find_units(case.model)
    tape = record(case.model, case.forward, case.micros[0], units=units, device=CPU)
    cut = partition_units(case.model, tape, units=units, num_stages=1)
    calls: list[Any] = []
    for block in case.model.get_submodule("blocks").children():
        block.get_submodule("linear").register_forward_hook(lambda *_: calls.append(None))
    replayer = StageReplayer(case.model, units, device=CPU)
    out = replayer.replay(case.forward, case.micros[0], tape=tape, route=route(tape, cut), stage=0, received={})
    assert len(calls) == 4
    out.result.backward()
    assert len(calls) == 8
