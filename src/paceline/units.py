"""Numbers with units, as people read them: sizes, durations, counts.

Names in the code carry their unit (`num_bytes`, `timeout_s`); these functions are for the screen only.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

__all__ = [
    "GiB",
    "KiB",
    "MiB",
    "bytes_text",
    "count_text",
    "duration_text",
    "name_text",
    "printable",
    "shell_text",
    "workers_text",
]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30


# Of C0 all but tab and newline; DEL and C1; marks that change the direction of writing; Unicode's own line ends.
CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
CONTROLS = re.compile(f"[{CONTROL}]")
UNPASTED = re.compile(f"[{CONTROL}\t\n\udc80-\udcff]")  # in a command; the last are bytes that are no UTF-8
COLOR = re.compile("(\x1b\\[[0-9;]{0,40}m)")


def printable(text: str, *, colors: bool = False) -> str:
    """Return text in which control characters are spelled out ("\\x1b"), so that it cannot act on a terminal.

    Names and errors come from a user's data, or from another host. `colors`: sequences that set colors stay.
    """
    if colors:
        return "".join(part if COLOR.fullmatch(part) else printable(part) for part in COLOR.split(text))
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def name_text(name: str, *, most: int = 200) -> str:
    """Return a name as it is shown and stored: on one line, in characters that every encoding of text has, and cut.

    Names of metrics may come from file names (`os.fsdecode` gives lone surrogates) or from anywhere.
    """
    text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(name))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shell_text(*words: str) -> str:
    r"""Return words as they are pasted into bash; of one with control characters, each of these is spelled out.

    Example::

        shell_text("run", "a b", "c\x1b")  # r"run 'a b' $'c\x1b'"
    """
    return " ".join(_spelled_out(word) if UNPASTED.search(word) else shlex.quote(word) for word in words)


def _spelled_out(word: str) -> str:
    def codes(found: re.Match[str]) -> str:
        return "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0]))

    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{UNPASTED.sub(codes, escaped)}'"


def bytes_text(num_bytes: float) -> str:
    """Return a size in binary units, three digits or more: "512 B", "8.00 MiB", "1.95 GiB"."""
    return _scaled(num_bytes, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), base=1024)


def gigabytes_text(num_bytes: float) -> str:
    """Return decimal gigabytes without the unit, three digits: "0.289", "14.5", "80", "1280"."""
    value = num_bytes / 1e9
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def count_text(count: float) -> str:
    """Return a count in decimal units, three digits: "950", "12.3 k", "10.7 M", "1.20 G"."""
    return _scaled(count, ("", "k", "M", "G", "T"), base=1000)


def duration_text(seconds: float) -> str:
    """Return a duration in a fitting unit: "350 us", "12.5 ms", "1.85 s", "3 min 05 s", "2 h 04 min", "3 d 01 h"."""
    if seconds < 0:
        return "-" + duration_text(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:  # the limits are where three digits would round up to the next unit
        return f"{_three_digits(seconds * 1e6)} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    if (whole := round(seconds)) < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if (minutes := round(seconds / 60)) < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02} h"


def _scaled(value: float, units: tuple[str, ...], *, base: int) -> str:
    size, index = abs(float(value)), 0
    while size >= base - 0.5 and index < len(units) - 1:  # base - 0.5 would be printed as base
        size, index = size / base, index + 1
    digits = f"{size:.0f}" if index == 0 and size == round(size) else _three_digits(size)
    return f"{'-' if value < 0 else ''}{digits} {units[index]}".rstrip()


def _three_digits(value: float) -> str:
    """Three digits without an exponent; larger values keep all their whole digits."""
    for decimals, limit in ((2, 9.995), (1, 99.95)):
        if value < limit:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"


def workers_text(workers: Iterable[int]) -> str:
    """Return "worker 2" or "workers 0-3, 5"."""
    numbers = sorted(set(workers))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}{', ' if len(run) == 2 else '-'}{run[-1]}" for run in runs]
    return f"worker{'s' if len(numbers) != 1 else ''} {', '.join(parts)}"
