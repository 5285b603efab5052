"""What codecs remember from step to step, by parameter name, so that it outlives buckets, members and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import total
from paceline.comm.sharded_tensors import local_part
from paceline.sync.allreduce.gradient_sharding import GradientSharding

__all__ = ["CodecMemory", "sum_residuals"]


@dataclasses.dataclass(frozen=True, slots=True)
class CodecMemory:
    """What one worker's codecs remember."""

    own: Mapping[str, Tensor]  # this replica's error feedback, in the shape of the local part of the parameter
    common: Mapping[str, Mapping[str, Tensor]]  # what all replicas know

    def copied(self) -> CodecMemory:
        """Return a copy that later steps do not change."""
        return CodecMemory(
            {name: tensor.clone() for name, tensor in self.own.items()},
            {name: {key: tensor.clone() for key, tensor in named.items()} for name, named in self.common.items()},
        )


def sum_residuals(
    owed: dict[str, list[Tensor]],
    named: Sequence[tuple[str, Parameter]],
    *,
    sharding: GradientSharding,
    count: int,
    device: torch.device,
) -> None:
    """Replace the error feedback of each of `count` replicas by the sum over the sharding's workers, in place.

    It concerns parameters whose gradients are partial sums. All workers of `sharding` must call it with the same names;
    blocks.
    """
    partial = [sharding.adds_up(parameter) for _, parameter in named]
    known = [float(is_part and name in owed) for (name, _), is_part in zip(named, partial, strict=True)]
    numbers = total(sharding.group, known, what="whose parts are still to be sent", device=device)
    some = zip(named, partial, numbers, strict=True)
    here = [one for one, is_part, number in some if is_part and number and not one[1].is_meta]
    for name, parameter in here:
        if name not in owed:  # only other workers have error feedback for it
            like = local_part(parameter)
            owed[name] = [torch.zeros_like(like, dtype=torch.float32) for _ in range(count)]
    for replica in range(count):
        sharding.add_up([(parameter, owed[name][replica]) for name, parameter in here])
