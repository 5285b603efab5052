"""How a fault comes about in a worker or around it: slow steps, flipped bits, outputs that are off, cut cables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paceline.testing import (
    Programme,
    injection,
    network_namespaces,
    runs,
)
from paceline.testing.corruption import ModelCalls, flip_a_bit, poisoned
from paceline.testing.drill_folder import DrillFolder


def test_a_worker_that_calls_nobody_in_its_step_is_slow_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(injection.time, "sleep", slept.append)
    notes = DrillFolder.begin(tmp_path, Programme.parse("slow:worker=1,step=2,steps=1,times=3"), outside=())
    recorder: Any = SimpleNamespace(**{name: lambda *_, **__: 1 for name in ("begin", "enter", "wait", "join")})
    injection.install_faults(notes.path, worker_rank=1, recorder=recorder)
    for step, calls in ((1, 0), (2, 0), (3, 0), (2, 1)):
        slept.clear()
        recorder.begin(injection.GRADIENT_PASS, step)
        for _ in range(calls):
            recorder.enter("all_reduce", "gradients")
        recorder.begin(injection.BETWEEN, step)
        assert len(slept) == (step == 2), (step, calls)


def test_a_loss_leaps_only_where_its_worker_has_known_some(tmp_path: Path) -> None:
    notes = DrillFolder.begin(tmp_path, Programme.parse("spike:worker=1,step=6"), outside=())
    recorder: Any = SimpleNamespace(**{name: lambda *_, **__: 1 for name in ("begin", "enter", "wait", "join")})
    injection.install_faults(notes.path, worker_rank=1, recorder=recorder)
    model, spoilt = torch.nn.Identity(), []
    for step in range(3, 24, 3):  # every third batch is its own
        recorder.begin(injection.GRADIENT_PASS, step)
        spoilt.append(float(model(torch.ones(1, 2)).abs().max()) > 1000)
        recorder.begin(injection.BETWEEN, step)
    assert spoilt == [False] * 5 + [True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_of_one_weight_flips_and_it_stays_finite(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to(dtype)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    name = flip_a_bit(model, seed="flip:worker=1,step=2")
    changed = {key: int((value != before[key]).sum()) for key, value in model.named_parameters()}
    assert changed == {key: int(key == name) for key in before}
    assert all(bool(torch.isfinite(value).all()) for value in model.parameters())


def test_what_the_outermost_module_gives_is_spoilt_and_others_are_left_alone() -> None:
    seen: list[str] = []

    def came(module: torch.nn.Module, output: Any) -> Any:
        seen.append(type(module).__name__)
        return poisoned(output, "nan") if len(seen) == 2 else None

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    calls = ModelCalls(came)
    try:
        outputs = [model(torch.ones(2, 4)) for _ in range(3)]
    finally:
        calls.close()
    assert seen == ["Sequential"] * 3
    assert [bool(torch.isfinite(output).all()) for output in outputs] == [True, False, True]
    assert torch.equal(model(torch.ones(2, 4)), outputs[0]) and len(seen) == 3


def test_in_a_pipeline_what_its_stage_has_made_is_spoilt_and_stays_the_same_tensor() -> None:
    watched: list[str] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            watched.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class NoOutput(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.empty(2, 3, device="meta")

    here, model = torch.nn.Linear(4, 3), torch.nn.Sequential()
    model.extend([here, NoOutput()])
    made: list[torch.Tensor] = []
    here.register_forward_hook(lambda *given: made.append(given[-1]))
    calls = ModelCalls(lambda _, output: poisoned(output, "nan"))
    try:
        with Watching():
            output = model(torch.ones(2, 4))
    finally:
        calls.close()
    assert output.is_meta and bool(made[0].isnan().all())
    assert "is_floating_point" not in watched, "the pipeline would take that for the model's own"


def test_a_cable_is_whole_again_before_the_command_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    hosts: Any = [
        network_namespaces.NamespaceHost(name=name, address="", namespace="", device="", hosts_file=tmp_path)
        for name in network_namespaces.NAMES
    ]
    monkeypatch.setattr(network_namespaces, "mend", lambda host: done.append(f"mend {host.name}"))
    monkeypatch.setattr(runs.subprocess, "Popen", lambda *_, **__: done.append("start") or Over())
    run = runs._Run(tmp_path, Programme(), [], [])
    run._hosts = hosts
    run._start(deadline=0.0)
    assert done == ["mend far", "start", "start"]


class Over:
    """A process that has ended."""

    returncode = pid = 0

    def poll(self) -> int:
        return 0

    def kill(self) -> None: ...

    wait = poll


def test_a_spike_is_far_off_whatever_the_output_is() -> None:
    logits, loss, mask = torch.tensor([[2.0, -1.0]]), torch.tensor(0.5), torch.tensor([True])
    spoilt = poisoned({"logits": logits, "loss": loss, "mask": mask}, "spike")
    assert float(torch.nn.functional.cross_entropy(spoilt["logits"], torch.tensor([0]))) > 1000
    assert float(spoilt["loss"]) == 5000 and spoilt["mask"] is mask
