"""A worker's ring is read while it is written: what a reader sees is true, or nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.comm.flight_recorder import FILE_NAME, NOW, NOW_AT, FlightRecorder, read_flight_record

LOOKS = 4000
LONG_S = 60.0  # longer than anything here takes, shorter than any machine has been up that boots and runs tests


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Path]:
    """The ring of a process that enters, waits and leaves without a pause."""
    path = tmp_path / FILE_NAME
    recorder = FlightRecorder.create(path, worker=0, limit_s=600.0)
    recorder.join("generation 0", range(4), is_main=True)
    recorder.begin("forward and backward", 1)
    recorder.wait(recorder.enter("all_reduce", "gradients"))
    pid = os.fork()
    if pid == 0:
        while True:
            recorder.wait(recorder.enter("all_reduce", "gradients"))
            recorder.leave()
            recorder.begin("forward and backward", 1)
    yield path
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.thorough
def test_a_reader_never_sees_a_time_or_a_count_that_is_only_half_written(busy: Path) -> None:
    seen: list[tuple[float, float, float]] = []
    counts: list[int] = []
    while len(seen) < LOOKS or counts[-1] == counts[0]:  # at least until the other process has had its turn
        image = read_flight_record(busy, with_calls=False)
        assert image is not None
        seen.append((image.waited_s, image.idle_s, image.phase_s))
        counts += [group.entered for group in image.groups]
    assert max(max(ages) for ages in seen) < LONG_S
    assert counts == sorted(counts)


def test_a_wait_whose_beginning_is_not_written_yet_begins_now(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    recorder = FlightRecorder.create(path, worker=0, limit_s=600.0)
    serial = recorder.enter("all_reduce", "gradients")
    with open(path, "r+b") as file:  # as a writer leaves it that has lost its core between two numbers
        file.seek(NOW_AT)
        file.write(NOW.pack(0, serial, 0, 0, 1, b"forward"))
    image = read_flight_record(path)
    assert image is not None and image.waits_for == serial
    assert (image.waited_s, image.idle_s, image.phase_s) == (0.0, 0.0, 0.0)
