"""How fast a script's data comes, beside what its steps take: the rates, and what is said of them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from paceline.doctor import loader_rates
from paceline.doctor.findings import ClusterFinding
from paceline.doctor.loader_rates import reading_rate
from paceline.doctor.measured import Examination, ReadingRate, ScriptReading, WorkerRates
from paceline.doctor.report import reading_lines
from paceline.doctor.script_findings import reading_findings, waiting_share
from paceline.plan import Plan
from paceline.worker.script_inspection import ScriptData

SLEEP_S = 0.002
WORKER = WorkerRates(
    rank=0,
    host="a",
    device="gpu",
    threads=4,
    cores=16,
    memory=16e9,
    runtime=0.3e9,
    matmul={"fp32": 1e11, "bf16": 2e11},
    memory_bandwidth=2e10,
    attention=5e10,
    launch_s=3e-6,
    disk_write=5e8,
    disk_read=1e9,
    interface="eth0",
    interface_rate=1.25e9,
    faster_interface=None,
)
RATE = ReadingRate(
    samples_per_s=100.0,
    bytes_per_sample=4000.0,
    stored_per_sample=1e5,
    busy_cores=1.0,
    first_s=0.5,
    loaders=2,
    prefetch=2,
    is_iterable=False,
)


class Slow(Dataset[torch.Tensor]):
    """A sample is of 100 numbers, and takes a while; those that were read are noted."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLEEP_S)
        self.read.append(index)
        return torch.zeros(100)


