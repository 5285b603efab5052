"""The console of hosts that print into files on a shared disk."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ConsoleFiles"]

MOST_BYTES = 1 << 20  # at one look, of each file


class ConsoleFiles:
    """Reads what is appended to files of a directory; new files are found as they come. A name in `skip` has as many
    bytes that are not shown."""

    def __init__(self, folder: Path, pattern: str, skip: Mapping[str, int] | None = None) -> None:
        self._folder, self._pattern = folder, pattern
        self._read = dict(skip or {})
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._partial: dict[str, str] = {}

    def read(self) -> str:
        """Return the whole lines that are new; a partial one waits for its end."""
        found = list[str]()
        for path in sorted(self._folder.glob(self._pattern)):
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path.name, 0))
                    data = file.read(MOST_BYTES)
            except OSError:  # it is being written anew
                continue
            self._read[path.name] = self._read.get(path.name, 0) + len(data)
            decoder = self._decoders.setdefault(path.name, codecs.getincrementaldecoder("utf-8")(errors="replace"))
            text = self._partial.pop(path.name, "") + decoder.decode(data)
            whole, newline, rest = text.rpartition("\n")
            found.append(whole + newline)
            if rest:
                self._partial[path.name] = rest
        return "".join(found)

    def close(self) -> None:
        """Nothing is held open."""
