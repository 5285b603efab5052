"""Gossip: replicas mix their weights with those of a few others, and with all only now and then.

Decentralised averaging (D-PSGD, Lian et al. 2017, algorithm 1): x_i becomes the sum of w_ij x_j over its peers, after
steps that each has taken by itself. So replicas come closer to each other without a sum over all of them. Their average
moves as with all-reduce, but each computes gradients at weights of its own; so at the end of a round all take the
average (Gossip-PGA, Chen et al. 2021), by the outer step of local SGD without an outer optimizer.

Each worker mixes the local parts of the parameters that it has, with those at the same place in other replicas.
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
    """Mixes weights by `mix` and `take_mixed`; what it inherits is the average of all, at a round's end."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        group: WorkerGroup,
        everybody: WorkerGroup,
        sync: Gossip,
        wire: Wire,
        seed: int = 0,
        holders: Callable[[Parameter], Hashable] = lambda _: None,
    ) -> None:
        average = LocalSGD(every=sync.average_every, bucket_bytes=sync.bucket_bytes)
        super().__init__(
            parameters, group=group, everybody=everybody, sync=average, wire=wire, seed=seed, holders=holders
        )
        self._gossip, self._seed = sync, seed
        self._mixed: list[tuple[list[Tensor], Tensor]] = []  # local parts, and what they become, one behind the other

    @torch.no_grad()
    def mix(self, step: int) -> None:
        """Send this replica's weights to its peers, and mix theirs with them; nothing changes yet. All replicas must
        call it; blocks until the peers' are here. Raises Disrupted."""
        group = self._group
        row = mixing_row(self._gossip.peers, group.index, count=group.size, step=step, seed=self._seed)
        self._mixed = []
        for parts in self._by_kind():
            own = torch.cat([part.reshape(-1) for part in parts])
            nothing = own.new_empty(0)
            out = [torch.empty_like(own) if k in row and k != group.index else nothing for k in range(group.size)]
            sent = [own if one.numel() else nothing for one in out]  # who is a peer of another has it for a peer
            group.all_to_all(sent, out, what="weights of peers")
            self.sums.sent_beside(sum(one.nbytes for one in sent))
            out[group.index] = own
            mixed = torch.zeros_like(own)
            for number in sorted(row):
                # Two roundings for each number wherever it lies: parameters that several workers of a replica have
                # beside other ones must stay the same there.
                mixed.add_(out[number].mul_(row[number]))
            self._mixed.append((parts, mixed))

    @torch.no_grad()
    def take_mixed(self) -> None:
        """Give this replica the weights that were mixed."""
        for parts, mixed in self._mixed:
            for part, values in zip(parts, mixed.split([one.numel() for one in parts]), strict=True):
                part.copy_(values.view_as(part))
        self._mixed = []

    def _by_kind(self) -> list[list[Tensor]]:
        """The local parts of what is trained here, those of one type together."""
        found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, _ in self._pairs():
            if parameter.requires_grad:
                part = local_part(parameter)
                found.setdefault((part.dtype, part.device), []).append(part)
        return list(found.values())
