"""One list says what a run's state is: what is added to it comes back with each of the four carriers."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.reader import open_checkpoint
from paceline.comm.memory_checkpoint import MemoryCheckpoint
from paceline.worker.state.memory_checkpointing import read_state, write_state
from paceline.worker.state.run_state import Carrier, RunState, StateContents, When, describe_run
from paceline.worker.state.state_registry import StateRegistry


class Sampler:
    """Something new in the state: a second sampler, say."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Run:
    """A worker's state with an optimizer that has stepped, and the parts that `describe_run` lists."""

    def __init__(self, *, scales_losses: bool = True) -> None:
        registry = StateRegistry()
        registry.models["model"] = self.model = nn.Linear(3, 2)
        registry.optimizers["optimizer"] = self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.5, momentum=0.9
        )
        codecs: Any = mock.Mock()
        codecs.here.return_value = {}
        self.codecs = codecs
        self.contents = StateContents(registry, codecs, mock.Mock())
        self.parts = {
            name: Sampler()
            for name in (
                "losses",
                "loss_scale",
                "rounded",
                "streams",
                "sizes",
                "loop",
                "guard",
                "memory_checkpointer",
                "second",
            )
        }
        listed: dict[str, Any] = {name: part for name, part in self.parts.items() if name != "second"}
        listed |= {} if scales_losses else {"loss_scale": None, "rounded": None}
        describe_run(self.contents, attempt=3, **listed)
        self.contents.add("second_sampler", self.parts["second"].state_dict, self.parts["second"].load_state_dict)

    def train(self, number: int) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        for part in self.parts.values():
            part.position = number

    def values(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.contents.registry.tensors().items()}


def on_disk(directory: Path, state: RunState) -> RunState:
    writer = AsyncWriter(directory, keep=1, on_event=lambda event: None)
    writer.save(state.step, dict(state.tensors), dict(state.plain), {})
    path = writer.close()
    assert path is not None
    found = open_checkpoint(path)
    return RunState(step=found.step, tensors=found.load(), plain=found.state)


def in_memory(_: Path, state: RunState) -> RunState:
    with contextlib.closing(MemoryCheckpoint.create("test")) as memory:
        slot = memory.next
        slot.commit(write_state(slot, state.to_dict(), step=state.step, is_for_all=False))
        found = RunState.from_dict(read_state(slot))
        return RunState.from_dict({**found.to_dict(), "tensors": dict(found.tensors)})


def to_peer(_: Path, state: RunState) -> RunState:
    return RunState.from_dict(pickle.loads(pickle.dumps(state.to_dict())))


CARRIED = {Carrier.DISK: on_disk, Carrier.MEMORY: in_memory, Carrier.PEER: to_peer}


@pytest.mark.parametrize("carrier", CARRIED)
def test_what_is_added_to_the_list_comes_back_with_every_carrier(tmp_path: Path, carrier: Carrier) -> None:
    run, other = Run(), Run()
    run.train(7)
    carry: Callable[[Path, RunState], RunState] = CARRIED[carrier]
    state = carry(tmp_path, RunState.capture(run.contents, carrier, step=5))
    drawn = torch.rand(2)
    state.fill_model("model", other.contents.registry)
    state.fill_optimizer("optimizer", other.contents.registry)
    state.restore(other.contents, When.ARRIVED)
    assert (state.step, other.parts["streams"].position, other.parts["second"].position) == (5, 7, 0)
    state.restore(other.contents, When.BEFORE_TRAINING)
    assert other.parts["second"].position == other.parts["losses"].position == 7
    assert torch.equal(torch.rand(2), drawn), "the random state is that of the capture"
    found, expected = other.values(), run.values()
    assert found.keys() == expected.keys() and "optimizer.state.model.weight.momentum_buffer" in found
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_rollback_gives_back_the_same_list_but_for_what_only_goes_forward() -> None:
    run = Run()
    run.train(7)
    expected, drawn_from = run.values(), torch.get_rng_state()
    state = RunState.capture(run.contents, Carrier.ROLLBACK, step=5).copied(run.contents)
    for _ in range(2):
        run.train(8)
        torch.rand(3)
        state.roll_back(run.contents)
        assert all(torch.equal(value, expected[name]) for name, value in run.values().items())
        assert torch.equal(torch.get_rng_state(), drawn_from)
        found = {name: part.position for name, part in run.parts.items()}
        assert found == {
            "losses": 7,
            "loss_scale": 8,
            "rounded": 7,
            "second": 7,
            "streams": 8,
            "sizes": 8,
            "loop": 8,
            "guard": 8,
            "memory_checkpointer": 8,
        }
    assert run.codecs.drop_error_feedback.call_count == 2


def test_a_rollback_copy_uses_the_memory_of_the_one_before() -> None:
    run = Run()
    run.train(1)
    first = RunState.capture(run.contents, Carrier.ROLLBACK, step=1).copied(run.contents)
    run.train(2)
    second = RunState.capture(run.contents, Carrier.ROLLBACK, step=2).copied(run.contents, instead_of=first)
    assert {name: value.data_ptr() for name, value in second.tensors.items()} == {
        name: value.data_ptr() for name, value in first.tensors.items()
    }
    assert all(torch.equal(value, second.tensors[name]) for name, value in run.values().items())


def test_a_checkpoint_has_the_keys_that_earlier_versions_wrote_and_read() -> None:
    run = Run(scales_losses=False)
    run.train(1)
    state = RunState.capture(run.contents, Carrier.DISK, step=1)
    assert list(state.plain) == [
        "run",
        "random",
        "losses",
        "streams",
        "micro_batch",
        "attempt",
        "huggingface",
        "second_sampler",
    ]
    assert list(state.plain["run"]) == ["optimizers", "objects", "extra"]
    assert list(state.tensors) == [
        "model.weight",
        "model.bias",
        "optimizer.state.model.weight.momentum_buffer",
        "optimizer.state.model.bias.momentum_buffer",
    ]
    kept = {"run", "random", "losses", "streams", "micro_batch", "attempt", "loop", "second_sampler"}
    assert set(RunState.capture(run.contents, Carrier.MEMORY, step=1).plain) == kept
    assert set(RunState.capture(run.contents, Carrier.PEER, step=1).plain) == {
        *kept,
        "numerical_guard",
        "memory_checkpointer",
    }


def test_a_state_of_an_earlier_version_leaves_what_it_lacks_as_it_is() -> None:
    run = Run()
    run.parts["losses"].position = 4
    state = RunState.capture(run.contents, Carrier.DISK, step=1)
    plain = {name: value for name, value in state.plain.items() if name != "losses"}
    run.parts["losses"].position = 6
    RunState(step=1, tensors=state.tensors, plain=plain).restore(run.contents, When.BEFORE_TRAINING)
    assert run.parts["losses"].position == 6


def test_two_entries_of_one_name_are_refused() -> None:
    run = Run()
    with pytest.raises(ValueError, match="the run's state has 'second_sampler' already: give it another name"):
        run.contents.add("second_sampler", dict)
