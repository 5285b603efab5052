"""Readings: one at a time, short ones at once, long ones and those beside a long one in the thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from paceline.ui import reader as module
from paceline.ui.reader import Reader

LIMIT_S = 20.0


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def test_a_short_reading_that_comes_again_is_done_at_once(reader: Reader) -> None:
    async def look() -> None:
        first = await reader.read_often("a run", threading.get_ident)
        again = await reader.read_often("a run", threading.get_ident)
        other = await reader.read_often("another run", threading.get_ident)
        assert first == other != threading.get_ident() == again

    asyncio.run(look())


def test_a_long_reading_stays_in_the_thread_until_it_has_been_short_for_some_time(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def lasting(seconds: float) -> int:
        now[0] += seconds
        return threading.get_ident()

    async def look() -> None:
        await reader.read_often("a run", lambda: lasting(2 * module.AT_ONCE_S))
        were_here = [
            await reader.read_often("a run", lambda: lasting(0.001)) == threading.get_ident() for _ in range(30)
        ]
        assert were_here == sorted(were_here)
        assert 10 < were_here.count(False) < 20  # 0.95 ** 14 is less than a half

    asyncio.run(look())


def test_no_reading_is_done_at_once_beside_one_of_the_thread(reader: Reader) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def long() -> None:
        has_begun.set()
        assert may_end.wait(LIMIT_S)

    async def look() -> None:
        await reader.read_often("a run", int)
        other = asyncio.create_task(reader.read(long))
        await asyncio.to_thread(has_begun.wait, LIMIT_S)
        waiting = asyncio.create_task(reader.read_often("a run", threading.get_ident))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        may_end.set()
        assert await waiting != threading.get_ident()
        await other

    asyncio.run(look())


def test_a_reading_whose_asker_has_gone_is_still_one_at_a_time(reader: Reader) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def long() -> None:
        has_begun.set()
        assert may_end.wait(LIMIT_S)

    async def look() -> None:
        await reader.read_often("a run", int)
        gone = asyncio.create_task(reader.read(long))
        await asyncio.to_thread(has_begun.wait, LIMIT_S)
        gone.cancel()
        waiting = asyncio.create_task(reader.read_often("a run", threading.get_ident))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        may_end.set()
        assert await waiting != threading.get_ident()

    asyncio.run(look())


def test_an_error_is_raised_where_it_was_asked_for_and_the_next_reading_goes_on(reader: Reader) -> None:
    def fails() -> None:
        raise ValueError("damaged")

    async def look() -> None:
        await reader.read_often("a run", int)
        with pytest.raises(ValueError, match="damaged"):
            await reader.read_often("a run", fails)
        assert await reader.read_often("a run", int) == 0
        assert await reader.read(int, lambda: 2) == 2

    asyncio.run(look())
