"""The update rule of a Keras optimizer, applied to torch tensors: Keras' own code computes, on what this worker has.

A Keras optimizer is built for a list of variables, and keeps what it remembers of each in further variables: in lists
in the same order (momentums, velocities, averages). For a step, the model's variables and these stand for tensors that
torch knows: a parameter's local part, and its entries of a torch optimizer's state. What is one number for all
parameters (the count of steps, NAdam's product) is among the options. So formulas are Keras' own to the last bit, and
state is sharded, saved, moved to other layouts and sent to newcomers as that of any torch optimizer.

Rules that treat each number by itself are right on any part. Others are tried by Paceline when they are prepared, on
copies (`__deepcopy__`), and refused where a part is not enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.sharded_tensors import as_local_of, full_tensor, is_sharded, local_part, part_like
from paceline.compat.keras.the_keras import keras
from paceline.compat.keras.variables import HeldVariable
from paceline.errors import PlanError

__all__ = ["UpdateRule"]

LISTS = ("_variables", "_trainable_variables")  # of a Keras optimizer: they hold nothing that it remembers
RATE = "lr"
COUNT = "iterations"


class UpdateRule:
    """A Keras optimizer with the variables that it updates, by the ids of torch's parameters."""

    def __init__(self, optimizer: Any, variables: Mapping[int, Any] | None = None) -> None:
        """`variables`: those of the model; None: they are made for the parameters of the first step, for a trial."""
        self.optimizer = optimizer
        self.norm: Callable[[], Tensor | None] = _no_norm  # of all gradients of the step, over all workers
        self._variables, self._is_trial = variables, variables is None
        self._order: dict[int, int] = {}  # places in the optimizer's lists, by the ids of parameters
        self._slots: dict[str, list[Any]] = {}  # those lists, by the names of state
        self._scalars: dict[str, Any] = {}  # what it keeps as one number, by the names of options
        self._told_rate = 0.0  # the learning rate that was in the options when they were last written

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdateRule:
        """Return a rule with the same settings that has seen no step: trials are made with it."""
        found = UpdateRule(_fresh(self.optimizer))
        found._told_rate = self._told_rate
        return found

    @property
    def rate(self) -> float:
        """The present learning rate."""
        rate = self.optimizer.learning_rate
        return float(rate._value.detach()) if isinstance(rate, keras.Variable) else float(rate)

    def build(self, parameters: Sequence[Tensor]) -> None:
        """Make what the optimizer remembers of these parameters, in the size of this worker's part.

        Raises PlanError where it keeps something that belongs to no parameter, and is not one number.
        """
        optimizer = self.optimizer
        if self._variables is None:
            self._variables = {id(one): keras.Variable(local_part(one).clone(), name="tried") for one in parameters}
        self._order = {id(one): number for number, one in enumerate(parameters)}
        if not optimizer.built:
            with self._standing_for(parameters):
                optimizer.build([self._variables[id(one)] for one in parameters])
        self._slots = _slots_of(optimizer, len(parameters))
        in_slots = {id(one) for slots in self._slots.values() for one in slots}
        named = {id(value): name for name, value in vars(optimizer).items() if isinstance(value, keras.Variable)}
        self._scalars = {
            named.get(id(one), one.name).strip("_"): one
            for one in optimizer.variables
            if id(one) not in in_slots and one is not optimizer._iterations and one is not optimizer._learning_rate
        }
        odd = [name for name, one in self._scalars.items() if one._value.numel() != 1]
        if odd:
            raise PlanError(
                f"{type(optimizer).__name__} keeps {', '.join(odd)}, which belong to no parameter, so they cannot be "
                "sharded or saved with one. Use an optimizer that keeps its state in lists in the order of the "
                "variables, as Keras' own do, or a torch optimizer in a loop of your own."
            )
        self._told_rate = self.rate

    def options(self) -> dict[str, Any]:
        """What belongs to all parameters: the learning rate, the count of steps, and other single numbers."""
        plain = {name: float(one._value.detach()) for name, one in self._scalars.items()}
        return {RATE: self.rate, COUNT: int(self.optimizer._iterations._value), **plain}

    def apply(
        self, parameters: Sequence[Tensor], options: dict[str, Any], state: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Take a step on parameters that have gradients, which may be some of those that it was built for."""
        if not self._order or any(id(one) not in self._order for one in parameters):
            self._rebuild(parameters)
        for one in parameters:
            self.remember(one, state[one])
        self.read(options)
        self.attach(parameters, state)
        variables = [(self._variables or {})[id(one)] for one in parameters]
        gradients = [local_part(one.grad) for one in parameters if one.grad is not None]
        if any(is_sharded(one) for one in parameters) and self.optimizer.clipnorm:
            gradients = _each_clipped(parameters, gradients, self.optimizer.clipnorm)
        with self._standing_for(parameters), self._without_norms(parameters) as clip:
            if clip is not None:
                gradients = self._clipped(gradients, clip)
            self.optimizer.apply(gradients, variables)
        self.write(options)

    def remember(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        """Have a parameter's state contain all that the optimizer keeps of it, with its first values if it is new."""
        number = self._order[id(parameter)]
        for key, slots in self._slots.items():
            slot = slots[number]
            if slot is None or key in entries:
                continue
            value = slot._value.detach()
            if value.shape == local_part(parameter).shape:
                entries[key] = as_local_of(value.to(local_part(parameter).dtype), parameter)
            elif is_sharded(parameter) and value.shape == parameter.shape:  # it was built before the model was prepared
                entries[key] = part_like(value, parameter).contiguous()
            else:
                entries[key] = value

    def attach(self, parameters: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Have the optimizer's own variables be these entries of the state."""
        for one in parameters:
            entries = state.get(one, {})
            for key, slots in self._slots.items():
                slot = slots[self._order[id(one)]]
                if slot is not None and key in entries:
                    slot._value = local_part(entries[key])
                    slot._shape = tuple(slot._value.shape)

    def read(self, options: Mapping[str, Any]) -> None:
        """Take over what the options say: they may be those of a checkpoint, or a scheduler of torch has set a rate."""
        optimizer = self.optimizer
        optimizer._iterations.assign(int(options[COUNT]))
        for name, one in self._scalars.items():
            one.assign(options[name])
        if options[RATE] != self._told_rate and isinstance(optimizer._learning_rate, keras.Variable):
            optimizer.learning_rate = options[RATE]
        self._told_rate = options[RATE]

    def write(self, options: dict[str, Any]) -> None:
        """Put the present numbers into the options."""
        options.update(self.options())
        self._told_rate = options[RATE]

    def slots(self) -> Iterator[tuple[int, str, Any]]:
        """What is kept: the parameter's place in the list, the name of the entry, and Keras' variable."""
        for key, slots in self._slots.items():
            for number, slot in enumerate(slots):
                yield number, key, slot

    def finish(self, parameters: Sequence[Tensor]) -> None:
        """Give the model its final weights, where they are averages (`use_ema`)."""
        with self._standing_for(parameters):
            self.optimizer.finalize_variable_values([(self._variables or {})[id(one)] for one in parameters])

    def _rebuild(self, parameters: Sequence[Tensor]) -> None:
        if not self._is_trial:
            raise ValueError("a Keras optimizer steps the parameters that it was made for: make another for others")
        self.optimizer, self._variables = _fresh(self.optimizer), None
        self.build(parameters)

    @contextlib.contextmanager
    def _standing_for(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Meanwhile the variables are this worker's parts of the parameters."""
        known, former = self._variables or {}, list[tuple[Any, Any]]()
        try:
            for one in parameters:
                variable, local = known[id(one)], local_part(one)
                former.append((variable, variable._shape))
                variable._shape = tuple(local.shape)
                if isinstance(variable, HeldVariable):
                    variable.place.lent = local
                else:
                    variable._value = local
            yield
        finally:
            for variable, shape in former:
                variable._shape = shape
                if isinstance(variable, HeldVariable):
                    variable.place.lent = None

    @contextlib.contextmanager
    def _without_norms(self, parameters: Sequence[Tensor]) -> Iterator[float | None]:
        """Meanwhile the optimizer does not clip by norms of what is here, where that is a part, and divides by no
        scale: gradients are those of the loss. Yields the bound of the global norm."""
        optimizer = self.optimizer
        former = optimizer.global_clipnorm, optimizer.clipnorm, optimizer.loss_scale_factor
        optimizer.global_clipnorm, optimizer.loss_scale_factor = None, None
        if any(is_sharded(one) for one in parameters):
            optimizer.clipnorm = None
        try:
            yield former[0]
        finally:
            optimizer.global_clipnorm, optimizer.clipnorm, optimizer.loss_scale_factor = former

    def _clipped(self, gradients: list[Tensor], clip: float) -> list[Tensor]:
        """As Keras' `global_clipnorm`: gradients are scaled by min(1, clip / norm)."""
        norm = self.norm()
        if norm is None:
            return gradients
        scale = torch.clamp(clip / norm.to(gradients[0].device, torch.float32), max=1.0)
        return [gradient * scale.to(gradient.dtype) for gradient in gradients]


def _no_norm() -> None:
    return None


def _each_clipped(parameters: Sequence[Tensor], gradients: Sequence[Tensor], clip: float) -> list[Tensor]:
    """As Keras' `clipnorm`: each gradient is scaled by clip / max(norm, clip). Norms are of whole gradients; all
    workers that hold rows call it."""
    norms = [full_tensor(torch.linalg.vector_norm(one.grad)) for one in parameters if one.grad is not None]
    return [
        gradient * (clip / torch.clamp(norm.to(gradient.dtype), min=clip))
        for gradient, norm in zip(gradients, norms, strict=True)
    ]


def _fresh(optimizer: Any) -> Any:
    """Return an optimizer with the same settings; None where it cannot tell them, so it cannot be tried."""
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except Exception:  # an optimizer of the user's may raise anything
        return None


def _slots_of(optimizer: Any, count: int) -> dict[str, list[Any]]:
    """The lists in which an optimizer keeps something of each variable."""
    return {
        name.strip("_"): list(value)
        for name, value in vars(optimizer).items()
        if name not in LISTS
        and isinstance(value, list)
        and len(value) == count
        and any(one is not None for one in value)
        and all(one is None or isinstance(one, keras.Variable) for one in value)
    }
