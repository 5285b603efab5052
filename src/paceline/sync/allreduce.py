"""Synchronous averaging: every replica's gradients are summed in buckets while backward runs.

One walk over a step's micro-batches goes `begin`, backward ..., `arm`, the last backward, `flush`, `land`. Only after
`arm` do buckets leave, each as soon as all its gradients are there and all buckets before it have left: collectives are
then issued in the same order on every worker, also on one that has no micro-batch in this step and sends zeros. Weights
are the business of the caller, who has scaled each loss.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.codec.build import build_codec
from paceline.comm.group import WorkerGroup
from paceline.plan import AllReduce, Cast, Raw
from paceline.sync.buckets import Bucket, StayingBucket, assign

__all__ = ["GradientSum"]


class GradientSum:
    """Sums the gradients of a set of named parameters over a group."""

    def __init__(
        self, parameters: Sequence[tuple[str, Parameter]], *, group: WorkerGroup, sync: AllReduce, wire: Raw | Cast
    ) -> None:
        self._all = list(parameters)
        self._group, self._sync, self._wire = group, sync, wire
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._armed = False
        self.waited_s = 0.0  # for transfers, in the last `land`
        self._build()

    def begin(self) -> None:
        """Forget old gradients; a step's gradients start from nothing."""
        if self._trainable != [parameter.requires_grad for _, parameter in self._all]:
            self._build()  # the user froze or thawed parameters, on all workers alike
        for _, parameter in self._all:
            parameter.grad = None
        self._armed = False
        self._num_departed = 0
        self._arrived: set[int] = set()
        self._pending = [len(bucket.parameters) for bucket in self._buckets]

    def arm(self) -> None:
        """The coming backward is the walk's last: let buckets leave as they fill."""
        self._armed = True

    def flush(self) -> list[bool]:
        """Send all that has not left, and return which parameters got a gradient here, in the order of `names`."""
        used = [parameter.grad is not None for parameter in self.parameters]
        self._armed = False
        while self._num_departed < len(self._buckets):
            self._depart_next()
        return used

    def land(self, used: Sequence[bool], *, scale: float) -> None:
        """Wait for all sums, multiply them by `scale`, and install them; `used` is that of all workers together.

        Parameters that no worker used keep no gradient, so that optimizers leave them alone, as in one process.
        """
        self.waited_s = 0.0
        for bucket in self._buckets:
            began = time.perf_counter()
            bucket.land()
            self.waited_s += time.perf_counter() - began
            if scale != 1.0:
                bucket.scale(scale)
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if not is_used:
                parameter.grad = None

    def norm(self) -> Tensor:
        """The global norm of all gradients, 0-d; equal on every worker, since all hold the same sums."""
        gradients = [gradient for bucket in self._buckets for gradient in bucket.gradients()]
        return torch.nn.utils.get_total_norm(gradients)

    def is_finite(self) -> bool:
        """Whether all gradients are finite. A norm that overflows is looked into."""
        if bool(torch.isfinite(self.norm())):
            return True
        return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in self.parameters)

    def drop(self) -> None:
        """Remove all gradients: an optimizer's step then changes nothing."""
        for _, parameter in self._all:
            parameter.grad = None

    @property
    def num_bytes_sent(self) -> int:
        """Bytes handed to the wire since the beginning."""
        return self._bytes_before + sum(bucket.num_bytes_sent for bucket in self._buckets)

    def _build(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._bytes_before = self.num_bytes_sent if self._hooks else 0
        self._trainable = [parameter.requires_grad for _, parameter in self._all]
        trainable = [(name, parameter) for name, parameter in self._all if parameter.requires_grad]
        runs = assign(trainable, bucket_bytes=self._sync.bucket_bytes)
        self._buckets: list[Bucket] | list[StayingBucket]
        if self._group.size == 1:
            self._buckets = [StayingBucket(run) for run in runs]
        else:
            self._buckets = [Bucket(run, group=self._group, codec=build_codec(self._wire)) for run in runs]
        self.parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self.names = [name for bucket in self._buckets for name in bucket.names]
        self._hooks = []
        place = 0
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                arrived = functools.partial(self._gradient_arrived, number, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
                place += 1

    def _gradient_arrived(self, bucket: int, place: int, parameter: Tensor) -> None:
        if not self._armed:
            return
        if place in self._arrived:
            raise RuntimeError(
                f"a second gradient arrived for {self.names[place]} in the step's last micro-batch: "
                "add the losses and call backward once, or walk over the batch again for another optimizer"
            )
        # Buckets leave one gradient late: hooks that the user put on this parameter run after this one and may change
        # its gradient.
        while self._num_departed < len(self._buckets) and self._pending[self._num_departed] == 0:
            self._depart_next()
        self._arrived.add(place)
        self._pending[bucket] -= 1

    def _depart_next(self) -> None:
        self._buckets[self._num_departed].depart()
        self._num_departed += 1
