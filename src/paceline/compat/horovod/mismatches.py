"""What stands against an operation that all members have submitted: they must mean the same by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.compat.horovod.requests import Kind, OpRequest, Reduction

__all__ = ["mismatch"]

REDUCES = {Kind.ALLREDUCE, Kind.REDUCESCATTER}
SAME_SHAPE = {Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER}
HAS_ROWS = {Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER}
NOT_WITH_JOIN = {Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER}


def mismatch(requests: Mapping[int, OpRequest], *, has_joined: bool, ranks: Sequence[int]) -> str:
    """Return what is wrong with these requests, by rank, for one name; "" where they fit together.

    `has_joined`: some members have joined, and take part with zeros. `ranks`: of the process set.
    """
    (first_rank, first), *others = requests.items()
    if first.kind in (Kind.ALLREDUCE, Kind.BARRIER) and all(other == first for _, other in others):
        return ""  # the most frequent case, without a word
    if has_joined and first.kind in NOT_WITH_JOIN:
        return f"{first.kind.capitalize()} is not supported with Join at this time."
    if first.kind in HAS_ROWS and any(not shape for shape in first.shapes):
        return f"rank {first_rank} tried to {first.kind} a tensor without dimensions; it needs at least one"
    for rank, other in others:
        for what, one, two in _facts(first, other):
            if one != two:
                return f"Mismatched {what}: rank {first_rank} has {one}, but rank {rank} has {two}."
    if first.kind == Kind.BROADCAST and first.root not in ranks:
        return f"the root rank {first.root} is not in the process set {list(ranks)}"
    return ""


def _facts(one: OpRequest, two: OpRequest) -> list[tuple[str, object, object]]:
    """Pairs of what must be equal, each with its name."""
    facts: list[tuple[str, object, object]] = [
        ("operations", one.kind, two.kind),
        ("data types", ", ".join(one.dtypes), ", ".join(two.dtypes)),
        ("CPU/GPU device selection", one.device, two.device),
    ]
    if one.kind in SAME_SHAPE:
        facts.append((f"{one.kind} tensor shapes", one.shapes, two.shapes))
    if one.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        facts += [
            (f"{one.kind} numbers of dimensions", [len(s) for s in one.shapes], [len(s) for s in two.shapes]),
            (f"{one.kind} dimensions after the first", [s[1:] for s in one.shapes], [s[1:] for s in two.shapes]),
        ]
    if one.kind in REDUCES:
        facts += [
            ("prescale and/or postscale factors", (one.prescale, one.postscale), (two.prescale, two.postscale)),
            ("reduction operation", Reduction.NAMES[one.reduction], Reduction.NAMES[two.reduction]),
        ]
    if one.kind in (Kind.BROADCAST, Kind.REMOVE_SET):
        facts.append(("broadcast root ranks" if one.kind == Kind.BROADCAST else "process sets", one.root, two.root))
    if one.kind == Kind.ADD_SET:
        facts.append(("ranks of a new process set", one.ranks, two.ranks))
    return facts
