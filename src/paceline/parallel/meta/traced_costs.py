"""What a model costs, found by running one forward of it without weights, values or a device.

Every operation is seen: matrix products and convolutions with their sizes, attention by its function, all others by the
elements that they read and write; and so is every value that autograd keeps. They count for the unit (repeated block)
in whose forward they happen, or for the rest. Equal units become one `Block` with a count. Costs are per sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it, and has no public name for it

from paceline.parallel.meta.fake_weights import fake_of, fake_values
from paceline.parallel.meta.meta_device import own_tensors
from paceline.parallel.meta.tensor_tree import map_tensors, tensors_in
from paceline.planner.model_costs import Attention, Block, Matmul, ModelCosts

__all__ = ["trace_costs"]

aten = torch.ops.aten
VALUE = 2  # bytes of a kept value in 16 bit
PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}  # where the operands are
LOOKS = (aten._unsafe_view, aten.detach, aten.empty, aten.empty_like)  # move nothing
LOOKUPS = (aten.embedding, aten.index, aten.gather)  # read what they write, and not the whole table


@dataclasses.dataclass(slots=True)
class _Counts:
    """What happened within one unit, for the whole sample."""

    matmuls: list[tuple[float, int, int]] = dataclasses.field(default_factory=list[tuple[float, int, int]])
    moved: float = 0.0  # elements in tensors as wide as the unit's input, if kernels are fused as far as they can be
    moved_split: float = 0.0
    single: float = 0.0  # elements, if each operation is a kernel
    launches: int = 0
    kept: float = 0.0
    kept_split: float = 0.0
    attention: list[tuple[int, int, float, float, bool]] = dataclasses.field(
        default_factory=list[tuple[int, int, float, float, bool]]
    )  # heads, head size, queries x keys, elements of keys and values, causal
    parameters: int = 0
    shapes: tuple[tuple[int, int], ...] = ()
    width: int = 0  # elements of its input, for each of its rows
    rows: float = 0.0


def trace_costs(
    model: nn.Module,
    run: Callable[[Callable[[Any], Any]], Any],
    *,
    samples: int,
    units: Sequence[tuple[str, nn.Module]],
) -> ModelCosts:
    """Return the costs of `model` for one sample.

    `run(fake)` does one forward of `samples` samples; it gives its input to `fake`, which takes away the values, and
    may return anything. Raises what the model raises when it looks at values.
    """
    named = [unit for _, unit in units]
    counts: dict[nn.Module | None, _Counts] = {unit: _Counts() for unit in named} | {None: _Counts()}
    for unit, found in _parameters_of(model, named).items():
        counts[unit].parameters = sum(one.numel() for one in found)
        counts[unit].shapes = tuple(_rows_and_columns(one) for one in found)
    recorder = _Recorder(counts)
    with fake_values(model) as mode:
        own = {id(tensor) for _, _, tensor in own_tensors(model.modules())}

        def without_values(value: Any) -> Any:
            return map_tensors(value, lambda one: fake_of(mode, one))

        with recorder.watching(model, named), recorder.keeping(own), recorder, _attention_seen(recorder):
            run(without_values)
    return _as_costs([counts[unit] for unit in named], counts[None], samples)


def _parameters_of(model: nn.Module, units: Sequence[nn.Module]) -> dict[nn.Module | None, list[nn.Parameter]]:
    """Parameters of each unit and of the rest; shared ones count where they come first."""
    seen: set[int] = set()
    found: dict[nn.Module | None, list[nn.Parameter]] = {}
    for unit in units:
        new = {id(one): one for one in unit.parameters() if id(one) not in seen}
        seen |= new.keys()
        found[unit] = list(new.values())
    found[None] = [one for one in model.parameters() if id(one) not in seen]
    return found


def _rows_and_columns(parameter: nn.Parameter) -> tuple[int, int]:
    """A parameter's shape as a matrix; with fewer than two dims, a column."""
    if parameter.dim() < 2 or not parameter.numel():
        return parameter.numel(), 1
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


