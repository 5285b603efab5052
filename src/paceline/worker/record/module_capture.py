"""Captures of single modules for `paceline parity`: what each module's forward got and returned, and its gradients.

They are made only where a file `modules.json` lies in the capture directory, and only for its first steps:

    modules.json                          {"steps": 2, "rounding": 0.0}
    modules_<step>_worker_<rank>.safetensors, .json    tensors, and what each of them is (`TensorNote`)
    splits_worker_<rank>.json                          how parameters are split: {name: words}
    start_<step>_worker_<rank>.safetensors             parameters before the step
    buffers_<step>_worker_<rank>.safetensors           buffers before the step
    squares_<step>_<pass>_worker_<rank>.json           of these gradients, the squares of what this worker has
    summed_<step>_<pass>_worker_<rank>.safetensors     gradients after their sum over the workers, before clipping

A tensor of which a worker has a part (features, tokens) is written as this part, with the ranges of the whole that it
covers. Tensors of modules that hold routed experts are left out under expert parallelism: a worker's experts see other
tokens there. Each loss is divided by the samples of the whole step, so the gradients that come back are the same on any
number of workers. Under context parallelism each worker's are of the sum of all workers' losses: they are divided by
the number of workers, and those of tensors that are not split, of which each worker has a part, are left out.

`rounding`: each parameter is changed by this part of itself before the first step, and by one rounding of its own type
at least; 0: by nothing. What this changes in a tensor is the level of rounding noise there, by which differences are
judged.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from paceline.comm.sharded_tensors import local_part
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.context.token_slices import slices
from paceline.parallel.meta.meta_device import unseen
from paceline.parallel.tensor.split_shapes import ranges
from paceline.parallel.tensor.split_tensor import SplitTensor, TokenSplitTensor
from paceline.worker.record.parity_capture import GatherWhole, portable

__all__ = ["REQUEST", "ModuleCapture", "TensorNote"]

REQUEST = "modules.json"
Piece = tuple[int, tuple[tuple[int, int], ...]]  # a dim, and the ranges of it that are here


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorNote:
    """What a captured tensor is."""

    key: str  # in the file of tensors; "": a tensor that is there already, as what another module returned
    kind: str  # "input" or "output"
    is_gradient: bool
    micro: tuple[int, int]  # the pass of the step, and the micro-batch's number in the whole step
    module: str  # full name, with the model's
    call: int  # of the module in this micro-batch, from 0
    item: int  # of the tensors that the call got, or returned, from 0
    tensor: int  # notes of one tensor have the same number
    pieces: tuple[Piece, ...]  # in how far it is a part; (): it is whole
    is_void: bool  # of a run that counts for nothing


class ModuleCapture:
    """Writes the module captures of one worker, for the first steps of a run."""

    @classmethod
    def asked_for(cls, directory: Path, worker_rank: int) -> ModuleCapture | None:
        """Return a capture where `modules.json` asks for one."""
        path = directory / REQUEST
        if not path.exists():
            return None
        request = json.loads(path.read_text(encoding="utf-8"))
        return cls(directory, worker_rank, num_steps=request["steps"], rounding=request["rounding"])

    def __init__(self, directory: Path, worker_rank: int, *, num_steps: int, rounding: float = 0.0) -> None:
        self._directory, self._rank = directory, worker_rank
        self._num_steps, self._rounding = num_steps, rounding
        self._step = 0
        self._names: dict[int, str] = {}  # of modules, by id
        self._left_out: tuple[str, ...] = ()
        self._context_size = 1
        self._micro: tuple[int, int] | None = None  # set during a forward
        self._is_void = False
        self._calls: dict[tuple[tuple[int, int], str], int] = {}
        self._tensors: dict[str, Tensor] = {}
        self._notes: list[TensorNote] = []
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # of tensors, by id
        self._hook: RemovableHandle | None = None

    # --------------------------------------------------------------------------------------------------- of a step

    def is_due(self, step: int) -> bool:
        """Whether modules of this step are captured."""
        return 0 < step <= self._num_steps

    def start(
        self,
        step: int,
        models: Mapping[str, nn.Module],
        whole: GatherWhole,
        *,
        left_out: tuple[str, ...],
        splits: Mapping[str, str],
        context_size: int,
    ) -> None:
        """Note parameters and buffers before a step; all workers of a replica call it. `left_out`: the full names of
        modules whose insides cannot be compared; `splits`: how parameters are split, in words; `context_size`: how many
        workers share a sequence."""
        if self._hook is None:
            self._hook = register_module_forward_hook(self._after_forward, with_kwargs=True)
        if step == self._step:
            return  # another pass of the same step
        if self._rounding and self._step == 0:
            _perturb(models, self._rounding)
        self._step, self._left_out, self._context_size = step, left_out, context_size
        (self._directory / f"splits_worker_{self._rank}.json").write_text(json.dumps(dict(splits)), encoding="utf-8")
        self._tensors, self._notes, self._calls, self._numbers = {}, [], {}, {}
        self._names = {
            id(module): f"{prefix}.{name}" if name else prefix
            for prefix, model in models.items()
            for name, module in model.named_modules()
        }
        parameters = [(f"{prefix}.{name}", one) for prefix, model in models.items() for name, one in _parameters(model)]
        self._write_whole(f"start_{step}", parameters, whole)
        buffers = [(f"{prefix}.{name}", one) for prefix, model in models.items() for name, one in model.named_buffers()]
        self._write_whole(f"buffers_{step}", buffers, whole)

    def summed(self, step: int, number: int, models: Mapping[str, nn.Module], whole: GatherWhole) -> None:
        """Note the gradients of pass `number` after their sum over the workers, and write what was captured in it; all
        workers of a replica call it."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._micro = None
        named = [(f"{prefix}.{name}", one.grad) for prefix, model in models.items() for name, one in _parameters(model)]
        self._write_whole(f"summed_{step}_{number}", named, whole)
        parts = {name: local_part(tensor) for name, tensor in named if tensor is not None and not tensor.is_meta}
        squares = {name: float(part.double().square().sum()) for name, part in parts.items() if not part.is_sparse}
        path = self._directory / f"squares_{step}_{number}_worker_{self._rank}.json"
        path.write_text(json.dumps(squares), encoding="utf-8")
        name = f"modules_{step}_worker_{self._rank}"
        _save(self._tensors, self._directory / f"{name}.safetensors")
        rows = [dataclasses.asdict(note) for note in self._notes]
        (self._directory / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")

    def _write_whole(self, name: str, named: Sequence[tuple[str, Tensor | None]], whole: GatherWhole) -> None:
        found: dict[str, Tensor] = {}
        for key, tensor in named:
            complete = whole(key, tensor)
            if complete is not None and not complete.is_meta:
                found[key] = portable(complete)
        _save(found, self._directory / f"{name}_worker_{self._rank}.safetensors")

    # --------------------------------------------------------------------------------------------- of a micro-batch

    def open(self, micro: tuple[int, int], *, is_void: bool) -> None:
        """The forward of a micro-batch (pass, number) begins."""
        if self._hook is not None:
            self._micro, self._is_void = micro, is_void

    def close(self) -> None:
        """The forward has ended: what runs now is backward, which may compute some of it again."""
        self._micro = None

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        micro, name = self._micro, self._names.get(id(module))
        if micro is None or name is None or any(name == one or name.startswith(f"{one}.") for one in self._left_out):
            return
        with unseen():
            call = self._calls.get((micro, name), 0)
            self._calls[micro, name] = call + 1
            for kind, value in (("input", (args, kwargs)), ("output", output)):
                for item, tensor in enumerate(_tensors_in(value)):
                    if _is_real(tensor):
                        self._note_tensor(tensor, kind, micro, name, call, item)

    def _note_tensor(
        self, tensor: Tensor, kind: str, micro: tuple[int, int], module: str, call: int, item: int
    ) -> None:
        """Note a tensor of a forward, and later its gradient."""
        seen, number = self._numbers.get(id(tensor), (None, 0))
        is_new = seen is None or seen() is not tensor
        if is_new:
            number = len(self._notes)
            self._numbers[id(tensor)] = weakref.ref(tensor), number
        note = TensorNote(
            key=str(len(self._notes)) if is_new or kind == "output" else "",
            kind=kind,
            is_gradient=False,
            micro=micro,
            module=module,
            call=call,
            item=item,
            tensor=number,
            pieces=_pieces(tensor),
            is_void=self._is_void,
        )
        self._notes.append(note)
        if note.key:
            self._tensors[note.key] = portable(tensor)

        def arrived(gradient: Tensor) -> None:
            with unseen():
                key = str(len(self._notes))
                self._tensors[key] = portable(gradient) / self._context_size
            self._notes.append(dataclasses.replace(note, key=key, is_gradient=True))

        if tensor.requires_grad and (self._context_size == 1 or _is_slice(tensor)):
            _ = tensor.register_hook(arrived)


def _parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def _pieces(tensor: Tensor) -> tuple[Piece, ...]:
    """Which ranges of the whole a worker's part covers, along each dim in which it is split."""
    if not isinstance(tensor, (SplitTensor, TokenSplitTensor)):
        return ()
    found = [_piece(tensor.ops, tensor.split_dim, tensor.sections)]
    if isinstance(tensor, SplitTensor) and tensor.under is not None:
        found.append(_piece(tensor.under.ops, tensor.under.dim, tensor.under.sections))
    return tuple(found)


def _is_slice(tensor: Tensor) -> bool:
    """Whether each worker has some tokens of it."""
    if not isinstance(tensor, (SplitTensor, TokenSplitTensor)):
        return False
    under = tensor.under if isinstance(tensor, SplitTensor) else None
    return isinstance(tensor.ops, ContextGroupOps) or (under is not None and isinstance(under.ops, ContextGroupOps))


def _piece(ops: Any, dim: int, sections: tuple[int, ...]) -> Piece:
    held = slices if isinstance(ops, ContextGroupOps) else ranges
    return dim, tuple(held(sections, size=ops.size, index=ops.index))


def _is_real(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, (SplitTensor, TokenSplitTensor))
    return is_plain and tensor.is_floating_point() and not tensor.is_meta


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)


def _perturb(models: Mapping[str, nn.Module], rounding: float) -> None:
    """Change each number of each parameter by the size of one rounding, up or down."""
    with torch.no_grad():
        for prefix, model in models.items():
            for name, parameter in model.named_parameters():
                if not parameter.is_floating_point() or parameter.is_meta:
                    continue
                generator = torch.Generator().manual_seed(zlib.crc32(f"{prefix}.{name}".encode()))
                signs = torch.randint(2, parameter.shape, generator=generator).mul_(2).sub_(1).to(parameter)
                parameter.mul_(1 + max(torch.finfo(parameter.dtype).eps, rounding) * signs)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file  # only parity needs it

    save_file(dict(tensors), path)
