"""State that lies in mapped files: the numbers of the optimizer's own step, room that is there, files without names."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from paceline.errors import PlanError
from paceline.parallel.offload import optimizer_state as offloaded_state
from paceline.parallel.offload.memory import EXTENT_BYTES, HostMemory, MappedMemory, room_for
from paceline.parallel.offload.optimizer_state import OffloadedState, state_bytes

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD-plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "NAdam": torch.optim.NAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,  # it makes its state when it is made itself
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),  # its state has other shapes; it is not elementwise
}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def trained(make: Make, memory: Any = None, *, steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The model and optimizer after some steps with a schedule, and how often a hook on steps ran."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 37), nn.Tanh(), nn.Linear(37, 3), nn.Conv1d(1, 2, 3))
    idle = nn.Parameter(torch.ones(3))
    groups: Any = [{"params": [*model[0].parameters(), idle]}, {"params": list(model[2].parameters()), "lr": 0.02}]
    optimizer = make(groups)
    before = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    if memory is not None:
        OffloadedState(optimizer, memory)
    after = LambdaLR(optimizer, lambda step: 1 / (step + 2))
    hooks: list[int] = []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    x = torch.randn(8, 20)
    for _ in range(steps):
        optimizer.zero_grad()
        model[2](model[1](model[0](x))).square().mean().backward()
        optimizer.step()
        before.step()
        after.step()
    return model, optimizer, len(hooks)


def assert_same_state(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same_state(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    else:
        assert found == expected


@pytest.mark.filterwarnings("error")  # a schedule warns where it has not seen a step
@pytest.mark.parametrize("piece_bytes", [16 << 20, 64], ids=["whole", "in-pieces"])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in OPTIMIZERS.items()])
def test_every_optimizer_has_its_own_numbers(
    make: Make, piece_bytes: int, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded_state, "PIECE_BYTES", piece_bytes)
    model, optimizer, _ = trained(make)
    away_model, away, num_hooks = trained(make, MappedMemory(disk))
    assert num_hooks == 4
    assert all(map(torch.equal, away_model.parameters(), model.parameters()))
    assert_same_state(away.state_dict(), optimizer.state_dict())


def addresses(state: Any) -> Iterator[int]:
    for values in state.values():
        yield from (value.data_ptr() for value in values.values() if isinstance(value, Tensor) and value.dim())


def deleted_ranges(folder: Path) -> list[range]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in lines if str(folder) in line and "(deleted)" in line]
    return [range(int(first, 16), int(stop, 16)) for first, stop in found]


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in OPTIMIZERS.items()])
def test_all_state_is_in_files_without_a_name_and_the_room_was_there_before(make: Make, disk: Path) -> None:
    memory = MappedMemory(disk)
    _, optimizer, _ = trained(make, memory, steps=1)
    taken, mapped = memory.num_bytes, deleted_ranges(disk)
    places = list(addresses(optimizer.state))
    assert all(any(place in one for one in mapped) for place in places)
    assert os.listdir(disk) == []
    local = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor) and v.dim()]
    if make not in (OPTIMIZERS["Adafactor"], torch.optim.ASGD):  # they look at numbers: their room is a guess
        idle = room_for(torch.ones(3))  # has no gradient, and most have no state for it
        assert 0 <= taken - sum(map(room_for, local)) <= 3 * idle


def test_the_room_of_a_state_is_known_before_there_is_one() -> None:
    parameters = [nn.Parameter(torch.randn(1000, 7)), nn.Parameter(torch.randn(3))]
    optimizer = torch.optim.Adam(parameters)
    room = state_bytes(optimizer, type(optimizer).step)
    assert room == 2 * (room_for(parameters[0]) + room_for(parameters[1]))
    assert not optimizer.state and optimizer.param_groups[0]["params"][0] is parameters[0]
    assert state_bytes(torch.optim.SGD(parameters), torch.optim.SGD.step) == 0


def test_loading_a_state_keeps_it_where_it_is(disk: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    _, other, _ = trained(make, steps=3)
    _, optimizer, _ = trained(make, MappedMemory(disk), steps=1)
    places = list(addresses(optimizer.state))
    optimizer.load_state_dict(other.state_dict())
    assert list(addresses(optimizer.state)) == places
    assert_same_state(optimizer.state_dict(), other.state_dict())


def test_what_is_taken_is_the_optimizers_at_its_next_load(disk: Path) -> None:
    parameter = nn.Parameter(torch.zeros(4, 5))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    away = OffloadedState(optimizer, MappedMemory(disk))
    value = torch.randn(4, 5)
    away.take(parameter, "momentum_buffer", value)
    assert not optimizer.state
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], value)
    value.zero_()
    assert optimizer.state[parameter]["momentum_buffer"].any()


def test_options_that_a_step_counts_up_are_counted_once(disk: Path) -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"steps": 0})

        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has overloads
            for group in self.param_groups:
                group["steps"] += 1
                for parameter in group["params"]:
                    self.state[parameter]["seen"] = torch.full_like(parameter, group["steps"])

    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
    optimizer = Counting([{"params": parameters[:3]}, {"params": parameters[3:]}])
    OffloadedState(optimizer, MappedMemory(disk))
    optimizer.step()
    optimizer.step()
    assert [group["steps"] for group in optimizer.param_groups] == [2, 2]
    assert [float(optimizer.state[one]["seen"][0]) for one in parameters] == [2.0] * 5


def test_a_step_that_fails_leaves_the_groups_as_they_were(disk: Path) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    OffloadedState(optimizer, MappedMemory(disk))
    parameters[1].grad = torch.zeros(2)
    optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError):
        optimizer.step()
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in parameters]


def test_a_closure_is_called_once_with_gradients(disk: Path) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer: Any = torch.optim.Adam(parameters)
    OffloadedState(optimizer, MappedMemory(disk))
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        loss = torch.stack([one.square().sum() for one in parameters]).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 4.0
    assert len(calls) == 1 and all(float(one.detach()[0]) < 1 for one in parameters)


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(disk: Path) -> None:
    with pytest.raises(PlanError, match="LBFGS needs all of them at once: use offload='none'"):
        OffloadedState(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]), MappedMemory(disk))


def test_released_tensors_keep_their_values_and_leave_the_process(disk: Path) -> None:
    memory = MappedMemory(disk)
    memory.reserve(32 << 20)
    tensor = memory.empty_like(torch.empty(8 << 20, device="meta"))
    tensor.fill_(3.0)
    before = resident_file_bytes()
    memory.release([tensor])
    assert before - resident_file_bytes() > 30 << 20
    assert float(tensor.sum()) == 3.0 * (8 << 20)


def resident_file_bytes() -> int:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssFile")]
    return int(line.split()[1]) * 1024


def test_more_than_was_reserved_gets_another_file(disk: Path) -> None:
    memory = MappedMemory(disk)
    memory.reserve(4096)
    first, second = (memory.empty_like(torch.empty(1024)) for _ in range(2))
    first.fill_(1.0)
    second.fill_(2.0)
    assert memory.num_bytes == 4096 + EXTENT_BYTES
    assert float(first[0]) == 1.0
    assert memory.empty_like(torch.empty(2, 4, 6, 6).to(memory_format=torch.channels_last)).stride() == (144, 1, 24, 4)


def test_no_room_is_an_error_with_both_numbers(disk: Path) -> None:
    memory = MappedMemory(disk)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(PlanError, match=r"free for this user, and .* takes 8\.00 MiB more\. Free space there"):
            memory.reserve(8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(disk) == [] and memory.num_bytes == 0


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"cannot be used: .* Name a directory that this user may write to"):
        MappedMemory(tmp_path / "file" / "below")


def test_the_hosts_memory_is_plain_memory_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: memory is pinned")
    _, optimizer, _ = trained(OPTIMIZERS["AdamW"])
    _, away, _ = trained(OPTIMIZERS["AdamW"], HostMemory())
    assert_same_state(away.state_dict(), optimizer.state_dict())
