"""The rows of embeddings that a step has used, and nothing of the others, whose gradients are zero.

First all replicas exchange how many such rows each has, for each matrix. From that all know which matrices are cheaper
as rows. Then the rest is summed as it is, and rows are gathered with their numbers, and added up in the order of the
replicas. Nothing is rounded. Bytes: those of the used rows and 4 for each row, as many from each replica as the one
with the most has; 4 for each matrix; the whole gradient of all else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, GatherPayload, Rounds, SumPayload, as_bytes

__all__ = ["SparseCodec"]


class SparseCodec(Codec):
    """`shapes`: rows and columns of each parameter in the bucket, in the order of its memory; (n, 1) of a vector."""

    elementwise = False
    num_rounds = 3

    def __init__(self, *, shapes: Sequence[tuple[int, int]]) -> None:
        self._shapes = list(shapes)
        self._matrices = [place for place, (rows, columns) in enumerate(shapes) if rows > 1 and columns > 1]

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        parts = list(flat.split([rows * columns for rows, columns in self._shapes]))
        touched = {
            place: (parts[place].view(self._shapes[place]) != 0).any(1).nonzero().view(-1) for place in self._matrices
        }
        counts: dict[int, int] = {}
        if touched:
            own = [len(rows) for rows in touched.values()]
            all_counts = yield GatherPayload(torch.tensor(own, dtype=torch.int32, device=flat.device))
            largest = all_counts.amax(0).tolist()
            counts = {
                place: most
                for place, most in zip(touched, largest, strict=True)
                if self._is_cheaper(place, most, len(all_counts), flat.itemsize)
            }
        dense = [part for place, part in enumerate(parts) if place not in counts]
        if dense:
            total = yield SumPayload(torch.cat(dense))
            for part, summed in zip(dense, total.split([part.numel() for part in dense]), strict=True):
                part.copy_(summed)
        if any(counts.values()):
            yield from self._rows(parts, {place: touched[place] for place in counts}, counts)
        return None

    def _is_cheaper(self, place: int, count: int, num_replicas: int, itemsize: int) -> bool:
        """Whether a matrix has fewer bytes as so many rows from each replica than summed."""
        rows, columns = self._shapes[place]
        as_rows = (num_replicas - 1) * count * (columns * itemsize + 4)
        return as_rows < 2 * (num_replicas - 1) / num_replicas * rows * columns * itemsize

    def _rows(self, parts: Sequence[Tensor], touched: dict[int, Tensor], counts: dict[int, int]) -> Rounds:
        """Sum the matrices of `touched`, of each of which every replica sends as many rows."""
        sent: list[Tensor] = []
        for place, count in counts.items():
            rows = touched[place][:count]
            numbers = torch.zeros(count, dtype=torch.int32, device=rows.device)
            numbers[: len(rows)] = rows
            values = parts[place].new_zeros(count, self._shapes[place][1])
            values[: len(rows)] = parts[place].view(self._shapes[place]).index_select(0, rows)
            sent += [values, numbers]
        gathered = yield GatherPayload(as_bytes(*sent))
        for place in counts:
            parts[place].zero_()
        for row in gathered:
            pieces = row.split([one.nbytes for one in sent])
            for number, place in enumerate(counts):
                values, numbers = (
                    piece.clone().view(one.dtype).view(one.shape)  # a piece may begin at an odd place
                    for piece, one in zip(pieces[2 * number :][:2], sent[2 * number :][:2], strict=True)
                )
                parts[place].view(self._shapes[place]).index_add_(0, numbers, values)  # zeros to row 0 where filled up
        return None
