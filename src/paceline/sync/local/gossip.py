"""Gossip: replicas mix their weights with those of a few others, and average over all only now and then.

Decentralized averaging (D-PSGD, Lian et al. 2017, algorithm 1): x_i becomes the sum of w_ij x_j over its peers, after
steps that each replica has taken by itself. So replicas approach each other without a sum over all of them. Their
average moves as with all-reduce, but each computes gradients at its own weights. So at the end of a round all take the
average (Gossip-PGA, Chen et al. 2021), by the outer step of local SGD without an outer optimizer.

Each worker mixes the local parts of its parameters with those at the same place in other replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import local_part
from paceline.plan import Gossip, LocalSGD, Wire
from paceline.schedule.gossip_mixing import mixing_row
from paceline.sync.allreduce.buckets import NamedParameter
from paceline.sync.local.local_sgd import OuterStep

__all__ = ["GossipStep"]


class GossipStep(OuterStep):
    """Mixes weights by `mix` and `take_mixed`; inherits the average of all replicas at the end of a round."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        group: WorkerGroup,
        all_workers: WorkerGroup,
        sync: Gossip,
        wire: Wire,
        seed: int = 0,
        holders: Callable[[Parameter], Hashable] = lambda _: None,
    ) -> None:
        average = LocalSGD(every=sync.average_every, bucket_bytes=sync.bucket_bytes)
        super().__init__(
            parameters, group=group, all_workers=all_workers, sync=average, wire=wire, seed=seed, holders=holders
        )
        self._gossip, self._seed = sync, seed
        self._mixed: list[tuple[list[Tensor], Tensor]] = []  # local parts, and their new values in one flat tensor

    @torch.no_grad()
    def mix(self, step: int) -> None:
        """Send this replica's weights to its peers, and compute the mix with theirs; nothing changes yet.

        All replicas must call it; blocks until the peers' weights are here. Raises Disrupted.
        """
        group = self._group
        row = mixing_row(self._gossip.peers, group.index, count=group.size, step=step, seed=self._seed)
        self._mixed = []
        for parts in self._by_kind():
            own = torch.cat([part.reshape(-1) for part in parts])
            nothing = own.new_empty(0)
            out = [torch.empty_like(own) if k in row and k != group.index else nothing for k in range(group.size)]
            sent = [own if one.numel() else nothing for one in out]  # peers are mutual
            group.all_to_all(sent, out, what="weights of peers")
            self.sums.sent_beside(sum(one.nbytes for one in sent))
            out[group.index] = own
            mixed = torch.zeros_like(own)
            for number in sorted(row):
                # Two roundings for each number, wherever it lies. Workers of a replica that hold the same parameter
                # beside different ones must get the same bits.
                mixed.add_(out[number].mul_(row[number]))
            self._mixed.append((parts, mixed))

    @torch.no_grad()
    def take_mixed(self) -> None:
        """Install the mixed weights in this replica."""
        for parts, mixed in self._mixed:
            for part, values in zip(parts, mixed.split([one.numel() for one in parts]), strict=True):
                part.copy_(values.view_as(part))
        self._mixed = []

    def _by_kind(self) -> list[list[Tensor]]:
        """Return the local parts of trained parameters, grouped by dtype and device."""
        found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, _ in self._pairs():
            if parameter.requires_grad:
                part = local_part(parameter)
                found.setdefault((part.dtype, part.device), []).append(part)
        return list(found.values())
