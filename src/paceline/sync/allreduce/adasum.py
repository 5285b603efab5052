"""Adasum: of the replicas' gradients, what they have in common counts once, and what they have not adds up.

Two gradients become  a (1 - <a,b> / 2|a|^2) + b (1 - <a,b> / 2|b|^2),  each parameter by itself: their mean where they
point the same way, their sum where they are orthogonal (Maleki et al. 2021, "Scaling distributed training with adaptive
summation", equation 3). More are combined in a tree of neighbours; whoever has none goes up alone.

The paper walks the tree: log2 n exchanges of halves, and at each of them a sum of inner products. But whatever
comes out of the tree is a weighted sum of what went in, and the weights follow from the inner products of what went in,
by arithmetic of a few numbers. So each replica is sent its share of all gradients, while backward runs; the inner
products of all shares are added up with the step's tally, over everybody, also over those who hold other parts of the
same parameters; and each replica sends the combination of its share to all. That is 2 (n-1)/n of the tensor and three
exchanges for any n, and the same bits on all. Memory: one more copy of the gradients, and a share of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from paceline.codec.cast import HALF
from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import local_part
from paceline.plan import Cast, Raw, Wire
from paceline.sync.allreduce.buckets import Bucket, NamedParameter

__all__ = ["AdasumBucket", "AdasumWeights", "coefficients"]


def coefficients(products: Tensor) -> Tensor:
    """Return the weights (p, n) with which n gradients are added up, from their inner products (p, n, n)."""
    count = products.shape[1]
    nodes = list(
        torch.eye(count, dtype=products.dtype, device=products.device)[:, None, :].expand(-1, len(products), -1)
    )
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=False)
        alone = nodes[-1:] if len(nodes) % 2 else []
        nodes = [_combined(left, right, products) for left, right in pairs] + alone
    return nodes[0]


def _combined(left: Tensor, right: Tensor, products: Tensor) -> Tensor:
    """Combine two weighted sums, each given by its weights (p, n)."""
    left_products = torch.einsum("pij,pj->pi", products, left)
    between = (right * left_products).sum(1, keepdim=True)
    lefts = (left * left_products).sum(1, keepdim=True)
    rights = (right * torch.einsum("pij,pj->pi", products, right)).sum(1, keepdim=True)
    return left * _kept(between, lefts) + right * _kept(between, rights)


def _kept(between: Tensor, own: Tensor) -> Tensor:
    """The factor of one of two; of nothing, any."""
    return torch.where(own > 0, 1 - between / (2 * own), 1.0)


class AdasumWeights:
    """The inner products of one walk's gradients, which ride in its tally, and what follows from them."""

    def __init__(
        self,
        buckets: Sequence[AdasumBucket],
        *,
        group: WorkerGroup,
        place_of: Callable[[Parameter], int],
        counts: Callable[[Parameter], bool],
        num_places: int,
    ) -> None:
        """`place_of(parameter)`: its place among `num_places`, on all workers alike; of what several workers have the
        same of, it `counts` on one of them."""
        self._buckets, self._size = tuple(buckets), group.size
        self._place_of, self._counts, self._num_places = place_of, counts, num_places
        self._upper = torch.triu_indices(self._size, self._size)
        self._whole = torch.empty(0)

    def products(self) -> Tensor:
        """Return what this worker knows of the inner products, 1-D in double precision; sums over all are whole."""
        found = torch.zeros(self._num_places, self._upper.shape[1], dtype=torch.float64)
        for bucket in self._buckets:
            for parameter, products in zip(bucket.parameters, bucket.products, strict=True):
                if self._counts(parameter):
                    found[self._place_of(parameter)] += products[self._upper[0], self._upper[1]].cpu()
        return found.view(-1)

    def combine(self, sums: Tensor, factors: Sequence[float]) -> None:
        """Put what comes of the tree in the place of each gradient, of replica r `factors[r]` times what it gave.

        `sums`: those of `products` over all workers. Blocks; raises Disrupted.
        """
        whole = torch.zeros(self._num_places, self._size, self._size, dtype=torch.float64)
        whole[:, self._upper[0], self._upper[1]] = sums.view(self._num_places, -1).cpu()
        whole += whole.triu(1).mT
        self._whole = whole
        scale = torch.tensor(factors, dtype=torch.float64)
        weights = (coefficients(whole * scale[:, None] * scale) * scale).tolist()
        for bucket in self._buckets:
            bucket.combine([weights[self._place_of(parameter)] for parameter in bucket.parameters])
        for bucket in self._buckets:
            bucket.land()

    def squares(self, scale: float) -> tuple[list[float], float]:
        """Return the squared norm of what each replica gave, and of `scale` times their sum, in the last walk."""
        over_all = self._whole.sum(0)
        return over_all.diagonal().tolist(), scale**2 * float(over_all.sum())


