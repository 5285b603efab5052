"""Recursive halving and doubling: pairs exchange halves, then quarters, and so on, and the same way back.

Of 2^k workers each exchanges, with the one at distance 2^(k-1), that half of its chunks which the other one keeps, and
goes on with its own half and half the distance; when all is done each has the sum of its part, and the same exchanges
backwards bring the parts together. Each worker sends 2 (n-1)/n of the tensor, as in a ring, in 2 log2 n steps: for all
sizes, where n is a power of two. Of other numbers the workers beyond the power of two give all they have to a partner
first, and get the sum in the end, which costs a whole tensor each way (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005, section 4.5).
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.schedule.allreduce.rounds import Round, Send, split

__all__ = ["halving"]


def halving(num_workers: int, num_chunks: int) -> Iterator[Round]:
    """Yield the rounds; what is exchanged at once goes in as many pieces as there are chunks for each worker."""
    inner = 1 << (num_workers.bit_length() - 1)
    pieces = -(-num_chunks // inner)
    # Worker 2i + 1 hands its numbers to 2i, as long as there are more workers than `inner`; the others take part alone.
    num_folded = num_workers - inner
    hosts = [2 * index if index < num_folded else index + num_folded for index in range(inner)]
    for first, stop in split(0, num_chunks, pieces):
        if num_folded:
            yield tuple(Send(2 * index + 1, 2 * index, first, stop, True) for index in range(num_folded))
    kept = [(0, num_chunks)] * inner
    exchanges: list[tuple[int, list[tuple[int, int]]]] = []  # distance, and what each had before
    distance = inner // 2
    while distance:
        exchanges.append((distance, kept))
        halves = [_half(*kept[index], is_upper=bool(index & distance)) for index in range(inner)]
        sent = [halves[index ^ distance] for index in range(inner)]
        yield from _exchanged(hosts, distance, sent, pieces, adds=True)
        kept = halves
        distance //= 2
    for distance, before in reversed(exchanges):
        yield from _exchanged(hosts, distance, kept, pieces, adds=False)
        kept = before
    for first, stop in split(0, num_chunks, pieces):
        if num_folded:
            yield tuple(Send(2 * index, 2 * index + 1, first, stop, False) for index in range(num_folded))


def _half(first: int, stop: int, *, is_upper: bool) -> tuple[int, int]:
    middle = (first + stop) // 2
    return (middle, stop) if is_upper else (first, middle)


def _exchanged(
    hosts: list[int], distance: int, sent: list[tuple[int, int]], pieces: int, *, adds: bool
) -> Iterator[Round]:
    """Yield each worker's sends to the worker at `distance`, piece by piece."""
    ranges_of = [list(split(first, stop, pieces)) for first, stop in sent]
    for piece in range(max(map(len, ranges_of))):
        yield tuple(
            Send(hosts[index], hosts[index ^ distance], *ranges[piece], adds)
            for index, ranges in enumerate(ranges_of)
            if piece < len(ranges)
        )
