"""`SplitTensor`: each worker holds a part of the tensor, while the model's code sees the shape of the whole.

An ordinary model's attention says `x.view(B, T, self.n_head, C // self.n_head)`, with C from the shape of its input.
Such code breaks if layers simply return fewer features, and nothing tells which of a module's integers count heads.
So the model's code stays as it is, and its *tensors* know that they are split. A column layer returns a `SplitTensor`:
its shape is that of the whole, its data are this worker's part.

Each torch function that meets one follows a rule (`op_rules.py`, `shape_rules.py`) for running on the parts alone: a
view finds the dim in which the split goes on, a product over batches of heads stays with its heads. Where there is no
rule, or the operation needs the whole, the parts are gathered first. An unforeseen line of code therefore costs time
and never changes a result. Below torch functions nothing differs: kernels, autograd and recomputation see plain
tensors. DTensor does the same one level lower, for each operator. Here a composite function (attention, for example) is
one rule, which also works where its kernels have no sharding rule.

Context parallelism splits sequences in the same way, along tokens. Where both are used, a tensor may be split twice:
`under` says how its part of the features is split along tokens (`tensor_context_ops.py`).

One `TensorGroupOps` belongs to one model and does the collectives where plain and split tensors meet. Random numbers:
outside of split layers all workers draw the same, because their generators are in the same state. For dropout on a
split tensor, each worker draws a seed from the common generator and mixes in its index. Afterwards the common generator
is again equal on all workers. So parts get different masks, all workers stay in step, and recomputation repeats the
masks.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from paceline.errors import PlanError, Reason
from paceline.parallel.tensor import collectives
from paceline.parallel.tensor.collectives import TensorCollectives
from paceline.parallel.tensor.split_shapes import CannotSplit, Sections, divided
from paceline.parallel.torch_functions import attribute_of, mapped, on_parts, tensors_in

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


class SplitSpec(NamedTuple):
    """How a tensor is split: by which group, along which dim, in which sections, and behind which layer."""

    ops: TensorGroupOps
    dim: int
    sections: Sections
    site: str


class SplitTensor(Tensor):
    """This worker's part of a tensor that is split along `split_dim` in `sections`; made by `wrap` only."""

    ops: TensorGroupOps
    split_dim: int
    sections: Sections
    site: str  # the layer where the split began, for messages
    under: SplitSpec | None = None  # how the part is split once more, along tokens

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
            split = args[0] if args and isinstance(args[0], SplitTensor) else next(split_tensors_in((args, kwargs)))
            follow = split.ops.follow if split.ops.combined is None else split.ops.combined.follow
            return follow(func, args, kwargs)


class TokenSplitTensor(Tensor):
    """A tensor that is split along tokens only, within tensor parallel layers: there it looks like a whole tensor."""

    ops: TensorGroupOps
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
        if one.ops.combined is None:
            raise RuntimeError("a TokenSplitTensor was used outside of a tensor parallel model")
        return one.ops.combined.run_in_layer(func, args, kwargs or {})


def wrap(part: Tensor, *, ops: TensorGroupOps, dim: int, sections: Sections, site: str) -> Tensor:
    """Make a fresh tensor a SplitTensor, in place: no copy, and no node in autograd's graph.

    A tensor that the other group has already split becomes split twice; raises CannotSplit where both would use one
    dim.
    """
    split: Any = part
    under = None
    if isinstance(part, (SplitTensor, TokenSplitTensor)):
        if part.ops is not ops and part.split_dim == dim:
            raise CannotSplit("tokens and features would be split in one dim")
        if isinstance(part, TokenSplitTensor):
            under = SplitSpec(part.ops, part.split_dim, part.sections, part.site)
        elif part.ops is ops:  # it was changed in place
            under = part.under
        else:
            part.under = SplitSpec(ops, dim, sections, site)
            return part
    split.__class__ = SplitTensor
    split.ops, split.split_dim, split.sections, split.site, split.under = ops, dim, sections, site, under
    return part


