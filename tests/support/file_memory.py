"""What of a file is in this process's memory."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["resident_kib"]


def resident_kib(file: Path) -> int:
    """Of all its mappings, as /proc/self/smaps says."""
    with open("/proc/self/smaps") as lines:
        found = re.findall(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", lines.read())
    return sum(map(int, found))
