"""Steps of a copy of an optimizer on small tensors, also those parts of its step that act late.

A trial has the real optimizer's options and attributes, parameters and state of its own, and no hooks. Parts that act
after many steps (a warm-up, a preconditioner made every thousand steps) are reached without these steps: what grows by
1 in each step is a count, and is set forward, to just before each number that the options name.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "NUM_AT_EACH",
    "NUM_FIRST",
    "CrossElement",
    "ElementOps",
    "Phase",
    "Trial",
    "has_counts",
    "inner_optimizers",
    "late_steps",
    "preserved_randomness",
    "wants_closure",
]

NUM_FIRST = 12  # steps that every trial takes at least: queues of ten gradients are full then
NUM_AT_EACH = 4  # steps around each number at which something may begin
LADDER = (100, 1000, 100_000)  # numbers of steps that are tried whatever the options say
NUM_LATE = 12  # at most, of numbers that the options name
LARGEST_COUNT = 10**9  # larger whole numbers in options are no numbers of steps
SMALL_COUNT = 3  # to which whole numbers in options are lowered, for what counts by itself


class Trial:
    """A copy of an optimizer with parameters of its own; the optimizer stays as it is."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        *,
        group: int = 0,
        lowers_counts: bool = False,
        with_closure: bool = False,
        with_state: bool = False,
    ) -> None:
        """`group`: whose options the parameters get. `lowers_counts`: whole numbers in the options become 3, so that
        what is kept for a hundred steps, say, is full after three. `with_state`: it begins with state like that which
        the optimizer has now; some make theirs when they are created."""
        self.source, self._values = optimizer, parameters
        self.how: dict[str, Any] = {
            "group": group,
            "lowers_counts": lowers_counts,
            "with_closure": with_closure,
            "with_state": with_state,
        }
        self.parameters = [torch.nn.Parameter(one.clone()) for one in parameters]
        self._with_closure = with_closure or wants_closure(optimizer)
        self._copies: dict[int, Optimizer] = {}
        self._with_state = with_state
        self.optimizer = self._copy(optimizer, group, lowers_counts)
        for one in self._copies.values():
            if callable(begin := getattr(one, "train", None)):  # some step in that mode only
                begin()

    def _copy(self, optimizer: Optimizer, group: int, lowers_counts: bool) -> Optimizer:
        if id(optimizer) in self._copies:
            return self._copies[id(optimizer)]
        trial = type(optimizer).__new__(type(optimizer))
        self._copies[id(optimizer)] = trial
        known = {id(one): one for options in optimizer.param_groups for one in options["params"]}
        for name, value in list(vars(optimizer).items()):
            if isinstance(value, collections.OrderedDict):
                trial.__dict__[name] = type(value)()  # hooks are about the real optimizer's step
            elif isinstance(value, Optimizer):
                trial.__dict__[name] = self._copy(value, min(group, len(value.param_groups) - 1), lowers_counts)
            elif name not in ("state", "param_groups", "step"):  # schedulers replace the real optimizer's step
                trial.__dict__[name] = _copied(value, known)
        own = optimizer.param_groups[group]
        options = {name: _copied(value, known) for name, value in own.items() if name not in ("params", "param_names")}
        if "lr" in options:
            options["lr"] = float(options["lr"] or 0.1)  # it may be 0 now, before a warm-up
        if "capturable" in options:
            options["capturable"] = False  # which is for parameters on a GPU
        if lowers_counts:
            options = {name: SMALL_COUNT if _is_count(value) else value for name, value in options.items()}
            held = {name: SMALL_COUNT for name, value in vars(trial).items() if _is_count(value)}
            trial.__dict__.update(held)
        trial.__dict__["param_groups"] = [{**options, "params": self.parameters}]
        trial.__dict__["state"] = collections.defaultdict(dict)
        for key, value in optimizer.state.items():
            if not isinstance(key, Tensor):  # what it has beside the parameters' state
                trial.state[key] = _copied(value, known)
        for parameter in self.parameters if self._with_state else ():
            alike = (one for one in own["params"] if optimizer.state.get(one) and one.dim() == parameter.dim())
            if (held := next(alike, None)) is not None:
                entries = optimizer.state[held].items()
                trial.state[parameter] = {key: _like(value, held, parameter) for key, value in entries}
        for name, value in vars(optimizer).items():  # wrappers share them with what they wrap
            for inner in inner_optimizers(optimizer):
                if name == "param_groups" and value is inner.param_groups:
                    trial.__dict__["param_groups"] = self._copies[id(inner)].param_groups
                if name == "state" and value is inner.state:
                    trial.__dict__["state"] = self._copies[id(inner)].state
        return trial

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take a step with these gradients; where the optimizer moves the parameters before it asks again, others."""
        begun = [one.detach().clone() for one in self.parameters]

        def evaluate() -> Tensor:
            for parameter, start, gradient in zip(self.parameters, begun, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype) * (1.0 + parameter.detach() - start)
            return torch.ones(())

        evaluate()
        step: Callable[..., Any] = type(self.optimizer).step
        step(self.optimizer, evaluate) if self._with_closure else step(self.optimizer)

    def run(self, phases: Sequence[Phase]) -> Iterator[list[Tensor]]:
        """Take steps, and yield by how much each has moved the parameters. What the optimizer counts its steps by is
        learned in the first phase."""
        growing: list[tuple[Any, ...]] = []
        for number, phase in enumerate(phases):
            seen: list[dict[tuple[Any, ...], float]] = []
            with torch.no_grad():
                for parameter, value in zip(self.parameters, self._values, strict=True):
                    parameter.copy_(value)
            if phase.count is not None:
                self._set_counts(growing, phase.count)
            for each in phase.gradients:
                before = [one.detach().clone() for one in self.parameters]
                self.step(each)
                yield [one.detach() - old for one, old in zip(self.parameters, before, strict=True)]
                if number == 0:
                    seen = [*seen[-2:], self._counts()]
            growing = _growing(seen) if number == 0 else growing

    def _counts(self) -> dict[tuple[Any, ...], float]:
        """Every single number that the optimizer has: in its options, its state and its attributes."""
        found: dict[tuple[Any, ...], float] = {}
        for path, holder in self._holders():
            for key, value in holder.items():
                number = _number(value)
                if number is not None:
                    found[(*path, key)] = number
        return found

    def _set_counts(self, paths: Sequence[tuple[Any, ...]], number: int) -> None:
        """Set numbers that `_counts` has found."""
        holders = dict(self._holders())
        for *path, key in paths:
            holder = holders.get(tuple(path))
            if holder is None or key not in holder:
                continue
            value = holder[key]
            if isinstance(value, Tensor):
                value.fill_(number)
            else:
                holder[key] = type(value)(number)

    def _holders(self) -> Iterator[tuple[tuple[Any, ...], dict[Any, Any]]]:
        for which, one in enumerate(self._copies.values()):
            yield (which, "attributes"), one.__dict__
            for number, options in enumerate(one.param_groups):
                yield (which, "options", number), options
            for number, parameter in enumerate(self.parameters):
                if isinstance(one.state.get(parameter), dict):
                    yield (which, "state", number), one.state[parameter]


def has_counts(optimizer: Optimizer, group: int) -> bool:
    """Whether lowering the whole numbers in an optimizer's options makes a difference."""
    return any(_is_count(value) for value in _option_values(optimizer, group))


