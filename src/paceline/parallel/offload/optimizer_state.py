"""An optimizer whose state lies elsewhere: its step passes over the parameters, one at a time.

Each parameter's state is brought to the parameter's device where it is not there, the optimizer's own step runs for
this parameter alone, and the state goes home. So what the step needs of the device's memory (or, of a mapped file,
of the process's) is the state of one parameter, and the numbers are those of the optimizer's own step. An optimizer
that treats every element by itself passes over large parameters in pieces, too.

What is per parameter small (counts of steps, say) stays where it is.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import is_sharded, local_part
from paceline.errors import PlanError
from paceline.host_memory import give_back_freed
from paceline.parallel.offload.memory import OffloadMemory, room_for
from paceline.parallel.step_takeover import take_over_step, unhooked_step

__all__ = ["OffloadedState", "brought_bytes", "state_bytes"]

TRIM_BYTES = 8 << 20  # freed by the first step: then it is given back
PIECE_BYTES = 16 << 20  # of a parameter; a step's temporaries are as large, some of them

# Optimizers of torch whose step does the same to each element, whatever the others are.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


class OffloadedState:
    """Keeps the state of one optimizer in a memory of its own; made once, before the optimizer's first step.

    The optimizer stays the user's own object, and so do its hooks: they run once a step, as before.
    """

    def __init__(self, optimizer: Optimizer, memory: OffloadMemory) -> None:
        """Make room for the state and take over the optimizer's `step`. Raises PlanError."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PlanError(
                "Compute(offload=...) steps one parameter at a time, and LBFGS needs all of them at once: use "
                "offload='none', or another optimizer."
            )
        self.memory = memory
        self._optimizer = optimizer
        self._homes: dict[Tensor, dict[str, Tensor]] = {}  # of each parameter: what this worker has of its state
        self._taken: dict[Tensor, dict[str, Tensor]] = {}  # to be the optimizer's at its next load_state_dict
        self._num_moved = 0  # bytes that came home from the CPU's own memory, and may not have been given back yet
        self._own_step = unhooked_step(optimizer)
        self._is_elementwise = type(optimizer) in ELEMENTWISE
        memory.reserve(state_bytes(optimizer, self._own_step))
        self._settle()
        optimizer.register_load_state_dict_post_hook(lambda _: self._settle())
        take_over_step(optimizer, self._step_in_blocks)

    def take(self, parameter: Tensor, key: str, value: Tensor) -> None:
        """Copy a tensor of a parameter's state home; it becomes the optimizer's at its next `load_state_dict`.

        `value` is on any device; of a parameter that is split, a DTensor or the rows that are here.
        """
        like = self._optimizer.state.get(parameter, {}).get(key, value)
        home = self._home_for(parameter, key, local_part(value))
        self._bring_home(home, local_part(value))
        self._taken.setdefault(parameter, {})[key] = _wrapped(home, like)
        self.memory.release([home])

    def release(self) -> None:
        """Nothing of the state is needed before the next step."""
        self.memory.release_all()

    @torch.no_grad()
    def _step_in_blocks(self) -> None:
        """Step parameter by parameter; whatever a step changes in a group's options, it changes once."""
        groups = self._optimizer.param_groups
        try:
            for group in groups:
                options = {key: value for key, value in group.items() if key != "params"}
                for parameter in _here(group["params"]):
                    alone = {**options, "params": [parameter]}
                    self._optimizer.param_groups = [alone]
                    self._step(parameter, alone)
                    group.update({key: value for key, value in alone.items() if key != "params"})
        finally:
            self._optimizer.param_groups = groups
        if any(parameter.is_cuda for group in groups for parameter in group["params"]):
            torch.cuda.current_stream().synchronize()  # before the CPU reads what is copied home

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        local = local_part(parameter)
        is_large = local.nbytes > PIECE_BYTES and local.is_contiguous() and parameter.grad is not None
        if self._is_elementwise and is_large:
            self._step_in_pieces(parameter, local, group)
            return
        state, homes = self._optimizer.state, self._homes.get(parameter, {})
        own = state.get(parameter)
        if own is not None and local.device.type != "cpu":
            own.update({key: _fetched(value, local.device) for key, value in own.items() if key in homes})
        self._own_step(self._optimizer)
        self._go_home(parameter)

    def _step_in_pieces(self, parameter: Tensor, local: Tensor, group: dict[str, Any]) -> None:
        """Step over elements that lie one behind the other, as if each piece were a parameter."""
        state = self._optimizer.state
        own = state.get(parameter, {})
        options = {key: value for key, value in group.items() if key != "params"}
        flat, gradient = local.view(-1), local_part(_gradient(parameter)).reshape(-1)
        made: dict[str, Tensor] = {}
        for first, stop in _pieces(local):
            piece = flat[first:stop]
            piece.grad = gradient[first:stop]
            homes = {key: home.view(-1)[first:stop] for key, home in self._homes.get(parameter, {}).items()}
            state[piece] = {
                key: _fetched(homes[key], local.device)
                if key in homes
                else (value.clone() if isinstance(value, Tensor) else value)
                for key, value in own.items()
            }
            group.update(options)
            group["params"] = [piece]
            self._own_step(self._optimizer)
            after = state.pop(piece)
            for key, value in after.items():
                if not isinstance(value, Tensor) or value.shape != piece.shape:
                    continue
                made[key] = self._home_for(parameter, key, _like(local, value.dtype))
                home = made[key].view(-1)[first:stop]
                self._bring_home(home, value)
                self.memory.release([home])
            small = {k: v for k, v in after.items() if not isinstance(v, Tensor) or v.shape != piece.shape}
            if stop == flat.numel():
                own.update(small)
        own.update({key: _wrapped(home, parameter) for key, home in made.items() if key not in own})
        if own:
            state[parameter] = own

    def _settle(self) -> None:
        """Have all of the optimizer's state at home: what was taken for it, and whatever else it has."""
        for parameter, values in self._taken.items():
            self._optimizer.state[parameter].update(values)
        self._taken = {}
        with torch.no_grad():
            for parameter in _here(self._optimizer.state):
                self._go_home(parameter)

    def _go_home(self, parameter: Tensor) -> None:
        own: dict[str, Any] = self._optimizer.state.get(parameter, {})
        for key, value in own.items():
            if isinstance(value, Tensor) and _is_kept(local_part(value)):
                home = self._home_for(parameter, key, local_part(value))
                if local_part(value).data_ptr() != home.data_ptr():
                    self._bring_home(home, local_part(value))
                    own[key] = _wrapped(home, value)
        self.memory.release(self._homes.get(parameter, {}).values())

    def _bring_home(self, home: Tensor, value: Tensor) -> None:
        """Copy a tensor home, where it is not there. What was made on the CPU is freed soon: now and then give that
        back."""
        if home.data_ptr() == value.data_ptr():
            return
        home.copy_(value, non_blocking=home.is_pinned())
        if value.device.type == "cpu":
            self._num_moved += value.nbytes
            if self._num_moved > TRIM_BYTES:
                self._num_moved = 0
                give_back_freed()

    def _home_for(self, parameter: Tensor, key: str, local: Tensor) -> Tensor:
        """The place of a tensor of a parameter's state: the one that it has, where that fits."""
        homes = self._homes.setdefault(parameter, {})
        home = homes.get(key)
        if home is None or home.shape != local.shape or home.dtype != local.dtype:
            home = homes[key] = self.memory.empty_like(local)
        return home


