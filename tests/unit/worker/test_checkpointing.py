"""A model is filled from a checkpoint, or from a snapshot, by the names of what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.comm.group import SingleWorkerGroup
from paceline.errors import CheckpointError
from paceline.worker.state.checkpoint_loading import load_model
from paceline.worker.state.run_state import Carrier, RunState, StateContents
from paceline.worker.state.state_registry import StateRegistry


class TwoNames(nn.Module):
    """A bias with two names, and a cache that is one of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.bias = self.inner.bias
        scale = torch.rand(2)
        self.register_buffer("scale", scale)
        self.register_buffer("cache", scale, persistent=False)


def saved(directory: Path, model: nn.Module, *, without: set[str]) -> Checkpoint:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if name not in without}
    writer = AsyncWriter(directory, keep=1, on_event=lambda event: None)
    writer.save(1, tensors, {}, {})
    path = writer.close()
    assert path is not None
    return open_checkpoint(path)


@pytest.mark.parametrize("without", ["bias", "inner.bias"])
def test_of_two_names_of_one_tensor_a_checkpoint_may_have_either(tmp_path: Path, without: str) -> None:
    model, other = TwoNames(), TwoNames()
    load_model("model", other, {"extra": {}}, saved(tmp_path, model, without={without}), SingleWorkerGroup(), {}, {})
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_tensor_that_a_checkpoint_has_under_no_name_is_told_by_all_of_them(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, TwoNames(), without={"bias", "inner.bias"})
    with pytest.raises(CheckpointError, match=r"model\.bias: in the model, but not .*\n.*model\.inner\.bias: in the m"):
        load_model("model", TwoNames(), {"extra": {}}, checkpoint, SingleWorkerGroup(), {}, {})


class Odd(nn.Module):
    """With an extra state that is a tensor, and a buffer that begins as None."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = torch.full((2,), scale)
        self.register_buffer("kept", None)

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = state


def used() -> nn.ModuleDict:
    model = nn.ModuleDict({"odd": Odd(3.0)})
    model["odd"].kept = torch.ones(2)
    return model


def saved_of(directory: Path, registry: StateRegistry) -> Checkpoint:
    writer = AsyncWriter(directory, keep=1, on_event=lambda event: None)
    writer.save(1, registry.tensors(), {"run": registry.plain()}, {})
    path = writer.close()
    assert path is not None
    return open_checkpoint(path)


def test_a_tensor_as_extra_state_and_a_buffer_that_was_none_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    registry = StateRegistry()
    registry.models["model"] = used()
    checkpoint, model = saved_of(tmp_path, registry), nn.ModuleDict({"odd": Odd()})
    plain = checkpoint.state["run"]
    load_model("model", model, plain, checkpoint, SingleWorkerGroup(), {}, {})
    odd: Any = model["odd"]
    assert (odd.scale.tolist(), odd.kept.tolist()) == ([3.0, 3.0], [1.0, 1.0])
    odd.scale.zero_()
    assert plain["extra"]["model"]["odd._extra_state"].tolist() == [3.0, 3.0], "it is filled from once more, perhaps"


def test_an_extra_state_that_was_stored_among_the_tensors_is_given_back(tmp_path: Path) -> None:
    model, other = Odd(3.0), Odd()
    other.scale = torch.ones(7)  # of another size, as what is pickled may be
    load_model(
        "model", other, {"extra": {"model": {}}}, saved(tmp_path, model, without=set()), SingleWorkerGroup(), {}, {}
    )
    assert other.scale.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("there", "here"), [(nn.Linear(2, 2), Odd()), (Odd(), nn.Linear(2, 2))])
def test_an_extra_state_that_only_one_side_has_is_refused(tmp_path: Path, there: nn.Module, here: nn.Module) -> None:
    registry = StateRegistry()
    registry.models["model"] = nn.Sequential(there)
    checkpoint = saved_of(tmp_path, registry)
    with pytest.raises(CheckpointError, match=r"model\.0\._extra_state: in the .*, but not in the "):
        load_model("model", nn.Sequential(here), checkpoint.state["run"], checkpoint, SingleWorkerGroup(), {}, {})


def test_a_snapshot_has_a_tensor_as_extra_state_and_buffers_as_they_were() -> None:
    registry = StateRegistry()
    registry.models["model"] = model = used()
    odd: Any = model["odd"]
    no_codecs: Any = mock.Mock()
    contents = StateContents(registry, no_codecs, mock.Mock())
    snapshot = RunState.capture(contents, Carrier.ROLLBACK, step=1).copied(contents)
    for _ in range(2):
        odd.scale.zero_()
        odd.kept = None
        snapshot.roll_back(contents)
        assert (odd.scale.tolist(), odd.get_buffer("kept").tolist()) == ([3.0, 3.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("known", "new"),
    [
        (("model", "gan"), ("optimizer", "gan.optim")),
        (("optimizer", "gan.optim"), ("model", "gan")),
        (("model", "gan"), ("model", "gan.critic")),
        (("model", "model.critic"), ("model", None)),
        (("optimizer", "gan"), ("model", "gan.state")),
    ],
)
def test_names_by_which_tensors_could_not_be_told_apart_are_refused(
    known: tuple[str, str], new: tuple[str, str | None]
) -> None:
    registry, model = StateRegistry(), nn.Linear(1, 1)
    name = registry.name_for(*known)
    if known[0] == "model":
        registry.models[name] = model
    else:
        registry.optimizers[name] = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=rf"a new {new[0]} cannot be named .* beside '{name}'"):
        registry.name_for(*new)


def test_other_names_may_have_dots() -> None:
    registry, model = StateRegistry(), nn.Linear(1, 1)
    registry.models[registry.name_for("model", "gan")] = model
    registry.optimizers[registry.name_for("optimizer", "gan_optim.a")] = torch.optim.SGD(model.parameters())
    assert registry.name_for("scheduler", "gan.schedule") == "gan.schedule", "schedulers have no tensors"
    assert registry.name_for("optimizer", "gan_optim") == "gan_optim"
