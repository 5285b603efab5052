"""Record the tape of a forward: run it once on an example, without any unit's weights.

Units and what depends on them run on the meta device, where tensors have shapes but no contents. A unit whose code
needs contents (it sorts tokens by expert, for example) is run on the real device instead, alone, on invented weights.
So is everything under autocast, which the meta device does not support. Root-level code must not ask for contents (`if
x.max() > 1`): every stage would have to know them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from paceline.errors import PlanError, Reason
from paceline.parallel.coded_layers import coded_layers_as_linear
from paceline.parallel.kept_attributes import attributes
from paceline.parallel.meta.meta_device import (
    DEVICE_QUERIES,
    USER_ERRORS,
    absent,
    invented,
    on_invented_values,
    on_meta,
    swapped,
    unseen,
    version,
)
from paceline.parallel.meta.tensor_tree import TensorSpec, held, map_tensors, tensors_in
from paceline.parallel.model_units import ModelUnit, replaced_forward
from paceline.parallel.pipeline.custom_functions import CustomFunction, watched_functions
from paceline.parallel.pipeline.forward_hooks import HookCall, call_hooks, has_hooks, silenced_hooks
from paceline.parallel.pipeline.operation_trial import RecordingRefused, first_line, try_operation
from paceline.parallel.pipeline.random_draws import GeneratorState, draws, may_draw
from paceline.parallel.pipeline.tape import RandomDraw, Tape
from paceline.parallel.pipeline.tape_builder import EVERY_STAGE, TapeBuilder, where
from paceline.parallel.pipeline.user_checkpoints import UserCheckpoints

__all__ = ["record"]

OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def record(
    model: nn.Module,
    forward: Callable[[Any], Any],
    micro: Any,
    *,
    units: Sequence[ModelUnit],
    device: torch.device,
    meter: Callable[[], float] | None = None,
) -> Tape:
    """Return the tape of `forward(micro)`, which runs `model` (and the loss) on one micro-batch.

    `device` is where the model will be; `meter` is read before and after each call. The model may be on the meta
    device, or partly so. The model and the generators of torch and Python stay as they are. Raises PlanError with
    everything that keeps this forward from being partitioned.
    """
    at_sight = _refused_at_sight(model, micro)
    hooked_modules: set[str] = set()
    while True:
        tape, notes = _recorded(model, forward, micro, units, device, meter or (lambda: 0.0), frozenset(hooked_modules))
        if notes.hooked_modules <= hooked_modules:
            break
        hooked_modules |= notes.hooked_modules  # recorded again, with their hooks observed
    refusals = at_sight + notes.refusals
    if tape is None or refusals:
        said = "\n".join(f"- {text}" for text in dict.fromkeys(refusals))
        raise PlanError(f"{type(model).__name__} cannot be partitioned into stages as it is:\n{said}", reasons=refusals)
    return tape


def _recorded(
    model: nn.Module,
    forward: Callable[[Any], Any],
    micro: Any,
    units: Sequence[ModelUnit],
    device: torch.device,
    meter: Callable[[], float],
    hooked_modules: frozenset[str],
) -> tuple[Tape | None, TapeBuilder]:
    """Run the forward once; the tape is None if it cannot go on. `hooked`: modules inside units whose hooks hand
    something out."""
    unit_modules = {module for unit in units for module in unit.module.modules()}
    root = [module for module in model.modules() if module not in unit_modules]
    put_back, generators = attributes(model.modules()), GeneratorState(device)
    tape = None
    try:
        with (
            coded_layers_as_linear(model),
            swapped(unit_modules, absent),
            swapped(root, lambda t: absent(t) if _is_parameter(t) else t.clone()),
        ):
            notes = TapeBuilder(model, units, root)
            recorder = _TapeRecorder(model, notes, device, meter, hooked_modules)
            try:
                with (
                    replaced_forward(units, recorder.wrap),
                    recorder.watching_modules(),
                    recorder.checkpoints.watched(),
                    watched_functions(recorder, passes_by=recorder.is_inside),
                ):
                    with recorder:
                        result = forward(micro)
                    notes.may_draw |= generators.has_moved()  # what units draw is undone
                    tape = notes.tape(result)
            except RecordingRefused as error:
                notes.refusals.append(error.reason)
    finally:
        put_back()
        generators.put_back()
    return tape, notes


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _refused_at_sight(model: nn.Module, micro: Any) -> list[Reason]:
    found = []
    if any(tensor.requires_grad for tensor in tensors_in(micro)):
        found.append(
            Reason(
                module=type(model).__name__,
                what="the input requires a gradient, and every stage would compute a part of it.",
                remedy="Pass inputs that require none; what is to be learned is a parameter of the model.",
            )
        )
    return found


class _TapeRecorder(TorchFunctionMode):
    """Sees every torch call of the recorded forward, and every call of a unit."""

    def __init__(
        self,
        model: nn.Module,
        notes: TapeBuilder,
        device: torch.device,
        meter: Callable[[], float],
        hooked_modules: frozenset[str],
    ) -> None:
        super().__init__()
        self._model, self._notes, self._device, self._meter = model, notes, device, meter
        self._hooked_modules, self._names = hooked_modules, {module: name for name, module in model.named_modules()}
        self._inside: int | None = None  # the unit that runs
        self._needs: set[int] = set()
        self._given: set[int] = set()
        self._changed: dict[int, Tensor] = {}  # id of a tensor that the unit changed -> its current placeholder
        self._is_open = False
        # on the real device nothing is recorded; split tensors, a subclass, must still show their shape
        self._ignores_calls = False
        self.checkpoints = UserCheckpoints(self.is_inside)

    def is_inside(self) -> bool:
        """Whether a unit is running."""
        return self._inside is not None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._ignores_calls:
            return func(*args, **kwargs)
        if func in DEVICE_QUERIES and args[0].device.type == "meta":
            return DEVICE_QUERIES[func](self._device)
        given = tensors_in((args, kwargs))
        if self._inside is not None:
            return self._within_unit(func, args, kwargs, given, self._inside)
        owner = self._notes.owner(given)
        if owner != EVERY_STAGE:
            return self._between_units(func, args, kwargs, given, owner)
        self._note_draw(func, args, kwargs, EVERY_STAGE)
        out = func(*args, **kwargs)
        self._notes.everywhere(tensors_in(out))
        return out

    # ----------------------------------------------------------------------------------------------------- operations

    def _between_units(self, func: Callable[..., Any], args: Any, kwargs: Any, given: list[Tensor], owner: int) -> Any:
        before = self._meter()
        name = getattr(func, "__name__", str(func))
        args, kwargs = map_tensors((args, kwargs), self._notes.stand_in)
        self._note_draw(func, args, kwargs, owner)
        place = f"at {where()}, {self._notes.between()},"
        out, changed = try_operation(
            func, args, kwargs, name=name, place=place, after=self._after(), device=self._device
        )
        out = self._as_given(out, given)
        if may_draw(name) and not changed:  # an inactive dropout returns its argument, but may become active
            out = map_tensors(out, lambda made: self._apart(made) if any(made is one for one in given) else made)
        if not tensors_in(out) and not changed:
            self._notes.queries.add(func)
            return out
        says = f"the result of {name}() at {where()}"
        if name == "batch_norm":  # it updates running statistics, and their version counters do not show it
            self._notes.updates(given, owner, f"{name}() at {where()}")
        needs = self._notes.used(given, owner, f"{name}() at {where()}", in_unit=False)
        self._notes.call(
            name=name,
            says=says,
            owner=owner,
            is_unit=False,
            out=out,
            given=given,
            changed=changed,
            needs=needs,
            effort=self._meter() - before,
        )
        return out

    def _within_unit(self, func: Callable[..., Any], args: Any, kwargs: Any, given: list[Tensor], index: int) -> Any:
        args, kwargs = map_tensors((args, kwargs), self._notes.stand_in)
        if any(tensor.device.type == "meta" for tensor in tensors_in((args, kwargs))):
            out, changed = on_meta(func, args, kwargs)
        else:
            out, changed = func(*args, **kwargs), {}
        out = self._as_given(out, given)
        self._changed.update({id(given[place]): placeholder for place, placeholder in changed.items()})
        made = tensors_in(out)
        if made or changed:
            subject = f"{self._notes.unit_name(index)} (at {where()})"
            self._needs |= self._notes.used(given, index, subject, in_unit=True)
            self._is_open |= any(self._notes.has_number(t) and id(t) not in self._given for t in given)
        for tensor in made:
            self._notes.inside(tensor, index)
        return out

    def _as_given(self, out: Any, given: list[Tensor]) -> Any:
        """Return the caller's own objects for arguments that come back, not their placeholders."""
        originals = {id(self._notes.stand_in(tensor)): tensor for tensor in given}
        return map_tensors(out, lambda tensor: originals.get(id(tensor), tensor))

    def _apart(self, tensor: Tensor) -> Tensor:
        """Return a placeholder for a value that equals this one so far."""
        placeholder = self._notes.stand_in(tensor)
        return TensorSpec.of(placeholder).seen(held(placeholder).clone())

    def _after(self) -> str:
        """Return the last unit called, to help to find the place; else the model."""
        return self._notes.newest() or type(self._model).__name__

    def _note_draw(self, func: Callable[..., Any], args: Any, kwargs: Any, owner: int) -> None:
        if isinstance(func, CustomFunction):
            func.tell(lambda inner, args, kwargs: self._note_draw(inner, args, kwargs, owner))
        name = getattr(func, "__name__", "")
        self._notes.may_draw |= may_draw(name)  # probabilities and training mode may change later
        if draws(name, args, kwargs):
            self._notes.draws.append(RandomDraw(after=self._notes.num_unit_calls, unit=owner, where=where()))

    # -------------------------------------------------------------------------------------------------- calls of units

    def wrap(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward that replaces that of the unit at `place`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None:
                self._note_nested(place, self._inside)
                return forward(*args, **kwargs)
            with unseen():
                index, given = self._notes.index_of(place), tensors_in((args, kwargs))
                effort_before, attributes_before = self._meter(), self._attributes()
                versions = [version(tensor) for tensor in given]
                self._begin(place, index, given)
                generators = GeneratorState(self._device)
            try:
                out, changed, left, hook_outputs = self._run_unit(place, forward, args, kwargs)
            finally:
                self._inside = None
                generators.put_back()
            with unseen():
                for number, tensor in enumerate(given):
                    if version(tensor) != versions[number] or id(tensor) in self._changed:
                        changed[number] = self._changed.get(id(tensor), tensor)
                name = self._notes.unit_name(index)
                self._notes.call(
                    name=name,
                    says=f"an output of {name}",
                    owner=index,
                    is_unit=True,
                    out=out,
                    given=given,
                    changed=changed,
                    needs=self._needs,
                    left=left or self._left(place, index, attributes_before),
                    hook_outputs=hook_outputs,
                    is_open=self._is_open,
                    effort=self._meter() - effort_before,
                )
            self._call_hooks(place, hook_outputs)
            return out

        return call

    def watching_modules(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, outputs that hooks of modules inside units receive are recorded, because hooks may keep them for
        others."""
        return contextlib.closing(_ModuleCallWatcher(self._on_module_output))

    def _on_module_output(self, module: nn.Module, output: Any) -> None:
        index = self._inside
        if index is None or not has_hooks(module):
            return
        name = self._names.get(module, "")
        made = [one for one in tensors_in(output) if self._ignores_calls or self._notes.is_inside(one, index)]
        for tensor in made:
            self._notes.inside(tensor, index)
        self._notes.handed(made, name)

    def _call_hooks(self, place: int, hook_outputs: list[HookCall]) -> None:
        unit = self._notes.units[place]
        try:
            call_hooks(unit.module, hook_outputs)
        except USER_ERRORS as error:
            raise RecordingRefused(
                module=unit.name,
                what=f"a forward hook inside {unit.name} hands out what stages without {unit.name} need, and cannot be "
                f"called there, with the module and its output alone ({first_line(error)}).",
                remedy=f"Return the value from {unit.name} instead.",
            ) from error

    def _note_nested(self, place: int, around: int) -> None:
        index = self._notes.index_of(place)
        self._notes.join(around, index, f"{self._notes.unit_name(around)} calls {self._notes.unit_name(index)}")
        for parameter in self._notes.units[place].module.parameters():
            self._notes.uses(parameter, around)

    def _begin(self, place: int, index: int, given: list[Tensor]) -> None:
        self._notes.num_unit_calls += 1
        self._inside, self._given = index, {id(tensor) for tensor in given}
        self._needs, self._changed, self._is_open = set(), {}, False
        for parameter in self._notes.units[place].module.parameters():
            self._notes.uses(parameter, index)

    def _run_unit(
        self, place: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, dict[int, Tensor], list[tuple[str, str, Tensor]], list[HookCall]]:
        """Return the unit's output, which arguments it changed, what it left in attributes (on the real device), and
        hook calls."""
        module = self._notes.units[place].module
        put_back = attributes(module.modules(), objects=(args, kwargs))
        reason: BaseException | None = None
        if not torch.is_autocast_enabled(self._device.type):
            try:
                with silenced_hooks(module, self._hooked_modules_in(place)) as hook_outputs:
                    return forward(*args, **kwargs), {}, [], hook_outputs
            except USER_ERRORS as error:
                reason = error
                put_back()
        self._ignores_calls = True
        try:
            out, changed, left, hook_outputs = self._run_for_real(place, forward, args, kwargs)
        except USER_ERRORS as error:
            said = f" on tensors without contents ({first_line(reason)}) or" if reason else ""
            name = self._notes.units[place].name
            raise RecordingRefused(
                module=name,
                what=f"{name} ({type(module).__name__}) cannot be run alone, to see what it returns,{said} on "
                f"invented numbers ({first_line(error)}).",
                remedy="Name a module around it as a unit, or one inside it.",
            ) from error
        finally:
            self._ignores_calls = False
            put_back()
        for name, key, placeholder in left:
            setattr(module.get_submodule(name), key, placeholder)
        return out, changed, left, hook_outputs

    def _hooked_modules_in(self, place: int) -> list[str]:
        """Return the names of hooked modules inside the unit."""
        within = f"{self._notes.units[place].name}."
        return [name.removeprefix(within) for name in sorted(self._hooked_modules) if name.startswith(within)]

    def _run_for_real(
        self, place: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, dict[int, Tensor], list[tuple[str, str, Tensor]], list[HookCall]]:
        module, index = self._notes.units[place].module, self._notes.index_of(place)
        args, kwargs = map_tensors((args, kwargs), self._notes.stand_in)
        before = self._attributes()
        self._needs, self._changed, self._is_open = set(), {}, False

        def alone(*args: Any, **kwargs: Any) -> tuple[Any, list[tuple[str, str, Tensor]], list[HookCall]]:
            with silenced_hooks(module, self._hooked_modules_in(place)) as hook_outputs:
                out = forward(*args, **kwargs)
            left = [
                (_name_inside(module, inner), key, value)
                for inner, key, value in self._set_since(before)
                if isinstance(value, Tensor)
            ]
            return out, left, hook_outputs

        def weights(tensor: Tensor) -> Tensor:
            if _is_parameter(tensor):
                return nn.Parameter(invented(TensorSpec.of(tensor), self._device).detach(), tensor.requires_grad)
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=self._device)

        with swapped(module.modules(), weights):
            (out, left, hook_outputs), changed = on_invented_values(alone, args, kwargs, device=self._device)
        given = tensors_in((args, kwargs))
        self._needs |= self._notes.used(given, index, self._notes.unit_name(index), in_unit=True)
        return out, changed, left, hook_outputs

    def _attributes(self) -> dict[tuple[nn.Module, str], Any]:
        return {
            (module, key): value
            for module in self._model.modules()
            for key, value in vars(module).items()
            if key not in OF_EVERY_MODULE
        }

    def _set_since(self, before: dict[tuple[nn.Module, str], Any]) -> list[tuple[nn.Module, str, Any]]:
        missing = object()
        return [(*at, value) for at, value in self._attributes().items() if before.get(at, missing) is not value]

    def _left(self, place: int, index: int, before: dict[tuple[nn.Module, str], Any]) -> list[tuple[str, str, Tensor]]:
        """Return tensors that the unit has left in attributes of its own modules; other modules must not be set."""
        own, found = set(self._notes.units[place].module.modules()), []
        for module, key, value in self._set_since(before):
            if module not in own:
                names = {inner: name for name, inner in self._model.named_modules()}
                unit = self._notes.unit_name(index)
                self._notes.refusals.append(
                    Reason(
                        module=unit,
                        what=f"{unit} sets the attribute {key!r} of {names[module] or 'the model'}, which is outside "
                        "of it: stages without the unit would not see that.",
                        remedy="Return the value instead.",
                    )
                )
            elif isinstance(value, Tensor) and self._notes.is_inside(value, index):
                found.append((_name_inside(self._notes.units[place].module, module), key, value))
        return found


class _ModuleCallWatcher:
    """Calls `on_output` after each module's forward, until `close`; hooks of the modules themselves come later."""

    def __init__(self, on_output: Callable[[nn.Module, Any], None]) -> None:
        self._hook = modules.register_module_forward_hook(lambda module, _, output: on_output(module, output))

    def close(self) -> None:
        self._hook.remove()


def _name_inside(module: nn.Module, inner: nn.Module) -> str:
    return next((name for name, found in module.named_modules() if found is inner), "")
