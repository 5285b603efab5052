"""Run one stage's part of a forward: the model's own code, in which the tape says what is this stage's to do.

Calls of other stages return ghosts at once. A call of this stage gets contents for the ghosts that it needs: the
values received from earlier stages. Inside a unit nothing is watched (unless values come in by other ways than
arguments), so a unit runs as fast as it does alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]  # nothing public tells which mode is on top
)
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.errors import PlanError
from paceline.parallel.stages.asking import ASKED
from paceline.parallel.stages.cut import Route
from paceline.parallel.stages.structure import map_leaves, map_tensors, tensors_in
from paceline.parallel.stages.tape import Call, Given, New, Tape
from paceline.parallel.stages.trial import unseen
from paceline.parallel.units import Unit, replaced_forward, seed_generators

__all__ = ["Part", "replay"]


class Part:
    """What one stage's forward made: `values` for later stages, by number; on the last one the forward's result."""

    __slots__ = ("result", "values")

    def __init__(self, result: Any, values: dict[int, Tensor]) -> None:
        self.result, self.values = result, values


def replay(
    forward: Callable[[Any], Any],
    micro: Any,
    *,
    units: Sequence[Unit],
    tape: Tape,
    route: Route,
    stage: int,
    received: Mapping[int, Tensor],
    device: torch.device,
    seed: tuple[int, ...] | None = None,
) -> Part:
    """Run the part of `stage` in `forward(micro)`; `received` are the values of earlier stages that arrive there.

    With `seed`, each unit's call draws the random numbers that `seeded_units` would give it. Raises PlanError where the
    forward goes another way than the tape.
    """
    mode = _Replay(units, tape, route, stage, received, device, seed)
    if seed is not None:
        seed_generators(*seed, 0, 1)
    with replaced_forward(units, mode.wrap), mode:
        result = forward(micro)
    mode.expect_end()
    last = stage == len(route.crossing)
    return Part(map_tensors(result, mode.real) if last else None, mode.kept)


class _Replay(TorchFunctionMode):
    def __init__(
        self,
        units: Sequence[Unit],
        tape: Tape,
        route: Route,
        stage: int,
        received: Mapping[int, Tensor],
        device: torch.device,
        seed: tuple[int, ...] | None,
    ) -> None:
        super().__init__()
        self._units, self._tape, self._route, self._stage = units, tape, route, stage
        self._device, self._seed = device, seed
        self._wanted = frozenset(route.crossing[stage]) if stage < len(route.crossing) else frozenset[int]()
        self.kept: dict[int, Tensor] = {number: received[number] for number in self._wanted if number in received}
        self._reals = dict(received)  # contents for ghosts, by number
        self._numbers = WeakTensorKeyDictionary()
        self._unit_buffers = {id(buffer) for unit in units for buffer in unit.module.buffers()}
        self._next = 0
        self._unit_calls = 0  # so far
        self._inside = False

    # ------------------------------------------------------------------------------------------------------ operations

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ASKED:
            return ASKED[func](self._device) if args[0].device.type == "meta" else func(*args)
        if func in self._tape.asks:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if self._inside:  # of an open unit of this stage
            return func(*map_tensors(args, self.real), **map_tensors(kwargs, self.real))
        if not any(self._is_owned(tensor) for tensor in given):
            return func(*args, **kwargs)
        call = self._advance(getattr(func, "__name__", str(func)), is_unit=False)
        if self._route.stage_of[call.unit] != self._stage:
            return self._answer(call, given, None)
        real = self._with_contents(call, args, kwargs, given)
        return self._done(call, given, tensors_in(real), func(*real[0], **real[1]), None)

    def _is_owned(self, tensor: Tensor) -> bool:
        return tensor in self._numbers or isinstance(tensor, nn.Parameter) or id(tensor) in self._unit_buffers

    # -------------------------------------------------------------------------------------------------- calls of units

    def wrap(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What the unit at `place` does when it is called."""
        unit = self._units[place]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            with unseen():
                given = tensors_in((args, kwargs))
                record = self._advance(unit.name, is_unit=True)
                if self._route.stage_of[record.unit] != self._stage:
                    self._seed_generators(after=True)
                    return self._answer(record, given, unit.module)
                args, kwargs = self._with_contents(record, args, kwargs, given)
                passed = tensors_in((args, kwargs))
                self._seed_generators(after=False)
            out = self._run(forward, args, kwargs, is_open=record.is_open)
            with unseen():
                self._seed_generators(after=True)
                return self._done(record, given, passed, out, unit.module)

        return call

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, is_open: bool) -> Any:
        """Run a unit of this stage, with nobody watching where that can be."""
        self._inside = True
        watching = is_open or _get_current_function_mode() is not self
        try:
            if watching:  # the model's code has put another mode on top
                return forward(*args, **kwargs)
            self.__exit__(None, None, None)
            try:
                return forward(*args, **kwargs)
            finally:
                self.__enter__()
        finally:
            self._inside = False

    def _seed_generators(self, *, after: bool) -> None:
        if self._seed is not None:
            seed_generators(*self._seed, self._unit_calls, int(after))

    # -------------------------------------------------------------------------------------------------------- the tape

    def _advance(self, name: str, *, is_unit: bool) -> Call:
        """Return the record of the call that is about to happen."""
        call = self._tape.calls[self._next] if self._next < len(self._tape.calls) else None
        if call is None or call.name != name or call.is_unit != is_unit:
            raise PlanError(_other_way(f"{name}()", f"{call.name}()" if call else "the end"))
        self._next += 1
        self._unit_calls += is_unit
        return call

    def expect_end(self) -> None:
        """Raise PlanError if calls of the tape have not happened."""
        if self._next < len(self._tape.calls):
            raise PlanError(_other_way("the end", f"{self._tape.calls[self._next].name}()"))

    def real(self, tensor: Tensor) -> Tensor:
        """The contents of a ghost, if this stage has received or made them; else the tensor itself."""
        number = self._numbers.get(tensor)
        return tensor if number is None else self._reals.get(number, tensor)

    def _answer(self, call: Call, given: list[Tensor], module: nn.Module | None) -> Any:
        """What a call of another stage returns: ghosts."""
        ghosts: dict[int, Tensor] = {}

        def ghost(number: int) -> Tensor:
            if number not in ghosts:
                ghosts[number] = self._tape.values[number].spec.ghost()
                self._numbers[ghosts[number]] = number
            return ghosts[number]

        def fill(leaf: Any) -> Any:
            return (
                ghost(leaf.number) if isinstance(leaf, New) else given[leaf.place] if isinstance(leaf, Given) else leaf
            )

        out = map_leaves(call.output, fill)
        if module is not None:
            for name, key, number in call.left:
                setattr(module.get_submodule(name), key, ghost(number))
        for place, number, _ in call.changed:
            self._numbers[given[place]] = number
        return out

    def _with_contents(self, call: Call, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """The arguments for a call of this stage; what it changes in place is copied if it was received."""
        if self._reals.keys().isdisjoint(call.needs):
            return args, kwargs
        own = {id(given[place]) for place, _, _ in call.changed}

        def contents(tensor: Tensor) -> Tensor:
            real = self.real(tensor)
            return real.clone() if real is not tensor and id(tensor) in own else real

        return map_tensors((args, kwargs), contents)

    def _done(self, call: Call, given: list[Tensor], passed: list[Tensor], out: Any, module: nn.Module | None) -> Any:
        """Number what a call of this stage has made. `passed`: the contents of `given`."""
        for place, number, _ in call.changed:
            self._numbers[given[place]] = self._numbers[passed[place]] = number
            self._keep(number, passed[place])
            if passed[place] is not given[place]:
                self._reals[number] = passed[place]
        made, marks = tensors_in(out), _marks_in(call.output)
        if len(made) != len(marks):
            raise PlanError(_other_way(f"{call.name}() with {len(made)} tensors", f"{len(marks)}"))
        for tensor, mark in zip(made, marks, strict=True):
            if isinstance(mark, New):
                self._numbers[tensor] = mark.number
                self._keep(mark.number, tensor)
            elif tensor is not given[mark.place] and (number := self._numbers.get(given[mark.place])) is not None:
                self._numbers[tensor] = number
        if module is not None:
            for name, key, number in call.left:
                tensor = getattr(module.get_submodule(name), key)
                self._numbers[tensor] = number
                self._keep(number, tensor)
        return out

    def _keep(self, number: int, tensor: Tensor) -> None:
        spec = self._tape.values[number].spec
        if not spec.fits(tensor):
            raise PlanError(
                f"{self._tape.values[number].says} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, "
                f"but {spec} was expected: its kind depends on the contents of the inputs, or the weights' types have "
                "changed. What leaves a unit must have the same shape for inputs of the same shapes."
            )
        if number in self._wanted:
            self.kept[number] = tensor.clone() if number in self._route.copied else tensor


def _marks_in(output: Any) -> list[New | Given]:
    marks: list[New | Given] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, (New, Given)):
            marks.append(leaf)
        return leaf

    map_leaves(output, note)
    return marks


def _other_way(came: str, expected: str) -> str:
    return (
        f"the model's forward went another way than for the first inputs of these shapes: {came} came where {expected} "
        "was expected. With stages it may depend on shapes and types of the inputs, not on their contents. Move what "
        "depends on contents into a unit."
    )
