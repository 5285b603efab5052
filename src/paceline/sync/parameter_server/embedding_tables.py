"""Tables that lie on the servers, the workers' side: the rows that a forward asks for come, and their gradients go.

A table is the matrix of an embedding whose gradients are sparse. Every server has every n-th row of it, and a worker
none, from its first step on: the parameter is *away* (`paceline.comm.remote_tensor`). A forward pulls the rows of its
words, from all servers at once; within a walk each row comes once, however many micro-batches ask for it. Their
gradients are pushed in the place of a bucket of numbers. Whole tables come only to who writes a checkpoint, and to who
asks for a model's state, piece by piece.
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
        self._places: dict[int, int] = {}  # and those that are trained on the servers, in the models' parameters
        self._names: dict[int, str] = {}
        self._known: dict[int, tuple[Tensor, Tensor]] | None = None  # numbers and rows that came in the walk under way
        self._num_bytes_asked = 0

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._tables

    def add(self, parameter: Parameter) -> None:
        """A parameter is the table of a module that asks for its rows."""
        self._tables[id(parameter)] = parameter

    def settle(self, named: Sequence[NamedParameter]) -> dict[int, Parameter]:
        """The servers are to have the tables among these parameters, under their places here; returns those tables."""
        found = {place: parameter for place, (_, parameter) in enumerate(named) if parameter in self}
        self._places = {id(parameter): place for place, parameter in found.items()}
        self._names = {id(parameter): named[place][0] for place, parameter in found.items()}
        return found

    def rows_of(self, server: int) -> dict[int, slice]:
        """Of each table, by its place, the rows that a server has."""
        return {place: rows_on(server, servers=self._servers.count) for place in self._places.values()}

    @torch.no_grad()
    def leave(self) -> None:
        """The servers have the tables: this worker lets go of them."""
        for key in self._places:
            self._tables[key].data = remote_tensor(self._tables[key])

    @torch.no_grad()
    def fetch(self, optimizers: Sequence[Optimizer], told: Sequence[Sequence[Any]]) -> None:
        """Have the whole tables here, and in the optimizers what these keep by rows: `told` by a server of what it has
        (`Rows.entries`). They stay until `leave`."""
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
        """Return a table with all of its rows, as they are on the servers. Where replicas do not wait for each other,
        updates may come meanwhile, which some of the rows have then, and others not."""
        return self._read_table(parameter, set())

    def begin(self) -> None:
        """A walk begins, in which rows do not change that have come."""
        self._known = {}

    def give_up(self) -> None:
        """No walk is under way any more: rows that came in it may change."""
        self._known = None

    def end(self) -> int:
        """The weights of the walk are not needed any more; returns the bytes of what was asked for since then."""
        self._known = None
        asked, self._num_bytes_asked = self._num_bytes_asked, 0
        return asked

    @torch.no_grad()
    def rows(self, parameter: Parameter, numbers: Tensor) -> Tensor:
        """Return the rows of these numbers, which are sorted and of which none comes twice."""
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
        """Send each server its rows of a table's gradient, also that there are none; returns how many bytes."""
        header = {"op": "push_rows", **about, "place": self._place(parameter)}
        sent = list(self.divided(parameter, wire_dtype=wire_dtype))
        for server, tensors in enumerate(sent):
            self._servers.push(server, header, *tensors)  # nobody writes to them
        return sum(tensor.nbytes for tensors in sent for tensor in tensors)

    def divided(self, parameter: Parameter, *, wire_dtype: torch.dtype | None) -> Iterator[list[Tensor]]:
        """Yield what each server is to get of a table's gradient: the numbers of rows there, and the rows as the wire
        has them."""
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
        """Ask the servers for rows, all at once; whoever else is lost meanwhile, they answer."""
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
        """Fill `whole` by what the servers have by rows: of the table, or of an optimizer's entry for it.

        `versions`: with those that the servers had then.
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
    """Of the numbers of rows."""
    return torch.int32 if parameter.shape[0] < 1 << 31 else torch.int64


class RowsBucket(LocalBucket):
    """Tables, of whose gradients the rows that were touched are pushed to all servers, to each its own."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        tables: EmbeddingTables,
        about: Callable[[], Mapping[str, Any]],
        wire_dtype: torch.dtype | None,
    ) -> None:
        """`about()`: by what servers know the walk, and whose gradient this is."""
        super().__init__(parameters)
        self._tables, self._about, self._wire_dtype = tables, about, wire_dtype

    def depart(self, riders: Sequence[float] = (), *, seed: int = 0) -> None:
        for parameter in self.parameters:
            pushed = self._tables.push(parameter, self._about(), wire_dtype=self._wire_dtype)
            self.bytes += SentBytes(pushed, parameter.nbytes)
            if parameter.grad is None:  # others may have one; a dense one of zeros would take the table's memory
                none, shape = torch.empty(0, dtype=torch.long), parameter.shape
                parameter.grad = sparse_rows(none, parameter.new_empty(0, *shape[1:]), shape)

    def scale(self, factor: float) -> None:
        """The servers are told of it."""
