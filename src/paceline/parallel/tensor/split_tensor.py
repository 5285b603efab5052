"""`SplitTensor`: a tensor of which each worker holds a part, while code that uses it sees the shape of the whole.

An ordinary model's attention says `x.view(B, T, self.n_head, C // self.n_head)`, with C from the shape of its input.
Such code breaks when layers simply return fewer features, unless somebody edits its numbers; and nobody can know which
of a module's integers count heads. So the model's code stays as it is and its *tensors* know: a layer that is cut by
columns returns a `SplitTensor`, whose shape is that of the whole, and whose data are this worker's part in an ordinary
tensor. Each torch function that meets one follows a rule (`rules.py`) on how to do it on the parts alone: a view finds
the dim in which the cut goes on, a product over batches of heads stays with its heads. Where there is no rule, or the
operation needs the whole, the parts are gathered first, so that an unforeseen line of code costs time and never changes
a result. Below torch functions nothing differs: kernels, autograd and recomputation see plain tensors. DTensor does the
same one floor lower, for each operator; here a composite (attention, say) is one rule, which also works where its
kernels have no sharding rule.

Sequences that are shared are cut in the same way, along tokens. Where layers are cut as well, a tensor may be cut
twice: its part of the features is `under`stood as a tensor that is cut along tokens (`twice.py`).

The workers that share a model's layers, and what they do for each other when plain and cut tensors meet.

One `TensorGroupOps` belongs to one model. Random numbers: outside the layers that are cut all workers draw the same,
because their generators are in the same state. For dropout on a cut tensor each worker draws a number from the common
generator, and seeds the part's own randomness by it and by its place in the group; afterwards the common generator is
as the others'. So parts get different masks, all workers stay in step, and recomputation repeats them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from paceline.errors import PlanError, Reason
from paceline.parallel.tensor import collectives
from paceline.parallel.tensor.collectives import TensorCollectives
from paceline.parallel.tensor.split_shapes import CannotSplit, Sections, divided

__all__ = [
    "Rule",
    "SplitSpec",
    "SplitTensor",
    "TensorGroupOps",
    "TokenSplitTensor",
    "is_in_place",
    "mapped",
    "name_of",
    "on_parts",
    "refused_tokens",
    "split_tensors_in",
    "tensors_in",
    "whole",
    "wrap",
]

# Within it a Cut is the plain tensor of the part. torch documents it, and has no public name for it.
on_parts: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]  # see above


class SplitSpec(NamedTuple):
    """How a tensor is cut: by whom, along which dim, in which sections, and behind which layer."""

    team: TensorGroupOps
    dim: int
    sections: Sections
    site: str


class SplitTensor(Tensor):
    """This worker's part of a tensor that is cut along `dim` in `sections`; made by `wrap` only."""

    team: TensorGroupOps
    split_dim: int
    sections: Sections
    site: str  # the layer where the cut began, for messages
    under: SplitSpec | None = None  # how the part is cut once more, along tokens

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with on_parts():
            cut = args[0] if args and isinstance(args[0], SplitTensor) else next(split_tensors_in((args, kwargs)))
            follow = cut.team.follow if cut.team.beside is None else cut.team.beside.follow
            return follow(func, args, kwargs)


class TokenSplitTensor(Tensor):
    """A tensor that is cut along tokens alone, as those who cut layers see it: it is no Cut of theirs."""

    team: TensorGroupOps
    split_dim: int
    sections: Sections
    site: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        one = next(one for one in tensors_in((args, kwargs)) if isinstance(one, TokenSplitTensor))
        if one.team.beside is None:
            raise RuntimeError("a tensor is seen as whole that nobody cuts along features")
        return one.team.beside.run_in_layer(func, args, kwargs or {})


def wrap(part: Tensor, *, team: TensorGroupOps, dim: int, sections: Sections, site: str) -> Tensor:
    """Make a fresh tensor a Cut, in place: no copy, and no node in autograd's graph.

    What is cut already, by the other team, is cut twice then; raises NotCut where that would be along one dim.
    """
    cut: Any = part
    under = None
    if isinstance(part, (SplitTensor, TokenSplitTensor)):
        if part.team is not team and part.split_dim == dim:
            raise CannotSplit("tokens and features would be cut in one dim")
        if isinstance(part, TokenSplitTensor):
            under = SplitSpec(part.team, part.split_dim, part.sections, part.site)
        elif part.team is team:  # it was changed in place
            under = part.under
        else:
            part.under = SplitSpec(team, dim, sections, site)
            return part
    cut.__class__ = SplitTensor
    cut.team, cut.split_dim, cut.sections, cut.site, cut.under = team, dim, sections, site, under
    return part