class _Recorder(TorchDispatchMode):
    """Counts operations for the innermost unit that is running."""

    def __init__(self, counts: dict[nn.Module | None, _Counts]) -> None:
        super().__init__()
        self._counts = counts
        self._running: list[nn.Module | None] = [None]
        self._fusible: dict[int, Tensor] = {}  # results that so far only a fused kernel has seen
        self.is_paused = False

    @property
    def here(self) -> _Counts:
        return self._counts[self._running[-1]]

    @contextlib.contextmanager
    def watching(self, model: nn.Module, units: Sequence[nn.Module]) -> Iterator[None]:
        """Within it, it is known which unit runs; a recurrent layer is one kernel, as makers' libraries have it."""

        def enter(unit: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(unit)
            wide = next((one for one in tensors_in((args, kwargs)) if one.dim() > 1 and one.is_floating_point()), None)
            if wide is not None and not self.here.width:
                self.here.width, self.here.rows = wide.shape[-1], wide.numel() / wide.shape[-1]

        def leave(unit: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        handles = [unit.register_forward_pre_hook(enter, with_kwargs=True) for unit in units]
        handles += [unit.register_forward_hook(leave) for unit in units]
        for layer in {layer for layer in model.modules() if isinstance(layer, nn.RNNBase)}:
            handles += [layer.register_forward_pre_hook(self._recur), layer.register_forward_hook(self._recurred)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recur(self, layer: nn.Module, args: Any) -> None:
        given = args[0].data if isinstance(args[0], PackedSequence) else args[0]
        steps, weights = given.numel() / given.shape[-1], [one for one in layer.parameters() if one.dim() == 2]
        self.here.matmuls += [(steps, int(one.shape[1]), int(one.shape[0])) for one in weights]
        self.here.kept_split += VALUE * steps * sum(one.shape[0] for one in weights)  # the gates
        self.here.launches += 1
        self.is_paused = True

    def _recurred(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.is_paused = False

    @contextlib.contextmanager
    def keeping(self, own: set[int]) -> Iterator[None]:
        """Within it, what autograd keeps is counted, once, without the model's own tensors."""
        seen: set[int] = set()
        alive: list[Tensor] = []  # so that no storage gets the number of another one

        def pack(tensor: Tensor) -> Tensor:
            base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
            if not self.is_paused and id(base) not in own and id(base) not in seen:
                seen.add(id(base))
                alive.append(base)
                self.keep(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def keep(self, tensor: Tensor) -> None:
        self._write(tensor)
        num_bytes = tensor.numel() * (VALUE if tensor.dtype.is_floating_point else tensor.element_size())
        if self._is_wide(tensor):
            self.here.kept += num_bytes
        else:
            self.here.kept_split += num_bytes

    def _is_wide(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[-1] == self.here.width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet, results = func.overloadpacket, tensors_in(result)
        if not results or func.is_view or packet in LOOKS:
            return
        self.here.launches += 1
        if packet in PRODUCTS:
            left, right = (args[index] for index in PRODUCTS[packet])
            batch = left.shape[0] if left.dim() == 3 else 1
            self.here.matmuls.append((float(batch * left.shape[-2]), int(left.shape[-1]), int(right.shape[-1])))
        elif packet is aten.convolution:
            weight, groups = args[1], args[8]
            if args[6]:  # transposed: each place of the input makes a whole kernel of outputs
                rows, inner = args[0].numel() / weight.shape[0] * groups, weight.shape[0] // groups
                self.here.matmuls.append((rows, inner, math.prod(weight.shape[1:])))
            else:
                rows = result.numel() / weight.shape[0] * groups
                self.here.matmuls.append((rows, math.prod(weight.shape[1:]), weight.shape[0] // groups))
        else:
            inputs = [] if packet in LOOKUPS else tensors_in((args, kwargs))
            self._count_moves(inputs, results)
            return
        for tensor in tensors_in((args, kwargs)):
            self._write(tensor)  # for a product, if a fused kernel has made it

    def _count_moves(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Kernels that follow each other are fused: they read what others have made, and write what others take."""
        for tensor in (*inputs, *results):
            self.here.single += tensor.numel()
        for tensor in inputs:
            if _storage(tensor) not in self._fusible:
                self._move(tensor)
        self._fusible |= {_storage(tensor): tensor for tensor in results}

    def _write(self, tensor: Tensor) -> None:
        if self._fusible.pop(_storage(tensor), None) is not None:
            self._move(tensor)

    def _move(self, tensor: Tensor) -> None:
        if self._is_wide(tensor):
            self.here.moved += tensor.numel()
        else:
            self.here.moved_split += tensor.numel()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, result: Tensor) -> None:
        """One call of fused attention, of (..., heads, tokens, head size); it keeps its inputs and its result."""
        self.here.launches += 1
        for tensor in (query, key, value):
            self._write(tensor)
        heads, queries, size = (query.shape[-3] if query.dim() > 3 else 1), query.shape[-2], query.shape[-1]
        samples = query.numel() / (heads * queries * size)
        pairs = samples * queries * key.shape[-2]
        self.here.attention.append((int(heads), int(size), float(pairs), float(key.numel() + value.numel()), causal))
        for tensor in (query, key, value, result):
            self.here.kept_split += VALUE * tensor.numel()


def _storage(tensor: Tensor) -> int:
    """What tells tensors of the same memory; they live as long as the recorder knows them."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


@contextlib.contextmanager
def _attention_seen(recorder: _Recorder) -> Iterator[None]:
    """Within it, scaled_dot_product_attention is one operation, also where torch's own modules call it."""
    former = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recorder.is_paused = True
        try:
            result = former(query, key, value, *args, **kwargs)
        finally:
            recorder.is_paused = False
        causal = bool(args[2] if len(args) > 2 else kwargs.get("is_causal", False))
        recorder.attend(query, key, value, causal=causal, result=result)
        return result

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = former


def _as_costs(units: Sequence[_Counts], rest: _Counts, samples: int) -> ModelCosts:
    blocks: list[Block] = []
    for found in units:
        block = _block(found, samples)
        if blocks and dataclasses.replace(blocks[-1], count=1) == block:
            blocks[-1] = dataclasses.replace(blocks[-1], count=blocks[-1].count + 1)
        else:
            blocks.append(block)
    if not blocks:  # nothing is repeated: all of it is one block
        return ModelCosts(blocks=(_block(rest, samples),), sequence=1)
    return ModelCosts(blocks=tuple(blocks), sequence=1, rest=_block(rest, samples))


def _block(found: _Counts, samples: int) -> Block:
    matmuls = tuple(
        Matmul(inputs=inner, outputs=outer, rows=rows / samples, split="outputs" if outer >= inner else "inputs")
        for rows, inner, outer in found.matmuls
    )
    attention = None
    if found.attention:
        heads, size = found.attention[0][:2]
        pairs = sum(one[0] * one[1] * one[2] for one in found.attention) / (heads * size)
        attention = Attention(
            heads=heads,
            head_size=size,
            span=pairs / samples,
            kv_elements=sum(one[3] for one in found.attention) / samples,
            causal=all(one[4] for one in found.attention),
        )
    return Block(
        count=1,
        parameters=found.parameters,
        shapes=found.shapes,
        matmuls=matmuls,
        hidden=round(found.width * found.rows / samples),
        attention=attention,
        moved=found.moved / samples,
        moved_split=found.moved_split / samples,
        kept=found.kept / samples,
        kept_split=found.kept_split / samples,
        single=found.single / samples,
        launches=found.launches,
    )