class Together(Slow):
    """A process's first sample is not read before each of four processes reads its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.meet = multiprocessing.get_context("fork").Barrier(4)

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.read:
            self.meet.wait(timeout=60)
        return super().__getitem__(index)


class Items(IterableDataset[torch.Tensor]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.zeros(self.number, 100)


class Files(Dataset[torch.Tensor]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.path.open("rb", buffering=0) as file:
            return torch.frombuffer(bytearray(file.read(50_000)), dtype=torch.uint8)[:100]


def data(dataset: Any, plan: str = "batch(size=8,micro=2)", **options: Any) -> ScriptData:
    return ScriptData.of(Plan.parse(plan), dataset, options)


def rate_of(given: ScriptData, *, index: int = 0, readers: int = 1, seconds: float = 0.05) -> ReadingRate:
    return reading_rate(given, index=index, readers=readers, seconds=seconds, pin=False, timeout_s=20.0)


def test_the_rate_is_that_of_the_dataset_and_bytes_are_those_of_its_tensors() -> None:
    dataset, began = Slow(), time.perf_counter()
    found = rate_of(data(dataset))
    took = time.perf_counter() - began
    assert (len(dataset.read) - 2) / took <= found.samples_per_s <= 1 / SLEEP_S, "the first two are not counted"
    assert found.bytes_per_sample == 400
    assert found.first_s >= 2 * SLEEP_S, "a micro-batch of two"
    assert (found.loaders, found.is_iterable) == (0, False)
    assert found.busy_cores < 0.8, "it sleeps most of the time"


def test_workers_read_different_samples() -> None:
    first, second = Slow(), Slow()
    rate_of(data(first, "batch(size=50,micro=5)"), index=0, readers=2, seconds=0.01)
    rate_of(data(second, "batch(size=50,micro=5)"), index=1, readers=2, seconds=0.01)
    assert first.read
    assert second.read
    assert not set(first.read) & set(second.read)


@pytest.mark.thorough
def test_loader_processes_read_at_the_same_time_and_what_they_read_before_does_not_count() -> None:
    found = rate_of(data(Together(), loaders=4), seconds=0.3)
    assert 0 < found.samples_per_s <= 4.4 / SLEEP_S


def test_bytes_of_files_are_counted_and_those_of_memory_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    assert rate_of(data(Files(path))).stored_per_sample == pytest.approx(50_000, rel=0.1)
    in_memory = rate_of(data(TensorDataset(torch.zeros(64, 100)))).stored_per_sample
    assert in_memory < 5_000, "what the measurement itself reads, where a busy machine gives time for two samples"


class Counted(Dataset[torch.Tensor]):
    """The kernel counts so many bytes that calls have read, and so many from the disk, for each sample."""

    def __init__(self, counts: Path, by_calls: int, from_disk: int) -> None:
        self.counts, self.more = counts, (by_calls, from_disk)
        self.note(1_000, 9_000_000)

    def note(self, by_calls: int, from_disk: int) -> None:
        self.found = by_calls, from_disk
        self.counts.write_text(f"rchar: {by_calls}\nread_bytes: {from_disk}\n")

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.note(self.found[0] + self.more[0], self.found[1] + self.more[1])
        return torch.zeros(100)


@pytest.mark.parametrize(("by_calls", "from_disk"), [(50_000, 100), (100, 50_000)])
def test_what_the_process_had_read_before_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_calls: int, from_disk: int
) -> None:
    """Libraries, for one, which are mapped from the disk."""
    monkeypatch.setattr(loader_rates, "PROC", tmp_path)
    (tmp_path / str(os.getpid())).mkdir()
    found = rate_of(data(Counted(tmp_path / str(os.getpid()) / "io", by_calls, from_disk)))
    assert found.stored_per_sample == 50_000


def test_an_iterable_is_read_by_steps_of_which_a_worker_has_its_part() -> None:
    found = rate_of(data(Items(20)), index=1, readers=2)
    assert found.samples_per_s > 0
    assert found.bytes_per_sample == 400
    assert found.is_iterable


@pytest.mark.parametrize(
    ("dataset", "plan", "says"),
    [
        (Items(0), "batch(size=8,micro=2)", "gives this worker no sample"),
        (TensorDataset(torch.zeros(4, 1)), "batch(size=8,micro=2,drop_last=true)", "give worker 0 of 1 none"),
        (TensorDataset(torch.zeros(0, 1)), "batch(size=8,micro=2)", "give worker 0 of 1 none"),
        (DataLoader(TensorDataset(torch.zeros(4, 1)), 8, drop_last=True), "batch(size=8)", "give worker 0 of 1 none"),
    ],
)
def test_what_gives_nothing_is_an_error_and_no_endless_wait(dataset: Any, plan: str, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        rate_of(data(dataset, plan))


def test_both_names_of_an_option_count() -> None:
    def own(items: list[Any]) -> Any:
        return default_collate(items)

    first, second = data(Items(1), collate=own, loaders=3), data(Items(1), collate_fn=own, num_workers=3)
    assert first.request.collate is second.request.collate is own
    assert first.request.loaders == second.request.loaders == 3
    assert data(Items(1)).request.loaders == 0


@pytest.mark.parametrize(
    ("loaders", "samples_per_s", "share"),
    [
        (0, 100.0, 0.5),  # as long as a step, and before it
        (0, 300.0, 0.25),
        (2, 100.0, 0.0),  # meanwhile
        (2, 50.0, 0.5),
        (2, 1000.0, 0.0),
    ],
)
def test_the_share_of_waiting(loaders: int, samples_per_s: float, share: float) -> None:
    one = dataclasses.replace(RATE, loaders=loaders, samples_per_s=samples_per_s)
    assert waiting_share(one, 100.0) == pytest.approx(share)


def found_for(appetite: float, *, worker: WorkerRates = WORKER, **changed: Any) -> list[ClusterFinding]:
    rates = [dataclasses.replace(RATE, **changed), dataclasses.replace(RATE, samples_per_s=1e9)]
    workers = [worker, dataclasses.replace(worker, rank=1)]
    seen = Examination(workers=workers, hosts=1, pairs=[], all_reduce=[], took_s=1.0, torch="2")
    reading = ScriptReading(script="train.py", rates=rates, problem=None, plan="replicas=2", appetite=appetite)
    return reading_findings(reading, seen)


def test_data_that_comes_fast_enough_is_no_finding() -> None:
    assert found_for(90.0) == []


def test_more_loaders_are_advised_by_what_one_gives() -> None:
    (one,) = found_for(240.0)
    assert one.where == "worker 0 (a)", "the slowest of the host"
    assert one.what.startswith("waits for data 58 % of the time: 100 samples/s come with loaders=2")
    assert "loaders=5)" in one.remedy, "240 / 50"
    assert one.remedy.startswith("Use worker.batches"), "16 / 2 cores, and one keeps the GPU busy"


def test_loaders_without_cores_for_them_are_no_remedy() -> None:
    (one,) = found_for(240.0, worker=dataclasses.replace(WORKER, cores=8))
    assert "5 keep 5.0 cores busy. But 3 of the host's 8 cores are free" in one.remedy
    on_cpu = dataclasses.replace(WORKER, device="cpu", threads=8)
    (one,) = found_for(240.0, worker=on_cpu)
    assert "But 0 of the host's 16 cores are free" in one.remedy, "a CPU computes with its threads"
    (one,) = found_for(240.0, worker=on_cpu, busy_cores=0.04)
    assert "Use worker.batches(..., loaders=5): " in one.remedy, "they wait for a disk, and leave the cores alone"


def test_a_disk_that_cannot_give_it_is_the_limit() -> None:
    (one,) = found_for(240.0, worker=dataclasses.replace(WORKER, disk_read=4.7e7))
    assert "48 MB/s of files" in one.remedy, "two workers of 1e5 bytes x 240"
    assert "faster disk" in one.remedy
    assert "loaders" not in one.remedy


def test_an_iterable_has_one_process() -> None:
    (one,) = found_for(240.0, is_iterable=True, loaders=1)
    assert "one process" in one.remedy
    assert "len() and []" in one.remedy


def test_a_script_that_could_not_be_read_is_a_finding() -> None:
    seen = Examination(workers=[WORKER], hosts=1, pairs=[], all_reduce=[], took_s=1.0, torch="2")
    reading = ScriptReading(script="train.py", rates=[], problem="on worker 0: ValueError: no such file")
    (one,) = reading_findings(reading, seen)
    assert "no such file" in one.what
    (first, _) = reading_lines(reading, [one])
    assert first.startswith("finding  train.py: how fast its data comes could not be measured")


def test_both_rates_are_shown_and_an_unknown_appetite_with_its_reason() -> None:
    reading = ScriptReading(script="train.py", rates=[RATE], problem=None, plan="replicas=2", appetite=90.0)
    lines = list(reading_lines(reading, []))
    assert lines[0].startswith("data     100 samples/s on each worker with loaders=2, the first after 500 ms")
    assert "97.7 KiB read from files" in lines[0]
    assert lines[1] == "data     90 samples/s is what each worker's steps will take, as predicted for replicas=2"
    assert lines[2] == "findings none: the data of train.py comes as fast as steps take it"
    unknown = dataclasses.replace(reading, appetite=None, no_appetite="it has no stepper")
    assert list(reading_lines(unknown, []))[1:] == ["data     what steps will take is not known: it has no stepper"]