def whole(tensor: Tensor, by: TensorGroupOps | None = None) -> Tensor:
    """Return the whole of a tensor that may be split. It is a torch function, so that torch function modes see it.

    `by`: undo only the split of this group.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(whole, (tensor,), tensor, by)
    return tensor


def split_tensors_in(value: Any) -> Iterator[SplitTensor]:
    """Yield every SplitTensor in nested tuples, lists and dictionaries."""
    if isinstance(value, SplitTensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for one in inside:
            if not isinstance(one, (str, int, float)):
                yield from split_tensors_in(one)


Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CombinedOps(Protocol):
    """The operations on tensors that are split twice, along features and along tokens."""

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...

    def run_in_layer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...

    def in_layer(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...

    def on_parts(self) -> contextlib.AbstractContextManager[None]: ...

    def crossed(self, move: Callable[[], Tensor], tensor: Tensor) -> Tensor: ...


class TensorGroupOps:
    """One worker's view of the group, and the collectives between plain and split tensors."""

    combined: CombinedOps | None = None  # set where the model is both tensor and context parallel
    is_of_tokens = False  # whether tensors are split along tokens

    def __init__(
        self, group: TensorCollectives, *, rules: Callable[[Callable[..., Any]], Rule], sequence: bool = False
    ) -> None:
        self.group, self.size, self.index = group, group.size, group.index
        self.rule = rules
        self.sequence = sequence  # between pairs of layers, tokens are split
        self._summed: dict[int, weakref.ref[Tensor]] = {}  # by id(): parameters whose gradients the training loop sums
        self._entered: tuple[weakref.ref[Tensor], int, bool, Tensor] | None = None
        self._warned: set[tuple[str, str]] = set()

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function on parts, by its rule; where there is none, on the whole."""
        try:
            return self.rule(func)(func, args, kwargs)
        except CannotSplit as reason:
            return self.without_rule(func, args, kwargs, reason)

    def on_parts(self) -> contextlib.AbstractContextManager[None]:
        """Within it a SplitTensor of this group is the plain tensor of its part."""
        return on_parts() if self.combined is None else self.combined.on_parts()

    # ------------------------------------------------------------------------------- into layers, and out of them

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a layer's input for split work; consecutive layers that read the same tensor share one collective."""
        keeps = not tensor.is_inference()  # which may be changed without a trace
        if self._entered is not None and keeps:
            known, version, had_grad, crossed = self._entered
            if known() is tensor and version == tensor._version and had_grad == torch.is_grad_enabled():
                return crossed
        crossed = self.gather_for_group(tensor) if isinstance(tensor, SplitTensor) else self.copy_to_group(tensor)
        self._entered = (weakref.ref(tensor), tensor._version, torch.is_grad_enabled(), crossed) if keeps else None
        return crossed

    def leave(self, partial: Tensor, *, site: str) -> Tensor:
        """Return the sum of partial results: plain, or split by tokens where `sequence` is set; raises PlanError."""
        self.forget()
        if not self.sequence or partial.ndim < 3:
            return self.total(partial)
        if refusal := refused_tokens(partial.shape[-2], size=self.size, site=site):
            raise PlanError(str(refusal))
        return self.scatter_total(partial, dim=partial.ndim - 2, site=site)

    def owner_sums_gradients_of(self, parameters: Iterable[Tensor]) -> None:
        """Declare whole parameters whose gradients are partial on each worker; the training loop sums them over the
        group."""
        self._summed = {id(one): weakref.ref(one) for one in parameters}

    def leaves(self, tensor: Tensor) -> bool:
        """Return whether the tensor is such a parameter."""
        known = self._summed.get(id(tensor))
        return known is not None and known() is tensor  # ids are reused when tensors are freed

    def forget(self) -> None:
        """Forget the last layer's input, which would keep the graph of its block alive."""
        self._entered = None

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor that may be split, for plain work."""
        return self.gather(tensor) if isinstance(tensor, SplitTensor) else tensor

    # ------------------------------------------------------------------------------------------------- crossings

    def copy_to_group(self, tensor: Tensor) -> Tensor:
        if self.leaves(tensor):
            return tensor
        return self._crossed(lambda: collectives.copy_to_group(tensor, self.group), tensor)

    def total(self, tensor: Tensor) -> Tensor:
        return self._crossed(lambda: collectives.total(tensor, self.group), tensor)

    def scatter(self, tensor: Tensor, *, dim: int, sections: Sections) -> Tensor:
        return self._crossed(lambda: collectives.scatter(tensor, self.group, dim=dim, sections=sections), tensor)

    def gather(self, split: SplitTensor) -> Tensor:
        dim, sections = split.split_dim, split.sections
        return self._crossed(lambda: _plain(collectives.gather(split, self.group, dim=dim, sections=sections)), split)

    def gather_for_group(self, split: SplitTensor) -> Tensor:
        dim, sections = split.split_dim, split.sections
        return self._crossed(
            lambda: _plain(collectives.gather_for_group(split, self.group, dim=dim, sections=sections)), split
        )

    def _crossed(self, move: Callable[[], Tensor], tensor: Tensor) -> Tensor:
        """Run a collective on the tensors as they are in memory."""
        if self.combined is not None:
            return self.combined.crossed(move, tensor)
        with on_parts():
            return move()

    def scatter_total(self, partial: Tensor, *, dim: int, site: str) -> Tensor:
        sections = (partial.shape[dim],)
        part = collectives.scatter_total(partial, self.group, dim=dim, sections=sections)
        return wrap(part, ops=self, dim=dim, sections=sections, site=site)

    def meet(self, tensor: Tensor, trailing: int, sections: Sections, *, split: SplitTensor) -> Tensor:
        """Return what a plain tensor contributes to an operation with a split one.

        `trailing` is the split dim, counted from the end. Where the plain tensor has this dim whole, its part is taken;
        where it is broadcast, it is used as it is and its gradient is summed.
        """
        if tensor.ndim < -trailing or tensor.shape[trailing] == 1:
            return self.copy_to_group(tensor)
        if tensor.shape[trailing] != sum(sections):
            raise CannotSplit(f"it meets a tensor of shape {tuple(tensor.shape)}")
        return self.scatter(tensor, dim=tensor.ndim + trailing, sections=sections)

    # ----------------------------------------------------------------------------- what rules tell, for the finder

    def join(self, splits: Sequence[SplitTensor]) -> None:
        """Called where split tensors meet in one operation: their layers can only be split together."""

    def constrain(self, split: SplitTensor, sections: Sections, noun: str) -> None:
        """Called where parts must be whole numbers of what a view has made, heads for example; raises CannotSplit."""
        if not (divided(sections, self.size) and divided(split.sections, self.size)):
            raise CannotSplit(f"{sections} {noun} do not divide among {self.size} workers")

    # --------------------------------------------------------------------------------------------- no rule applies

    def without_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit
    ) -> Any:
        """Gather what is split and run the function on the whole; PlanError where that would write into a copy."""
        splits = list(split_tensors_in((args, kwargs)))
        name, site = name_of(func), splits[0].site
        if is_in_place(func) and isinstance(args[0], SplitTensor):
            raise PlanError(str(self.in_place_refusal(func, args[0], reason)))
        if (name, site) not in self._warned:
            self._warned.add((name, site))
            warnings.warn(
                f"{name} needs the whole of what is split behind {site} ({reason}): it is gathered each time, which is "
                f"right but slow. worker.prepare(model, cut={{{site!r}: 'replicated'}}) avoids it.",
                stacklevel=4,
            )

        def whole(value: Any) -> Any:
            return self.gather(value) if isinstance(value, SplitTensor) else value

        return func(*mapped(args, whole), **mapped(kwargs, whole))

    def in_place_refusal(self, func: Callable[..., Any], split: SplitTensor, reason: CannotSplit) -> Reason:
        return Reason(
            module=split.site,
            what=f"{name_of(func)} changes a tensor in place of which each worker has a part, behind {split.site}: "
            f"{reason}.",
            remedy="Write it without the change in place, or leave the layer whole, "
            f"cut={{{split.site!r}: 'replicated'}}{', or use sequence=False' if self.sequence else ''}.",
        )

    # -------------------------------------------------------------------------------------------------- randomness

    @contextlib.contextmanager
    def own_randomness(self, device: torch.device) -> Iterator[None]:
        """Within it, random numbers differ between workers; after it, the generators agree again."""
        seed = int(torch.randint(1 << 62, (1,), device="cpu")) ^ (self.index * 0x9E3779B97F4A7C15 & ((1 << 62) - 1))
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            torch.random.default_generator.manual_seed(seed)
            if devices:
                torch.get_device_module(device).manual_seed(seed)
            yield


def _plain(whole: Tensor) -> Tensor:
    return whole.view_as(whole) if isinstance(whole, SplitTensor) else whole  # the group of one has moved nothing


def refused_tokens(num_tokens: int, *, size: int, site: str) -> Reason | None:
    """Return why `num_tokens` cannot be split among `size` workers; None where they can."""
    if num_tokens % size == 0:
        return None
    return Reason(
        module=site,
        what=f"sequence=True splits tokens among {size} workers, but {site} has {num_tokens} of them.",
        remedy=f"Pad sequences to a multiple of {size}, or use sequence=False.",
    )


@functools.lru_cache(maxsize=4096)
def name_of(func: Callable[..., Any]) -> str:
    """Return the plain name of a torch function: "add" for `Tensor.__iadd__`, "get:shape" for an attribute."""
    name = getattr(func, "__name__", str(func))
    if attribute := attribute_of(func):
        return attribute
    bare = name.strip("_") if name.startswith("__") else name.removesuffix("_")
    if name.startswith("__") and bare in REFLECTED:
        return REFLECTED[bare]
    return bare


@functools.lru_cache(maxsize=4096)
def is_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a torch function writes into its first argument."""
    name = getattr(func, "__name__", str(func))
    if name.startswith("__"):
        return name in ("__setitem__", "__set__", "__delitem__") or name.strip("_") in IN_PLACE
    return name.endswith("_")


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
REFLECTED = {f"{side}{name}": name for name in OPERATORS for side in ("r", "i")}
IN_PLACE = frozenset(f"i{name}" for name in OPERATORS)
