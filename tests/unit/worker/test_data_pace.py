"""The sentence on how fast data is read, and how fast it is used: once, and a warning with the option that helps."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from paceline.worker.data.data_loading import open_loader
from paceline.worker.data.read_meter import ReadMeter
from paceline.worker.loop.data_pace import DataPace, PaceWindow, pace_text


def window(*, wait: float, read: float, samples: int = 1000, busy: float = 1.0) -> PaceWindow:
    return PaceWindow(
        num_steps=10, num_samples=samples, wait_s=wait, busy_s=busy, read_s=read, num_bytes=samples * 20_000
    )


@pytest.mark.parametrize(
    ("seen", "loaders", "cores", "lacks", "says"),
    [
        (
            window(wait=0.05, read=1.6),
            2,
            8,
            False,
            r"reads 1,250 samples/s on each worker \(2 loader processes, 25 MB/s\)",
        ),
        (window(wait=0.05, read=1.6), 2, 8, False, r"the step needs 1,000$"),
        (window(wait=1.0, read=2.0), 1, 8, True, r"50% of the time it waits.*loaders=3 \(num_workers\)"),
        (window(wait=1.0, read=1.0), 0, 8, True, r"in the worker itself, 20 MB/s.*loaders=2"),
        (window(wait=4.0, read=20.0), 4, 6, True, r"loaders=6 \(num_workers\)"),
        (window(wait=1.0, read=2.0), 1, 1, True, r"One process at most.*ShardedStream divides it"),
        (window(wait=4.0, read=20.0), 6, 6, True, r"More loaders than cores do not help"),
        (window(wait=0.5, read=1.0), 4, 8, True, r"enough on average. Read further ahead: prefetch=4"),
    ],
)
def test_what_is_said_names_both_rates_and_what_helps(
    seen: PaceWindow, loaders: int, cores: int, lacks: bool, says: str
) -> None:
    text, found = pace_text(seen, name="train", loaders=loaders, prefetch=2, most_loaders=cores)
    assert found is lacks
    assert __import__("re").search(says, text), text


class Slow(Dataset[Any]):
    def __getitem__(self, number: int) -> Any:
        return torch.zeros(3, 100)


class SlowStream(IterableDataset[Any]):
    dataset = None

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            yield torch.zeros(3, 100)


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize("kind", [Slow, SlowStream])
def test_the_time_comes_with_the_data_from_any_process(kind: Any, loaders: int) -> None:
    reader, meter = kind(), ReadMeter()
    reader.dataset = None
    requests: Any = [0, 1, 2, 3] if kind is Slow else None
    items = open_loader(reader, requests, loaders=loaders, prefetch=2, pin=False, timeout_s=60, meter=meter)
    assert len([next(items) for _ in range(3)]) == 3
    read_s, num_bytes = meter.take()
    assert read_s > 0 and num_bytes == 3 * 1200
    assert meter.take() == (0.0, 0)
    assert len(list(items)) == 1, "it ends where the reader does"


def test_one_sentence_comes_after_the_first_steps_and_a_lack_is_warned_of_later() -> None:
    told, warned = list[str](), list[str]()
    pace = DataPace(tell=told.append, warn=lambda text, once: warned.append(once), is_first=True)
    source = types.SimpleNamespace(name="train", loaders=1, prefetch=2, lanes=(), is_endless=False)
    stream: Any = types.SimpleNamespace(source=source, meter=ReadMeter(), num_samples=100)
    pace.opened(stream)
    batch = cast("Any", types.SimpleNamespace(stream="train", micros=[types.SimpleNamespace(num_samples=16)]))

    def step(wait_s: float, read_s: float) -> None:
        stream.meter.read_s += read_s
        pace.step(batch, {"data": wait_s, "total": wait_s + 0.5})

    for _ in range(3):
        step(9.0, 9.0)  # loader processes start
    for _ in range(9):
        step(0.0, 0.25)
    assert not told
    step(0.0, 0.25)
    assert told == ["data: stream 'train' reads 64 samples/s on each worker (1 loader process), the step needs 32"]
    for _ in range(120):
        step(0.5, 1.0)
    assert len(told) == 1 and warned == ["pace of train", "pace of train"]
