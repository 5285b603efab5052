"""Numbers of sharded tensors, as user code reads and writes them: right as in one process, or refused by name.

Of a sum over a sharded tensor each worker has its own part. torch's DTensor gives that part as the number, without a
word: `float(p.norm())` differs between workers. Random fills draw for each worker's rows, which is another matrix. And
DTensors meet no plain tensors, so `p.copy_(whole)` fails in torch's words. Here the first two are refused, since to add
up is a call of all workers. Of plain tensors the worker's rows are taken.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.sharded_tensors import is_sharded, part_like
from paceline.errors import PlanError
from paceline.parallel.torch_functions import sets_masked

__all__ = ["explained", "install"]

COPIES = ("tolist", "numpy", "__array__")  # of all numbers; torch's own fail for DTensors
READS = ("item", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__format__")
# operations that draw a number for each place of a tensor; of all their overloads
RANDOM = (
    *("rand_like", "randn_like", "randint_like", "normal", "normal_", "uniform", "uniform_", "random", "random_"),
    *("exponential", "exponential_", "log_normal", "log_normal_", "cauchy", "cauchy_", "geometric", "geometric_"),
    *("bernoulli", "bernoulli_", "binomial", "multinomial", "poisson", "native_dropout", "_fused_dropout"),
    *("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional", "_standard_gamma", "_sample_dirichlet"),
)
WRITES = ("copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_")
SETS = ("__setitem__",)
WHOLE = (
    "A penalty on weights belongs in worker.stepper(..., penalty=fn): fn(name, parameter) gets each parameter whole. "
    "worker.clip_gradients(max_norm) returns the norm of all "
    "gradients. Or gather on all workers, by tensor.full_tensor()"
)
SWAP_WORDS = ("Cannot swap t1", "Cannot swap t2", "Couldn't swap")  # module.to(dtype), parametrizations
TORCH_WORDS = ("torch.Tensor and DTensor", "sharding strategy", "Sharding propagation failed", "DTensorSpec")


def install() -> None:
    """Have torch's DTensors follow these rules, from now on."""
    from torch.distributed.tensor import DTensor

    if "item" in vars(DTensor):
        return
    for names, guard in ((READS, _read), (COPIES, _copied), (WRITES, _written), (SETS, _set)):
        for name in names:
            setattr(DTensor, name, _method(guard, name, getattr(DTensor, name)))
    # Functions of torch meet no method of DTensors. Its dispatcher has a table of operations with a handler of their
    # own, which is not public.
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore[reportPrivateUsage]  # as said
    for name in RANDOM:
        packet = getattr(torch.ops.aten, name, None)  # some are new in torch 2.13
        for overload in () if packet is None else packet.overloads():
            handlers[getattr(packet, overload)] = _drawn


def explained(error: BaseException) -> PlanError | None:
    """Return what to say in place of torch's error about an operation that it does not know for DTensors, if it is
    one."""
    said = str(error)
    if isinstance(error, RuntimeError) and any(words in said for words in SWAP_WORDS):
        return PlanError(
            "the script puts another tensor in the place of a sharded parameter (model.to(dtype), a parametrization, "
            f"pruning), under Layout(shard=...) ({_first_line(said)}). Change the model before "
            "worker.prepare(model), or use Layout(replicas=n)"
        )
    if not isinstance(error, RuntimeError) or not any(words in said for words in TORCH_WORDS):
        return None
    if _is_in_a_module(error):
        return PlanError(
            "a part of the model was called by itself, under Layout(shard=...): its weights are gathered around the "
            "model's own forward only. model.generate(...) of an encoder and a decoder does so. Call the model, or "
            f"load whole weights into a model of your own: weights = worker.state_dict(model). ({_first_line(said)})"
        )
    return PlanError(
        "the script computes with a parameter (or gradient) of which each worker has rows, under Layout(shard=...), "
        f"and torch does not know how ({_first_line(said)}). {WHOLE}"
    )


def _first_line(said: str) -> str:
    return said.strip().partition("\n")[0][:160]