def state_bytes(optimizer: Optimizer, own_step: Callable[..., Any]) -> int:
    """Bytes of mapped memory for the state that an optimizer has, or that its first step will make.

    For an optimizer of torch that is seen by one step over tensors without data. Where that does not work, and for
    other optimizers (whose step may note things elsewhere), it is two tensors for each parameter.
    """
    if optimizer.state:
        return _room({parameter: optimizer.state[parameter] for parameter in _here(optimizer.state)})
    groups = optimizer.param_groups
    locals_of = [[local_part(parameter) for parameter in _here(group["params"])] for group in groups]
    guess = 2 * sum(room_for(local) for locals_ in locals_of for local in locals_)
    if not type(optimizer).__module__.startswith("torch.optim."):
        return guess
    former, plain = optimizer.state, {"foreach": False, "fused": False, "capturable": False}
    try:
        optimizer.state = collections.defaultdict(dict)
        optimizer.param_groups = [
            {**group, **{key: value for key, value in plain.items() if key in group}, "params": _stand_ins(locals_)}
            for group, locals_ in zip(groups, locals_of, strict=True)
        ]
        own_step(optimizer)
        return _room(optimizer.state)
    except RuntimeError:  # it looks at numbers, and there are none
        return guess
    finally:
        optimizer.state, optimizer.param_groups = former, groups


def brought_bytes(optimizer: Optimizer, parameter: Tensor, num_bytes: int) -> int:
    """Of so many bytes of state of a parameter (or of this worker's part of it), what a step brings at a time."""
    is_in_pieces = type(optimizer) in ELEMENTWISE and parameter.nbytes > PIECE_BYTES
    return num_bytes * PIECE_BYTES // parameter.nbytes if is_in_pieces else num_bytes


def _here(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that are not of other stages."""
    return [parameter for parameter in parameters if not parameter.is_meta]


def _stand_ins(locals_: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for local in locals_:
        stand_in = torch.empty_like(local, device="meta")
        stand_in.grad = torch.empty_like(stand_in)
        found.append(stand_in)
    return found


def _room(state: Mapping[Any, Mapping[str, Any]]) -> int:
    tensors = [local_part(v) for values in state.values() for v in values.values() if isinstance(v, Tensor)]
    return sum(room_for(tensor) for tensor in tensors if _is_kept(tensor))


def _is_kept(local: Tensor) -> bool:
    """Whether a tensor of the state goes elsewhere: single numbers, which steps read on the CPU, stay."""
    return local.dim() > 0 and local.numel() > 0 and local.layout == torch.strided


def _pieces(local: Tensor) -> Iterator[tuple[int, int]]:
    """[first, stop) of each piece, as elements; all but the last are of one size."""
    step = PIECE_BYTES // local.element_size()
    for first in range(0, local.numel(), step):
        yield first, min(first + step, local.numel())


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter without a gradient has no pieces to step over")
    return parameter.grad


def _like(local: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without data, of another's shape."""
    return torch.empty_like(local, dtype=dtype, device="meta")


def _fetched(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the state where the parameter is; itself where it is there."""
    local = local_part(value)
    if local.device == device:
        return value
    return _wrapped(local.to(device, non_blocking=local.is_pinned()), value)


def _wrapped(local: Tensor, like: Tensor) -> Tensor:
    """`local` as a tensor that is split like `like`, wherever it lies; itself where that one is not split."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    # Not by from_local, which would move it to the mesh's device; it is what fully_shard does with rows on the CPU.
    return DTensor(local, like._spec, requires_grad=False)  # pyright: ignore[reportPrivateUsage]  # the constructor takes it, and it has no other name
