"""Builds a tape while the forward runs: numbers of values, which unit uses what, and what ties units together."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.errors import PlanError, Reason
from paceline.parallel.meta.tensor_tree import TensorSpec, map_tensors, tensors_in
from paceline.parallel.model_units import ModelUnit
from paceline.parallel.pipeline.tape import NewValue, PassedArgument, RandomDraw, SameStage, Tape, TapeCall, TapeValue
from paceline.parallel.second_order import refuse_transforms
from paceline.parallel.tensor.split_tensor import on_parts

__all__ = ["EVERY_STAGE", "TapeBuilder", "where"]

EVERY_STAGE = -1  # the owner of what is computed from the inputs alone
SILENT_DIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)


class TapeBuilder:
    """Grows into a tape. Units have places (in the list of units) and indices (by first call)."""

    def __init__(self, model: nn.Module, units: Sequence[ModelUnit], root: Iterable[nn.Module]) -> None:
        self.units, self.order = units, list[int]()
        self.refusals: list[Reason] = []
        self.draws: list[RandomDraw] = []
        # root-level code draws, also from Python's own generator, or may draw under other settings
        self.may_draw = False
        self.queries: set[Callable[..., Any]] = set()
        self.hooked_modules: set[str] = (
            set()
        )  # modules inside units whose hooks hand out what code outside of them uses
        self.num_unit_calls = 0
        self._calls: list[TapeCall] = []
        self._values: list[tuple[int, TensorSpec, GradientEdge | None, str]] = []
        self._joints: dict[SameStage, None] = {}
        self._numbers = WeakTensorKeyDictionary()
        self._inner = WeakTensorKeyDictionary()  # made inside a unit, and not returned -> the unit's index
        self._handed = WeakTensorKeyDictionary()  # what a module inside a unit returned to its hooks -> its name
        # a tensor with contents that a unit's tensor has changed -> its placeholder
        self._stand_ins = WeakTensorKeyDictionary()
        self._aliases: dict[int, WeakTensorKeyDictionary] = {}  # by storage: tensor -> index of the unit
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._uses: dict[str, set[int]] = {name: set() for name in self._names.values()}
        self._buffers = {id(buffer): place for place, unit in enumerate(units) for buffer in unit.module.buffers()}
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        self._root_buffers = {
            id(buffer): names[id(buffer)] for module in root for buffer in module.buffers(recurse=False)
        }
        self._buffer_uses: dict[str, set[int]] = {}  # of root-level modules' buffers

    # ------------------------------------------------------------------------------------------- identity of tensors

    def index_of(self, place: int) -> int:
        """Return the index of a unit; a unit that is called for the first time gets the next one."""
        if place not in self.order:
            self.order.append(place)
        return self.order.index(place)

    def unit_name(self, index: int) -> str:
        return self.units[self.order[index]].name if index < len(self.order) else "the first unit"

    def newest(self) -> str:
        """Return the name of the last unit called; "" before the first."""
        return next((call.name for call in reversed(self._calls) if call.is_unit), "")

    def between(self) -> str:
        """Return where between units the forward is, in words."""
        done = self.newest()
        return f"after {done} and before the next unit" if done else "before the first unit"

    def owner(self, tensors: Iterable[Tensor]) -> int:
        """Return the latest unit that `tensors` come from; what depends on parameters alone belongs to the first
        unit.
        """
        owner = EVERY_STAGE
        for tensor in tensors:
            number = self._numbers.get(tensor)
            if number is not None:
                owner = max(owner, self._values[number][0])
            elif tensor in self._inner:
                owner = max(owner, self._inner[tensor])
            elif id(tensor) in self._names:
                owner = max(owner, 0)
            elif id(tensor) in self._buffers:
                owner = max(owner, self.index_of(self._buffers[id(tensor)]))
        return owner

    def has_number(self, tensor: Tensor) -> bool:
        return tensor in self._numbers

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the placeholder for a tensor whose contents are not those that a stage would have put there."""
        placeholder = self._stand_ins.get(tensor)
        return tensor if placeholder is None else placeholder

    # ---------------------------------------------------------------------------------------------------- what happens

    def call(
        self,
        *,
        name: str,
        says: str,
        owner: int,
        is_unit: bool,
        out: Any,
        given: Sequence[Tensor],
        changed: Mapping[int, Tensor],
        needs: Iterable[int],
        left: Iterable[tuple[str, str, Tensor]] = (),
        hook_outputs: Iterable[tuple[str, Any]] = (),
        is_open: bool = False,
        effort: float = 0.0,
    ) -> None:
        """Record a call that took the tensors `given` and returned `out`."""
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(given)))}
        mine: dict[int, int] = {}

        def number(tensor: Tensor) -> int:
            if id(tensor) not in mine:
                mine[id(tensor)] = self._number(tensor, owner, says)
            return mine[id(tensor)]

        def mark(tensor: Tensor) -> NewValue | PassedArgument:
            return PassedArgument(places[id(tensor)]) if id(tensor) in places else NewValue(number(tensor))

        output = map_tensors(out, mark)
        attributes = tuple((module, key, number(tensor)) for module, key, tensor in left)
        handed = tuple((module, map_tensors(one, mark)) for module, one in hook_outputs)
        changes = []
        for place, placeholder in changed.items():
            self._check_change(given[place], owner, name if is_unit else says)
            if placeholder is not given[place]:
                self._stand_ins[given[place]] = placeholder
            former = self._numbers.get(given[place])
            changes.append((place, self._number(given[place], owner, says), former))
        self._calls.append(
            TapeCall(
                name=name,
                unit=owner,
                is_unit=is_unit,
                needs=frozenset(needs),
                output=output,
                changed=tuple(changes),
                left=attributes,
                hook_outputs=handed,
                is_open=is_open,
                effort=effort,
            )
        )

    def inside(self, tensor: Tensor, index: int) -> None:
        """Record what was made inside a unit."""
        if tensor not in self._numbers and id(tensor) not in self._names:
            self._inner[tensor] = index

    def handed(self, tensors: Iterable[Tensor], module: str) -> None:
        """Record what the hooks of a module inside a unit have received."""
        for tensor in tensors:
            self._handed.setdefault(tensor, module)

    def is_inside(self, tensor: Tensor, index: int) -> bool:
        return self._inner.get(tensor) == index

    def everywhere(self, tensors: Iterable[Tensor]) -> None:
        """Record what every stage computes."""
        for tensor in tensors:
            self._note_alias(tensor, EVERY_STAGE)

    def used(self, tensors: Iterable[Tensor], owner: int, subject: str, *, in_unit: bool) -> set[int]:
        """Return the numbers of the values among `tensors`; records parameters, and whatever ties units together."""
        needs = set()
        for tensor in tensors:
            number = self._numbers.get(tensor)
            if number is not None:
                needs.add(number)
                if (unit := self._values[number][0]) > owner:
                    self.join(owner, unit, f"{subject} takes {self._values[number][3]}, which comes later in the model")
            elif tensor in self._inner:
                if not in_unit and (hooked := self._handed.get(tensor)) is not None:
                    self.hooked_modules.add(hooked)
                self._used_inner(self._inner[tensor], owner, subject, in_unit)
            elif id(tensor) in self._names:
                self.uses(tensor, owner)
            elif (buffer := self._root_buffers.get(id(tensor))) is not None:
                self._buffer_uses.setdefault(buffer, set()).add(owner)
            elif (place := self._buffers.get(id(tensor))) is not None:
                self.join(self.index_of(place), owner, f"{subject} uses a buffer of {self.units[place].name}")
        return needs

    def updates(self, tensors: Iterable[Tensor], owner: int, subject: str) -> None:
        """Record that buffers of root-level modules are updated by an operation that belongs to a unit, in a way that
        does not show: all who do that must be on one stage."""
        for name in filter(None, (self._root_buffers.get(id(tensor)) for tensor in tensors)):
            for user in self._buffer_uses.get(name, ()):
                self.join(user, owner, f"{subject} updates the buffer {name}, and so does an operation elsewhere")

    def uses(self, parameter: Tensor, index: int) -> None:
        """Record that a parameter takes part in what the unit does; PlanError where it is no parameter of the model."""
        name = self._names.get(id(parameter))
        if name is None:
            raise PlanError(
                f"the model ran with another tensor in the place of a parameter of {self.units[index].name} "
                "(torch.func.functional_call, or an assignment to the module), but under Layout(stages=...) stages are "
                "made of the prepared parameters: use a parametrization (torch.nn.utils.parametrize) that computes the "
                "weight inside its module, or Layout(replicas=n)"
            )
        self._uses[name].add(index)

    def join(self, one: int, other: int, reason: str) -> None:
        """Record that two units must be on one stage."""
        if one != other:
            self._joints[SameStage(first=min(one, other), last=max(one, other), reason=reason)] = None

    def _used_inner(self, unit: int, owner: int, subject: str, in_unit: bool) -> None:
        says = f"uses a tensor from inside {self.unit_name(unit)} that is not among its results"
        if not in_unit:
            self.refusals.append(
                Reason(
                    module=self.unit_name(unit),
                    what=f"{subject} {says}, so that other stages do not know it.",
                    remedy=f"Return it from {self.unit_name(unit)}, or keep it as an attribute of one of its modules.",
                )
            )
        elif unit != owner:
            self.join(unit, owner, f"{subject} {says}")

    def _number(self, tensor: Tensor, owner: int, says: str) -> int:
        placeholder = self.stand_in(tensor)
        with on_parts():
            # A view of a parameter that was made without gradients says that it requires one, and has no edge.
            has_edge = placeholder.requires_grad and (placeholder.grad_fn is not None or torch.is_grad_enabled())
            edge = get_gradient_edge(placeholder) if has_edge else None
        self._values.append((owner, TensorSpec.of(placeholder), edge, says))
        self._numbers[tensor] = len(self._values) - 1
        self._inner.pop(tensor, None)
        self._note_alias(tensor, owner)
        return len(self._values) - 1

    def _note_alias(self, tensor: Tensor, owner: int) -> None:
        if tensor.layout == torch.strided:
            self._aliases.setdefault(_storage(tensor), WeakTensorKeyDictionary())[tensor] = owner

    def _check_change(self, tensor: Tensor, owner: int, subject: str) -> None:
        """A change in place reaches every view of the same memory; views of other units would not follow it."""
        if id(tensor) in self._names or id(tensor) in self._root_buffers:
            kind = "parameter" if id(tensor) in self._names else "buffer"
            made = self.unit_name(owner)
            self.refusals.append(
                Reason(
                    module=made,
                    what=f"{subject} changes a {kind} of the model from what {made} made, which other stages would not "
                    "see.",
                    remedy="Change it inside the unit that has it, or after the step.",
                )
            )
            return
        for view, unit in list(self._aliases.get(_storage(tensor), {}).items()):
            if view is tensor or unit == owner:
                continue
            if unit == EVERY_STAGE:
                made = self.unit_name(owner)
                self.refusals.append(
                    Reason(
                        module=made,
                        what=f"{subject} writes what {made} made into a view of a tensor that every stage computes.",
                        remedy="Write into the tensor itself (x[...] = y), or use torch.cat or torch.where.",
                    )
                )
            else:
                self.join(unit, owner, f"{subject} changes in place what {self.unit_name(unit)} made, through a view")

    # ---------------------------------------------------------------------------------------------------- the end

    def tape(self, result: Any) -> Tape:
        """Return the tape, after the forward has returned `result`."""
        returned = tensors_in(result)
        self.used(returned, len(self.order) - 1, "the forward's result", in_unit=False)
        numbers = [self._numbers[tensor] for tensor in returned if tensor in self._numbers]
        reached = _reached([edge for number in numbers if (edge := self._values[number][2]) is not None])
        return Tape(
            units=tuple(self.units[place].name for place in self.order),
            calls=tuple(self._calls),
            values=tuple(
                TapeValue(unit=unit, spec=spec, has_gradient=edge is not None and _key(edge) in reached, says=says)
                for unit, spec, edge, says in self._values
            ),
            results=tuple(numbers),
            parameters={name: frozenset(users) for name, users in self._uses.items()},
            buffers={name: frozenset(users) for name, users in self._buffer_uses.items()},
            unused=self._unused(),
            joints=tuple(self._joints),
            draws=tuple(self.draws),
            draws_between=self.may_draw,
            queries=frozenset(self.queries),
            placeholders=None if any(call.changed for call in self._calls) else {},
        )

    def _unused(self) -> dict[str, int]:
        beside, found = 0, {}
        for place, unit in enumerate(self.units):
            if place in self.order:
                beside = self.order.index(place)
            else:
                found[unit.name] = beside
        return found


def where() -> str:
    """Return the line of the model's code that is running, as file:line."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(SILENT_DIRS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _storage(tensor: Tensor) -> int:
    refuse_transforms("Layout(stages=...)")
    with on_parts():
        return StorageWeakRef(tensor.untyped_storage()).cdata


def _key(edge: GradientEdge) -> tuple[Any, int]:
    return edge.node, edge.output_nr


def _reached(starts: Sequence[GradientEdge]) -> set[tuple[Any, int]]:
    """Return all edges of the graph at which a gradient arrives."""
    seen = {_key(edge) for edge in starts}
    nodes = {node for node, _ in seen}
    waiting = list(nodes)
    while waiting:
        for node, number in waiting.pop().next_functions:
            if node is not None:
                seen.add((node, number))
                if node not in nodes:
                    nodes.add(node)
                    waiting.append(node)
    return seen
