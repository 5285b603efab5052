"""A log that is sealed loses no line and doubles none, wherever its writer is killed, and with a full disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from paceline.logs import sealed_log
from paceline.logs.log_reader import last_lines, lines_of
from paceline.logs.sealed_log import LineLog, SealedMark, Sealing, sealed_path
from paceline.monitor.records.growing_log import GrowingLog


def merge(lines: Sequence[str]) -> list[str]:
    """Neighbors become one line, with the time of the last: by it a reader that lags tells what is new."""
    numbers = [number for line in lines for number in json.loads(line)["n"]]
    groups = [numbers[place : place + 3] for place in range(0, len(numbers), 3)]
    return [json.dumps({"n": group, "time": float(group[-1])}) for group in groups]


SEALING = Sealing(merge=merge, cut=lambda lines: max(0, len(lines) - 3), over_bytes=1 << 30)


def write(log: LineLog, first: int, last: int) -> None:
    for number in range(first, last + 1):
        log.write(json.dumps({"n": [number], "time": float(number)}))


def numbers(path: Path) -> list[int]:
    return [number for line in lines_of(path) for number in json.loads(line)["n"]]


def killed_at(line: int, path: Path) -> bool:
    """Seal in a process that is killed before the n-th new line that this executes; False: it has ended before."""
    pid = os.fork()
    if pid == 0:
        seen = set[tuple[str, int]]()

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename != sealed_log.__file__:
                return None
            if event == "line":
                seen.add((frame.f_code.co_name, frame.f_lineno))
            if len(seen) == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        log = LineLog(path, sealing=SEALING)
        sys.settrace(trace)
        log.seal()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.thorough
def test_a_kill_at_any_line_of_a_sealing_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path, last, kills = tmp_path / "log.jsonl", 10, 0
    log = LineLog(path, sealing=SEALING)
    write(log, 1, last)
    log.seal()
    log.close()
    while killed_at(kills + 1, path):
        kills += 1
        assert numbers(path) == list(range(1, last + 1))
        log = LineLog(path, sealing=SEALING)  # the successor goes on with what it finds, and leaves more to be sealed
        write(log, last + 1, last + 5)
        log.close()
        last += 5
        assert numbers(path) == list(range(1, last + 1))
    assert kills > 40
    assert numbers(path) == list(range(1, last + 1))
    assert sorted(number for line in last_lines(path) for number in json.loads(line)["n"]) == numbers(path)
    assert {one.name for one in tmp_path.iterdir()} == {"log.jsonl", "log.sealed.jsonl.gz"}


def test_what_lies_behind_the_sealed_bytes_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LineLog(path, sealing=SEALING)
    write(log, 1, 10)
    log.seal()
    whole = sealed_path(path).read_bytes()
    for torn in range(1, len(whole)):
        sealed_path(path).write_bytes(whole + whole[:torn])
        assert numbers(path) == list(range(1, 11))
    write(log, 11, 20)
    log.seal()
    log.close()
    assert numbers(path) == list(range(1, 21))


def test_sealed_lines_that_are_missing_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LineLog(path, sealing=SEALING)
    write(log, 1, 10)
    log.seal()
    log.close()
    sealed_path(path).unlink()
    assert "are lost" in next(lines_of(path))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_log_as_it_was_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, said = tmp_path / "log.jsonl", list[str]()
    ready = threading.Event()
    log = LineLog(path, sealing=Sealing(merge=merge, cut=SEALING.cut, over_bytes=200), say=said.append)
    with monkeypatch.context() as patched:
        patched.setattr(sealed_log.os, call, full)
        for number in range(1, 101):
            write(log, number, number)
            thread = log._thread
            if thread is not None:
                thread.join()
    ready.set()
    assert len(said) == 1 and "No space left" in said[0] and "free space there" in said[0]
    assert numbers(path) == list(range(1, 101)) and not lines_of_sealed(path)
    assert {one.name for one in tmp_path.iterdir()} <= {"log.jsonl", "log.sealed.jsonl.gz"}
    log.seal()
    log.close()
    assert numbers(path) == list(range(1, 101)) and lines_of_sealed(path)


def lines_of_sealed(path: Path) -> bool:
    with open(path) as file:
        return SealedMark.parse(file.readline()) is not None


def test_a_log_is_sealed_by_itself_while_it_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LineLog(path, sealing=Sealing(merge=merge, cut=SEALING.cut, over_bytes=500))
    reader, read = GrowingLog(path), list[int]()
    for number in range(1, 2001):
        write(log, number, number)
        if number % 7 == 0:
            read += [each for line in reader.poll() for each in json.loads(line)["n"]]
        if number % 50 == 0:
            assert numbers(path) == list(range(1, number + 1))
    log.close()
    read += [each for line in reader.poll(None) for each in json.loads(line)["n"]]
    reader.close()
    assert lines_of_sealed(path)
    assert sorted(set(read)) == list(range(1, 2001))


def test_a_reader_that_was_stopped_gets_what_was_sealed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LineLog(path, sealing=SEALING)
    reader = GrowingLog(path)
    write(log, 1, 4)
    assert len(reader.poll()) == 4
    for last in (10, 20, 30):
        write(log, last - 5 if last == 10 else last - 9, last)
        log.seal()
    late = GrowingLog(path)
    read = {number for line in reader.poll(None) for number in json.loads(line)["n"]}
    assert {number for line in late.poll(None) for number in json.loads(line)["n"]} == set(range(1, 31))
    log.close()
    reader.close()
    late.close()
    assert read >= set(range(28, 31)) and max(read) == 30
