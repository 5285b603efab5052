"""What codecs remember from step to step, by the names of parameters: so it outlives buckets, members and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

__all__ = ["Memory"]


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What one worker's codecs remember."""

    own: Mapping[str, Tensor]  # what its replica has still to send, in the shape of what is here of the parameter
    common: Mapping[str, Mapping[str, Tensor]]  # what all replicas know

    def copied(self) -> Memory:
        """Return a copy that later steps do not reach."""
        return Memory(
            {name: tensor.clone() for name, tensor in self.own.items()},
            {name: {key: tensor.clone() for key, tensor in named.items()} for name, named in self.common.items()},
        )
