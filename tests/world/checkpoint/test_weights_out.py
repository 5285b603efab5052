"""Whole weights leave a run under the model's own names in every layout, and half of them never do without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from forked import World
from layout_runs import ROWS, Text, beside, next_word, plan_of, prepared, workers_of
from paceline.comm.sharded_tensors import local_part
from paceline.errors import CheckpointError
from paceline.plan import Batch, Layout, Plan


def refusal(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def weights_out(worker: Any, out: Path) -> dict[str, Any]:
    """Train, take the weights out in each way, spoil them, and load them again."""
    model, optim = prepared(worker, drop=0.0)
    step = worker.stepper(model, optim, next_word)
    for batch in worker.batches(Text(ROWS)):
        step(batch)
    weights = worker.state_dict(model)
    worker.save_model(out / "model.safetensors")
    worker.save_model(str(out / "folder"), model)
    with pytest.raises(CheckpointError, match="could not be written"):
        worker.save_model(out / "model.safetensors" / "below.safetensors")
    with pytest.raises(ValueError, match=r"safetensors.*worker.state_dict"):
        worker.save_model(out / "model.pt")
    with pytest.raises(ValueError, match="was not prepared"):
        worker.state_dict(nn.Linear(1, 1))
    if worker.is_first:
        torch.save(weights, out / "model.pt")
    worker.wait()
    refused = [refusal(model.state_dict), refusal(model.blocks[0].state_dict), refusal(nn.Sequential(model).state_dict)]
    by_torch = 0
    if worker.plan.layout.shard == worker.workers == 2:
        by_torch = len(get_model_state_dict(model))
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).mul_(0.5)
    model.load_state_dict(torch.load(out / "model.pt"))
    again = worker.state_dict(model)
    loss = worker.evaluate(model, Text(8), next_word)["loss"]
    return {"weights": weights, "refused": refused, "again": again, "loss": loss, "by_torch": by_torch}


LAYOUTS = [Layout(shard=2), Layout(shard=2, zero=1), Layout(replicas=2, tensor=2), Layout(shard=2, stages=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whole_weights_leave_every_layout(tmp_path: Path, layout: Layout) -> None:
    out, alone = tmp_path / "out", tmp_path / "alone"
    out.mkdir()
    alone.mkdir()
    first, *others = World(tmp_path)(lambda worker: weights_out(worker, out), workers_of(layout), plan_of(layout))
    [oracle] = beside(tmp_path)(lambda worker: weights_out(worker, alone), 1, plan_of(Layout()))
    whole: dict[str, Tensor] = oracle["weights"]
    assert not any(oracle["refused"][:3])
    for found in (first["weights"], first["again"], torch.load(out / "model.pt")):
        assert list(found) == list(whole)
        torch.testing.assert_close(found, whole, rtol=1e-7, atol=1e-9)
        assert found["head.weight"] is found["words.weight"] or found["head.weight"].equal(found["words.weight"])
    for file in (out / "model.safetensors", out / "folder" / "model.safetensors"):
        stored = load_file(file)
        assert set(whole) - set(stored) == {"head.weight"}  # tied: it is stored once
        torch.testing.assert_close(stored, {name: whole[name] for name in stored}, rtol=1e-7, atol=1e-9)
    assert first["loss"] == pytest.approx(oracle["loss"], rel=1e-7)
    for result in (first, *others):
        assert all("worker.save_model" in text and "Layout(" in text for text in result["refused"])
        assert result["refused"][0].startswith("state_dict() of Net was called"), "the user's class, not torch's"
        assert result["by_torch"] == (len(whole) if layout.workers_each == layout.shard else 0)
    assert all(result["weights"] == {} for result in others)


def buffers_and_extra(worker: Any, out: Path) -> tuple[dict[str, Any], list[str]]:
    class Noted(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"width": self.in_features}

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == {"width": self.in_features}

    model = worker.prepare(nn.Sequential(Noted(4, 6), nn.BatchNorm1d(6), Noted(6, 2)))
    worker.save_model(out / "noted.safetensors")
    return worker.state_dict(model), sorted(model.state_dict() if worker.workers == 1 else ())


def test_buffers_and_extra_state_leave_too(tmp_path: Path) -> None:
    def run(worker: Any) -> Any:
        return buffers_and_extra(worker, tmp_path)

    [(alone, names)] = beside(tmp_path)(run, 1, Plan(batch=Batch(size=4)))
    (split, _), _ = World(tmp_path)(
        run,
        2,
        Plan(layout=Layout(stages=2), batch=Batch(size=4)),
    )
    assert sorted(split) == sorted(alone) == names
    assert split["0._extra_state"] == {"width": 4} and split["1.running_mean"].shape == (6,)
    assert set(load_file(tmp_path / "noted.safetensors")) == {name for name in names if "_extra_state" not in name}
