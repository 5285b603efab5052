"""Units that draw random numbers by themselves: from the seed and the number of the call alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.parallel.model_units import find_units, seeded_units
from paceline.parallel.pipeline.stage_partition import closed_boundaries
from paceline.parallel.pipeline.tape_recorder import record

CPU = torch.device("cpu")


def test_seeds_make_draws_depend_on_the_call_alone() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), nn.Sequential(nn.Linear(6, 6), nn.Dropout()))
    units, x = find_units(model, named=["0", "1"]), torch.randn(5, 6)
    with seeded_units(units, 1, 2):
        first = model(x)
    torch.rand(7)
    with seeded_units(units, 1, 2):
        assert torch.equal(model(x), first)
    with seeded_units(units, 1, 3):
        assert not torch.equal(model(x), first)
    assert not closed_boundaries(record(model, lambda m: model(m).sum(), x, units=units, device=CPU))


def test_units_that_backward_runs_again_draw_what_they_drew() -> None:
    units = [nn.Sequential(nn.Linear(6, 6), nn.Dropout()) for _ in range(3)]
    model, x = nn.ModuleList(units), torch.randn(5, 6)
    gradients: list[list[Tensor]] = []
    for is_recomputed in (False, True):
        with seeded_units(find_units(model, named=["0", "1", "2"]), 1, 2) as end_forward:
            out = x
            for unit in (*units, units[1]):  # one of them is called twice
                out = checkpoint(unit, out, use_reentrant=False) if is_recomputed else unit(out)
            end_forward()
            gradients.append(list(torch.autograd.grad(out.sum(), list(model.parameters()))))
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed) and kept.any()
