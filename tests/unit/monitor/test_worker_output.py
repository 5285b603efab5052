"""What workers print is shown as it is or once, and tracebacks only where they say something new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.monitor.console.worker_output import SURVIVED_S, WorkerOutput

WARNING = '/home/me/train.py:12: UserWarning: odd data\n  warnings.warn("odd data")\n'
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    g(x)\nValueError: bad\n'


class Desk:
    """Workers' log files, an Output over them, and what it has shown."""

    def __init__(self, run: Path, workers: int, *, everyone: bool = False, hides_information: bool = False) -> None:
        self.directory, self.shown, self.now = run / "attempt_1", list[str](), 0.0
        for worker in range(workers):
            (self.directory / f"worker_{worker}").mkdir(parents=True)
        self.output = WorkerOutput(
            self.directory,
            range(workers),
            everyone=everyone,
            show=self.shown.append,
            hides_information=hides_information,
        )

    def write(self, worker: int, stream: str, text: str) -> None:
        with open(self.directory / f"worker_{worker}" / f"{stream}.log", "a", newline="") as file:
            file.write(text)

    def pass_time(self, seconds: float) -> list[str]:
        """Poll now and after `seconds`; return what came."""
        self.shown.clear()
        self.output.poll(self.now)
        self.now += seconds
        self.output.poll(self.now)
        return self.shown

    def finish(self, failed: set[int] = frozenset()) -> list[str]:  # type: ignore[assignment]  # only read
        self.shown.clear()
        self.output.finish(self.now, failed=failed)
        return self.shown


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, 3)
    yield desk
    desk.output.finish(0.0)


def test_standard_output_of_worker_0_is_shown_as_it_is_and_of_others_not(desk: Desk) -> None:
    desk.write(1, "stdout", "not this\n")
    desk.write(0, "stdout", "a\tb  \n\nhalf")
    assert desk.pass_time(0) == ["a\tb  \n"]
    desk.write(0, "stdout", " and half\nrest")
    assert desk.pass_time(0) == ["half and half"]
    assert desk.finish() == ["rest"]


def test_show_all_tags_the_lines_of_every_worker(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 2, everyone=True)
    desk.write(0, "stdout", "a\nb\n")
    desk.write(1, "stdout", "c\n")
    assert desk.pass_time(0) == ["[0] a\n[0] b", "[1] c"]
    desk.finish()


def test_equal_lines_of_standard_error_are_shown_once_tagged(desk: Desk) -> None:
    for worker in (0, 1):
        desk.write(worker, "stderr", "same\n")
    desk.write(2, "stderr", "other\n")
    assert desk.pass_time(1) == ["[workers 0, 1] same", "[worker 2] other"]
    desk.write(2, "stderr", "same\nother\n\n")
    assert desk.pass_time(1) == []


@pytest.mark.parametrize("is_hidden", [False, True])
def test_lines_of_information_are_left_out_only_where_the_run_asks_for_it(tmp_path: Path, is_hidden: bool) -> None:
    desk = Desk(tmp_path, 1, hides_information=is_hidden)
    told = ["I0000 00:00:1764340000.123456    4711 gpu_device.cc:20] found", "I1128 14:00:00.5  12 train.py:7] epoch 1"]
    error = "E1128 14:00:00.123456    4711 train.py:8] bad"
    desk.write(0, "stderr", "".join(f"{line}\n" for line in [*told, error]))
    assert desk.pass_time(1) == [f"[worker 0] {line}" for line in ([] if is_hidden else told) + [error]]
    desk.finish()


def test_a_warning_and_its_source_line_are_one_text(desk: Desk) -> None:
    for worker in range(3):
        desk.write(worker, "stderr", WARNING)
    assert desk.pass_time(1) == [f"[workers 0-2] {WARNING.rstrip()}"]


def test_a_source_line_that_comes_later_still_belongs_to_its_warning(desk: Desk) -> None:
    first, second = WARNING.splitlines(keepends=True)
    desk.write(1, "stderr", first)
    assert desk.pass_time(0) == []
    desk.write(1, "stderr", second)
    assert desk.pass_time(1) == [f"[worker 1] {WARNING.rstrip()}"]


def test_a_warning_without_a_source_line_is_shown_and_hides_nothing_after_it(desk: Desk) -> None:
    desk.write(0, "stderr", "x.py:1: DeprecationWarning: old\nplain\n")
    assert desk.pass_time(1) == ["[worker 0] x.py:1: DeprecationWarning: old", "[worker 0] plain"]
    desk.write(0, "stderr", "x.py:1: DeprecationWarning: older\n")
    assert desk.pass_time(1) == []
    assert desk.pass_time(1) == ["[worker 0] x.py:1: DeprecationWarning: older"]


def test_the_traceback_of_a_failing_worker_is_left_to_the_failure_report(desk: Desk) -> None:
    desk.write(2, "stderr", f"before\n{TRACEBACK}after\n")
    assert desk.pass_time(1) == ["[worker 2] before", "[worker 2] after"]
    assert desk.finish(failed={2}) == []


@pytest.mark.parametrize(
    "chain",
    [
        "\nDuring handling of the above exception, another exception occurred:\n\n",
        "\nThe above exception was the direct cause of the following exception:\n\n",
    ],
)
def test_chained_tracebacks_and_messages_of_several_lines_are_left_out_whole(desk: Desk, chain: str) -> None:
    text = TRACEBACK + "\tMissing key: a\n" + chain + TRACEBACK.replace("bad", "worse")
    desk.write(0, "stderr", text + "next\n")
    assert desk.pass_time(1) == ["[worker 0] next"]
    assert desk.finish()[0].startswith(
        "[worker 0] ValueError: worse (its traceback is in attempt_1/worker_0/stderr.log)"
    )


def test_the_tags_that_torch_puts_before_a_traceback_tell_where_its_message_ends(desk: Desk) -> None:
    lines = [*TRACEBACK.splitlines(), "of several lines", "", *TRACEBACK.splitlines(), "and again"]
    desk.write(1, "stderr", "".join(f"[rank1]: {line}\n" for line in lines))
    desk.write(1, "stderr", "[rank1]:[W1121 05:21:00.123456789 Group.cpp:12] Warning: not closed\n")
    assert desk.pass_time(1) == ["[worker 1] [rank1]:[W1121 05:21:00.123456789 Group.cpp:12] Warning: not closed"]
    assert desk.finish(failed={1}) == []


def test_a_traceback_that_its_worker_survived_is_told_in_one_line(desk: Desk) -> None:
    desk.write(1, "stderr", TRACEBACK)
    assert desk.pass_time(1) == []
    desk.now += SURVIVED_S
    assert desk.pass_time(0) == ["[worker 1] ValueError: bad (its traceback is in attempt_1/worker_1/stderr.log)"]
    assert desk.finish() == []


def test_of_a_progress_bar_the_last_state_is_shown(desk: Desk) -> None:
    desk.write(0, "stderr", "\r 0%\r 50%")
    assert desk.pass_time(1) == []
    desk.write(0, "stderr", "\r100%\n")
    assert desk.pass_time(1) == ["[worker 0] 100%"]


def test_unfinished_lines_come_at_the_end(desk: Desk) -> None:
    desk.write(1, "stderr", "cut off")
    assert desk.pass_time(1) == []
    assert desk.finish() == ["[worker 1] cut off"]