def _is_in_a_module(error: BaseException) -> bool:
    """Whether an error arose within the call of a module."""
    call = nn.Module._call_impl.__code__  # pyright: ignore[reportPrivateUsage]  # the one function of all calls
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not call:
        trace = trace.tb_next
    return trace is not None


def _method(guard: Any, name: str, own: Any) -> Any:
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return guard(name, own, self, args, kwargs)

    return method


def _read(name: str, own: Any, self: Any, args: Any, kwargs: Any) -> Any:
    if any(placement.is_partial() for placement in self.placements):
        what = f"{name.strip('_')}()"
        raise PlanError(
            f"{what} of a number that is a sum over all rows of a tensor, under Layout(shard=...): this worker has its "
            f"own part of it only. {WHOLE}"
        )
    return own(self, *args, **kwargs)


def _copied(name: str, own: Any, self: Any, args: Any, kwargs: Any) -> Any:
    raise PlanError(
        f"{name.strip('_')}() of a tensor of which each worker has rows, under Layout(shard=...): there is no one "
        f"array of it here, and what is written to a copy is lost. {WHOLE}.{name}(), and write by tensor.copy_(whole)"
    )


def _drawn(operation: Any, args: Any, kwargs: Any) -> Any:
    name = str(operation).split(".")[1]
    raise PlanError(
        f"{name}() of a tensor of which each worker has rows, under Layout(shard=...): each would draw other "
        "numbers than one process. Initialise the model before worker.prepare(model), or draw a whole tensor on "
        "all workers, with the same seed (torch.randn(parameter.shape, generator=...)), and write it: "
        "parameter.copy_(whole), parameter.add_(whole)"
    )


def _written(name: str, own: Any, self: Any, args: Any, kwargs: Any) -> Any:
    """Take this worker's rows of plain tensors like the whole; not where autograd follows, which would see others.

    Optimizers write so to each parameter. Numbers at the same places are written here, past DTensor's rules of which
    worker has which rows, which take longer than the numbers of a small layer.
    """
    is_followed = torch.is_grad_enabled() and any(
        isinstance(one, Tensor) and one.requires_grad for one in (self, *args)
    )
    if is_followed or not any(one.is_shard() for one in self.placements):
        return own(self, *args, **kwargs)
    args = tuple(_rows(one, self) for one in args)
    kwargs = {key: _rows(one, self) for key, one in kwargs.items()}
    is_alike = all(_is_at_its_places(self, one) for one in (*args, *kwargs.values()))
    is_alike = is_alike and not any(
        one.is_partial() for one in self.placements
    )  # to add to a sum is not to add to parts
    if not is_alike or torch.compiler.is_compiling():
        return own(self, *args, **kwargs)
    here = [_local(one) for one in args]
    getattr(self._local_tensor, name)(*here, **{key: _local(one) for key, one in kwargs.items()})
    torch.autograd.graph.increment_version(self)
    return self


def _set(name: str, own: Any, self: Any, args: Any, kwargs: Any) -> Any:
    if kwargs or not sets_masked(self, *args):
        return own(self, *args, **kwargs)
    return self.masked_fill_(*args)


def _local(one: Any) -> Any:
    return getattr(one, "_local_tensor", one)


def _is_at_its_places(whole: Any, one: Any) -> bool:
    """Whether the numbers of `one` belong to those of a sharded tensor on each worker; one number belongs to all."""
    if not isinstance(one, Tensor):
        return True
    spec: Any = getattr(one, "_spec", None)
    if spec is None:
        return one.dim() == 0
    own = whole._spec
    return spec is own or (spec.placements == own.placements and spec.mesh == own.mesh and one.shape == whole.shape)


def _rows(one: Any, like: Any) -> Any:
    held = getattr(like, "held", None)  # of a part, where layers are split, too
    if held is not None and type(one) is Tensor and tuple(one.shape) == held.whole:
        one = held.part_of(one)
    is_whole = isinstance(one, Tensor) and not is_sharded(one) and one.dim() > 0 and one.shape == like.shape
    return part_like(one.detach(), like) if is_whole else one
