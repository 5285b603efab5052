"""Adasum: where the replicas' gradients agree they count once, and where they differ they add up.

Two gradients become a (1 - <a,b> / 2|a|^2) + b (1 - <a,b> / 2|b|^2), each parameter by itself: their mean where they
point the same way, their sum where they are orthogonal (Maleki et al. 2021, "Scaling distributed training with adaptive
summation", equation 3). More than two are combined in a tree of neighbors; an odd one goes up alone.

The paper follows the tree: log2 n exchanges of halves, each with a sum of inner products. But the result is a weighted
sum of the inputs, and the weights follow from the inputs' inner products, by arithmetic on a few numbers. So each
replica gets its share of all gradients while backward runs. The inner products of all shares are added up with the step
metadata, over all workers, including those with other parts of the same parameters. Then each replica sends the
combination of its share to all. That is 2 (n-1)/n of the tensor and three exchanges for any n, and equal bits on all.
It takes the memory of one more copy of the gradients, and of one share.
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
    """Combine two weighted sums, each represented by its weights (p, n)."""
    left_products = torch.einsum("pij,pj->pi", products, left)
    between = (right * left_products).sum(1, keepdim=True)
    lefts = (left * left_products).sum(1, keepdim=True)
    rights = (right * torch.einsum("pij,pj->pi", products, right)).sum(1, keepdim=True)
    return left * _kept(between, lefts) + right * _kept(between, rights)


def _kept(between: Tensor, own: Tensor) -> Tensor:
    """Return the factor of one of two; for a zero gradient it does not matter."""
    return torch.where(own > 0, 1 - between / (2 * own), 1.0)


class AdasumWeights:
    """The inner products of one gradient pass, which travel in its step metadata, and the resulting weights."""

    def __init__(
        self,
        buckets: Sequence[AdasumBucket],
        *,
        group: WorkerGroup,
        place_of: Callable[[Parameter], int],
        counts: Callable[[Parameter], bool],
        num_places: int,
    ) -> None:
        """`place_of(parameter)`: its index among `num_places`, equal on all workers.

        `counts(parameter)`: true on exactly one of the workers that hold the same gradient.
        """
        self._buckets, self._size = tuple(buckets), group.size
        self._place_of, self._counts, self._num_places = place_of, counts, num_places
        self._upper = torch.triu_indices(self._size, self._size)
        self._whole = torch.empty(0)

    def products(self) -> Tensor:
        """Return this worker's part of the inner products, 1-D in double precision; the sum over all workers is
        complete."""
        found = torch.zeros(self._num_places, self._upper.shape[1], dtype=torch.float64)
        for bucket in self._buckets:
            for parameter, products in zip(bucket.parameters, bucket.products, strict=True):
                if self._counts(parameter):
                    found[self._place_of(parameter)] += products[self._upper[0], self._upper[1]].cpu()
        return found.view(-1)

    def combine(self, sums: Tensor, factors: Sequence[float]) -> None:
        """Replace each gradient by the combination, in which replica r counts `factors[r]` times.

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
        """Return the squared norm of each replica's gradient, and of `scale` times their sum, in the last gradient
        pass."""
        over_all = self._whole.sum(0)
        return over_all.diagonal().tolist(), scale**2 * float(over_all.sum())


class AdasumBucket(Bucket):
    """A bucket that distributes shares of its gradients when it departs, and gathers the combined shares.

    `advance` ends the first half. `products` are then the inner products of the gradients in this replica's share, (n,
    n) for each parameter. `combine` begins the second half, which `land` ends.
    """

    def __init__(self, parameters: Sequence[NamedParameter], *, group: WorkerGroup, wire: Wire) -> None:
        num_elements = sum(local_part(parameter).numel() for _, parameter in parameters)
        super().__init__(parameters, group=group, wire=Raw(), metadata_capacity=-num_elements % group.size)
        self.can_carry_metadata = False
        self._flat[num_elements:] = 0  # so that it can be sent as it is, in equal shares
        self.products: list[Tensor] = []
        self._half = HALF[wire.dtype] if isinstance(wire, Cast) else None
        self._shares = torch.empty(0)  # row r: this replica's share of replica r's gradients
        self._spans: list[tuple[int, int]] = []  # of each parameter, in this replica's share

    def depart(self, metadata: Sequence[float] = (), *, seed: int = 0) -> None:
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
        self._shares = self._shares.new_empty(0)  # the answer takes as much memory
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
        """Return the weighted sum of the shares, as it is sent; it changes them."""
        # Two roundings for each number, wherever it lies in a share. Workers that hold the same parameter beside
        # different ones must get the same bits.
        for (first, stop), factors in zip(self._spans, weights, strict=True):
            for row, factor in zip(self._shares, factors, strict=True):
                row[first:stop].mul_(factor)
        share = self._shares[0]
        for row in self._shares[1:]:
            share.add_(row)
        return share.to(self._half or share.dtype, copy=True)

    def _numbers(self) -> Tensor:
        """Return the gradients as real numbers."""
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
