"""Local SGD and DiLoCo: replicas take steps by themselves and then agree on weights.

Each replica keeps the last agreed weights, its *anchors*. How far it has moved since, (anchor - weight) times its share
of the samples, is to an anchor what a gradient is to a weight. It is summed over the replicas in buckets, with the
plan's wire and error feedback, and applied by an outer optimizer: torch's SGD with Nesterov momentum (DiLoCo, Douillard
et al. 2023, algorithm 1). Without one, anchor - sum is the average of the replicas' weights (McMahan et al. 2017,
algorithm 1; Stich 2019). All replicas compute the same anchors, bit for bit, and continue from them. Of a sharded
parameter each worker has the anchor of its local part.

Streaming (Douillard et al. 2025, algorithm 2): one OuterStep for each *fragment* of the parameters. Its transfer is
under way while the replica takes steps. When it lands, the replica's weights are mixed with the new anchors. Or they
become anchor + (weight - weight when it was sent), so that the steps meanwhile count (CoCoD-SGD, Shen et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import as_local_of, local_part
from paceline.plan import LocalSGD, Wire
from paceline.sync.allreduce.buckets import NamedParameter, bytes_of_sum
from paceline.sync.allreduce.gradient_reducer import GradientReducer

__all__ = ["OuterStep", "fragments_of"]


class OuterStep:
    """Agrees on named parameters. `group`: the workers with the same ones in other replicas; `all_workers`: those
    of the run."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        group: WorkerGroup,
        all_workers: WorkerGroup,
        sync: LocalSGD,
        wire: Wire,
        seed: int = 0,
        holders: Callable[[Parameter], Hashable] = lambda _: None,
    ) -> None:
        """`holders(parameter)`: which workers of the replica hold the same numbers of it, equal on all of them.

        Whatever the wire makes of these numbers, it then makes the same on each of these workers.
        """
        self._group, self._sync = group, sync
        self._parameters = [parameter for _, parameter in parameters]
        self._anchors = [_anchor_of(parameter) for parameter in self._parameters]
        self._names = [name for name, _ in parameters]
        self._sent: list[Tensor] = []  # the replica's weights when they were sent, if later moves are kept
        parameter_of = {id(anchor): one for one, anchor in zip(self._parameters, self._anchors, strict=True)}
        self.sums = GradientReducer(
            self.anchors,
            group=group,
            all_workers=all_workers,
            sync=sync.sums,
            wire=wire,
            seed=seed,
            holders=lambda anchor: holders(parameter_of[id(anchor)]),
        )
        self.optimizer: torch.optim.SGD | None = None
        if sync.outer is not None:
            momentum = sync.outer.momentum
            self.optimizer = torch.optim.SGD(self._anchors, sync.outer.lr, momentum=momentum, nesterov=momentum > 0)

    @property
    def anchors(self) -> list[NamedParameter]:
        """The last agreed weights, by the names of their parameters."""
        return list(zip(self._names, self._anchors, strict=True))

    @property
    def num_raw_bytes(self) -> int:
        """What this worker would send for one uncompressed sum of all gradients."""
        num_bytes = sum(local_part(one).nbytes for one in self._parameters if not one.is_meta and one.requires_grad)
        return bytes_of_sum(num_bytes, self._group.size)

    @torch.no_grad()
    def begin(self) -> None:
        """Take the current weights, which all replicas share, as the anchors."""
        self._follow_trained()
        for parameter, anchor in self._pairs():
            local_part(anchor).copy_(local_part(parameter))

    @torch.no_grad()
    def exchange(self, share: float, numbers: Sequence[float], *, step: int) -> list[float]:
        """Sum over all replicas how far they have moved; returns the sums of `numbers` over the whole run."""
        self.send(share, numbers, step=step)
        return self.receive()

    @torch.no_grad()
    def send(self, share: float, numbers: Sequence[float], *, step: int) -> None:
        """Begin the exchange; meanwhile the replica may take steps."""
        self._follow_trained()
        self.sums.begin(0, step=step)
        if self._sync.keep_moves:
            self._sent = [local_part(parameter).clone() for parameter, _ in self._pairs()]
        for parameter, anchor in self._pairs():
            own, agreed = local_part(parameter), local_part(anchor)
            # A parameter that no replica has used is not sent, and its momentum does not move it.
            if anchor.requires_grad and not torch.equal(own, agreed):
                anchor.grad = as_local_of((agreed - own).mul_(share), like=anchor)
        self.sums.flush(numbers)

    @torch.no_grad()
    def receive(self) -> list[float]:
        """Wait for the exchange that was begun."""
        found = self.sums.collect()
        self.sums.land(scale=1.0)
        return found

    @torch.no_grad()
    def take(self, *, mixing: float = 0.0) -> None:
        """Move the anchors, and give this replica their weights.

        The share `mixing` of its own weights stays, or everything that it has moved since it sent them.
        """
        owes = bool(self.sums.memory().own)  # remaining error feedback was added to what was sent now
        self.sums.settle()
        if self.optimizer is None and self._group.size == 1 and not owes:
            # Its current weights, moves since included, already are the average, to the last bit.
            self.begin()
            self.drop()
            return
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            for anchor in self._anchors:
                if anchor.grad is not None:
                    local_part(anchor).sub_(local_part(anchor.grad))
        for place, (parameter, anchor) in enumerate(self._pairs()):
            if anchor.grad is not None:
                own, agreed = local_part(parameter), local_part(anchor)
                if self._sent:
                    own.sub_(self._sent[place]).add_(agreed)
                else:
                    own.copy_(agreed if not mixing else own * mixing + agreed * (1 - mixing))
        self._sent = []
        self.sums.drop()

    @torch.no_grad()
    def settle(self) -> None:
        """Set this replica's weights to the anchors, if no step was taken since they moved."""
        for parameter, anchor in self._pairs():
            local_part(parameter).copy_(local_part(anchor))

    def drop(self) -> None:
        """Forget what was exchanged."""
        self._sent = []
        self.sums.drop()

    def _follow_trained(self) -> None:
        """Include every parameter that is trained now, also one that the user has thawed since `begin`.

        Its anchor has the weights of `begin`, like that of a frozen one. Parameters of other stages are in the step
        metadata.
        """
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            if parameter.requires_grad:
                anchor.requires_grad_(True)

    def _pairs(self) -> list[tuple[Parameter, Parameter]]:
        """Return local parameters with their anchors."""
        pairs = zip(self._parameters, self._anchors, strict=True)
        return [(parameter, anchor) for parameter, anchor in pairs if not parameter.is_meta]


def fragments_of(parameters: Sequence[NamedParameter], count: int) -> list[list[NamedParameter]]:
    """Divide parameters into runs of about the same size; fewer than `count` where there are not enough."""
    total, before = sum(parameter.numel() for _, parameter in parameters), 0
    runs: list[list[NamedParameter]] = [[] for _ in range(count)]
    for name, parameter in parameters:
        runs[min(count - 1, before * count // max(total, 1))].append((name, parameter))
        before += parameter.numel()
    return [run for run in runs if run]


def _anchor_of(parameter: Parameter) -> Parameter:
    """Return a copy that is sharded as the parameter is; for one of another stage, on the meta device."""
    if parameter.is_meta:
        return Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
    copy: Tensor = as_local_of(local_part(parameter).clone(), like=parameter)
    return Parameter(copy, requires_grad=parameter.requires_grad)
