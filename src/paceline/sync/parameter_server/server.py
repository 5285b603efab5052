"""A parameter server: holds some of a model's parameters, and runs the user's own optimizers on them.

Replicas push their gradients, each for a *walk*: (generation of the members, step, number of the walk in it). When the
gradients of all replicas are there, the server adds them up in the order of the replicas, so that the sum does not
depend on who came first, and tells the sum's norm to all who ask. Then they say that the step counts, by which factor
gradients are to be multiplied, and with which options; the first who says so has the optimizers step, and all get the
weights. A walk that was given up, because a member was lost in it, is forgotten when a newer generation pushes.

Nothing here knows how the process came to be, or who else is a server.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.messages.tensor_messages import TensorMessage, TensorServer
from paceline.sync.parameter_server.embedding_rows import EmbeddingRows, is_by_rows, summed_rows

__all__ = [
    "ParameterGroups",
    "PassKey",
    "PendingSum",
    "Server",
    "ServerFactory",
    "ServerParameters",
    "check_parameter_groups",
    "options_of",
    "parameter_groups_of",
    "pass_key_of",
    "places_of",
    "set_options",
    "squared_norm",
    "write_option",
]

LOOK_S = 0.2

PassKey = tuple[int, int, int]
ParameterGroups = tuple[tuple[tuple[int, ...], ...], ...]  # of each optimizer's groups, the ids of the parameters


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group as JSON has them, tensors as numbers: what a scheduler may change."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def parameter_groups_of(optimizers: Sequence[Optimizer]) -> ParameterGroups:
    """Which parameters are in which groups."""
    return tuple(tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups) for optimizer in optimizers)


def check_parameter_groups(optimizers: Sequence[Optimizer], held: ParameterGroups) -> None:
    """Raise RuntimeError where groups are not those that the servers began with."""
    now = parameter_groups_of(optimizers)
    changed = [one for one, was, has in zip(optimizers, held, now, strict=True) if was != has]
    if changed:
        raise RuntimeError(
            f"the parameter groups of {type(changed[0]).__name__} have changed since the first step "
            "(add_param_group?), but under ParameterServer the servers go on with those of the first step. Add all "
            "groups before it, with requires_grad_(False) where parameters are to stay as they are, or use "
            "sync=AllReduce()"
        )


class ServerParameters:
    """Some parameters, by their places in the model, and optimizers cut down to them.

    The objects are the process's own: they are changed in place. Those `elsewhere` are emptied, and of tables the
    `rows` are kept that are given by the tables' places.
    """

    def __init__(
        self,
        parameters: Mapping[int, Parameter],
        optimizers: Sequence[Optimizer],
        *,
        elsewhere: Iterable[Parameter] = (),
        rows: Mapping[int, slice] | None = None,
    ) -> None:
        self.version = 0  # updates since the beginning
        self._parameters = dict(parameters)
        self._places = {id(parameter): place for place, parameter in self._parameters.items()}
        tables = {place: self._parameters[place] for place in rows or {}}
        self.rows = EmbeddingRows(tables, rows or {}, optimizers)
        for parameter in (one for place, one in self._parameters.items() if place not in tables):
            parameter.data = parameter.data.clone()  # it may lie in memory that others see
            parameter.grad = None
        for parameter in elsewhere:
            parameter.grad = None
            if not parameter.is_shared():  # a process's own copy: it has one as soon as the worker changes its weights
                parameter.data = parameter.data.new_empty(0)
        self._optimizers = [_PartialOptimizer(optimizer, self._places) for optimizer in optimizers]

    def step(self, gradients: Mapping[int, Tensor], options: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Have the optimizers step, with these options of all their groups; who has no gradient stays as it is."""
        for place, gradient in gradients.items():
            self._parameters[place].grad = gradient
        for optimizer, groups in zip(self._optimizers, options, strict=True):
            optimizer.step(groups)
        for place in gradients:
            self._parameters[place].grad = None
        self.version += 1

    @torch.no_grad()
    def weights(self, places: Sequence[int]) -> list[Tensor]:
        """Copies of parameters, one flat tensor for each dtype, in the order of `places`."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for place in places:
            parameter = self._parameters[place]
            by_dtype.setdefault(parameter.dtype, []).append(parameter.detach().reshape(-1))
        return [torch.cat(some) for some in by_dtype.values()]

    def state(self, *, with_rows: bool = False) -> tuple[dict[str, list[Any]], list[Tensor]]:
        """What the optimizers keep, for a header, and its tensors in the same order: copies, which do not change.

        "entries" are those of their state, [optimizer, place, key, whether it is a tensor, plain value], what goes by
        the rows of tables only if asked; "written" what they have written into their groups themselves, [optimizer,
        group, key, and so on]; "options" what workers have said of the groups here.
        """
        entries: list[list[Any]] = []
        written: list[list[Any]] = []
        tensors: list[Tensor] = []
        for number, optimizer in enumerate(self._optimizers):
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    if not with_rows and is_by_rows(value) and self._places[id(parameter)] in self.rows:
                        continue
                    entries.append([number, self._places[id(parameter)], key, *_entered(value, tensors)])
        for number, optimizer in enumerate(self._optimizers):
            written += [[number, group, key, *_entered(value, tensors)] for group, key, value in optimizer.written()]
        return {"entries": entries, "written": written, "options": [one.options for one in self._optimizers]}, tensors

    @torch.no_grad()
    def fill(self, flats: Iterable[Tensor], kept: Mapping[str, Sequence[Any]], tensors: Iterator[Tensor]) -> None:
        """Take over what `weights` told of all `places`, and `state` of all rows, elsewhere."""
        by_dtype = {flat.dtype: flat for flat in flats}
        for parameter in self._parameters.values():
            flat = by_dtype[parameter.dtype]
            parameter.copy_(flat[: parameter.numel()].view(parameter.shape))
            by_dtype[parameter.dtype] = flat[parameter.numel() :]
        for optimizer, options in zip(self._optimizers, kept["options"], strict=True):
            optimizer.state.clear()
            optimizer.begin_with(options)
        for number, place, key, is_tensor, value in kept["entries"]:
            state = self._optimizers[number].state.setdefault(self._parameters[place], {})
            state[key] = next(tensors).clone() if is_tensor else value
        for number, group, key, is_tensor, value in kept["written"]:
            write_option(self._optimizers[number].groups[group], key, next(tensors).clone() if is_tensor else value)

    @property
    def places(self) -> list[int]:
        """All that it has."""
        return [*self._parameters]

    def like(self, place: int, flat: Tensor) -> Tensor:
        """A part of a flat tensor as the gradient of a parameter."""
        parameter = self._parameters[place]
        return flat.to(parameter.dtype).view(parameter.shape)

    def numel(self, place: int) -> int:
        return self._parameters[place].numel()


class _PartialOptimizer:
    """An optimizer without the parameters that are elsewhere; groups that are left without any are left out.

    An option of a group is set where workers say another value than they did before. What the optimizer writes there
    itself stays: some count their steps so.
    """

    def __init__(self, optimizer: Optimizer, places: Mapping[int, int]) -> None:
        self._optimizer = optimizer
        self.groups: dict[int, dict[str, Any]] = {}  # that are kept, by their numbers
        groups, optimizer.param_groups[:] = [*optimizer.param_groups], []
        for number, group in enumerate(groups):
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in places]
            if group["params"]:
                self.groups[number] = group
                optimizer.param_groups.append(group)
        for parameter in [one for one in optimizer.state if id(one) not in places]:
            del optimizer.state[parameter]
        self.options = options_of(optimizer)  # of these groups, as workers have said last

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        return self._optimizer.state

    def step(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Step, where there is anything, with these options of all its groups."""
        for (number, group), before in zip(self.groups.items(), self.options, strict=True):
            said = options[number]
            set_options(group, {key: said[key] for key in said if key not in before or before[key] != said[key]})
            before.update(said)
        if self.groups:
            self._optimizer.step()

    def begin_with(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Have these options, which workers have said elsewhere of the groups that are kept."""
        self.options = [dict(some) for some in options]
        for group, some in zip(self.groups.values(), self.options, strict=True):
            set_options(group, some)

    def written(self) -> Iterator[tuple[int, str, Any]]:
        """Yield what the optimizer has written into its groups: number of the group, key and value."""
        for (number, group), said in zip(self.groups.items(), self.options, strict=True):
            for key, value in group.items():
                if key != "params" and (key not in said or said[key] != _plain(value)):
                    yield number, key, value


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set a group's options as they came: in JSON a tuple is a list, and so is a tensor, or a number."""
    for key, value in options.items():
        held = group.get(key)
        if isinstance(held, Tensor):
            held.copy_(torch.as_tensor(value, dtype=held.dtype))
        else:
            write_option(group, key, value)


def write_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Put a value into a group in place of what was there: in JSON a tuple is a list."""
    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _plain(value: Any) -> Any:
    """An option as it comes out of JSON."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _entered(value: Any, tensors: list[Tensor]) -> tuple[bool, Any]:
    """What a header has of a value: whether it is a tensor, of which a copy goes to the others, and the plain value."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().clone())
        return True, None
    return False, value


@dataclasses.dataclass(slots=True)
class PendingSum:
    """What was pushed for a walk: of each parameter the gradient of each replica."""

    pushed: dict[int, dict[int, Tensor]] = dataclasses.field(default_factory=dict[int, dict[int, Tensor]])
    sums: dict[int, Tensor] = dataclasses.field(default_factory=dict[int, Tensor])

    def has_all(self, places: Sequence[int], replicas: int) -> bool:
        return all(place in self.sums or len(self.pushed.get(place, ())) == replicas for place in places)

    def add_up(self, places: Sequence[int]) -> None:
        for place in places:
            if place not in self.sums:
                parts = self.pushed.pop(place)
                ordered = [parts[replica] for replica in sorted(parts)]
                if ordered[0].is_sparse:
                    self.sums[place] = summed_rows(ordered)
                    continue
                first, *others = ordered
                for other in others:
                    first.add_(other)
                self.sums[place] = first


class ServerFactory(Protocol):
    """How a server's process makes it."""

    def __call__(
        self, part: ServerParameters, listener: TensorServer, *, is_deserted: Callable[[], bool]
    ) -> Server: ...


class Server:
    """Answers what comes in, one message after the other, until all callers have gone."""

    def __init__(self, part: ServerParameters, listener: TensorServer, *, is_deserted: Callable[[], bool]) -> None:
        """`is_deserted()`: nobody has come, and nobody will."""
        self.part, self.listener = part, listener
        self._is_deserted = is_deserted
        self._gatherings: dict[PassKey, PendingSum] = {}
        self._generation = -1  # the newest that has pushed
        self._stepped: PassKey = (-1, -1, -1)
        self._squared = 0.0  # what was told last: the sum's norm, squared
        self._waiting: list[tuple[bytes, TensorMessage]] = []  # for sums
        self._image: tuple[int, tuple[int, ...], list[Tensor]] = (-1, (), [])  # weights that were told: version, places
        self._callers: set[bytes] = set()

    def serve(self) -> None:
        """Return when all callers have gone. Whatever fails is told to all of them, and raised."""
        try:
            while not self._is_over():
                got = self.listener.receive(LOOK_S)
                if got is not None:
                    self._callers.add(got[0])
                    self._take(*got)
                self._look()
        except Exception:  # the process's boundary: the workers raise it
            for caller in self._callers:
                self.listener.send(caller, {"failed": traceback.format_exc()})
            raise

    def _is_over(self) -> bool:
        if self.listener.num_connected > 0:
            return False
        return self.listener.had_any or self._is_deserted()

    def _take(self, caller: bytes, message: TensorMessage) -> None:
        header = message.header
        match header["op"]:
            case "push":
                self._push(header, message.tensors[0])
            case "push_rows":
                self._push_rows(header, message.tensors)
            case "rows" | "piece":
                told = self.part.rows.told(header, message.tensors)
                self.listener.send(caller, {"call": header["call"], "version": self.part.version}, [told])
            case "sum":
                self._waiting.append((caller, message))
            case "step":
                self._step(header)
                self._tell_weights(caller, header)
            case "state":
                kept, tensors = self.part.state()
                about = {"call": header["call"], "rows": self.part.rows.entries(), "version": self.part.version}
                self.listener.send(caller, {**about, **kept}, tensors)
            case _:
                self._take_other(caller, message)
        self._answer_sums()

    def _look(self) -> None:
        """Called again and again, whether anything has come or not."""

    def _take_other(self, caller: bytes, message: TensorMessage) -> None:
        raise ValueError(f"a worker asked for {message.header['op']!r}, which this server does not know")

    def _push(self, header: Mapping[str, Any], flat: Tensor) -> None:
        gathering, offset = self._gathering(pass_key_of(header)), 0
        if gathering is None:
            return
        for place in header["places"]:
            count = self.part.numel(place)
            gradient = self.part.like(place, flat[offset : offset + count])
            gathering.pushed.setdefault(place, {})[header["replica"]] = gradient
            offset += count

    def _push_rows(self, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        gathering, place = self._gathering(pass_key_of(header)), header["place"]
        if gathering is not None:
            gathering.pushed.setdefault(place, {})[header["replica"]] = self.part.rows.gradient(place, *tensors)

    def _gathering(self, walk: PassKey) -> PendingSum | None:
        """What there is of a walk, to which something comes; what it replaces is forgotten. None: it was given up."""
        if walk[0] < self._generation:
            return None
        if walk[0] > self._generation:
            self._generation = walk[0]
            self._gatherings.clear()
            self._waiting.clear()
        # All have voted on the steps before the last one, and none was taken that is still here.
        for old in [one for one in self._gatherings if one[1] < walk[1] - 1]:
            del self._gatherings[old]
        return self._gatherings.setdefault(walk, PendingSum())

    def _answer_sums(self) -> None:
        """Tell all who wait for a sum that is complete."""
        still: list[tuple[bytes, TensorMessage]] = []
        for caller, message in self._waiting:
            header = message.header
            if pass_key_of(header) == self._stepped:  # a faster worker has had the step taken before this one asked
                self.listener.send(caller, {"call": header["call"], "squared": self._squared})
                continue
            places = places_of(header)
            gathering = self._gatherings.setdefault(pass_key_of(header), PendingSum())
            if not gathering.has_all(places, header["replicas"]):
                still.append((caller, message))
                continue
            gathering.add_up(places)
            self._squared = squared_norm([gathering.sums[place] for place in places])
            self._before_sum(pass_key_of(header), places)
            self.listener.send(caller, {"call": header["call"], "squared": self._squared})
        self._waiting = still

    def _step(self, header: Mapping[str, Any]) -> None:
        """Take the step, unless another worker has said so before."""
        walk = pass_key_of(header)
        if walk == self._stepped:
            return
        gathering = self._gatherings.pop(walk)
        gathering.add_up(places_of(header))
        gradients = {place: gathering.sums[place].mul_(header["factor"]) for place in places_of(header)}
        self._before_step(header)
        self.part.step(gradients, header["options"])
        self._stepped = walk
        self._after_step()
        for old in [one for one in self._gatherings if one[:2] < walk[:2]]:
            del self._gatherings[old]

    def _before_sum(self, walk: PassKey, places: Sequence[int]) -> None:
        """The sums of these parameters are complete, and about to be told."""

    def _before_step(self, header: Mapping[str, Any]) -> None:
        """The optimizers are about to step."""

    def _after_step(self) -> None:
        """They have, and nobody has been told."""

    def _tells(self) -> Mapping[str, Any]:
        """What is told of this server with its weights."""
        return {}

    def _tell_weights(
        self, caller: bytes, header: Mapping[str, Any], *, buffers: Mapping[int, Tensor] | None = None
    ) -> None:
        """Tell the weights that are asked for, and `buffers` by their numbers."""
        about, more = (self.part.version, tuple(header["places"])), buffers or {}
        if self._image[:2] != about:
            self._image = (*about, self.part.weights(header["places"]))
        told = {"call": header["call"], "version": self.part.version, "buffers": [*more], **self._tells()}
        self.listener.send(caller, told, [*self._image[2], *more.values()])


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """The square of the norm that they have together."""
    norms = [torch.linalg.vector_norm(_numbers(one), dtype=torch.float64) for one in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def _numbers(gradient: Tensor) -> Tensor:
    """The real numbers of which a gradient consists."""
    values = gradient.values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def places_of(header: Mapping[str, Any]) -> list[int]:
    """The parameters that a question is about, and the tables, of which all servers have rows."""
    return [*header["places"], *header.get("tables", ())]


def pass_key_of(header: Mapping[str, Any]) -> PassKey:
    generation, step, number = header["walk"]
    return int(generation), int(step), int(number)
