"""A model whose weights are still bytes of files is tried on other numbers: what a trial shows does not depend on them.

How layers depend on each other, which stage has what, and whether parts compute as the whole: all this is found by
small forwards. On the weights themselves they would read every file whole on every worker, some times over.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.host_memory import give_back_freed
from paceline.parallel.absent_tensors import AbsentParameter, as_absent
from paceline.parallel.file_weights import FileMappings
from paceline.parallel.number_pools import NumberPools

__all__ = ["stand_in_weights"]


@contextlib.contextmanager
def stand_in_weights(model: nn.Module) -> Iterator[None]:
    """Within it, floating-point parameters that are mapped from files have random numbers, the same on all workers, in
    little memory. Parameters that share memory go on sharing it."""
    mappings = FileMappings()
    mapped = [
        one
        for one in model.parameters()
        if type(one) in (nn.Parameter, AbsentParameter)
        and one.is_floating_point()
        and mappings.mapping_of(one) is not None
    ]
    own = [one.data for one in mapped]
    pools: dict[torch.dtype, NumberPools] = {}
    for one in own:
        pools.setdefault(one.dtype, NumberPools(one.dtype)).reserve((one,))
    made: dict[tuple[int, int, torch.dtype], Tensor] = {}
    for number, (parameter, data) in enumerate(zip(mapped, own, strict=True)):
        place = data.data_ptr(), data.nbytes, data.dtype
        if place not in made:
            made[place] = _apart(pools[data.dtype].window(data, number))
        parameter.data = made[place].view(data.shape)
    try:
        yield
    finally:
        for parameter, data in zip(mapped, own, strict=True):
            parameter.data = data
            as_absent(parameter)
        pools.clear()
        made.clear()
        give_back_freed()  # before weights are copied: the peak of memory is there


def _apart(window: Tensor) -> Tensor:
    """The same memory as another storage: what watches a forward takes tensors of one storage for views of each
    other."""
    room = (ctypes.c_char * window.nbytes).from_address(window.data_ptr())
    room.of = window  # type: ignore[attr-defined]  # the memory is there as long as this
    return torch.frombuffer(room, dtype=window.dtype)
