"""Parameters of which a worker holds a part, or nothing: code that would read the whole is refused by name.

Tensor and expert parallelism leave a worker with a slice of a parameter, pipeline stages with none of many. The layers
know that. Other code does not: `p.norm()`, `sum(p.pow(2).sum() for p in model.parameters())`, or a projection of the
weights computes on the slice, and nobody would notice. So these parameters are of a class of their own, which sees each
torch function that takes them. The layers' own forwards, Paceline and optimizers use them as before.

For all other code the rules are: questions about shape and size are answered for the whole, as learning rates by fan-in
and groups by size want it. Those about type and gradient are answered for the part. Numbers may be combined with
numbers at the same place (`p.mul_(0.9)`, an average of the weights). Of a whole tensor the worker's part is taken
(`p.copy_(whole)`), and where a parameter is elsewhere nothing happens. The result is a `PartialTensor`, with the same
rules, and so are gradients of these parameters. Everything else would need the whole, or numbers of other workers, and
is refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor, nn

from paceline.comm.sharded_tensors import TensorSlice
from paceline.errors import PlanError, Reason
from paceline.parallel.absent_tensors import AbsentParameter
from paceline.parallel.torch_functions import (
    ABOUT,
    POINTWISE,
    SIZES,
    mapped,
    name_of,
    on_parts,
    sets_masked,
    tensors_in,
)

__all__ = [
    "HeldPart",
    "PartialParameter",
    "PartialTensor",
    "explained",
    "is_trusted",
    "mark_partial",
    "on_parts",
    "size_of",
    "whole_shape",
]

TORCH_DIR = str(Path(torch.__file__).parent)
OWN_DIR = str(Path(__file__).parents[1])
OPTIMIZERS_DIR, LAYERS_DIR = f"{TORCH_DIR}/optim/", f"{TORCH_DIR}/nn/"
SCALER_DIR = f"{TORCH_DIR}/amp/"  # divides number by number; an overflow on one worker is shown to those of all
SHARDING_DIR = f"{TORCH_DIR}/distributed/fsdp/"  # moves rows
WATCH_FILE = f"{OWN_DIR}/parallel/parameter_watch.py"  # passes on what user code does to `.data`
STEP_CALL = "wrapper"  # torch's function there that calls an optimizer's step, and its hooks
MODULE_FILE, OPTIMIZER_FILE = f"{TORCH_DIR}/nn/modules/module.py", f"{TORCH_DIR}/optim/optimizer.py"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """What this worker holds of one parameter. `dim`: along which it is split; None where all of it is elsewhere."""

    name: str
    whole: tuple[int, ...]
    dim: int | None
    because: str  # "Layout(tensor=2) splits it", for messages
    ranges: tuple[tuple[int, int], ...] = ()  # of `dim`, that are here
    is_gradient: bool = False

    @property
    def gradient(self) -> HeldPart:
        """The same part of the parameter's gradient."""
        return dataclasses.replace(self, is_gradient=True)

    def part_of(self, whole: Tensor) -> Tensor:
        """Return what is here of a tensor like the whole parameter."""
        dim = 0 if self.dim is None else self.dim
        return TensorSlice(self.whole, dim, self.ranges).take(whole)

    def refusal(self, what: str) -> PlanError:
        here = "nothing of it" if self.dim is None else "a part of it"
        one = f"the gradient of {self.name}" if self.is_gradient else self.name
        said = f"{what} needs the whole of {one} {list(self.whole)}, but this worker holds {here}: {self.because}."
        remedy = (
            "To clip, call worker.clip_gradients(max_norm), which returns the norm of all gradients (float('inf'): it "
            "clips nothing), or worker.stepper(..., clip_norm=). A hook (parameter.register_hook) sees each "
            "gradient whole."
            if self.is_gradient
            else "To draw numbers or set some, make the whole alike on all workers (torch.Generator().manual_seed) and "
            "call parameter.copy_(whole). A constraint on weights can be a parametrization "
            "(torch.nn.utils.parametrizations). "
            "A penalty on weights belongs in worker.stepper(..., penalty=fn): fn(name, parameter) gets each parameter "
            "whole. Compute other values of whole weights, and call parts of the model by themselves (as generate() of "
            "an encoder and a decoder does), with a model of your own that has worker.state_dict(model)."
        )
        return PlanError(f"{said} {remedy}", reasons=[Reason(module=self.name, what=said, remedy=remedy)])


