"""Event files as TensorFlow writes them, read while they grow, and the rows that become of them."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2

from paceline.compat.tensorflow.event_file import EventFile, Scalar
from paceline.compat.tensorflow.program_scalars import ProgramRow, ProgramScalars

messages: Any = event_pb2  # its classes are made at run time
NAME = "events.out.tfevents.123.host.1.2.v2"
FLOAT, STRING = 1, 7  # types of tensors


def record(tag: str, step: int, value: float, *, time: float = 100.0, old: bool = False) -> bytes:
    """As `tf.summary.scalar` of TensorFlow 2 writes it, or of TensorFlow 1."""
    event = messages.Event(wall_time=time, step=step)
    said = event.summary.value.add(tag=tag)
    if old:
        said.simple_value = value
    else:
        said.tensor.dtype = FLOAT
        said.tensor.float_val.append(value)
    return framed(event.SerializeToString())


def framed(data: bytes) -> bytes:
    """A record; checksums are not looked at."""
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def append(path: Path, *records: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(records))
    return path


def test_scalars_of_both_kinds_are_read_once_and_only_whole(tmp_path: Path) -> None:
    begin = framed(messages.Event(file_version="brain.Event:2").SerializeToString())
    last = record("loss", 3, 0.25)
    path = append(tmp_path / NAME, begin, record("loss", 1, 0.5), record("loss", 2, 0.375, old=True), last[:20])
    file = EventFile(path)
    assert file.read() == [Scalar("loss", 1, 0.5, 100.0), Scalar("loss", 2, 0.375, 100.0)]
    assert file.read() == []
    append(path, last[20:])
    assert file.read() == [Scalar("loss", 3, 0.25, 100.0)]


def test_what_is_no_scalar_is_passed_over(tmp_path: Path) -> None:
    text = messages.Event(step=1)
    text.summary.value.add(tag="text").tensor.dtype = STRING
    text.summary.value[0].tensor.string_val.append(b"words")
    vector = messages.Event(step=1)
    vector.summary.value.add(tag="vector").tensor.dtype = FLOAT
    vector.summary.value[0].tensor.tensor_shape.dim.add(size=2)
    vector.summary.value[0].tensor.float_val.extend([1.0, 2.0])
    packed = messages.Event(step=2)
    packed.summary.value.add(tag="loss").tensor.dtype = FLOAT
    packed.summary.value[0].tensor.tensor_content = struct.pack("<f", 0.5)
    records = [framed(one.SerializeToString()) for one in (text, vector, packed)]
    path = append(tmp_path / NAME, framed(b"\xff\xff no message"), framed(bytes(1 << 17)), *records)
    assert EventFile(path).read() == [Scalar("loss", 2, 0.5, 0.0)]


def test_a_damaged_file_and_one_that_is_gone_have_nothing(tmp_path: Path) -> None:
    path = append(tmp_path / NAME, record("loss", 1, 0.5), struct.pack("<QI", 1 << 60, 0), bytes(100))
    file = EventFile(path)
    assert len(file.read()) == 1
    append(path, record("loss", 2, 0.5))
    assert file.read() == []
    assert EventFile(tmp_path / "none").read() == []


def test_numbers_of_steps_are_rows_of_these_steps(tmp_path: Path) -> None:
    path = append(tmp_path / "logs" / NAME, record("loss", 10, 0.5), record("accuracy", 10, 0.75))
    scalars = ProgramScalars()
    assert scalars.take([path]) == [ProgramRow(step=10, time=100.0, loss=0.5, metrics={"accuracy": 0.75})]
    append(path, record("loss", 20, math.nan, time=101.0))
    (row,) = scalars.take([], is_last=True)  # the program has closed it
    assert (row.step, row.time, row.metrics) == (20, 101.0, {}) and math.isnan(row.loss or 0.0)


def test_epochs_of_keras_are_steps_where_it_writes_no_others(tmp_path: Path) -> None:
    train = append(tmp_path / "train" / NAME, record("epoch_loss", 0, 0.5), record("epoch_loss", 1, 0.25, time=102.0))
    held_out = append(tmp_path / "validation" / NAME, record("epoch_loss", 1, 0.375, time=103.0))
    assert ProgramScalars().take([held_out, train]) == [
        ProgramRow(step=1, time=100.0, epoch=0, loss=0.5),
        ProgramRow(step=2, time=103.0, epoch=1, loss=0.25, metrics={"validation/epoch_loss": 0.375}),
    ]


def test_an_epochs_numbers_stand_at_its_last_step_where_keras_writes_steps_too(tmp_path: Path) -> None:
    batches = [record("batch_loss", step, 5 / step) for step in (10, 20)]
    train = append(tmp_path / "train" / NAME, *batches, record("epoch_loss", 0, 0.125, time=101.0))
    scalars = ProgramScalars()
    assert [(row.step, row.epoch, row.loss, row.metrics) for row in scalars.take([train])] == [
        (10, None, 0.5, {}),
        (20, None, 0.25, {}),
        (20, 0, None, {"epoch_loss": 0.125}),
    ]
    append(train, record("batch_loss", 30, 0.25, time=102.0))
    held_out = append(
        tmp_path / "validation" / NAME,
        record("epoch_loss", 0, 0.5, time=101.0),
        record("evaluation_loss_vs_iterations", 20, 0.5, time=101.0),
    )
    assert [(row.step, row.epoch, row.loss, row.metrics) for row in scalars.take([train, held_out])] == [
        (20, 0, None, {"validation/epoch_loss": 0.5}),
        (20, None, None, {"validation/evaluation_loss_vs_iterations": 0.5}),
        (30, None, 0.25, {}),
    ]


def test_the_same_tag_of_another_folder_has_the_folders_name_before_it(tmp_path: Path) -> None:
    paths = [append(tmp_path / name / NAME, record("loss", 5, value)) for name, value in (("one", 0.5), ("two", 0.25))]
    assert ProgramScalars().take(paths) == [ProgramRow(step=5, time=100.0, loss=0.5, metrics={"two/loss": 0.25})]
