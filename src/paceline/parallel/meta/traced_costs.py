"""What a model costs, found by running one forward of it without weights, values or a device.

Every operation is seen: matrix products and convolutions with their sizes, attention by its function, all others by the
elements that they read and write; and so is every value that autograd keeps. They count for the unit (repeated block)
in whose forward they happen, or for the rest. Equal units become one `Block` with a count. Costs are per sample.

What backward does follows from which operands need a gradient: frozen layers have no gradient of their weights, and
none at all below the first trained one. Routers spread tokens evenly over experts (`known_values`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily  # it has no public name
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it, and has no public name for it
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.parallel.meta.fake_weights import fake_of, fake_values
from paceline.parallel.meta.known_values import KnownValues
from paceline.parallel.meta.meta_device import own_tensors
from paceline.parallel.meta.tensor_tree import map_tensors, tensors_in
from paceline.parallel.meta.traced_calls import attention_seen, numbers_told, recompute_seen
from paceline.parallel.meta.traced_counts import (
    VALUE,
    HeldParameters,
    RecomputedRegion,
    TracedProduct,
    UnitCounts,
    as_costs,
    kept_bytes,
    storage_of,
)
from paceline.planner.model_costs import ModelCosts

__all__ = ["ExpertsModule", "trace_costs"]

aten = torch.ops.aten
PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}  # where the operands are
LOOKS = (aten._unsafe_view, aten.detach, aten.empty, aten.empty_like)  # move nothing
LOOKUPS = (aten.embedding, aten.index, aten.gather)  # read what they write, and not the whole table
GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})  # torch's, and that of transformers


class ExpertsModule(Protocol):
    """A module of `count` experts, called with (tokens, numbers of each token's experts, ...)."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def count(self) -> int: ...
    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield those that belong to one expert each."""
        ...


def trace_costs(
    model: nn.Module,
    run: Callable[[Callable[[Any], Any]], Any],
    *,
    samples: int,
    units: Sequence[tuple[str, nn.Module]],
    experts: Sequence[ExpertsModule] = (),
) -> ModelCosts:
    """Return the costs of `model` for one sample.

    `run(fake)` does one forward of `samples` samples; it gives its input to `fake`, which takes away the values, and
    may return anything. `experts`: modules of routed experts, whose parameters are told from others.

    Raises what the model raises when it looks at values.
    """
    named = [unit for _, unit in units]
    counts: dict[nn.Module | None, UnitCounts] = {unit: UnitCounts() for unit in named} | {None: UnitCounts()}
    for unit, held in _held_by(model, named, experts).items():
        counts[unit].held = held
    with fake_values(model) as mode:
        kv_heads: Any = getattr(getattr(model, "config", None), "num_key_value_heads", None)
        values = KnownValues(mode)
        recorder = _Recorder(counts, values, kv_heads=kv_heads if isinstance(kv_heads, int) else 0)
        own = [tensor for _, _, tensor in own_tensors(model.modules())]

        def without_values(value: Any) -> Any:
            return map_tensors(value, fake)

        def fake(tensor: Tensor) -> Tensor:
            made = fake_of(mode, tensor)
            if not (tensor.is_floating_point() or tensor.is_complex()):
                with unset_fake_temporarily():
                    values.give(made, tensor)
            return made

        with (
            recorder.watching(model, named, experts),
            recorder.keeping(own),
            recorder,
            attention_seen(recorder.attend),
            recompute_seen(recorder.region),
            numbers_told(values.knows),
        ):
            run(without_values)
    return as_costs([counts[unit] for unit in named], counts[None], samples)


def _held_by(
    model: nn.Module, units: Sequence[nn.Module], experts: Sequence[ExpertsModule]
) -> dict[nn.Module | None, HeldParameters]:
    """Parameters of each unit and of the rest; shared ones count where they come first."""
    of_experts = {id(one) for routed in experts for one in routed.parameters()}
    seen: set[int] = set()
    found: dict[nn.Module | None, HeldParameters] = {}
    for unit in (*units, None):
        held = found[unit] = HeldParameters()
        for one in (model if unit is None else unit).parameters():
            if id(one) in seen:
                continue
            seen.add(id(one))
            frozen = 0 if one.requires_grad else one.numel()
            held.parameters, held.frozen = held.parameters + one.numel(), held.frozen + frozen
            held.shapes += () if frozen else (_rows_and_columns(one),)
            if id(one) in of_experts:
                held.experts, held.frozen_experts = held.experts + one.numel(), held.frozen_experts + frozen
    return found


def _rows_and_columns(parameter: nn.Parameter) -> tuple[int, int]:
    """A parameter's shape as a matrix; with fewer than two dims, a column."""
    if parameter.dim() < 2 or not parameter.numel():
        return parameter.numel(), 1
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


class _Recorder(TorchDispatchMode):
    """Counts operations for the innermost unit that is running."""

    def __init__(self, counts: dict[nn.Module | None, UnitCounts], values: KnownValues, *, kv_heads: int) -> None:
        """`kv_heads`: heads of keys and values as the model's configuration has them; 0: it has none."""
        super().__init__()
        self._counts, self._values, self._kv_heads = counts, values, kv_heads
        self._running: list[nn.Module | None] = [None]
        self._fusible: dict[int, Tensor] = {}  # results that so far only a fused kernel has seen
        self._kept: dict[int, Tensor] = {}  # by storage; they live on, so that no storage gets the number of another
        self._region: RecomputedRegion | None = None  # that is computed again
        self._followed = WeakTensorKeyDictionary()  # results within an operation, which autograd marks at its end
        self._in_experts = 0
        self.is_paused = False

    @property
    def here(self) -> UnitCounts:
        return self._counts[self._running[-1]]

    @contextlib.contextmanager
    def watching(
        self, model: nn.Module, units: Sequence[nn.Module], experts: Sequence[ExpertsModule]
    ) -> Iterator[None]:
        """Within it, it is known which unit runs; a recurrent layer is one kernel, as makers' libraries have it."""

        def enter(unit: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(unit)
            self._take_entries()
            wide = next((one for one in tensors_in((args, kwargs)) if one.dim() > 1 and one.is_floating_point()), None)
            if wide is not None and not self.here.width:
                self.here.width, self.here.rows = wide.shape[-1], wide.numel() / wide.shape[-1]

        def leave(unit: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        handles = [unit.register_forward_pre_hook(enter, with_kwargs=True) for unit in units]
        handles += [unit.register_forward_hook(leave) for unit in units]
        for routed in experts:
            handles += self._watch_experts(routed)
        for layer in {layer for layer in model.modules() if isinstance(layer, nn.RNNBase)}:
            handles += [layer.register_forward_pre_hook(self._recur), layer.register_forward_hook(self._recurred)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch_experts(self, routed: ExpertsModule) -> list[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            index = args[1] if len(args) > 1 else None
            self.here.num_experts = routed.count
            if isinstance(index, Tensor) and index.dim() and 1 <= index.shape[-1] <= routed.count:
                self.here.routed = int(index.shape[-1])
            self._in_experts += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._in_experts -= 1

        return [
            routed.module.register_forward_pre_hook(enter, with_kwargs=True),
            routed.module.register_forward_hook(leave),
        ]

    def _recur(self, layer: nn.Module, args: Any) -> None:
        given = args[0].data if isinstance(args[0], PackedSequence) else args[0]
        steps = given.numel() / given.shape[-1]
        is_fed = self._need_gradient(tensors_in(args))
        needs = is_fed or self._need_gradient(layer.parameters())
        for number, one in enumerate(one for one in layer.parameters() if one.dim() == 2):
            inputs, weights = (
                is_fed or (needs and number > 0),
                self._need_gradient([one]),
            )  # the first one takes the data
            self._multiply(TracedProduct(steps, int(one.shape[1]), int(one.shape[0]), inputs, weights))
            if needs:
                self.here.kept_split += VALUE * steps * one.shape[0]  # the gates
        self.here.launches += 1
        self.is_paused = True

    def _recurred(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.is_paused = False

    @contextlib.contextmanager
    def keeping(self, own: Sequence[Tensor]) -> Iterator[None]:
        """Within it, what autograd keeps is counted, once, without the model's own tensors."""
        self._kept |= {storage_of(one): one for one in own}

        def pack(tensor: Tensor) -> Tensor:
            if not self.is_paused:
                self.keep(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def keep(self, tensor: Tensor) -> None:
        """Count what is kept for backward; within a region that runs again, as what it keeps then."""
        storage = storage_of(tensor)
        if storage in self._kept or (self._region is not None and storage in self._region.seen):
            return
        self._write(tensor)
        num_bytes, is_wide = kept_bytes(tensor), self._is_wide(tensor)
        if self._region is not None:
            self._region.keep(tensor, self.here, num_bytes, is_wide=is_wide)
            return
        self._kept[storage] = tensor
        if is_wide:
            self.here.kept += num_bytes
        else:
            self.here.kept_split += num_bytes

    @contextlib.contextmanager
    def region(self, given: Any) -> Iterator[None]:
        """Within it, what happens is what the model computes again in backward; `given`: its inputs, which are kept."""
        if self._region is not None or not torch.is_grad_enabled():
            yield  # within another one: that one runs again as a whole
            return
        self._region = RecomputedRegion([one for one in tensors_in(given) if one.is_floating_point()])
        try:
            yield
        finally:
            self._take_entries()
            region, self._region = self._region, None
            region.close()

    def _take_entries(self) -> None:
        """What a region has been given counts for the first unit in it, or else for the one around it."""
        if self._region is None or not self._region.entries:
            return
        region, self._region = self._region, None
        for tensor in region.entries:
            self.keep(tensor)
        region.entries = []
        self._region = region

    def _need_gradient(self, tensors: Iterable[Tensor]) -> bool:
        return torch.is_grad_enabled() and any(one.requires_grad or one in self._followed for one in tensors)

    def _is_wide(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[-1] == self.here.width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
            result = args[0].new_empty(args[0].shape[0], args[1].shape[2])  # torch knows its shape in 16 bit only
        else:
            result = self._values.run(func, args, kwargs)
        if not self.is_paused:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet, results = func.overloadpacket, tensors_in(result)
        follows = packet is not aten.detach and self._need_gradient(tensors_in((args, kwargs)))
        if follows:
            self._followed.update((one, True) for one in results)
        if not results or func.is_view or packet in LOOKS:
            return
        self.here.launches += 1
        if packet in PRODUCTS:
            left, right = (args[index] for index in PRODUCTS[packet])
            batch = left.shape[0] if left.dim() == 3 else 1
            self._product(float(batch * left.shape[-2]), int(left.shape[-1]), int(right.shape[-1]), left, right)
        elif packet.__name__ in GROUPED:
            left, right = args[:2]
            self._product(float(left.shape[0]), int(left.shape[1]), int(right.shape[2]), left, right, right.shape[0])
        elif packet is aten.convolution:
            given, weight, groups = args[0], args[1], args[8]
            if args[6]:  # transposed: each place of the input makes a whole kernel of outputs
                rows, inner = given.numel() / weight.shape[0] * groups, weight.shape[0] // groups
                self._product(rows, inner, math.prod(weight.shape[1:]), given, weight)
            else:
                rows = result.numel() / weight.shape[0] * groups
                self._product(rows, math.prod(weight.shape[1:]), weight.shape[0] // groups, given, weight)
        else:
            given = tensors_in((args, kwargs))
            self._count_moves([] if packet in LOOKUPS else given, results, follows=follows)
            return
        for tensor in tensors_in((args, kwargs)):
            self._write(tensor)  # for a product, if a fused kernel has made it

    def _product(self, rows: float, inner: int, outer: int, left: Tensor, right: Tensor, groups: int = 1) -> None:
        needs = self._need_gradient([left]), self._need_gradient([right])
        product = TracedProduct(rows, inner, outer, *needs, groups=int(groups))
        self._multiply(product)

    def _multiply(self, product: TracedProduct) -> None:
        if self._region is not None:
            self.here.again += product.flops
        if self._in_experts and product.groups == 1:  # one of the experts: with the others, a group
            for number, other in enumerate(self.here.matmuls):
                alike = dataclasses.replace(other, rows=product.rows, groups=1)
                if alike == product and 0 < other.groups < self.here.num_experts:
                    self.here.matmuls[number] = dataclasses.replace(
                        other, rows=other.rows + product.rows, groups=other.groups + 1
                    )
                    return
        self.here.matmuls.append(product)

    def _count_moves(self, inputs: Sequence[Tensor], results: Sequence[Tensor], *, follows: bool) -> None:
        """Kernels that follow each other are fused: they read what others have made, and write what others take."""
        elements = sum(tensor.numel() for tensor in (*inputs, *results))
        self.here.single += elements
        self.here.followed += elements if follows else 0
        self.here.again_single += elements if self._region is not None else 0
        for tensor in inputs:
            if storage_of(tensor) not in self._fusible:
                self._move(tensor)
        self._fusible |= {storage_of(tensor): tensor for tensor in results}

    def _write(self, tensor: Tensor) -> None:
        if self._fusible.pop(storage_of(tensor), None) is not None:
            self._move(tensor)

    def _move(self, tensor: Tensor) -> None:
        if self._is_wide(tensor):
            self.here.moved += tensor.numel()
        else:
            self.here.moved_split += tensor.numel()

    def attend(self, call: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """One call of fused attention, of (..., heads, tokens, head size); it keeps its inputs and its result."""
        self.is_paused = True
        try:
            result = call()
            if result.dim() > 3 and query.stride(-3) < query.stride(-2):  # the result lies in memory as queries do
                result = result.transpose(-3, -2).contiguous().transpose(-3, -2)
        finally:
            self.is_paused = False
        self.here.launches += 1
        for tensor in (query, key, value):
            self._write(tensor)
        heads, queries, size = (query.shape[-3] if query.dim() > 3 else 1), query.shape[-2], query.shape[-1]
        samples = query.numel() / (heads * queries * size)
        pairs = samples * queries * key.shape[-2]
        own_heads = key.shape[-3] if key.dim() > 3 else 1
        if self._kv_heads and heads % self._kv_heads == 0:  # they may be repeated before attention is called
            own_heads = min(own_heads, self._kv_heads)
        self.here.kv_heads = int(own_heads)
        self.here.attention.append((int(heads), int(size), float(pairs), float(key.numel() + value.numel()), causal))
        if self._region is not None:
            self.here.again += 4.0 * heads * size * pairs
        if self._need_gradient((query, key, value)):
            self.here.attends_backward = True
            for tensor in (query, key, value, result):
                self.keep(tensor)
        return result
