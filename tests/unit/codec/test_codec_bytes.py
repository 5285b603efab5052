"""Lossy wires send no more of the demo's gradients than is promised.

`world/sync/test_held_out.py` compares the losses.
"""

from __future__ import annotations

import math

import pytest
import torch

from codec_driver import exchanged
from gpt_example import demo
from paceline.codec.build import build_codec
from paceline.plan import Int8, OneBit, PowerSGD, TopK, Wire

REPLICAS = 2


@pytest.mark.parametrize(
    ("wire", "most"),
    [(Int8(), 0.27), (OneBit(), 1 / 28), (TopK(ratio=0.01), 1 / 40), (PowerSGD(rank=4), 1 / 50)],
    ids=str,
)
@pytest.mark.parametrize("only_matrices", [True, False])
def test_of_the_demos_gradients_a_wire_sends_no_more_than_is_promised(
    wire: Wire, most: float, only_matrices: bool
) -> None:
    model = demo().GPT()
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(p), p.numel() // len(p)) for p in model.parameters() if p.ndim == 2 or not only_matrices]
    size = sum(map(math.prod, shapes))
    flats = [torch.randn(size, generator=generator) for _ in range(REPLICAS)]
    _, num_bytes = exchanged([build_codec(wire, shapes=shapes) for _ in range(REPLICAS)], flats)
    assert 0 < num_bytes <= most * 4 * size