class PartialTensor(Tensor):
    """Numbers made from a worker's part of a parameter, each from the one at the same place."""

    held: HeldPart

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, types, args, kwargs or {})


class PartialParameter(nn.Parameter):
    """A parameter of which this worker holds a part, or nothing; made by `mark_partial` only."""

    held: HeldPart

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialParameter:
        if id(self) not in memo:
            with on_parts():
                copied = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            memo[id(self)] = mark_partial(copied, self.held)
        return memo[id(self)]


# torch's optimizers take their fast paths for these classes only.
for_each: list[type] = getattr(optimizer_module, "_foreach_supported_types", [])
for_each += [] if PartialParameter in for_each else [PartialParameter]


def mark_partial(parameter: nn.Parameter, held: HeldPart) -> Any:
    """Make `parameter` a PartialParameter, in place: it stays the same object."""
    marked = cast("Any", parameter)
    if type(parameter) in (nn.Parameter, AbsentParameter):
        marked.__class__ = PartialParameter
    marked.held = held
    return marked


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole of a parameter, of which another layout may have left a part."""
    held: HeldPart | None = getattr(parameter, "held", None)
    return tuple(parameter.shape) if held is None else held.whole


def explained(error: BaseException) -> PlanError | None:
    """Return what to say in place of an error of torch's compiler that met a part of a parameter, if it is one."""
    is_compiler = type(error).__module__.startswith("torch._dynamo")
    if not is_compiler or ": PlanError: " not in f": {error}" or "but this worker holds" not in str(error):
        return None
    return PlanError(
        "the script compiles a prepared model (torch.compile), but the compiler does not see through layers of which "
        "each worker has a part. Leave torch.compile out, or use Layout(replicas=n) or Layout(shard=n)"
    )


