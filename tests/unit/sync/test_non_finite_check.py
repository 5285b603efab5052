"""A worker's look at its own gradients: whose are not finite, also where only some rows are there."""

from __future__ import annotations

import math

import torch

from paceline.sync.allreduce.gradient_norm import NonFiniteCheck, is_finite


def rows(value: float) -> torch.Tensor:
    """A gradient of an embedding with four rows, of which one came twice."""
    return torch.sparse_coo_tensor(torch.tensor([[1, 3, 1]]), torch.tensor([[1.0], [value], [2.0]]), (4, 1))


def test_names_come_in_the_order_in_which_backward_made_what_is_broken() -> None:
    look = NonFiniteCheck()
    for name, value in {"head": 1.0, "b": math.nan, "a": math.inf}.items():
        look.at(name, torch.tensor([0.0, value]))
    look.at("none", torch.empty(0))
    assert look.broken() == ("b", "a")
    look.begin()
    assert look.broken() == ()


def test_a_sparse_gradient_is_judged_by_the_rows_that_it_has() -> None:
    look = NonFiniteCheck()
    look.at("whole", rows(1.0))
    look.at("broken", rows(-math.inf))
    look.at("no_rows", torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), torch.empty(0, 1), (4, 1)))
    assert look.broken() == ("broken",)
    assert is_finite(rows(1.0)) and not is_finite(rows(math.nan))
