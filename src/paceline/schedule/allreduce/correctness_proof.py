"""Verifies an all-reduce schedule by simulating it symbolically, with every sum written down.

For each chunk at each worker, the simulation knows the set of contributions in it, and the order of additions as a
term; every distinct term has a number. A floating-point sum depends on its order. So it is not enough that all workers
have all contributions: their terms must be equal, and then so are their bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.schedule.allreduce.rounds import Round, Schedule, Send

__all__ = ["problems"]


def problems(schedule: Schedule) -> list[str]:
    """Return everything that is wrong with a schedule; empty if it is correct.

    Correct means: in the end every worker has every contribution to every chunk exactly once, added up in one order. A
    chunk that is added has no contribution in common with the one there, and a chunk that replaces has all of its
    contributions. Within a round, no send reads or writes what another one writes, and no worker sends or receives
    twice.
    """
    simulation = _Simulation(schedule)
    found: list[str] = []
    for number, sends in enumerate(schedule.rounds):
        wrong = [*_illegal(schedule, sends)] or [*_races(sends), *_crowds(sends), *simulation.take(sends)]
        found += [f"round {number}: {text}" for text in wrong]
    return found or list(simulation.lacks())


def _illegal(schedule: Schedule, sends: Round) -> Iterator[str]:
    workers = range(schedule.num_workers)
    for send in sends:
        if send.source not in workers or send.target not in workers or send.source == send.target:
            yield f"{send} is not from one of {schedule.num_workers} workers to another"
        elif not 0 <= send.first < send.stop <= schedule.num_chunks:
            yield f"{send} has none of the {schedule.num_chunks} chunks, or others"


def _races(sends: Round) -> Iterator[str]:
    written: dict[tuple[int, int], Send] = {}
    for send in sends:
        for chunk in range(send.first, send.stop):
            if (other := written.setdefault((send.target, chunk), send)) is not send:
                yield f"{send} and {other} both write chunk {chunk} of worker {send.target}"
    for send in sends:
        for chunk in range(send.first, send.stop):
            if (other := written.get((send.source, chunk))) is not None:
                yield f"{send} reads chunk {chunk} of worker {send.source}, which {other} writes"


def _crowds(sends: Round) -> Iterator[str]:
    senders, receivers = [send.source for send in sends], [send.target for send in sends]
    if len(set(senders)) < len(senders):
        yield f"worker {_doubled(senders)} sends twice"
    if len(set(receivers)) < len(receivers):
        yield f"worker {_doubled(receivers)} receives twice"


def _doubled(numbers: list[int]) -> int:
    return next(number for number in numbers if numbers.count(number) > 1)


class _Simulation:
    """What every worker has."""

    def __init__(self, schedule: Schedule) -> None:
        self._size, self._name = schedule.num_workers, schedule.name
        self._everyone = (1 << self._size) - 1  # contributions are bits of a number
        # For each chunk, by worker: the contributions in it, and the number of its term (its own: a leaf).
        self._held = [[(1 << worker, worker) for worker in range(self._size)] for _ in range(schedule.num_chunks)]
        self._terms: dict[tuple[int, int], int] = {}  # a sum of two terms, in either order

    def take(self, sends: Round) -> Iterator[str]:
        """Simulate a round; yield errors."""
        arriving = [
            (send, [self._held[chunk][send.source] for chunk in range(send.first, send.stop)]) for send in sends
        ]
        for send, values in arriving:
            for chunk, (came, term) in enumerate(values, start=send.first):
                here, own = self._held[chunk][send.target]
                if send.adds and came & here:
                    yield f"{send} adds to chunk {chunk} what is in it: the contribution of {_told(came & here)}"
                elif not send.adds and here & ~came:
                    yield f"{send} takes from chunk {chunk} the contribution of {_told(here & ~came)}"
                if send.adds:
                    pair = (term, own) if term < own else (own, term)  # a + b is b + a to the last bit
                    came, term = came | here, self._terms.setdefault(pair, self._size + len(self._terms))
                self._held[chunk][send.target] = came, term

    def lacks(self) -> Iterator[str]:
        """Yield what is missing in the end."""
        for chunk, held in enumerate(self._held):
            for worker, (has, term) in enumerate(held):
                if has != self._everyone:
                    yield f"worker {worker} ends without the contribution of {_told(self._everyone & ~has)} to {chunk}"
                elif term != held[0][1]:
                    yield f"worker {worker} has summed chunk {chunk} in another order than worker 0"


def _told(contributions: int) -> str:
    """Name the workers whose contributions these are."""
    workers = [worker for worker in range(contributions.bit_length()) if contributions >> worker & 1]
    return f"worker {workers[0]}" if len(workers) == 1 else f"workers {', '.join(map(str, workers))}"
