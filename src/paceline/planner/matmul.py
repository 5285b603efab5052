"""How full a device is with one matrix product.

A product is cut into tiles, which the device's multiprocessors take in waves; the last wave is rarely full, and tiles
at the edges are not either ("wave and tile quantization", NVIDIA's matrix multiplication guide). Small tiles fill
better and each computes worse.
"""

from __future__ import annotations

import functools
import math

from paceline.planner.model_costs import Matmul

__all__ = ["Products", "fill", "products"]

TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.85))  # rows, columns, rate relative to the largest


@functools.lru_cache(maxsize=1 << 16)
def fill(rows: float, columns: float, units: int) -> float:
    """Return the share of its rate that a device with `units` multiprocessors reaches for a result of this size."""
    best = 0.0
    for high, wide, rate in TILES:
        for tile_rows, tile_columns in ((high, wide), (wide, high)):
            tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            waves = math.ceil(tiles / units)
            best = max(best, rate * rows * columns / (tile_rows * tile_columns * waves * units))
    return best


class Products:
    """Operations of linear layers, as if the device were full: `whole`, and `per_depth`, to be multiplied by a depth of
    the inner dimension that filling a tile's pipeline costs."""

    def __init__(self, whole: float = 0.0, per_depth: float = 0.0) -> None:
        self.whole, self.per_depth = whole, per_depth

    def add(self, rows: float, columns: float, inner: float, units: int, times: float = 1.0) -> None:
        """Add one product, so many `times`; a device of no `units` cuts nothing into tiles, and is always full."""
        flops = times * 2.0 * rows * columns * inner
        if units:
            flops /= fill(rows, columns, units)
            self.per_depth += flops / inner
        self.whole += flops

    def flops(self, depth: float) -> float:
        return self.whole + depth * self.per_depth


def products(
    tokens: float, layers: tuple[Matmul, ...], tensor: int, units: int, experts: int = 1
) -> tuple[Products, Products]:
    """Return the products of forward and of backward (gradients of inputs and weights) on one of `tensor` workers.

    Of `experts` workers each has a share of a product's groups, with the tokens of all.
    """
    forward, backward = Products(), Products()
    for layer in layers:
        outputs = layer.outputs / (tensor if layer.split == "outputs" else 1)
        inputs = layer.inputs / (tensor if layer.split == "inputs" else 1)
        held = max(1.0, layer.groups / experts)
        rows = tokens * layer.rows / held
        forward.add(rows, outputs, inputs, units, held)
        if layer.needs_inputs:
            backward.add(rows, inputs, outputs, units, held)
        if layer.needs_weights:
            backward.add(inputs, outputs, rows, units, held)
    return forward, backward
