"""Ring all-reduce: every worker sends to its right neighbor, first partial sums, then the sums.

The tensor is split into one segment for each worker. In step s of the first half worker w sends segment w - s, to which
all workers on its way have added. After n - 1 steps worker w has the sum of segment w + 1. In the second half the sums
go round once more. Each worker sends 2 (n-1)/n of the tensor, which is the minimum, in 2 (n-1) steps, which is the
maximum: for large tensors (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009).
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.schedule.allreduce.rounds import Round, Send, bounds

__all__ = ["ring"]


def ring(num_workers: int, num_chunks: int) -> Iterator[Round]:
    """Yield the rounds; a segment of several chunks travels chunk by chunk, so that the next worker can go on with the
    first while the others are under way."""
    segments = [bounds(num_chunks, num_workers, worker) for worker in range(num_workers)]
    longest = max(stop - first for first, stop in segments)
    for step in range(2 * (num_workers - 1)):
        adds = step < num_workers - 1
        for piece in range(longest):
            sends: list[Send] = []
            for worker in range(num_workers):
                # In the second half worker w begins with the segment that it has completed.
                first, stop = segments[(worker - step) % num_workers]
                if first + piece < stop:
                    chunk = first + piece
                    sends.append(Send(worker, (worker + 1) % num_workers, chunk, chunk + 1, adds))
            yield tuple(sends)