def _option_values(optimizer: Optimizer, group: int) -> Iterator[Any]:
    for one in (optimizer, *inner_optimizers(optimizer)):
        yield from one.param_groups[min(group, len(one.param_groups) - 1)].values()
        yield from vars(one).values()


def late_steps(optimizer: Optimizer, group: int) -> list[int]:
    """Return the numbers of steps, ascending, at which a part of the optimizer's step may begin to act."""
    named: set[int] = set()
    for value in _option_values(optimizer, group):
        several: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
        for number in several[:4]:
            if _is_count(number) and number > NUM_FIRST:
                named.add(int(number))
    return sorted({*sorted(named)[:NUM_LATE], *LADDER})


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Steps of a trial, which begin with the parameters at the trial's first values."""

    gradients: Sequence[Sequence[Tensor]]  # of each step, for each parameter
    count: int | None = None  # what the optimizer's counts of its steps are set to before


def _growing(seen: Sequence[Mapping[tuple[Any, ...], float]]) -> list[tuple[Any, ...]]:
    """Return which numbers grew by 1 in each of these steps."""
    pairs = list(itertools.pairwise(seen))
    return [path for path in (seen[0] if pairs else ()) if all(path in b and b[path] - a[path] == 1 for a, b in pairs)]


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that this one contains, as attributes or in lists and dicts of them."""
    found: list[Optimizer] = []
    for value in vars(optimizer).values():
        nested = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        found += [one for one in (value, *nested) if isinstance(one, Optimizer)]
    return found


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` must be given a closure."""
    step = inspect.signature(type(optimizer).step)
    return any(one.default is one.empty and one.name == "closure" for one in step.parameters.values())


