"""Lines of a run's files, and whole files, that cannot be read: they are passed over, and each file is named with the
first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from paceline.logs.log_reader import Unreadable
from paceline.monitor.records.run_files import local_path

__all__ = ["DamagedLines"]

T = TypeVar("T")
WIDTH = 40  # of a damaged line that is shown


class DamagedLines:
    """Collects them while files are read; costs O(files)."""

    def __init__(self) -> None:
        self._found: dict[Path, tuple[str, int]] = {}  # the first one, and how many

    def read(self, path: Path, lines: Iterable[str], parse: Callable[[str], T | None]) -> Iterator[T]:
        """Yield what lines of a file hold; `parse` returns None for a damaged one.

        The last one may have been cut off by a kill, which is no damage.
        """
        failed: str | None = None
        for line in lines:
            if failed is not None:
                self.note(path, failed)
                failed = None
            if isinstance(line, Unreadable):
                self.note(path, line)
                continue
            found = parse(line)
            if found is not None:
                yield found
            else:
                failed = line

    def note(self, path: Path, line: str) -> None:
        first, num = self._found.get(path, (line, 0))
        self._found[path] = first if isinstance(first, Unreadable) else first[:WIDTH], num + 1

    def texts(self) -> list[str]:
        """One sentence for each file."""
        return [
            f"{local_path(path)}: {first}" if isinstance(first, Unreadable) else _text(path, first, num)
            for path, (first, num) in sorted(self._found.items())
        ]


def _text(path: Path, first: str, num: int) -> str:
    return (
        f"{local_path(path)} has {'a line' if num == 1 else f'{num} lines'} that cannot be read and "
        f"{'was' if num == 1 else 'were'} left out, {'it' if num == 1 else 'the first'} begins with {first!r}"
    )
