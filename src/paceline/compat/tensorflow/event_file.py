"""Reads the scalars of one event file of TensorBoard, while a program writes it.

A file is a row of records: the length of the data in 8 bytes, its checksum in 4, the data, and its checksum in 4. The
data is an `Event` message of TensorBoard's own protocol. A record that is not there wholly is read later.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any

from paceline.regular_files import open_regular

__all__ = ["EventFile", "Scalar"]

HEADER_BYTES, FOOTER_BYTES = 12, 4
MOST_RECORD = 1 << 16  # bytes: a record of scalars is smaller; graphs and pictures are passed over
MOST_LENGTH = 1 << 31  # protocol buffers are no longer: the file is damaged
MOST_READ = 4 << 20  # bytes of one reading
FLOATS = {1: ("float_val", "<f"), 2: ("double_val", "<d")}  # of a tensor, by the number of its type


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """One value that a program has written."""

    tag: str
    step: int
    value: float
    time: float


class EventFile:
    """One file, read from its beginning; `read` goes on where it ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = 0
        self._is_damaged = False

    def read(self, *, is_last: bool = False) -> list[Scalar]:
        """Return the scalars that have come since the last call, of a few megabytes at most unless it `is_last`; none
        of a damaged file."""
        found: list[Scalar] = []
        if self._is_damaged:
            return found
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                until = size if is_last else self._begin + MOST_READ
                while self._begin + HEADER_BYTES <= size and self._begin < until:
                    file.seek(self._begin)
                    (length,) = struct.unpack_from("<Q", file.read(HEADER_BYTES))
                    if length >= MOST_LENGTH:
                        self._is_damaged = True
                        break
                    end = self._begin + HEADER_BYTES + length + FOOTER_BYTES
                    if end > size:
                        break
                    found += _scalars(file.read(length)) if length <= MOST_RECORD else ()
                    self._begin = end
        except (OSError, struct.error):  # it was removed, or cut off
            pass
        return found


def _scalars(data: bytes) -> list[Scalar]:
    """The scalars of a record, as TensorFlow 1 and 2 write them."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2  # 0.3 s, which a program without event files does not cost

    messages: Any = event_pb2  # its classes are made at run time
    try:
        event = messages.Event.FromString(data)
    except DecodeError:
        return []
    known = ((value.tag, _number(value)) for value in event.summary.value)
    return [Scalar(tag, event.step, number, event.wall_time) for tag, number in known if number is not None]


def _number(value: Any) -> float | None:
    """The number of a summary's value; None where it is something else."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.tensor.dtype not in FLOATS or value.tensor.tensor_shape.dim:
        return None
    name, layout = FLOATS[value.tensor.dtype]
    numbers = getattr(value.tensor, name)
    if len(numbers) == 1:
        return float(numbers[0])
    content = value.tensor.tensor_content
    return float(struct.unpack(layout, content)[0]) if len(content) == struct.calcsize(layout) else None