def _copied(value: Any, known: Mapping[int, Any]) -> Any:
    """Return a copy of an optimizer's attribute or option; the model's own parameters and modules are not copied."""
    if isinstance(value, (torch.nn.Module, torch.nn.Parameter)):
        return value
    try:
        return copy.deepcopy(value, dict(known))
    except Exception:  # locks, generators, process groups
        return value


def _like(value: Any, held: Tensor, parameter: Tensor) -> Any:
    """Return an entry of a parameter's state as it would be for a smaller parameter."""
    if isinstance(value, Tensor) and value.shape == held.shape:
        first = float(value.flatten()[0]) if value.numel() else 0.0
        dtype = parameter.dtype if value.dtype == held.dtype else value.dtype
        return torch.full_like(parameter, first, dtype=dtype, requires_grad=False)
    return copy.deepcopy(value)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()
    return is_whole and SMALL_COUNT < value <= LARGEST_COUNT


@contextlib.contextmanager
def preserved_randomness(seed: int = 0) -> Iterator[None]:
    """Leave the random state of torch (on the CPU), numpy and Python as it is; meanwhile it is a fixed one."""
    state, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(of_numpy)


class CrossElement(Exception):
    """An operation brings numbers of a tensor together."""


class ElementOps(TorchDispatchMode):
    """Watches operations: notes those that bring numbers of one tensor together, and whether random ones are drawn."""

    def __init__(self, *, stops: bool = False) -> None:
        """`stops`: raise CrossElement at the first operation that brings numbers together."""
        super().__init__()
        self._stops = stops
        self.across: list[str] = []
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = True
        elif not _is_by_element(func, name, args) and any(one.numel() > 1 for one in _tensors((args, kwargs))):
            self.across.append(name)
            if self._stops:
                raise CrossElement(name)
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for one in values:
            yield from _tensors(one)
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))


BY_ELEMENT = {
    *("clone", "copy", "copy_", "_to_copy", "detach", "alias", "lift_fresh", "cat", "stack", "zero_", "fill_", "abs_"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full"),
    *("new_empty_strided", "set_", "masked_fill", "masked_fill_", "lerp_", "where", "is_same_size"),
}
FOREACH_ACROSS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def _is_by_element(func: Any, name: str, args: Sequence[Any]) -> bool:
    """Whether each number of an operation's result comes from the numbers at one place of its tensors."""
    if name.startswith("_foreach_"):
        return name not in FOREACH_ACROSS
    if name == "index_put_":  # x[mask] = number
        return all(one is not None and one.dtype == torch.bool for one in args[1]) and args[2].numel() == 1
    if name.startswith("_fused_") or name in BY_ELEMENT or torch.Tag.pointwise in func.tags:
        return True
    returns = func._schema.returns  # a view has the numbers of its tensor, and mixes none
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