def _call(func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that met a partial tensor, by the rules above; raises PlanError."""
    if any(one not in (Tensor, nn.Parameter, PartialParameter, PartialTensor) for one in types):
        return NotImplemented  # another class's rules know more: SplitTensor's, for example
    name = name_of(func)
    with on_parts():
        if name in SIZES and not is_trusted(in_layers=True):
            return size_of(name, args[0].held, args, kwargs)
        if name in ABOUT or is_trusted():
            if name == "reduce_ex":
                return args[0].detach().__reduce_ex__(*args[1:])
            return func(*args, **kwargs)
        if name in ("get:grad", "get:_grad", "grad"):
            return _gradients(func, args, kwargs)
        if name == "setitem" and sets_masked(*args):
            func, name = Tensor.masked_fill_, "masked_fill_"
        partial = list(_partial_in((args, kwargs)))
        held = partial[0].held
        if name.removesuffix("_") not in POINTWISE:
            raise held.refusal(f"{name}()" if not name.startswith("get:") else f".{name[4:]}")
        if held.dim is None and name.startswith("_foreach_"):
            raise held.refusal(f"{name}()")
        args, kwargs = _at_its_place((args, kwargs), name=name, held=held, lead=partial[0])
        try:
            out = func(*args, **kwargs)
        except NotImplementedError as error:  # there are no numbers to move to another device
            raise held.refusal(f"{name}()") from error
        if name.startswith("_foreach_") or not isinstance(out, Tensor):
            return out
        if out.shape != partial[0].shape:
            raise held.refusal(f"{name}() with a tensor of another shape")
        return _followed(out, held)


def size_of(name: str, held: HeldPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a question about the size of a part for the whole."""
    whole = torch.Size(held.whole)
    if name in ("get:shape", "size"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return whole if dim is None else whole[dim]
    if name == "len":
        return whole[0]
    return whole.numel() * (args[0].element_size() if name == "get:nbytes" else 1)


def _gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `p.grad` or `torch.autograd.grad`: gradients of parts are parts, too."""
    found = func(*args, **kwargs)
    if isinstance(found, tuple):
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        held: list[HeldPart | None] = [getattr(one, "held", None) for one in inputs]
        return tuple(one if of is None else _followed(one, of.gradient) for one, of in zip(found, held, strict=True))
    if found is None or found.is_sparse:
        return found
    return _followed(found.detach() if found.grad_fn is None else found, args[0].held.gradient)


def _followed(out: Any, held: HeldPart) -> Any:
    """Make a result a PartialTensor, in place."""
    result: Any = out
    if type(out) is Tensor:
        result.__class__ = PartialTensor
        result.held = held
    return result


def _at_its_place(given: Any, *, name: str, held: HeldPart, lead: Tensor) -> Any:
    """Return arguments that meet the part place by place; raises PlanError for others.

    Of whole tensors the worker's part is taken, and where it has nothing their shape is all that is left. So what is
    written to must be partial itself.
    """
    target = given[1].get("out", given[0][0] if _is_in_place(name) else lead)
    if not isinstance(target, (PartialTensor, PartialParameter, list, tuple)):
        raise held.refusal(f"{name}() of another tensor")

    def change(one: Tensor) -> Tensor:
        if isinstance(one, (PartialTensor, PartialParameter)):
            return one
        if held.dim is None:
            return one if one.is_meta or not one.ndim else one.to("meta")
        place = held.dim - len(held.whole)
        if name == "set:data" and one.shape == lead.shape:
            return one
        meets = one.ndim < -place or one.shape[place] in (1, lead.shape[place]) or name.startswith("_foreach_")
        if meets and name != "set:data":
            return one  # torch compares lists of tensors one by one
        if held.ranges and tuple(one.shape) == held.whole:
            return held.part_of(one)
        raise held.refusal(f"{name}() with a tensor of shape {list(one.shape)}")

    return mapped(given, lambda one: change(one) if isinstance(one, Tensor) else one)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") or name in ("set:data", "iadd", "isub", "imul", "itruediv")


def is_trusted(*, in_layers: bool = False) -> bool:
    """Whether Paceline, or an optimizer, has called the torch function: they know that they work on parts.

    `in_layers`: also where torch's functions of layers lie between.
    """
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # the inspect module takes a thousand times as long
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith((TORCH_DIR, WATCH_FILE)):
        file = caller.f_code.co_filename
        if file.startswith((OPTIMIZERS_DIR, SCALER_DIR, SHARDING_DIR)):
            return True
        if file == MODULE_FILE and caller.f_code.co_name == "_load_from_state_dict":
            return True  # what it loads was cut before: PartialStateGuard
        if not in_layers and file.startswith(LAYERS_DIR) and file != MODULE_FILE:
            return False  # a layer that was not split, or a function of layers
        caller = caller.f_back
    if caller is None or caller.f_code.co_filename.startswith(OWN_DIR):
        return True
    outermost = caller
    while caller is not None:  # an optimizer of another package
        if caller.f_code.co_filename == OPTIMIZER_FILE:
            # torch calls hooks of a step there as well, and these are the user's.
            return caller.f_code.co_name != STEP_CALL or outermost.f_code.co_name == "step"
        if not caller.f_code.co_filename.startswith(TORCH_DIR):
            outermost = caller
        caller = caller.f_back
    return False


def _partial_in(value: Any) -> Iterator[Any]:
    return (one for one in tensors_in(value) if isinstance(one, (PartialTensor, PartialParameter)))
