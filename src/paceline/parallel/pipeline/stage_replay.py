"""Run one stage's part of a forward: the model's own code, in which the tape says which calls are this stage's.

Calls of other stages return placeholders at once. A call of this stage gets contents for the placeholders that it
needs: the values received from earlier stages. Inside a unit no torch function mode is active, unless values come in by
other ways than arguments. So a unit runs as fast as it does alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]  # nothing public tells which mode is on top
)

from paceline.errors import PlanError
from paceline.parallel.meta.meta_device import DEVICE_QUERIES, unseen
from paceline.parallel.meta.tensor_tree import TensorSpec, held, map_leaves, map_tensors, tensors_in
from paceline.parallel.model_units import ModelUnit, UnitRandomness, replaced_forward
from paceline.parallel.pipeline.custom_functions import watched_functions
from paceline.parallel.pipeline.forward_hooks import call_hooks, silenced_hooks
from paceline.parallel.pipeline.stage_partition import ValueRoute
from paceline.parallel.pipeline.tape import NewValue, PassedArgument, Tape, TapeCall
from paceline.parallel.pipeline.user_checkpoints import UserCheckpoints

__all__ = ["StageOutput", "StageReplayer"]


class StageOutput:
    """What one stage's forward made: `values` for later stages, by number; on the last stage the forward's result."""

    __slots__ = ("result", "values")

    def __init__(self, result: Any, values: dict[int, Tensor]) -> None:
        self.result, self.values = result, values


class StageReplayer:
    """Runs stages of the forwards of `model` with these units, which is on `device`."""

    def __init__(self, model: nn.Module, units: Sequence[ModelUnit], *, device: torch.device) -> None:
        self.units, self.device = units, device
        modules = (module for unit in units for module in unit.module.modules())
        self._buffers = [module.__dict__["_buffers"] for module in modules]
        self._parameters = [module.__dict__["_parameters"] for module in model.modules()]

    def replay(
        self,
        forward: Callable[[Any], Any],
        micro: Any,
        *,
        tape: Tape,
        route: ValueRoute,
        stage: int,
        received: Mapping[int, Tensor],
        seed: tuple[int, ...] | None = None,
    ) -> StageOutput:
        """Run the part of `stage` in `forward(micro)`; `received` are the values of earlier stages that arrive there.

        With `seed`, each unit's call draws the random numbers that `seeded_units` would give it. Raises PlanError if
        the forward differs from the tape.
        """
        draws = None if seed is None else UnitRandomness(*seed, between=tape.draws_between)
        mode = _Replay(self, tape, route, stage, received, draws)
        with replaced_forward(self.units, mode.wrap), mode.checkpoints.watched(), watched_functions(mode), mode:
            result = forward(micro)
        mode.expect_end()
        last = stage == len(route.crossing)
        return StageOutput(map_tensors(result, mode.real) if last else None, mode.kept)

    def tensor_ids(self) -> set[int]:
        """Return the ids of the model's parameters and of the units' current buffers, which may be replaced between
        forwards. Another model that the forward calls, a teacher for example, runs on every stage."""
        buffers = {id(buffer) for own in self._buffers for buffer in own.values()}
        return buffers | {id(parameter) for own in self._parameters for parameter in own.values()}


class _ValueNumbers:
    """Which tensors are which values of a tape. Keeps no reference, so that the forward's temporaries are freed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __setitem__(self, tensor: Tensor, number: int) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), number

    def get(self, tensor: Tensor) -> int | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None  # ids are reused


