"""What a trace has counted, by unit, and the costs of one sample that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.planner.model_costs import Attention, Block, Matmul, ModelCosts

__all__ = [
    "VALUE",
    "HeldParameters",
    "RecomputedRegion",
    "TracedProduct",
    "UnitCounts",
    "as_costs",
    "kept_bytes",
    "storage_of",
]

VALUE = 2  # bytes of a kept value in 16 bit


@dataclasses.dataclass(frozen=True, slots=True)
class TracedProduct:
    """A product of a sample: `rows` x inner times inner x outer, in so many `groups` with weights of their own."""

    rows: float
    inner: int
    outer: int
    needs_inputs: bool  # a gradient of its left operand
    needs_weights: bool  # and of the right one
    groups: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.outer


@dataclasses.dataclass(slots=True)
class HeldParameters:
    """Parameters of a unit: all, those that are not trained, and those of both kinds that belong to routed experts."""

    parameters: int = 0
    frozen: int = 0
    experts: int = 0
    frozen_experts: int = 0
    shapes: tuple[tuple[int, int], ...] = ()  # of those that are trained


@dataclasses.dataclass(slots=True)
class UnitCounts:
    """What happened within one unit, for the whole sample."""

    matmuls: list[TracedProduct] = dataclasses.field(default_factory=list["TracedProduct"])
    moved: float = 0.0  # elements in tensors as wide as the unit's input, if kernels are fused as far as they can be
    moved_split: float = 0.0
    single: float = 0.0  # elements, if each operation is a kernel
    followed: float = 0.0  # of these, those of operations that have a backward
    launches: int = 0
    kept: float = 0.0
    kept_split: float = 0.0
    again: float = 0.0  # operations, and
    again_single: float = 0.0  # elements of those that the model itself computes again in backward
    working: float = 0.0  # bytes that the largest such region keeps while it is computed again
    working_split: float = 0.0
    attention: list[tuple[int, int, float, float, bool]] = dataclasses.field(
        default_factory=list[tuple[int, int, float, float, bool]]
    )  # heads, head size, queries x keys, elements of keys and values, causal
    kv_heads: int = 0
    attends_backward: bool = False
    held: HeldParameters = dataclasses.field(default_factory=HeldParameters)
    num_experts: int = 1
    routed: int = 1  # experts that each token takes
    width: int = 0  # elements of its input, for each of its rows
    rows: float = 0.0


class RecomputedRegion:
    """What the model computes again in one go: what it is given, and what it keeps in the meantime, by unit."""

    def __init__(self, entries: list[Tensor]) -> None:
        self.entries = entries
        self.seen: dict[int, Tensor] = {storage_of(one): one for one in entries}
        self._bytes: dict[int, tuple[UnitCounts, list[float]]] = {}

    def keep(self, tensor: Tensor, unit: UnitCounts, num_bytes: float, *, is_wide: bool) -> None:
        self.seen[storage_of(tensor)] = tensor
        _, held = self._bytes.setdefault(id(unit), (unit, [0.0, 0.0]))
        held[0 if is_wide else 1] += num_bytes

    def close(self) -> None:
        """Regions are computed again one after the other: the largest one of each unit counts."""
        for unit, (wide, split) in self._bytes.values():
            if wide + split > unit.working + unit.working_split:
                unit.working, unit.working_split = wide, split


def kept_bytes(tensor: Tensor) -> float:
    """The whole memory that a kept view keeps, where values have 16 bit."""
    storage = tensor.untyped_storage().nbytes()
    return storage / tensor.element_size() * VALUE if tensor.dtype.is_floating_point else storage


def storage_of(tensor: Tensor) -> int:
    """What tells tensors of the same memory; they live as long as the recorder knows them."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


def as_costs(units: Sequence[UnitCounts], rest: UnitCounts, samples: int) -> ModelCosts:
    blocks: list[Block] = []
    for found in units:
        block = _block(found, samples)
        if blocks and dataclasses.replace(blocks[-1], count=1) == block:
            blocks[-1] = dataclasses.replace(blocks[-1], count=blocks[-1].count + 1)
        else:
            blocks.append(block)
    if not blocks:  # nothing is repeated: all of it is one block
        return ModelCosts(blocks=(_block(rest, samples),), sequence=1)
    return ModelCosts(blocks=tuple(blocks), sequence=1, rest=_block(rest, samples))


def _block(found: UnitCounts, samples: int) -> Block:
    matmuls = tuple(
        Matmul(
            inputs=one.inner,
            outputs=one.outer,
            rows=one.rows / samples,
            split="outputs" if one.outer >= one.inner else "inputs",
            needs_inputs=one.needs_inputs,
            needs_weights=one.needs_weights,
            groups=one.groups,
        )
        for one in found.matmuls
    )
    attention, flops = None, sum(one.flops for one in found.matmuls)
    if found.attention:
        heads, size = found.attention[0][:2]
        pairs = sum(one[0] * one[1] * one[2] for one in found.attention) / (heads * size)
        flops += 4.0 * heads * size * pairs
        attention = Attention(
            heads=heads,
            head_size=size,
            span=pairs / samples,
            kv_elements=sum(one[3] for one in found.attention) / samples,
            causal=all(one[4] for one in found.attention),
            kv_heads=found.kv_heads,
            needs_backward=found.attends_backward,
        )
    again = found.again / flops if flops else found.again_single / max(1.0, found.single)
    return Block(
        count=1,
        parameters=found.held.parameters,
        frozen=found.held.frozen,
        shapes=found.held.shapes,
        matmuls=matmuls,
        hidden=round(found.width * found.rows / samples),
        attention=attention,
        moved=found.moved / samples,
        moved_split=found.moved_split / samples,
        kept=found.kept / samples,
        kept_split=found.kept_split / samples,
        single=found.single / samples,
        launches=found.launches,
        followed=found.followed / found.single if found.single else 1.0,
        again=again,
        working=found.working / samples,
        working_split=found.working_split / samples,
        experts=found.num_experts,
        routed=found.routed,
        expert_parameters=found.held.experts,
        frozen_experts=found.held.frozen_experts,
    )
