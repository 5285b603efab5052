"""The rows of embedding tables on one parameter server: sent to forwards, summed for steps, read for checkpoints.

A server has every n-th row of each table (`paceline.schedule.parameter_placement.rows_on`) as a parameter of its own,
which the optimizers train. Its gradients are sparse, so optimizers for sparse gradients change only the rows that were
used, and their state. State with dims is kept by rows; a plain number (a count of steps) is equal on all servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.remote_tensors import sparse_rows

__all__ = ["EmbeddingRows", "is_by_rows", "pieces_of", "summed_rows"]


class EmbeddingRows:
    """The rows of some tables on this server, by the tables' places in the model; all other rows are freed."""

    def __init__(
        self, tables: Mapping[int, Parameter], rows: Mapping[int, slice], optimizers: Sequence[Optimizer]
    ) -> None:
        """`tables` are whole, and so is their state in the optimizers; both are reduced to the rows in place."""
        self._tables, self._optimizers = dict(tables), tuple(optimizers)
        for place, parameter in self._tables.items():
            for state in self._states(parameter):
                state.update({key: v[rows[place]].clone() for key, v in state.items() if is_by_rows(v)})
            parameter.data = parameter.data[rows[place]].clone()
            parameter.grad = None

    def __contains__(self, place: int) -> bool:
        return place in self._tables

    @torch.no_grad()
    def read(self, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> Tensor:
        """Return a copy of the rows that a forward asks for by their numbers here, or of a piece for a reader of all
        rows: `first` to `stop`, of the table or of an optimizer's `entry`."""
        parameter = self._tables[header["place"]]
        if header["op"] == "rows":
            return parameter.detach().index_select(0, tensors[0])
        source: Tensor = parameter.detach()
        if header["entry"] is not None:
            number, key = header["entry"]
            source = self._optimizers[number].state[parameter][key]
        return source[header["first"] : header["stop"]].clone()

    def gradient(self, place: int, numbers: Tensor, values: Tensor) -> Tensor:
        """Return what was pushed, rows and their numbers here, as a sparse gradient of the table here."""
        parameter = self._tables[place]
        shape = parameter.shape
        return torch.sparse_coo_tensor(numbers.long()[None], values.to(parameter.dtype), shape, check_invariants=True)

    def summed(self, place: int, numbers: Tensor, values: Tensor) -> Tensor:
        """Return a sum that another server has of a table: `pieces_of` it."""
        return sparse_rows(numbers, values, self._tables[place].shape)

    def entries(self) -> list[list[Any]]:
        """Return the optimizers' state by rows: [optimizer, place, key, dtype, shape of a row] of each entry."""
        return [
            [number, place, key, str(value.dtype).removeprefix("torch."), [*value.shape[1:]]]
            for place, parameter in self._tables.items()
            for number, optimizer in enumerate(self._optimizers)
            for key, value in optimizer.state.get(parameter, {}).items()
            if is_by_rows(value)
        ]

    def _states(self, parameter: Parameter) -> Iterator[dict[str, Any]]:
        return (one.state[parameter] for one in self._optimizers if parameter in one.state)


def pieces_of(gradient: Tensor) -> list[Tensor]:
    """Return the dense tensors that a sum of gradients is made of."""
    return [gradient.indices()[0], gradient.values()] if gradient.is_sparse else [gradient]


def is_by_rows(value: Any) -> bool:
    """Whether an optimizer's state of a table is kept by rows."""
    return isinstance(value, Tensor) and value.dim() > 0


def summed_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the coalesced sum of sparse gradients; each row is added in the order of `parts`, which contain it at most
    once each."""
    numbers = torch.cat([part._indices()[0] for part in parts])
    found, places = torch.unique(numbers, return_inverse=True)
    values = parts[0]._values()
    total = values.new_zeros(len(found), *values.shape[1:])
    for part, here in zip(parts, places.split([part._nnz() for part in parts]), strict=True):
        total.index_add_(0, here, part._values())
    return sparse_rows(found, total, parts[0].shape)
