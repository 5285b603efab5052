"""Who steps which parameter, what an optimizer must bear for it, and how parts come together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP, Lamb, Lookahead, Shampoo

from paceline.comm.sharded_tensors import TensorSlice
from paceline.parallel.fully_sharded.collectives import ShardCollectives
from paceline.parallel.owner_steps.ownership import LoadTable, step_cost
from paceline.parallel.owner_steps.part_exchange import PartExchange, RowHop, SliceHop, SplitParameter
from paceline.parallel.owner_steps.stand_ins import standing_in, why_not_by_owners
from paceline.planner.owner_steps import owner_traffic

pytestmark = pytest.mark.thorough  # pytorch_optimizer takes seconds to import


def made(kind: Any, **fields: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.randn(3, 5))], **{"lr": 0.1, **fields})


class CountsWhereItHasSome(torch.optim.SGD):
    """Counts its steps in the options of groups that have parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + bool(group["params"])
        return super().step(closure)


class RemembersInParameters(torch.optim.SGD):
    """Keeps the sum of a parameter's gradients as an attribute of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.total = getattr(one, "total", 0) + one.grad
                one -= group["lr"] * one.total


class StepsWhatItWasGiven(torch.optim.SGD):
    """Steps the parameters that it was made with, whatever its groups hold."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.given = [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for one in self.given:
            one -= 0.1 * one.grad


def test_the_costly_parameters_are_spread_evenly_and_alike_whatever_their_order() -> None:
    shapes = {f"layer{k}": (64, 64) for k in range(6)} | {"wide": (64, 256), "bias": (64,)}
    owners = LoadTable().place(shapes, (("rows", 2), ("tensor", 2)))
    assert owners == LoadTable().place(dict(reversed(shapes.items())), (("rows", 2), ("tensor", 2)))
    loads = [sum(step_cost(shapes[name]) for name, at in owners.items() if at == owner) for owner in range(4)]
    assert max(loads) <= 4 / 3 * max(sum(loads) / 4, step_cost((64, 256)))
    assert set(owners.values()) == {0, 1, 2, 3}


def test_a_second_optimizer_fills_up_what_the_first_one_left_free() -> None:
    table, axes = LoadTable(), (("rows", 2),)
    assert table.place({"a": (8, 8)}, axes) == {"a": 0}
    assert table.place({"b": (8, 8)}, axes) == {"b": 1}


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, Lamb, Shampoo, SOAP])
def test_optimizers_that_step_what_their_groups_hold_can_be_stepped_by_owners(kind: Any) -> None:
    optimizer = made(kind)
    assert why_not_by_owners(optimizer) is None
    assert not optimizer.state, "the trial leaves it as it is"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (RemembersInParameters, "replaced by others"),
        (StepsWhatItWasGiven, "cannot be tried"),
        (CountsWhereItHasSome, "has no parameters for a step"),
    ],
)
def test_those_that_do_not_are_known_by_the_trial(kind: Any, says: str) -> None:
    assert says in (why_not_by_owners(made(kind)) or "")


def test_stand_ins_reach_an_optimizer_inside_and_leave_nothing_behind() -> None:
    inner = made(torch.optim.SGD, momentum=0.9)
    optimizer = Lookahead(inner)
    (parameter,), held = inner.param_groups[0]["params"], inner.param_groups[0]["params"]
    whole = torch.nn.Parameter(torch.zeros(6, 5))
    whole.grad = torch.ones(6, 5)
    with standing_in(optimizer, {parameter: whole}):
        optimizer.step()
        assert whole in inner.state
    assert inner.param_groups[0]["params"] is held and held == [parameter]
    assert set(inner.state) == {parameter} and inner.state[parameter]["momentum_buffer"].shape == (6, 5)
    with pytest.raises(ZeroDivisionError), standing_in(optimizer, {parameter: None}):
        assert not held
        raise ZeroDivisionError
    assert held == [parameter]


class ThreadGroup:
    """A member of a group of threads; only `all_to_all`."""

    def __init__(self, index: int, box: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.index, self.size, self._box, self._barrier = index, barrier.parties, box, barrier

    def all_to_all(self, parts: list[torch.Tensor], out: list[torch.Tensor], *, what: str) -> None:
        self._box[self.index] = [one.clone() for one in parts]
        self._barrier.wait()
        for k, target in enumerate(out):
            target.copy_(self._box[k][self.index])
        self._barrier.wait()


def grid() -> dict[tuple[int, int], tuple[Any, Any]]:
    """The groups along rows and along slices of six workers, by their places."""
    rows: list[Any] = [({}, threading.Barrier(3)) for _ in range(2)]
    cuts: list[Any] = [({}, threading.Barrier(2)) for _ in range(3)]
    return {(r, c): (ThreadGroup(r, *rows[c]), ThreadGroup(c, *cuts[r])) for r in range(3) for c in range(2)}


def test_parts_of_any_types_and_sizes_come_together_at_their_owners_and_go_back() -> None:
    """Seven rows over three workers; columns in unequal slices of several ranges, over two."""
    slices = [TensorSlice((7, 5), 1, ((0, 1), (3, 5))), TensorSlice((7, 5), 1, ((1, 3),))]
    wholes = [torch.randn(7, 5, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    owners, problems, traffic = [(2, 1), (0, 0), (2, 0)], list[str](), list[ShardCollectives]()

    def work(row: int, column: int, groups: tuple[Any, Any]) -> None:
        cut = slices[column].take(wholes[0]).shape
        hops = (RowHop("rows", groups[0], tuple(cut)), SliceHop("tensor", groups[1], (7, 5), slices))
        split = [SplitParameter(f"p{k}", hops, owner) for k, owner in enumerate(owners)]
        parts = [hops[0].part(slices[column].take(whole), row) for whole in wholes]
        counter = ShardCollectives()
        exchange = PartExchange(counter)
        found = exchange.gather(list(zip(split, parts, strict=True)))
        for one, owner, whole in zip(found, owners, wholes, strict=True):
            if (one is not None) != (owner == (row, column)) or (one is not None and not torch.equal(one, whole)):
                problems.append(f"{row} {column} has another whole")
        doubled = [None if one is None else one * 2 for one in found]
        back = exchange.scatter(list(zip(split, doubled, parts, strict=True)))
        if not all(torch.equal(a, b * 2) for a, b in zip(back, parts, strict=True)):
            problems.append(f"{row} {column} has another part")
        traffic.append(counter)

    threads = [threading.Thread(target=work, args=(*at, groups), daemon=True) for at, groups in grid().items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert not problems and len(traffic) == 6
    num_bytes = sum(one.nbytes for one in wholes)
    sent = sum(one.num_bytes_sent for one in traffic) / 2  # of one tensor there and back, where a step moves 3
    assert sent == pytest.approx(owner_traffic(num_bytes, [3, 2]) / 3, rel=0.2), "parts are uneven"


def test_a_member_alone_sends_nothing_and_many_send_three_times_what_there_is() -> None:
    assert owner_traffic(1000.0, [1]) == 0.0
    assert owner_traffic(1000.0, [4]) == 2250.0
    assert owner_traffic(1000.0, [4, 2]) == 3750.0, "along both axes"
