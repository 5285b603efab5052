"""Builds the all-reduce schedule of an algorithm's name, for a number of workers on their hosts."""

from __future__ import annotations

import functools

from paceline.schedule.allreduce.halving import halving
from paceline.schedule.allreduce.hierarchical import hierarchical, hosts_of
from paceline.schedule.allreduce.ring import ring
from paceline.schedule.allreduce.rounds import Schedule
from paceline.schedule.allreduce.tree import tree

__all__ = ["ALGORITHMS", "FLAT", "between_hosts", "build", "num_chunks_of"]

FLAT = {"ring": ring, "tree": tree, "halving": halving}
ALGORITHMS = (*FLAT, "hierarchical")

CHUNK_BYTES = 512 * 1024  # sent at once: large against the latency, small enough to be forwarded soon
TREE_CHUNK_BYTES = 128 * 1024  # smaller, because trees only forward: a worker has no part of its own
MOST_PIECES = 16  # of a worker's part of the tensor
MOST_CHUNKS, MOST_TREE_CHUNKS = 512, 128  # of the whole tensor: building a schedule must stay fast


@functools.lru_cache(maxsize=128)
def build(name: str, *, num_workers: int, num_chunks: int, hosts: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule called `name`; `hosts[w]` is the host of worker w, by default another one for each.

    Raises ValueError where the name or a number is not legal.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"the all-reduce algorithm {name!r} is not known. Use one of: {', '.join(ALGORITHMS)}.")
    hosts = tuple(range(num_workers)) if hosts is None else hosts
    if num_workers < 1 or num_chunks < 1 or len(hosts) != num_workers:
        raise ValueError(
            f"an all-reduce of {num_workers} workers on {len(hosts)} places in {num_chunks} chunks cannot be: give at "
            "least one worker and one chunk, and a host for each worker."
        )
    if name == "hierarchical":
        rounds = hierarchical(hosts, num_chunks, between=FLAT[between_hosts(len(hosts_of(hosts)))])
    else:
        rounds = FLAT[name](num_workers, num_chunks)
    kept = tuple(sends for sends in rounds if sends)
    return Schedule(name=name, num_workers=num_workers, num_chunks=num_chunks, rounds=kept)


def between_hosts(num_hosts: int) -> str:
    """Return the algorithm that the hierarchical one uses between hosts: the one with the fewest steps that sends the
    least. For numbers of hosts that are not powers of two this is the ring, as long as it is short."""
    return "halving" if num_hosts & (num_hosts - 1) == 0 else "ring" if num_hosts < 8 else "tree"


def num_chunks_of(name: str, *, num_bytes: int, num_workers: int) -> int:
    """Return the number of chunks of a tensor: as many as the algorithm needs, and more if they would be large."""
    if name == "tree":
        parts, each, most = 2, TREE_CHUNK_BYTES, MOST_TREE_CHUNKS // 2
    else:
        parts, each, most = num_workers, CHUNK_BYTES, max(1, min(MOST_PIECES, MOST_CHUNKS // num_workers))
    pieces = max(1, min(most, -(-num_bytes // (parts * each))))
    return parts * (1 << (pieces - 1).bit_length())  # powers of two: few different ones, so that each is made once