class AdasumBucket(Bucket):
    """A bucket that shares its gradients out when it departs, and gathers what was made of the shares.

    `advance` ends the first half, after which `products` are the inner products of the gradients in this replica's
    share, (n, n) for each parameter; `combine` begins the second half, which `land` ends.
    """

    def __init__(self, parameters: Sequence[NamedParameter], *, group: WorkerGroup, wire: Wire) -> None:
        num_elements = sum(local_part(parameter).numel() for _, parameter in parameters)
        super().__init__(parameters, group=group, wire=Raw(), num_riders=-num_elements % group.size)
        self.can_carry = False
        self._flat[num_elements:] = 0  # so that it can be sent as it is, in equal shares
        self.products: list[Tensor] = []
        self._half = HALF[wire.dtype] if isinstance(wire, Cast) else None
        self._shares = torch.empty(0)  # row r: of what replica r gave, this one's share
        self._spans: list[tuple[int, int]] = []  # of each parameter, in this replica's share

    def depart(self, riders: Sequence[float] = (), *, seed: int = 0) -> None:
        """Start to send each replica its share of the gradients."""
        self._begin()
        numbers = self._numbers()
        size, count = numbers.numel(), self._group.size
        each = -(-size // count)
        rows = self._flat
        if self._half is not None or rows.is_complex() or rows.numel() != each * count:
            rows = F.pad(numbers.to(self._half or numbers.dtype), (0, each * count - size))
        self._shares = torch.empty_like(rows).view(count, each)
        self._place_spans(each)
        self.bytes.num_raw += 2 * (count - 1) * size * numbers.itemsize // count
        self.bytes.num_sent += (count - 1) * each * rows.itemsize
        what = f"all_to_all of {self._span}"
        self._transfer = self._group.begin_all_to_all(rows.view(count, each), self._shares, what=what)

    @property
    def may_send_more(self) -> bool:
        return False

    def advance(self) -> bool:
        if self._transfer is None:
            raise RuntimeError("advance() without depart()")
        self._transfer.wait()
        self._transfer = None
        if self._shares.dtype.itemsize < 4:
            self._shares = self._shares.float()
        self.products = []
        for first, stop in self._spans:
            part = self._shares[:, first:stop]
            self.products.append((part @ part.mT).double())
        return False

    def combine(self, weights: Sequence[Sequence[float]]) -> None:
        """Add up the shares, each parameter's with its weights by replica, and start to send the result to all."""
        sent, count = self._added_up(weights), self._group.size
        self._shares = self._shares.new_empty(0)  # the answer takes as much
        self.bytes.num_sent += (count - 1) * sent.nbytes
        self._answer = sent.new_empty(count, sent.numel())
        self._transfer = self._group.begin_all_gather(sent, self._answer, what=f"all_gather of {self._span}")

    def land(self) -> None:
        if self._transfer is None or self._answer is None:
            raise RuntimeError("land() without combine()")
        self._transfer.wait()
        numbers = self._numbers()
        numbers.copy_(self._answer.view(-1)[: numbers.numel()])
        self._answer = self._transfer = None

    def _added_up(self, weights: Sequence[Sequence[float]]) -> Tensor:
        """The weighted sum of the shares, as it is sent; it changes them."""
        # Two roundings for each number, at whatever place of whatever share it is: those who hold the same parameter
        # beside other ones must get the same bits.
        for (first, stop), factors in zip(self._spans, weights, strict=True):
            for row, factor in zip(self._shares, factors, strict=True):
                row[first:stop].mul_(factor)
        share = self._shares[0]
        for row in self._shares[1:]:
            share.add_(row)
        return share.to(self._half or share.dtype, copy=True)

    def _numbers(self) -> Tensor:
        """The gradients as real numbers."""
        own = self._flat[: self._num_elements]
        return torch.view_as_real(own).view(-1) if own.is_complex() else own

    def _place_spans(self, each: int) -> None:
        begin, stop = self._group.index * each, (self._group.index + 1) * each
        each_is, place = 2 if self._flat.is_complex() else 1, 0
        self._spans = []
        for local in self._locals:
            after = place + local.numel() * each_is
            first, last = min(max(place, begin), stop), min(max(after, begin), stop)
            self._spans.append((first - begin, last - begin))
            place = after