class _Replay(TorchFunctionMode):
    def __init__(
        self,
        replayer: StageReplayer,
        tape: Tape,
        route: ValueRoute,
        stage: int,
        received: Mapping[int, Tensor],
        draws: UnitRandomness | None,
    ) -> None:
        super().__init__()
        self._replayer, self._tape, self._route, self._stage = replayer, tape, route, stage
        self._draws = draws
        self._wanted = frozenset(route.crossing[stage]) if stage < len(route.crossing) else frozenset[int]()
        self.kept: dict[int, Tensor] = {number: received[number] for number in self._wanted if number in received}
        # contents for placeholders
        self._reals = {number: self._seen(number, tensor) for number, tensor in received.items()}
        self._placeholders = {} if tape.placeholders is None else tape.placeholders
        self._numbers = _ValueNumbers()
        self._own: set[int] | None = None  # ids; computed at first use
        hooked_modules = {call.name for call in tape.calls if call.hook_outputs}
        self._hooked_modules = {
            place for place, unit in enumerate(replayer.units) if hooked_modules and unit.name in hooked_modules
        }
        self._next = 0
        self._inside = False
        self.checkpoints = UserCheckpoints(lambda: self._inside)

    # ------------------------------------------------------------------------------------------------------ operations

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DEVICE_QUERIES:
            return DEVICE_QUERIES[func](self._replayer.device) if args[0].device.type == "meta" else func(*args)
        if func in self._tape.queries:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if self._inside:  # inside an open unit of this stage
            return func(*map_tensors(args, self.real), **map_tensors(kwargs, self.real))
        if not any(self._is_owned(tensor) for tensor in given):
            return func(*args, **kwargs)
        call = self._advance(getattr(func, "__name__", str(func)), is_unit=False)
        only = call.only
        if self._route.stage_of[call.unit] != self._stage:
            return self._answer(call, given, None) if only is None else self._placeholder(only)
        real = self._with_contents(call, args, kwargs, given)
        if only is None:
            return self._done(call, given, tensors_in(real), func(*real[0], **real[1]), None)
        return self._made(call, only, func(*real[0], **real[1]))

    def _is_owned(self, tensor: Tensor) -> bool:
        if self._numbers.get(tensor) is not None:
            return True
        if self._own is None:
            self._own = self._replayer.tensor_ids()
        return id(tensor) in self._own

    # -------------------------------------------------------------------------------------------------- calls of units

    def wrap(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward that replaces that of the unit at `place`."""
        unit = self._replayer.units[place]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            record = self._advance(unit.name, is_unit=True)
            only, given, passed = record.only, list[Tensor](), list[Tensor]()
            with unseen():
                if only is None:
                    given = tensors_in((args, kwargs))
                if self._route.stage_of[record.unit] != self._stage:
                    if self._draws is not None:
                        self._draws.pass_by()
                    return self._answer(record, given, unit.module) if only is None else self._placeholder(only)
                args, kwargs = self._with_contents(record, args, kwargs, given)
                if only is None:
                    passed = tensors_in((args, kwargs))
            with contextlib.nullcontext() if self._draws is None else self._draws.unit():
                out = self._run(forward, args, kwargs, is_open=record.is_open)
            with unseen():
                if only is None:
                    return self._done(record, given, passed, out, unit.module)
                return self._made(record, only, out)

        return self._with_hooks(unit, call) if place in self._hooked_modules else call

    def _with_hooks(self, unit: ModelUnit, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` followed by the hook calls of modules inside the unit."""

        def with_hooks(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            given, record = tensors_in((args, kwargs)), self._tape.calls[self._next : self._next + 1]
            with silenced_hooks(unit.module, (name for one in record for name, _ in one.hook_outputs)) as hook_outputs:
                out = call(*args, **kwargs)
            (record,) = record  # the call has found it
            with unseen():
                if self._route.stage_of[record.unit] == self._stage:
                    self._number(record, given, hook_outputs, [one for _, one in record.hook_outputs])
                else:
                    hook_outputs = [(name, self._placeholders_for(one, given)) for name, one in record.hook_outputs]
            call_hooks(unit.module, hook_outputs)
            return out

        return with_hooks

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, is_open: bool) -> Any:
        """Run a unit of this stage, without this function mode where possible."""
        self._inside = True
        watching = is_open or _get_current_function_mode() is not self
        try:
            if watching:  # the model's code has entered another mode
                return forward(*args, **kwargs)
            self.__exit__(None, None, None)
            try:
                return self.checkpoints.recomputed(forward)(*args, **kwargs)
            finally:
                self.__enter__()
        finally:
            self._inside = False
        self.checkpoints = UserCheckpoints(lambda: self._inside)

    # -------------------------------------------------------------------------------------------------------- the tape

    def _advance(self, name: str, *, is_unit: bool) -> TapeCall:
        """Return the record of the call that is about to happen."""
        call = self._tape.calls[self._next] if self._next < len(self._tape.calls) else None
        if call is None or call.name != name or call.is_unit != is_unit:
            raise PlanError(_other_way(f"{name}()", f"{call.name}()" if call else "the end"))
        self._next += 1
        return call

    def expect_end(self) -> None:
        """Raise PlanError if calls of the tape have not happened."""
        if self._next < len(self._tape.calls):
            raise PlanError(_other_way("the end", f"{self._tape.calls[self._next].name}()"))

    def real(self, tensor: Tensor) -> Tensor:
        """Return the contents of a placeholder, if this stage has received or made them; else the tensor itself."""
        number = self._numbers.get(tensor)
        return tensor if number is None else self._reals.get(number, tensor)

    def _seen(self, number: int, part: Tensor) -> Tensor:
        """Return a received tensor as the model's code should see it; the leaf stays as it is."""
        spec = self._tape.values[number].spec
        return part if spec.split is None else spec.seen(part.view_as(part))

    def _answer(self, call: TapeCall, given: list[Tensor], module: nn.Module | None) -> Any:
        """Return the output of a call of another stage: placeholders."""
        out = self._placeholders_for(call.output, given)
        if module is not None:
            for name, key, number in call.left:
                setattr(module.get_submodule(name), key, self._placeholder(number))
        for place, number, _ in call.changed:
            self._numbers[given[place]] = number
        return out

    def _placeholder(self, number: int) -> Tensor:
        placeholders = self._placeholders
        if number not in placeholders:
            placeholders[number] = self._tape.values[number].spec.placeholder()
        self._numbers[placeholders[number]] = number
        return placeholders[number]

    def _placeholders_for(self, output: Any, given: list[Tensor]) -> Any:
        def fill(leaf: Any) -> Any:
            if isinstance(leaf, NewValue):
                return self._placeholder(leaf.number)
            return given[leaf.place] if isinstance(leaf, PassedArgument) else leaf

        return fill(output) if isinstance(output, (NewValue, PassedArgument)) else map_leaves(output, fill)

    def _with_contents(self, call: TapeCall, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """Return the arguments for a call of this stage; a received value that it changes in place is copied."""
        if self._reals.keys().isdisjoint(call.needs):
            return args, kwargs
        own = {id(given[place]) for place, _, _ in call.changed}

        def contents(tensor: Tensor) -> Tensor:
            real = self.real(tensor)
            return TensorSpec.of(real).seen(held(real).clone()) if real is not tensor and id(tensor) in own else real

        return map_tensors((args, kwargs), contents)

    def _made(self, call: TapeCall, number: int, out: Any) -> Any:
        """Number the result of a call of this stage that returns one tensor and does nothing else."""
        if not isinstance(out, Tensor):
            raise PlanError(_other_way(f"{call.name}() with {type(out).__name__}", "a tensor"))
        self._numbers[out] = number
        self._keep(number, out)
        return out

    def _done(
        self, call: TapeCall, given: list[Tensor], passed: list[Tensor], out: Any, module: nn.Module | None
    ) -> Any:
        """Number what a call of this stage has made. `passed`: the contents of `given`."""
        for place, number, _ in call.changed:
            self._numbers[given[place]] = self._numbers[passed[place]] = number
            self._keep(number, passed[place])
            if passed[place] is not given[place]:
                self._reals[number] = passed[place]
        self._number(call, given, out, call.output)
        if module is not None:
            for name, key, number in call.left:
                tensor = getattr(module.get_submodule(name), key)
                self._numbers[tensor] = number
                self._keep(number, tensor)
        return out

    def _number(self, call: TapeCall, given: list[Tensor], out: Any, expected: Any) -> None:
        """Give the tensors that a call of this stage has made their numbers on the tape."""
        made, marks = tensors_in(out), _marks_in(expected)
        if len(made) != len(marks):
            raise PlanError(_other_way(f"{call.name}() with {len(made)} tensors", f"{len(marks)}"))
        for tensor, mark in zip(made, marks, strict=True):
            if isinstance(mark, NewValue):
                self._numbers[tensor] = mark.number
                self._keep(mark.number, tensor)
            elif tensor is not given[mark.place] and (number := self._numbers.get(given[mark.place])) is not None:
                self._numbers[tensor] = number

    def _keep(self, number: int, tensor: Tensor) -> None:
        spec = self._tape.values[number].spec
        if not spec.fits(tensor):
            raise PlanError(
                f"{self._tape.values[number].says} is {TensorSpec.of(tensor)}, but {spec} was expected: its kind "
                "depends on the contents of the inputs, or the weights' types have changed. What leaves a unit must "
                "have the same shape for inputs of the same shapes."
            )
        if number in self._wanted:
            part = held(tensor)
            self.kept[number] = part.clone() if number in self._route.copied else part


def _marks_in(output: Any) -> list[NewValue | PassedArgument]:
    # most calls return one tensor, so there is no structure to traverse
    if isinstance(output, (NewValue, PassedArgument)):
        return [output]
    marks: list[NewValue | PassedArgument] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, (NewValue, PassedArgument)):
            marks.append(leaf)
        return leaf

    map_leaves(output, note)
    return marks


def _other_way(came: str, expected: str) -> str:
    return (
        f"the model's forward differs from that for the first inputs of these shapes:  {came} came where {expected} "
        "was expected. With stages it may depend on shapes and types of the inputs, not on their contents, nor on what "
        "the script changes between steps (an attribute of the model, torch.compile). Move what depends on them into a "
        "unit, or use Layout(shard=n), which splits any model."
    )
