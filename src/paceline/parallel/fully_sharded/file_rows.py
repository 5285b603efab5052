"""This worker's rows of weights that are mapped from files: fetched ahead, in the order in which units are split.

`fully_shard` copies the rows out of a unit's whole parameters. The kernel would read them page by page when they are
looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import Parameter

from paceline.parallel.absent_tensors import bring
from paceline.parallel.file_weights import WeightFiles

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FileRows"]


class FileRows:
    """The rows of units that are going to be split, each over the workers of its mesh."""

    def __init__(self, units: Iterable[tuple[nn.Module, DeviceMesh]], *, set_apart: Collection[Parameter]) -> None:
        """`units`: inner ones before those around them. `set_apart`: parameters that are not split."""
        over: dict[Parameter, DeviceMesh] = {}
        for unit, mesh in units:
            for one in unit.parameters():
                if one not in set_apart:
                    over.setdefault(one, mesh)
        self._files = WeightFiles(over)
        self._rows: dict[Parameter, Tensor] = {}
        for one, mesh in over.items():
            if self._files.has(one):
                parts, index = one.detach().chunk(mesh.size()), mesh.get_local_rank()  # as torch splits them
                self._rows[one] = parts[index] if index < len(parts) else one.detach()[:0]
        bring(self._rows.values())  # what is not on this host yet, with as few requests as possible
        self._files.coming(self._rows.values())

    def of(self, unit: nn.Module) -> list[Tensor]:
        """The rows of a unit that is not split yet, but those of units within it that are."""
        return [self._rows[one] for one in unit.parameters() if one in self._rows]

    def were_read(self, rows: Iterable[Tensor]) -> None:
        """The unit is split: what was read of files need not stay in memory."""
        for one in rows:
            self._files.was_read(one)

    def release(self) -> None:
        """Give back what was read now: all units are split."""
        self._files.release()
