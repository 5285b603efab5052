"""One worker's part of an all-reduce: its sends and receives in order, and what each has to wait for.

A round is not a barrier. A send begins as soon as everything that it carries was received. A received chunk is written
as soon as it has arrived, and its old content was sent. Both conditions are numbers: how many of the worker's receives,
or sends, must be done, counted from the first one.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from paceline.schedule.allreduce.rounds import Round, Schedule, Send

__all__ = ["Program", "ReceiveStep", "SendStep", "program_of"]


class SendStep(NamedTuple):
    """A send; it begins when `num_received` receives are done."""

    to: int
    first: int
    stop: int
    num_received: int


class ReceiveStep(NamedTuple):
    """A receive; its data are written when `num_sent` sends and all earlier receives are done."""

    source: int
    first: int
    stop: int
    adds: bool
    num_sent: int
    round: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One worker's part of a schedule."""

    name: str
    num_chunks: int
    num_rounds: int  # of the whole schedule
    rounds: tuple[tuple[Round, Round], ...]  # what it sends and receives in each
    sends: tuple[SendStep, ...]
    receives: tuple[ReceiveStep, ...]


def program_of(schedule: Schedule, worker_index: int) -> Program:
    """Return the part of one worker."""
    sends: list[SendStep] = []
    receives: list[ReceiveStep] = []
    sent_from, received_at = [0] * schedule.num_chunks, [0] * schedule.num_chunks  # by chunk: so many, up to the last
    mine: list[tuple[Round, Round]] = []
    for number, each in enumerate(schedule.rounds):
        out = tuple(send for send in each if send.source == worker_index)
        into = tuple(send for send in each if send.target == worker_index)
        if out or into:
            mine.append((out, into))
        sends += [SendStep(send.target, send.first, send.stop, _last(received_at, send)) for send in out]
        receives += [
            ReceiveStep(send.source, send.first, send.stop, send.adds, _last(sent_from, send), number) for send in into
        ]
        for send in out:
            sent_from[send.first : send.stop] = [len(sends)] * (send.stop - send.first)
        for send in into:
            received_at[send.first : send.stop] = [len(receives)] * (send.stop - send.first)
    return Program(
        name=schedule.name,
        num_chunks=schedule.num_chunks,
        num_rounds=len(schedule.rounds),
        rounds=tuple(mine),
        sends=tuple(sends),
        receives=tuple(receives),
    )


def _last(counts: list[int], send: Send) -> int:
    return max(counts[send.first : send.stop])