def whole(tensor: Tensor, by: TensorGroupOps | None = None) -> Tensor:
    """Return the whole of a tensor that may be cut: a torch function, so that whoever watches a forward sees it.

    `by`: only what this team has cut is put together.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(whole, (tensor,), tensor, by)
    return tensor


def split_tensors_in(value: Any) -> Iterator[SplitTensor]:
    """Yield every Cut in nested tuples, lists and dictionaries."""
    if isinstance(value, SplitTensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for one in inside:
            if not isinstance(one, (str, int, float)):
                yield from split_tensors_in(one)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to everything in its tuples, lists and dictionaries."""
    if isinstance(value, dict):
        changed = {key: mapped(one, change) for key, one in value.items()}
        if type(value) is dict:
            return changed
        for key, one in changed.items():  # a dictionary of the user's own class keeps its class
            if one is not value[key]:
                value[key] = one
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(one, change) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(one, change) for one in value)
    return change(value)


Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CombinedOps(Protocol):
    """What is asked of the operations of a tensor that is split twice, along features and along tokens."""

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...

    def run_in_layer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...

    def in_layer(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...

    def on_parts(self) -> contextlib.AbstractContextManager[None]: ...

    def crossed(self, move: Callable[[], Tensor], tensor: Tensor) -> Tensor: ...


class TensorGroupOps:
    """One worker's view of the group, and the crossings between plain and cut tensors."""

    beside: CombinedOps | None = None  # where the model's sequences are shared as well as its layers cut

    def __init__(
        self, group: TensorCollectives, *, rules: Callable[[Callable[..., Any]], Rule], sequence: bool = False
    ) -> None:
        self.group, self.size, self.index = group, group.size, group.index
        self.rule = rules
        self.sequence = sequence  # between pairs of layers, tokens are cut
        self._summed: dict[int, weakref.ref[Tensor]] = {}  # by id(): parameters whose gradients their owner sums
        self._entered: tuple[weakref.ref[Tensor], int, bool, Tensor] | None = None
        self._told: set[tuple[str, str]] = set()

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a torch function on parts, by its rule; where there is none, on the whole."""
        try:
            return self.rule(func)(func, args, kwargs)
        except CannotSplit as reason:
            return self.without_rule(func, args, kwargs, reason)

    def on_parts(self) -> AbstractContextManager[None]:
        """Within it a Cut of this team is the plain tensor of the part."""
        return on_parts() if self.beside is None else self.beside.on_parts()

    # ------------------------------------------------------------------------------- into layers, and out of them

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a layer's input for cut work. Layers that read the same tensor one after another share a crossing."""
        if self._entered is not None:
            known, version, had_grad, crossed = self._entered
            if known() is tensor and version == tensor._version and had_grad == torch.is_grad_enabled():
                return crossed
        crossed = self.gather_spread(tensor) if isinstance(tensor, SplitTensor) else self.spread(tensor)
        self._entered = (weakref.ref(tensor), tensor._version, torch.is_grad_enabled(), crossed)
        return crossed

    def leave(self, partial: Tensor, *, site: str) -> Tensor:
        """Return the sum of partial results: plain, or cut by tokens where `sequence` is set; raises PlanError."""
        self.forget()
        if not self.sequence or partial.ndim < 3:
            return self.total(partial)
        if refusal := refused_tokens(partial.shape[-2], size=self.size, site=site):
            raise PlanError(str(refusal))
        return self.scatter_total(partial, dim=partial.ndim - 2, site=site)

    def owner_sums_gradients_of(self, parameters: Iterable[Tensor]) -> None:
        """Of these whole parameters each worker has a part of the gradient, and their owner sums it over the group."""
        self._summed = {id(one): weakref.ref(one) for one in parameters}

    def leaves(self, tensor: Tensor) -> bool:
        """Whether it is one of them."""
        known = self._summed.get(id(tensor))
        return known is not None and known() is tensor  # an id may come again, when rows are split and wholes are freed

    def forget(self) -> None:
        """Let go of the last layer's input, which would keep the graph of its block alive."""
        self._entered = None

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor that may be cut, for plain work."""
        return self.gather(tensor) if isinstance(tensor, SplitTensor) else tensor

    # ------------------------------------------------------------------------------------------------- crossings

    def spread(self, tensor: Tensor) -> Tensor:
        if self.leaves(tensor):
            return tensor
        return self._crossed(lambda: collectives.spread(tensor, self.group), tensor)

    def total(self, tensor: Tensor) -> Tensor:
        return self._crossed(lambda: collectives.total(tensor, self.group), tensor)

    def scatter(self, tensor: Tensor, *, dim: int, sections: Sections) -> Tensor:
        return self._crossed(lambda: collectives.scatter(tensor, self.group, dim=dim, sections=sections), tensor)

    def gather(self, cut: SplitTensor) -> Tensor:
        dim, sections = cut.split_dim, cut.sections
        return self._crossed(lambda: _plain(collectives.gather(cut, self.group, dim=dim, sections=sections)), cut)

    def gather_spread(self, cut: SplitTensor) -> Tensor:
        dim, sections = cut.split_dim, cut.sections
        return self._crossed(
            lambda: _plain(collectives.gather_spread(cut, self.group, dim=dim, sections=sections)), cut
        )

    def _crossed(self, move: Callable[[], Tensor], tensor: Tensor) -> Tensor:
        """Do a move on what is in memory."""
        if self.beside is not None:
            return self.beside.crossed(move, tensor)
        with on_parts():
            return move()

    def scatter_total(self, partial: Tensor, *, dim: int, site: str) -> Tensor:
        sections = (partial.shape[dim],)
        part = collectives.scatter_total(partial, self.group, dim=dim, sections=sections)
        return wrap(part, team=self, dim=dim, sections=sections, site=site)

    def meet(self, tensor: Tensor, trailing: int, sections: Sections, *, cut: SplitTensor) -> Tensor:
        """Return what a plain tensor contributes beside a cut one; `trailing` is the cut dim, counted from the end.

        Where it has the dim whole, its part; where it is broadcast, itself, with its gradient summed.
        """
        if tensor.ndim < -trailing or tensor.shape[trailing] == 1:
            return self.spread(tensor)
        if tensor.shape[trailing] != sum(sections):
            raise CannotSplit(f"it meets a tensor of shape {tuple(tensor.shape)}")
        return self.scatter(tensor, dim=tensor.ndim + trailing, sections=sections)

    # ----------------------------------------------------------------------------- what rules tell, for the finder

    def join(self, cuts: Sequence[SplitTensor]) -> None:
        """Cut tensors meet in one operation: their layers can only be cut together."""

    def constrain(self, cut: SplitTensor, sections: Sections, noun: str) -> None:
        """The parts must be whole numbers of what a view has made, heads for example; raises NotCut."""
        if not (divided(sections, self.size) and divided(cut.sections, self.size)):
            raise CannotSplit(f"{sections} {noun} do not divide among {self.size} workers")

    # --------------------------------------------------------------------------------------------- no rule applies

    def without_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit
    ) -> Any:
        """Gather what is cut, and do it on the whole; raises PlanError where that would write into a copy."""
        cuts = list(split_tensors_in((args, kwargs)))
        name, site = name_of(func), cuts[0].site
        if is_in_place(func) and isinstance(args[0], SplitTensor):
            raise PlanError(str(self.in_place_refusal(func, args[0], reason)))
        if (name, site) not in self._told:
            self._told.add((name, site))
            warnings.warn(
                f"{name} needs the whole of what is cut behind {site} ({reason}): it is gathered each time, which is "
                f"right but slow. worker.prepare(model, cut={{{site!r}: 'replicated'}}) avoids it.",
                stacklevel=4,
            )

        def whole(value: Any) -> Any:
            return self.gather(value) if isinstance(value, SplitTensor) else value

        return func(*mapped(args, whole), **mapped(kwargs, whole))

    def in_place_refusal(self, func: Callable[..., Any], cut: SplitTensor, reason: CannotSplit) -> Reason:
        return Reason(
            module=cut.site,
            what=f"{name_of(func)} changes a tensor in place of which each worker has a part, behind {cut.site}: "
            f"{reason}.",
            remedy=f"Write it without the change in place, or leave the layer whole, cut={{{cut.site!r}: 'replicated'}}"
            f"{', or use sequence=False' if self.sequence else ''}.",
        )

    # -------------------------------------------------------------------------------------------------- randomness

    @contextlib.contextmanager
    def own_randomness(self, device: torch.device) -> Iterator[None]:
        """Within it, random numbers differ between workers; after it, the generators agree again."""
        seed = int(torch.randint(1 << 62, (1,), device="cpu")) ^ (self.index * 0x9E3779B97F4A7C15 & ((1 << 62) - 1))
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(seed)
            yield


def _plain(whole: Tensor) -> Tensor:
    return whole.view_as(whole) if isinstance(whole, SplitTensor) else whole  # the group of one has moved nothing


def refused_tokens(num_tokens: int, *, size: int, site: str) -> Reason | None:
    """Return why so many tokens cannot be cut among `size` workers; None where they can."""
    if num_tokens % size == 0:
        return None
    return Reason(
        module=site,
        what=f"sequence=True cuts tokens among {size} workers, but {site} has {num_tokens} of them.",
        remedy=f"Pad sequences to a multiple of {size}, or use sequence=False.",
    )


@functools.lru_cache(maxsize=4096)
def name_of(func: Callable[..., Any]) -> str:
    """Return the plain name of a torch function: "add" for `Tensor.__iadd__`, "get:shape" for an attribute."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')}:{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    bare = name.strip("_") if name.startswith("__") else name.removesuffix("_")
    if name.startswith("__") and bare in REFLECTED:
        return REFLECTED[bare]
    return bare


@functools.lru_cache(maxsize=4096)
def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes into its first argument."""
    name = getattr(func, "__name__", str(func))
    if name.startswith("__"):
        return name in ("__setitem__", "__set__", "__delitem__") or name.strip("_") in IN_PLACE
    return name.endswith("_")


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
REFLECTED = {f"{side}{name}": name for name in OPERATORS for side in ("r", "i")}
IN_PLACE = frozenset(f"i{name}" for name in OPERATORS)
