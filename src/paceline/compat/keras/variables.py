"""A Keras model as torch knows it: each layer's own variables are parameters or buffers of a module of that layer.

Keras on torch registers all variables below a layer in that layer once more, lists of layers nowhere, and statistics
and seeds as parameters that are not trained. A variable keeps the tensor that it began with. Layouts put other tensors
at a module's place (rows, gathered weights, parts), and combine buffers over micro-batches, so all of that is put right
here, in place:

- a layer's own trained (or frozen) variables are parameters, all others are buffers: statistics are then combined as
  those of any batch norm, and seeds are part of checkpoints;
- sublayers are submodules. Two or more blocks of one class beside each other are a ModuleList, which layouts gather and
  recompute block by block;
- a variable's value is what is registered at its place now.

Keras' own structure (`layers`, `weights`, paths in saved files) stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.compat.keras.seeds import draw_from_micro_batch
from paceline.compat.keras.the_keras import keras, refuse_distribution
from paceline.errors import PlanError

__all__ = ["HeldVariable", "LayerState", "VariablePlace", "bind_model", "hold", "lent", "places_of"]

STATE = "_torch_params"  # where Keras keeps a layer's tensors for torch


class VariablePlace:
    """Where torch has a variable's tensor: a parameter or a buffer of a module. `lent` stands in for it meanwhile."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.lent: Tensor | None = None

    def registered(self) -> Tensor:
        """The tensor that is registered there now: under some layouts rows, or a part, of the whole."""
        return getattr(self.module, self.name)

    def current(self) -> Tensor:
        """What the variable's value is now."""
        return self.registered() if self.lent is None else self.lent


class HeldVariable(keras.Variable):
    """A Keras variable whose value is what torch has registered at its place."""

    place: VariablePlace

    @property
    def _value(self) -> Tensor:
        return self.place.current()

    @_value.setter
    def _value(self, value: Tensor) -> None:
        self.place.lent = value


class LayerState(nn.Module):
    """What torch has of a Keras layer: its own variables, and its sublayers where no attribute has them."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: set[str] = set()

    def add(self, variable: Any, *, is_trained: bool) -> VariablePlace:
        """Register a variable's tensor; `is_trained`: as a parameter."""
        name = _unused(variable.name.replace(".", "_"), dir(self))
        value = variable._value
        if is_trained:
            trained = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
            self.register_parameter(name, trained)
        else:
            self.register_buffer(name, value.detach())
        self._paths.add(variable.path)
        return VariablePlace(self, name)

    def share(self, first: VariablePlace) -> None:
        """Register what another layer has at its place, here too."""
        name, found = _unused(first.name, dir(self)), first.registered()
        if isinstance(found, nn.Parameter):
            self.register_parameter(name, found)
        else:
            self.register_buffer(name, found)

    def add_sublayers(self, layers: list[Any]) -> None:
        """Register sublayers; blocks of one class that are beside each other as one list."""
        runs: list[list[Any]] = []
        for layer in dict.fromkeys(layers):
            if runs and _is_block(layer) and type(runs[-1][-1]) is type(layer):
                runs[-1].append(layer)
            else:
                runs.append([layer])
        for run in runs:
            kind = type(run[0]).__name__.lower()
            name = _unused(run[0].name.replace(".", "_") if len(run) == 1 else f"{kind}_list", dir(self))
            self.register_module(name, run[0] if len(run) == 1 else nn.ModuleList(run))

    # As Keras uses the dict that it has at this place.

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def __setitem__(self, path: str, value: Tensor) -> None:
        raise PlanError(
            f"the variable {path} was added to a layer of a prepared model: it would be neither averaged nor saved. "
            "Build the model before it is prepared: call it on one batch, or give it an Input."
        )

    def pop(self, path: str) -> None:
        """Keras lets go of a variable; the model goes on with what it was prepared with."""


