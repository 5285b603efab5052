"""Buffers on the first server: what replicas make of them that do not wait for each other, by the rule of each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.sync.parameter_server.served_buffers import BufferChanges, ServedBuffers

RULES = {"average": "mean", "seen": "sum", "met": "sum", "constant": "first"}


class Net(nn.Module):
    """A buffer of each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.tensor([1.0, 2.0]))
        self.register_buffer("seen", torch.tensor(4))
        self.register_buffer("met", torch.tensor([True, False, False]))
        self.register_buffer("constant", torch.tensor([0.0, 0.0]))


def replica(rules: dict[str, str]) -> tuple[Net, BufferChanges]:
    model = Net()
    made = BufferChanges([model], rules=lambda: {id(one): rules[name] for name, one in model.named_buffers()})
    made.begin()
    return model, made


def write(model: nn.Module, average: float, *, place: int, samples: int = 3) -> None:
    model.get_buffer("average").add_(average)
    model.get_buffer("seen").add_(samples)
    model.get_buffer("met")[place] = True
    model.get_buffer("constant").fill_(3.0)


def test_each_asynchronous_update_is_added_and_a_constant_is_none_the_larger() -> None:
    server = ServedBuffers([*Net().buffers()])
    for place in (1, 2):
        model, changes = replica(RULES)  # both have begun with the same values
        write(model, 0.5, place=place)
        changed = changes.changed()
        about = changes.about(changed)
        assert server.other_rule(about) is None
        server.add(about["buffers"], about["rules"], changes.deltas(changed))
    assert [one.tolist() for one in server.values] == [[2.0, 3.0], 10, [True, True, True], [3.0, 3.0]]


def test_shares_of_a_step_are_combined_by_their_rules() -> None:
    server, shares = ServedBuffers([*Net().buffers()]), []
    for place, samples in ((1, 1), (2, 3)):
        model, changes = replica(RULES)
        write(model, 4.0 * place, place=place, samples=samples)
        changed = changes.changed()
        assert server.other_rule(changes.about(changed)) is None
        shares.append((samples, changed))
    shares.append((4, {}))  # one that has changed nothing
    server.combine(shares)
    mean = (1 * 4 + 3 * 8) / 8
    assert [one.tolist() for one in server.values] == [[1 + mean, 2 + mean], 8, [True, True, True], [3.0, 3.0]]


def test_replicas_that_have_found_other_rules_are_told_so() -> None:
    server = ServedBuffers([*Net().buffers()])
    model, changes = replica(RULES)
    write(model, 1.0, place=1)
    assert server.other_rule(changes.about(changes.changed())) is None
    other, later = replica({**RULES, "average": "sum"})
    write(other, 1.0, place=1)
    answer = server.other_rule(later.about(later.changed()))
    assert answer is not None
    with pytest.raises(ValueError, match=r"buffer average: .* rule 'sum' on this replica, and 'mean' on another"):
        later.require_one_rule(answer)
