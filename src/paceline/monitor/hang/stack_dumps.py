"""Python stacks that workers wrote on request: found, shortened and worded.

The format is that of `faulthandler`: one dump after the other, the innermost frame first.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import re
from collections.abc import Sequence
from pathlib import Path

from paceline.comm.call_site import is_user_code, place_text
from paceline.comm.flight_recorder import STACKS_NAME
from paceline.regular_files import open_regular

__all__ = ["StackFile", "StackFrame", "newest_dump", "place_of", "stack_text"]

START = "Stack (most recent call first):"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
DUMP_BYTES = 1 << 17  # of the end of the file, at most


@dataclasses.dataclass(frozen=True, slots=True)
class StackFrame:
    path: str
    line: int
    function: str


class StackFile:
    """The file of one worker, to which each request adds a dump."""

    def __init__(self, worker_dir: Path) -> None:
        self.path = worker_dir / STACKS_NAME
        self._from = 0  # the dump that was asked for begins here
        self._size = -1

    def ask(self) -> None:
        """A dump is asked for now."""
        self._from, self._size = self._num_bytes(), -1

    def answer(self) -> tuple[StackFrame, ...] | None:
        """Return the frames, innermost first; None until they are there. Call it until they are.

        A dump is whole when the file has not grown between two calls.
        """
        size = self._num_bytes()
        is_whole = size > self._from and size == self._size
        self._size = size
        if not is_whole:
            return None
        try:
            with open_regular(self.path) as file:
                file.seek(max(self._from, size - DUMP_BYTES))
                return newest_dump(file.read().decode("utf-8", errors="replace"))
        except OSError:  # it was replaced meanwhile
            return None

    def _num_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def newest_dump(text: str) -> tuple[StackFrame, ...]:
    """The frames of the last dump."""
    matches = map(FRAME.match, text.rpartition(START)[2].splitlines())
    return tuple(StackFrame(match.group(1), int(match.group(2)), match.group(3)) for match in matches if match)


def place_of(frames: Sequence[StackFrame]) -> str:
    """Return the user's innermost line, "train.py:88 in load_image"; the innermost of all where none is the user's."""
    frame = next((frame for frame in frames if is_user_code(frame.path)), frames[0] if frames else None)
    return "" if frame is None else place_text(frame.path, frame.line, frame.function)


def stack_text(frames: Sequence[StackFrame]) -> str:
    """Return the frames as Python prints a traceback, the innermost last; runs of libraries' frames are one line."""
    lines: list[str] = []
    innermost_first = itertools.groupby(frames, key=lambda frame: is_user_code(frame.path))
    for users, run in [(users, list(run)) for users, run in innermost_first][::-1]:
        if users:
            for frame in reversed(run):
                lines.append(f'  File "{frame.path}", line {frame.line}, in {frame.function}')
                if source := linecache.getline(frame.path, frame.line).strip():
                    lines.append(f"    {source}")
        elif lines:  # not what has started the program
            inner = run[0]
            count = "1 frame" if len(run) == 1 else f"{len(run)} frames"
            lines.append(f"  ... {count} in libraries, the last: {place_text(inner.path, inner.line, inner.function)}")
    if not lines and frames:
        lines.append(f"  {place_text(frames[0].path, frames[0].line, frames[0].function)}")
    return "\n".join(lines)