def bind_model(model: Any) -> None:
    """Register the variables of a built Keras model with torch, in place; a second call changes nothing.

    Raises PlanError for a model that is not built, and where a `keras.distribution` is set.
    """
    if isinstance(vars(model)["_modules"].get(STATE), LayerState):
        return
    refuse_distribution()
    layers: list[Any] = list(dict.fromkeys(model._flatten_layers()))
    for layer in layers:
        _hide_untracked(layer)
        if not layer.built:
            raise PlanError(
                f"the layer {layer.name!r} of {model.name!r} is not built, so its weights are not known. Begin the "
                "model with keras.Input(shape=...), or call it on one batch before worker.prepare(model)."
            )
    draw_from_micro_batch(one for layer in layers for one in layer._seed_generators)
    elsewhere = _places_in_torch_modules(layers)
    for layer in layers:
        _register(layer, elsewhere)


def _hide_untracked(layer: Any) -> None:
    """Keep from torch the layers that Keras itself does not count: the functional model within a `Sequential`, which
    has the same sublayers again. As attributes they stay."""
    modules: dict[str, nn.Module | None] = vars(layer)["_modules"]
    tracked = {id(one) for one in layer._layers}
    for name, child in list(modules.items()):
        if isinstance(child, keras.Layer) and id(child) not in tracked:
            vars(layer)[name] = modules.pop(name)


def _places_in_torch_modules(layers: Iterable[Any]) -> dict[int, VariablePlace]:
    """Where modules of torch that layers wrap have parameters, by the ids of these."""
    found: dict[int, VariablePlace] = {}
    of_keras = set(layers)
    for layer in layers:
        for name, child in vars(layer)["_modules"].items():
            if name == STATE or child is None or child in of_keras:
                continue
            for module in child.modules():
                own = module.named_parameters(recurse=False) if module not in of_keras else ()
                found.update((id(one), VariablePlace(module, key)) for key, one in own)
    return found


def _register(layer: Any, elsewhere: Mapping[int, VariablePlace]) -> None:
    """Give a layer its `LayerState`."""
    modules: dict[str, nn.Module | None] = vars(layer)["_modules"]
    state = LayerState()
    trained: list[Any] = layer._trainable_variables
    others = [*layer._non_trainable_variables, *(one.state for one in layer._seed_generators)]
    for variable, is_trained in [*((one, True) for one in trained), *((one, False) for one in others)]:
        if isinstance(variable, HeldVariable):  # of another layer, too
            first = variable.place
            state.share(first)
            continue
        place = elsewhere.get(id(variable._value)) or state.add(variable, is_trained=is_trained)
        hold(variable, place)
    known = {id(one) for one in modules.values()}
    state.add_sublayers([one for one in layer._layers if id(one) not in known])
    modules[STATE] = state
    vars(layer)["_track_variables"] = _keep_state  # Keras would register all anew, at each build


def _keep_state() -> None:
    """In the place of Keras' own: all is registered already."""


def _is_block(layer: Any) -> bool:
    """Whether a layer is one of layers, with variables."""
    return bool(layer._layers) and bool(layer.trainable_variables)


def hold(variable: Any, place: VariablePlace) -> None:
    """Have a variable's value be what is at the place."""
    fields = vars(variable)
    fields.pop("_value", None)
    fields["place"] = place
    variable.__class__ = HeldVariable


def places_of(model: Any) -> dict[str, Any]:
    """Return the variables of a bound model by the names that torch has for them."""
    modules = {module: name for name, module in model.named_modules()}
    found: dict[str, Any] = {}
    for variable in model.variables:
        place: VariablePlace = variable.place
        prefix = modules.get(place.module)
        if prefix is not None:
            found[f"{prefix}.{place.name}" if prefix else place.name] = variable
    return found


@contextlib.contextmanager
def lent(values: Iterable[tuple[Any, Tensor]]) -> Iterator[None]:
    """While it lasts, held variables have these values, with their shapes."""
    former: list[tuple[Any, Any]] = []
    try:
        for variable, value in values:
            former.append((variable, variable._shape))
            variable.place.lent, variable._shape = value, tuple(value.shape)
        yield
    finally:
        for variable, shape in former:
            variable.place.lent, variable._shape = None, shape


def _unused(name: str, taken: Iterable[str]) -> str:
    names, number = set(taken), 1
    while (candidate := name if number == 1 else f"{name}_{number}") in names:
        number += 1
    return candidate
