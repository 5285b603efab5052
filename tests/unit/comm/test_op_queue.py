"""The line of operations behind torch's collectives in shared memory: who does them, in which order, and what ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from paceline.comm.op_queue import OpQueue, QueuedOp

LIMIT_S = 10.0


@pytest.fixture
def queue() -> Iterator[OpQueue]:
    line = OpQueue(name="test-collectives")
    yield line
    line.close()


def noting(done: list[tuple[str, str]], name: str, hold: threading.Event | None = None) -> Callable[[], None]:
    def do() -> None:
        if hold is not None:
            hold.wait(LIMIT_S)
        done.append((name, threading.current_thread().name))

    return do


def test_who_waits_does_all_that_comes_before_and_nothing_that_comes_later(queue: OpQueue) -> None:
    done: list[tuple[str, str]] = []
    begun = [queue.begin(noting(done, name), result=name, is_awaited=True) for name in "abc"]
    assert begun[1].wait() and not begun[2].is_done
    here = threading.current_thread().name
    assert done == [("a", here), ("b", here)]


def test_what_nobody_waits_for_is_done_all_the_same_and_ends_its_future(queue: OpQueue) -> None:
    done: list[tuple[str, str]] = []
    first = queue.begin(noting(done, "first"), result=[1], is_awaited=False)
    assert first.future().wait() == [1]
    second = queue.begin(noting(done, "second"), result=[2], is_awaited=True)
    assert second.future().wait() == [2]  # who asks for a future may wait for it where nobody sees
    assert done == [("first", "test-collectives"), ("second", "test-collectives")]
    assert second.future().done()


def test_order_holds_when_a_thread_is_at_it_already(queue: OpQueue) -> None:
    done: list[tuple[str, str]] = []
    hold = threading.Event()
    queue.begin(noting(done, "held", hold), result=None, is_awaited=False)
    last = queue.begin(noting(done, "last"), result=None, is_awaited=True)
    assert not last.wait(0.01)  # the time is over
    hold.set()
    assert last.wait()
    assert [name for name, _ in done] == ["held", "last"]


def test_what_hangs_on_a_future_may_wait_for_operations_of_its_own(queue: OpQueue) -> None:
    done: list[tuple[str, str]] = []
    hold = threading.Event()
    first = queue.begin(noting(done, "first", hold), result=1, is_awaited=False)

    def chained(future: object) -> int:
        inner = queue.begin(noting(done, "inner"), result=2, is_awaited=False)
        return inner.future().wait() + 1

    chain = first.future().then(chained).then(lambda one: one.value() + 1)
    hold.set()
    assert chain.wait() == 4
    late = queue.begin(noting(done, "late"), result=None, is_awaited=False)
    assert late.wait()
    assert [name for name, _ in done] == ["first", "inner", "late"]


def test_an_error_reaches_who_waits_and_the_future_and_not_the_next_one(queue: OpQueue) -> None:
    def fail() -> None:
        raise KeyError("a peer")

    failed = queue.begin(fail, result=None, is_awaited=True)
    future = failed.future()
    with pytest.raises(KeyError, match="a peer"):
        failed.wait()
    with pytest.raises(Exception, match="a peer"):
        future.wait()
    assert queue.begin(lambda: None, result=None, is_awaited=True).wait()


def test_after_the_end_the_line_is_done_by_those_who_wait(queue: OpQueue) -> None:
    done: list[tuple[str, str]] = []
    queue.begin(noting(done, "first"), result=None, is_awaited=False).wait()
    queue.close()
    assert queue.begin(noting(done, "last"), result=None, is_awaited=False).wait()
    assert done[-1] == ("last", threading.current_thread().name)


def test_what_was_broken_off_by_ctrl_c_is_over_for_everybody(queue: OpQueue) -> None:
    def broken_off() -> None:
        raise KeyboardInterrupt

    op = queue.begin(broken_off, result=None, is_awaited=True)
    for _ in range(2):  # a second wait raises the same at once
        with pytest.raises(KeyboardInterrupt):
            op.wait()
    assert op.is_done


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_the_future_of_what_was_broken_off_ends_and_says_so(queue: OpQueue, when: str) -> None:
    def broken_off() -> None:
        if when == "meanwhile":
            op.future()
        raise KeyboardInterrupt

    op = QueuedOp(broken_off, [1], queue)
    if when == "before":
        op.future()  # of what is not in the line yet: nobody else does it
    queue._queue.append(op)
    with pytest.raises(KeyboardInterrupt):
        op.wait()
    future = op.future()
    assert future.done()
    with pytest.raises(RuntimeError, match="broken off by KeyboardInterrupt"):
        future.wait()
