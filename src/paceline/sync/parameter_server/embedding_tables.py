"""Embedding tables on parameter servers, the workers' side: pulls the rows that a forward needs, and pushes gradients.

A table is the matrix of an embedding with sparse gradients. Each of n servers has every n-th row of it. From the first
step on, workers have none: the parameter is a placeholder (`paceline.comm.remote_tensors`). A forward pulls the rows
that it needs, from all servers at once. Within a gradient pass each row is pulled once, however many micro-batches use
it. The rows' gradients are pushed instead of a bucket. Whole tables are read only for a checkpoint, or for a model's
state, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.comm.remote_tensors import remote_tensor, sparse_rows
from paceline.errors import SyncError
from paceline.schedule.parameter_placement import rows_on
from paceline.sync.allreduce.buckets import LocalBucket, NamedParameter, SentBytes
from paceline.sync.parameter_server.client import ServerClient, ServerRequest
from paceline.units import MiB

__all__ = ["EmbeddingTables", "RowsBucket"]

PIECE_BYTES = 32 * MiB  # of a whole table that is read


class EmbeddingTables:
    """The tables of one worker's models. Once the servers have them, every row is pulled from there."""

    def __init__(self, servers: ServerClient) -> None:
        self._servers = servers
        self._tables: dict[int, Parameter] = {}  # by id
        self._places: dict[int, int] = {}  # the places of those that are trained on the servers
        self._names: dict[int, str] = {}
        self._known: dict[int, tuple[Tensor, Tensor]] | None = None  # numbers and rows pulled in this gradient pass
        self._num_bytes_asked = 0

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._tables

    def add(self, parameter: Parameter) -> None:
        """Register a parameter as the table of a module that asks for its rows."""
        self._tables[id(parameter)] = parameter

    def settle(self, named: Sequence[NamedParameter]) -> dict[int, Parameter]:
        """Put the tables among these parameters on the servers, under their places here; return those tables."""
        found = {place: parameter for place, (_, parameter) in enumerate(named) if parameter in self}
        self._places = {id(parameter): place for place, parameter in found.items()}
        self._names = {id(parameter): named[place][0] for place, parameter in found.items()}
        return found

    def rows_of(self, server: int) -> dict[int, slice]:
        """Return which rows of each table a server has, by the table's place."""
        return {place: rows_on(server, servers=self._servers.count) for place in self._places.values()}

    @torch.no_grad()
    def leave(self) -> None:
        """Free this worker's tables, which the servers have now."""
        for key in self._places:
            self._tables[key].data = remote_tensor(self._tables[key])

    @torch.no_grad()
    def fetch(self, optimizers: Sequence[Optimizer], told: Sequence[Sequence[Any]]) -> None:
        """Fetch the whole tables, and the optimizers' state by rows, as a server lists it in `told`
        (`EmbeddingRows.entries`). They stay until `leave`."""
        versions = set[tuple[int, int]]()
        for key, place in self._places.items():
            self._tables[key].data = self._read_table(self._tables[key], versions)
            for number, of, entry, dtype, row in told:
                if of == place:
                    parameter = self._tables[key]
                    like = torch.empty(0, dtype=getattr(torch, dtype))
                    shape = (parameter.shape[0], *row)
                    optimizers[number].state[parameter][entry] = self._read(
                        parameter, like.new_empty(shape), [number, entry], versions
                    )
        if len(versions) > self._servers.count:
            raise SyncError(
                "tables changed while they were read from the parameter servers for a checkpoint: this worker was "
                "taken for lost meanwhile, and the others went on"
            )

    def whole(self, parameter: Tensor) -> Tensor:
        """Return a table with all of its rows, as they are on the servers. With asynchronous updates, some rows may
        contain an update that others do not."""
        return self._read_table(parameter, set())

    def begin(self) -> None:
        """Begin a gradient pass, in which pulled rows do not change."""
        self._known = {}

    def give_up(self) -> None:
        """Abandon the gradient pass: its pulled rows are dropped."""
        self._known = None

    def end(self) -> int:
        """End the gradient pass; return the bytes of the requests that it has sent."""
        self._known = None
        asked, self._num_bytes_asked = self._num_bytes_asked, 0
        return asked

    @torch.no_grad()
    def rows(self, parameter: Parameter, numbers: Tensor) -> Tensor:
        """Return the rows of these numbers, which are sorted and unique."""
        key = id(parameter)
        if len(numbers) and not 0 <= int(numbers[0]) <= int(numbers[-1]) < parameter.shape[0]:
            which = int(numbers[0] if numbers[0] < 0 else numbers[-1])
            raise IndexError(f"{self._name(parameter)} was asked for row {which}, and has {parameter.shape[0]} rows")
        if self._known is None:
            return self._pull(parameter, numbers)
        if key not in self._known:
            self._known[key] = numbers, self._pull(parameter, numbers)
            return self._known[key][1]
        known, rows = self._known[key]
        new = numbers[torch.isin(numbers, known, assume_unique=True, invert=True)]
        if len(new):
            known, order = torch.cat([known, new]).sort()
            rows = torch.cat([rows, self._pull(parameter, new)])[order]
            self._known[key] = known, rows
        return rows[torch.searchsorted(known, numbers)]

    def push(self, parameter: Parameter, about: Mapping[str, Any], *, wire_dtype: torch.dtype | None) -> int:
        """Send each server its rows of a table's gradient, even if there are none; return the number of bytes."""
        header = {"op": "push_rows", **about, "place": self._place(parameter)}
        sent = list(self.split_by_server(parameter, wire_dtype=wire_dtype))
        for server, tensors in enumerate(sent):
            self._servers.push(server, header, *tensors)  # they are not written to afterwards
        return sum(tensor.nbytes for tensors in sent for tensor in tensors)

    def split_by_server(self, parameter: Parameter, *, wire_dtype: torch.dtype | None) -> Iterator[list[Tensor]]:
        """Yield each server's part of a table's gradient: the row numbers there, and the rows in the wire's type."""
        if parameter.grad is None:
            numbers, rows = torch.empty(0, dtype=torch.long), parameter.new_empty(0, *parameter.shape[1:])
        else:
            gradient = parameter.grad.coalesce()
            numbers, rows = gradient.indices()[0], gradient.values()
        if wire_dtype is not None and not rows.is_complex():
            rows = rows.to(wire_dtype)
        kind = _kind_of(parameter)
        for server in range(self._servers.count):
            here = numbers % self._servers.count == server
            yield [(numbers[here] // self._servers.count).to(kind), rows[here]]

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), "a table")

    def _pull(self, parameter: Parameter, numbers: Tensor) -> Tensor:
        """Ask all servers for rows at once; they answer even if other workers are lost meanwhile."""
        count, kind = self._servers.count, _kind_of(parameter)
        about = {"op": "rows", "place": self._place(parameter)}
        of, questions = [numbers % count == server for server in range(count)], dict[int, ServerRequest]()
        for server, here in enumerate(of):
            asked = (numbers[here] // count).to(kind)
            if len(asked):
                questions[server] = about, [asked]
                self._num_bytes_asked += asked.nbytes
        rows = parameter.new_empty(len(numbers), *parameter.shape[1:])
        for server, answer in self._asked(questions).items():
            rows[of[server]] = answer.tensors[0]
        return rows

    def _read_table(self, parameter: Tensor, versions: set[tuple[int, int]]) -> Tensor:
        return self._read(parameter, parameter.detach().new_empty(parameter.shape), None, versions)

    def _read(
        self, parameter: Tensor, whole: Tensor, entry: list[Any] | None, versions: set[tuple[int, int]]
    ) -> Tensor:
        """Fill `whole` with the servers' rows: of the table, or of an optimizer's entry for it.

        The servers' versions at that time are added to `versions`.
        """
        count = self._servers.count
        each = max(1, PIECE_BYTES // max(1, whole[:1].nbytes))
        about = {"op": "piece", "place": self._place(parameter), "entry": entry}
        for first in range(0, -(-len(whole) // count), each):
            question: ServerRequest = ({**about, "first": first, "stop": first + each}, [])
            for server, answer in self._asked(dict.fromkeys(range(count), question)).items():
                versions.add((server, answer.header["version"]))
                whole[rows_on(server, servers=count)][first : first + each] = answer.tensors[0]
        return whole

    def _asked(self, questions: Mapping[int, ServerRequest]) -> dict[int, TensorMessage]:
        if not self._servers.are_there:
            self._servers.join()
        return self._servers.ask_some(questions)

    def _place(self, parameter: Tensor) -> int:
        if id(parameter) not in self._places:
            raise RuntimeError("the rows of a table were asked for that no stepper trains: make the stepper first")
        return self._places[id(parameter)]


def _kind_of(parameter: Parameter) -> torch.dtype:
    """Return the type of row numbers."""
    return torch.int32 if parameter.shape[0] < 1 << 31 else torch.int64


class RowsBucket(LocalBucket):
    """Tables whose gradients are pushed as rows, to each server its own."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        tables: EmbeddingTables,
        about: Callable[[], Mapping[str, Any]],
        wire_dtype: torch.dtype | None,
    ) -> None:
        """`about()`: the fields that name the gradient pass and the replica."""
        super().__init__(parameters)
        self._tables, self._about, self._wire_dtype = tables, about, wire_dtype

    def depart(self, metadata: Sequence[float] = (), *, seed: int = 0) -> None:
        for parameter in self.parameters:
            pushed = self._tables.push(parameter, self._about(), wire_dtype=self._wire_dtype)
            self.bytes += SentBytes(pushed, parameter.nbytes)
            if parameter.grad is None:  # others may have one; a dense one of zeros would take the table's memory
                none, shape = torch.empty(0, dtype=torch.long), parameter.shape
                parameter.grad = sparse_rows(none, parameter.new_empty(0, *shape[1:]), shape)

    def scale(self, factor: float) -> None:
        """Do nothing: the servers get the factor with the step."""
