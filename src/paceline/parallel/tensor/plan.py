"""`TensorPlan`: which layers of a model are split among how many workers, what stays whole and why, and what it costs.

A plan is plain data: it can be printed before anything starts, and every worker can make it again from the same model.
`ParameterSplit` says which numbers of a whole parameter a worker holds, under the parameter's own name. With it a
checkpoint of any layout can be read in any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from paceline.parallel.tensor.collectives import TensorCollectives, gathered, part_of, whole_of
from paceline.parallel.tensor.layers import Layer
from paceline.parallel.tensor.split_shapes import Sections, ranges
from paceline.units import bytes_text

__all__ = ["ModuleRow", "ParameterSplit", "PlannedCollective", "TensorPlan"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSplit:
    """Where the parts of one parameter belong: dim `dim` of `shape`, each of whose `sections` is split among `size`
    workers."""

    name: str
    shape: tuple[int, ...]
    dim: int
    sections: Sections
    size: int

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return the half-open index ranges of `dim` that worker `index` holds, in the order in which it holds them."""
        return ranges(self.sections, size=self.size, index=index)

    def part_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of worker `index`'s part."""
        held = sum(end - start for start, end in self.ranges(index))
        return *self.shape[: self.dim], held, *self.shape[self.dim + 1 :]

    def part(self, whole: Tensor, index: int) -> Tensor:
        """Return worker `index`'s part of a whole tensor of this shape (a parameter, a gradient, a moment)."""
        return part_of(whole, dim=self.dim, sections=self.sections, size=self.size, index=index)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor of all workers' parts, in the order of their index."""
        return whole_of(list(parts), dim=self.dim, sections=self.sections)

    def gathered(self, part: Tensor, group: TensorCollectives) -> Tensor:
        """Return the whole tensor of all workers' parts; all workers of `group` must call it."""
        return gathered(part, group, dim=self.dim, sections=self.sections)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRow:
    """A layer in the report: its role or "whole", and the reason where it is whole."""

    name: str
    role: str
    why: str
    num_bytes: int  # of its own parameters; tied ones are counted at their first place
    worker_bytes: int  # the part of the first worker, which has most


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCollective:
    """A collective of every forward and its counterpart in backward; sizes are those of the sample's run."""

    site: str
    forward: str  # "all_reduce", "all_gather", "reduce_scatter", or "" where it moves nothing
    backward: str
    num_bytes: int  # of the whole tensor, each way
    is_unplanned: bool = False  # an operation needed the whole


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """How the layers of a model are split among `size` workers."""

    size: int
    sequence: bool
    layers: tuple[Layer, ...]
    rows: tuple[ModuleRow, ...]
    crossings: tuple[PlannedCollective, ...]
    summed: tuple[str, ...]  # parameters whose gradients the training loop must sum over the group after backward
    gathered: tuple[str, ...]  # modules without split layers that get whole inputs, because they cannot work on parts
    sample: str
    total_bytes: int  # of all parameters
    worker_bytes: int  # on the first worker, which has most

    def collectives(self) -> dict[str, tuple[int, int]]:
        """Return (calls, bytes) of one forward and backward of the sample, by kind."""
        found: dict[str, tuple[int, int]] = {}
        for crossing in self.crossings:
            for kind in filter(None, (crossing.forward, crossing.backward)):
                calls, num_bytes = found.get(kind, (0, 0))
                found[kind] = (calls + 1, num_bytes + crossing.num_bytes)
        return found

    @property
    def headline(self) -> str:
        """One line: how much is split."""
        return (
            f"tensor={self.size}{', sequence=True' if self.sequence else ''}: {len(self.layers)} layers are split;  "
            f"{bytes_text(self.worker_bytes)} of {bytes_text(self.total_bytes)} of parameters on each worker"
        )

    def __str__(self) -> str:
        """Return the report; repeated layers are shown once, with their number."""
        name_width = max((len(name) for name, _, _, _, _ in self._grouped()), default=0)
        lines = [self.headline]
        for name, count, role, why, num_bytes in self._grouped():
            times = f"x{count}" if count > 1 else ""
            lines.append(f"  {name:<{name_width}}  {times:>4}  {role:<10}  {bytes_text(num_bytes):>9}  {why}".rstrip())
        lines.append(f"  collectives of one forward and backward ({self.sample}):")
        for kind, (calls, num_bytes) in self.collectives().items():
            lines.append(f"    {kind.replace('_', '-')}: {calls} of {bytes_text(num_bytes)} in all")
        for site in sorted({_general(one.site) for one in self.crossings if one.is_unplanned}):
            lines.append(f"    an operation needs the whole behind {site}: it is gathered there")
        if self.gathered:
            lines.append(f"  whole inputs are gathered for: {', '.join(sorted(set(map(_general, self.gathered))))}")
        if self.summed:
            names = sorted({_general(name) for name in self.summed})
            lines.append(f"  gradients summed after backward: {', '.join(names)}")
        return "\n".join(lines)

    def _grouped(self) -> list[tuple[str, int, str, str, int]]:
        groups: dict[tuple[str, str, str], list[ModuleRow]] = {}
        for row in self.rows:
            groups.setdefault((_general(row.name), row.role, _general(row.why)), []).append(row)
        return [
            (rows[0].name if len(rows) == 1 else name, len(rows), role, why, sum(row.worker_bytes for row in rows))
            for (name, role, why), rows in groups.items()
        ]


def _general(name: str) -> str:
    """Return the name with its numbers replaced by "*": "layers.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
