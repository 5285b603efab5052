"""A parameter server without processes: what it answers, in whatever order its workers come."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fake_listener import PASS_KEY, PretendedListener
from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.sync.parameter_server.served_parameters import (
    ServerParameters,
    check_parameter_groups,
    options_of,
    parameter_groups_of,
)
from paceline.sync.parameter_server.server import Server


def test_a_worker_that_asks_for_the_sum_after_another_had_the_step_taken_is_told_it() -> None:
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    ask = {"walk": PASS_KEY, "places": [0]}

    def pushed(replica: int, *values: float) -> TensorMessage:
        return TensorMessage({**ask, "op": "push", "replica": replica}, (torch.tensor(values),))

    wants_sum = TensorMessage({**ask, "op": "sum", "replicas": 2, "call": 1}, ())
    has_it_taken = TensorMessage(
        {**ask, "op": "step", "factor": 0.5, "options": [options_of(optimizer)], "call": 2}, ()
    )
    said = [(b"fast", pushed(0, 2.0, 0.0)), (b"slow", pushed(1, 4.0, 8.0))]
    said += [(b"fast", wants_sum), (b"fast", has_it_taken), (b"slow", wants_sum), (b"slow", has_it_taken)]
    listener = PretendedListener(said)
    Server(ServerParameters({0: weight}, [optimizer]), listener, is_deserted=lambda: True).serve()

    squared = {caller: header["squared"] for caller, header, _ in listener.told if header["call"] == 1}
    assert squared == {b"fast": pytest.approx(100.0), b"slow": pytest.approx(100.0)}
    weights = [tensors[0].tolist() for _, header, tensors in listener.told if header["call"] == 2]
    assert weights == [[-3.0, -4.0]] * 2  # one step, however many ask for it


def test_gradients_of_steps_that_were_skipped_do_not_pile_up() -> None:
    said = [
        (b"one", TensorMessage({"op": "push", "walk": (0, step, 0), "places": [0], "replica": 0}, (torch.zeros(2),)))
        for step in range(1, 9)
    ]
    server = Server(
        ServerParameters({0: Parameter(torch.zeros(2))}, []), PretendedListener(said), is_deserted=lambda: True
    )
    server.serve()
    assert sorted(server._pending_sums) == [(0, 7, 0), (0, 8, 0)]


def test_complex_gradients_have_a_norm() -> None:
    ask, listener = {"walk": PASS_KEY, "places": [0]}, PretendedListener([])
    pushed = TensorMessage({**ask, "op": "push", "replica": 0}, (torch.tensor([3 + 4j]),))
    listener.said = [(b"one", pushed), (b"one", TensorMessage({**ask, "op": "sum", "replicas": 1, "call": 1}, ()))]
    weight = Parameter(torch.zeros(1, dtype=torch.complex64))
    Server(ServerParameters({0: weight}, []), listener, is_deserted=lambda: True).serve()
    assert [header["squared"] for _, header, _ in listener.told] == [pytest.approx(25.0)]


def test_what_is_on_other_servers_takes_no_memory() -> None:
    here, there = (Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.SGD([there, here], lr=1.0)
    part = ServerParameters({1: here}, [optimizer], elsewhere=[there])
    options = [options_of(optimizer)]
    assert there.numel() == 0
    part.step({1: torch.ones(3)}, options)
    assert part.weights([1])[0].tolist() == [0.0, 0.0, 0.0]


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, and goes as far as the count says."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["counts"] = torch.tensor([group["count"], 0.5], dtype=torch.float64)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] * group["count"])


def counting(*, lr: float, **options: Any) -> tuple[ServerParameters, Counting, list[list[dict[str, Any]]]]:
    """A server's part, with two groups of which it has the second, its optimizer, and what workers say of it."""
    here, there = (Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = Counting([{"params": [there]}, {"params": [here], **options}], lr=lr)
    said = [options_of(optimizer)]
    return ServerParameters({0: here}, [optimizer], elsewhere=[there]), optimizer, said


def steps(part: ServerParameters, said: list[list[dict[str, Any]]], count: int) -> float:
    """Have a part take steps; returns the weight."""
    for _ in range(count):
        part.step({0: torch.ones(1)}, json.loads(json.dumps(said)))
    return float(part.weights([0])[0])


def test_what_an_optimizer_writes_into_its_groups_stays_until_a_worker_says_otherwise() -> None:
    part, optimizer, said = counting(lr=1.0, count=100)  # it has gone on from a checkpoint
    (group,) = optimizer.param_groups
    assert steps(part, said, 2) == -(101 + 102)
    said[0][1]["lr"] = 0.5
    assert steps(part, said, 1) == -(203 + 51.5)
    said[0][1]["lr"] = 1.0
    assert steps(part, said, 1) == -(254.5 + 104) and group["count"] == 104
    said[0][1]["count"] = 0
    steps(part, said, 2)
    assert group["count"] == 2


@pytest.mark.parametrize("begins_with", [{}, {"count": 7}])
def test_what_an_optimizer_writes_into_its_groups_is_told_elsewhere(begins_with: dict[str, Any]) -> None:
    part, _, said = counting(lr=1.0, **begins_with)
    said[0][1]["lr"] = 0.5
    steps(part, said, 3)
    kept, tensors = part.state(with_rows=True)
    other, optimizer, _ = counting(lr=1.0, **begins_with)
    other.fill(part.weights([0]), json.loads(json.dumps(kept)), iter(tensors))
    (group,) = optimizer.param_groups
    assert group["counts"].tolist() == [begins_with.get("count", 0) + 3, 0.5]
    assert steps(other, said, 2) == steps(part, said, 2)


def test_groups_that_change_later_are_refused() -> None:
    weights = [Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(weights[:1], lr=1.0)]
    held = parameter_groups_of(optimizers)
    optimizers[0].param_groups[0]["lr"] = 0.5
    check_parameter_groups(optimizers, held)
    optimizers[0].add_param_group({"params": weights[1:]})
    with pytest.raises(RuntimeError, match=r"groups of SGD have changed .*sync=AllReduce"):
        check_parameter_groups(optimizers, held)
