"""The loop over asynchronous batches without servers and other workers: in which order it notes, reports and waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.plan import ParameterServer, Plan
from paceline.schedule.staleness_clock import AsyncBatch, StreamEnd
from paceline.worker.loop.async_batches import AsyncBatches

BATCH = SimpleNamespace(micros=(), chosen=None, stream="train", step=1)


class Pretended:
    """All that a loop calls writes down its name here, and answers as is given, or nothing. It is given two batches."""

    def __init__(self, **answers: Any) -> None:
        self.called: list[str] = []
        self._answers = {"next": iter([AsyncBatch(0, 0), AsyncBatch(1, 1), StreamEnd()]), **answers}
        self.step, self.behind, self.pending_commits, self.is_sent, self.ranks = 0, None, [], False, (0,)
        self.max_steps = self.save_every = None
        self.is_newcomer = False
        self.cursor = SimpleNamespace(epoch=0, position=0)
        self.source = SimpleNamespace(name="train")
        self.plan = Plan(sync=ParameterServer(staleness=None))
        self.place = self.group = self.consensus = self.recorder = self.models = self.files = self
        self.reducers = self.async_gradients = self.ledger = self

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            if name != "begin":  # of the flight recorder
                self.called.append(name)
            answer = self._answers.get(name)
            if isinstance(answer, Iterator):
                answer = next(answer)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call

    def batches(self) -> Iterator[Any]:
        other: Any = self
        whole = AsyncBatches(other, step_log=other, save=other.save, stop=other.stop, forget=other.forget)
        return whole.batches(other)

    def between(self, first: str, last: str) -> list[str]:
        """What was called from the first of these to the next of the others."""
        begin = self.called.index(first)
        return self.called[begin : self.called.index(last, begin) + 1]


def test_what_is_done_is_noted_and_told_before_it_is_waited_for_enough_workers() -> None:
    loop = Pretended(batch_at=BATCH, num_left=2, is_committed=True)
    assert len(list(loop.batches())) == 2
    assert loop.between("open", "next") == ["open", "pass_over", "close", "recorded", "await_enough", "next"]


def test_an_error_in_the_middle_of_a_step_that_is_caught_in_the_loop_gives_the_batch_back() -> None:
    loop = Pretended(batch_at=BATCH, num_left=2, is_committed=False)
    for _ in loop.batches():
        loop.is_sent = True
    assert loop.between("open", "next") == ["open", "is_committed", "leave", "give_back", "await_enough", "next"]


@pytest.mark.parametrize("is_committed", [False, True])
def test_who_breaks_the_loop_off_has_left_it(is_committed: bool) -> None:
    loop = Pretended(batch_at=BATCH, num_left=2, is_committed=is_committed)
    for _ in loop.batches():
        break
    noted = ["leave", "forget", "recorded", "leave", "refresh"] if is_committed else ["leave", "forget", "leave"]
    assert loop.called[loop.called.index("is_committed") + 1 :] == noted


def test_who_is_interrupted_while_it_waits_has_left_the_loop() -> None:
    loop = Pretended(next=KeyboardInterrupt(), num_left=2, is_committed=False)
    with pytest.raises(KeyboardInterrupt):
        list(loop.batches())
    assert loop.called[-3:] == ["leave", "forget", "leave"]
