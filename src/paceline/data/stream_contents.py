"""What the lanes of a stream are made of, in a few words: two lists of files that differ have other words.

The order of samples follows from the list. So the words are part of the order's name, by which workers are compared,
and a resume with a checkpoint.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from typing import Any

__all__ = ["contents_of"]


def contents_of(what: str, parts: Sequence[Any], *, also: str = "") -> str:
    """Return such as "70 files 1a2b3c4d". `also`: what else the order follows from.

    Where all parts are paths or addresses, the checksum is of their names in order: below the folder that holds all, so
    that they may lie elsewhere the next time, and without the query of an address, in which credentials change.
    """
    told = [*_names(parts), also] if also else _names(parts)
    number = f"{len(parts)} {what}"
    return f"{number} {zlib.crc32(chr(0).join(told).encode(errors='surrogateescape')):08x}" if told else number


def _names(parts: Sequence[Any]) -> list[str]:
    if not all(isinstance(one, (str, os.PathLike)) for one in parts):
        return []
    names = [os.fsdecode(one) for one in parts]
    plain = [name.partition("?")[0] if "://" in name else name for name in names]
    if len(set(plain)) == len(set(names)):
        names = plain
    first, last = min(names), max(names)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    begin = first.rfind("/", 0, shared) + 1  # behind the folder that holds all
    return [name[begin:] for name in names]
