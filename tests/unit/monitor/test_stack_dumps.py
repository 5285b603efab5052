"""Stacks of workers: found whole in a dump, asked for at any moment, and told beside the sentence of a hang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import quick
from paceline.comm.call_site import is_user_code
from paceline.comm.flight_recorder import (
    STACK_SIGNAL,
)
from paceline.monitor.hang.hang_detection import (
    HangDetector,
)
from paceline.monitor.hang.stack_dumps import StackFile, newest_dump, place_of, stack_text
from paceline.monitor.records.failure import Failure, explain

DUMP = """Stack (most recent call first):
  File "/usr/lib/python3.11/site-packages/PIL/Image.py", line 3 in open
  File "/home/u/train.py", line 88 in load_image
  File "/venv/lib/python3.11/site-packages/torch/utils/data.py", line 5 in fetch
  File "/home/u/train.py", line 20 in <module>
  File "<frozen runpy>", line 88 in run
"""


def test_the_users_innermost_line_is_found_in_a_dump() -> None:
    frames = newest_dump(DUMP)
    assert place_of(frames) == "train.py:88 in load_image"
    assert stack_text(frames).splitlines() == [
        '  File "/home/u/train.py", line 20, in <module>',
        "  ... 1 frame in libraries, the last: data.py:5 in fetch",
        '  File "/home/u/train.py", line 88, in load_image',
        "  ... 1 frame in libraries, the last: Image.py:3 in open",
    ]
    assert newest_dump(DUMP + DUMP.replace("line 88 in load_image", "line 99 in load_image"))[1].line == 99
    assert place_of(newest_dump("")) == ""


def test_a_dump_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_text(DUMP.replace("88", "77"))
    stack = StackFile(tmp_path)
    stack.ask()
    assert stack.answer() is None
    with open(path, "a") as file:
        file.write(DUMP[:60])
    assert stack.answer() is None, "it may still grow"
    with open(path, "a") as file:
        file.write(DUMP[60:])
    assert stack.answer() is None
    frames = stack.answer()
    assert frames is not None and place_of(frames) == "train.py:88 in load_image"


BUSY = """
import sys, threading
from paceline.worker.record.flight_recording import dump_stacks_on_signal

def deep(depth):
    return depth and deep(depth - 1)

def turn():
    while True:
        deep(50)

def aside():
    turn()

dump_stacks_on_signal(sys.argv[1])
threading.Thread(target=aside, daemon=True).start()
print("ready", flush=True)
turn()
"""


@pytest.mark.thorough
def test_a_process_of_busy_threads_lives_through_any_number_of_requests(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            stack = StackFile(tmp_path)
            for _ in quick.some(range(15), step=4):
                stack.ask()
                process.send_signal(STACK_SIGNAL)
                while (frames := stack.answer()) is None:
                    assert process.poll() is None
                    time.sleep(0.02)
                assert frames[-1].function == "<module>"
        finally:
            process.kill()
    stacks = (tmp_path / "stacks").read_text()
    assert "in aside" not in stacks, "a thread that runs meanwhile is not read"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/u/train.py", True),
        ("/tmp/ipykernel_1/2.py", True),
        ("/usr/lib/python3.11/queue.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/v/lib/python3.12/site-packages/torch/nn.py", False),
        ("<frozen importlib>", False),
        (HangDetector.look.__code__.co_filename, False),
    ],
)
def test_whose_file_it_is(path: str, expected: bool) -> None:
    assert is_user_code(path) is expected


def test_a_hang_is_explained_by_its_sentence_and_everybodys_stack() -> None:
    error = {"kind": "Hang", "message": "worker 1 has not entered x", "says_all": True, "names_workers": True}
    text = explain(
        [
            Failure(worker=1, host="a", pid=2, error={**error, "stacks": "worker 1:\n  train.py:88"}),
            Failure(worker=0, host="a", pid=1, signal=15, sent_by_us=True),
        ]
    )
    assert text.splitlines() == [
        "worker 1 has not entered x",
        "worker 1:",
        "  train.py:88",
        "worker 0 stopped because of it",
    ]
