"""Horovod programs whose workers are lost, stand still or leave: every wait ends, with Horovod's error."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import horovod_workers
import paceline.compat.horovod as hvd
from paceline.compat.horovod.control import LOOK_S
from paceline.worker import program_worker
from shared_memory_workers import LIMIT_S

FAR = 8 << 20  # numbers: the sum takes long enough to be killed in it


def killed_while_others_wait(rank: int, size: int, victim: int) -> str:
    hvd.init()
    hvd.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(4), name="gradient")
    with pytest.raises(hvd.HorovodInternalError):  # and at once from then on
        hvd.allgather(torch.ones(4))
    hvd.shutdown()
    return str(error.value)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_is_an_error_on_all_others(tmp_path: Path, victim: int) -> None:
    """Rank 0 coordinates: its loss is heard as well."""
    began = time.monotonic()
    workers = horovod_workers.start(tmp_path, 3, lambda rank, size: killed_while_others_wait(rank, size, victim))
    values = workers.values(killed=[victim])
    assert time.monotonic() - began < LIMIT_S / 2  # long before any limit: the loss itself is noticed
    for rank, value in enumerate(values):
        if rank != victim:
            assert f"rank {victim}" in value


def killed_in_a_sum(rank: int, size: int) -> str:
    hvd.init()
    hvd.barrier()
    try:  # from the first call on: the others may be faster, and gone
        handle = hvd.allreduce_async(torch.ones(FAR), name="large")
        hvd.poll(handle)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.synchronize(handle)
        hvd.allreduce(torch.ones(1))
    except hvd.HorovodInternalError as error:
        return str(error)
    return ""


def test_a_worker_that_is_killed_in_the_middle_of_a_sum_is_an_error(tmp_path: Path) -> None:
    values = horovod_workers.start(tmp_path, 3, killed_in_a_sum).values(killed=[1])
    assert all("lost" in values[rank] for rank in (0, 2))


def missing(rank: int, size: int, logged: Path) -> str:
    os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="0.5", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2")
    logging.basicConfig(filename=logged / f"log_{rank}")
    hvd.init()
    said = ""
    if rank == 1:
        while not (logged / "given_up_0").exists() or not (logged / "given_up_2").exists():
            time.sleep(0.01)
    else:
        with pytest.raises(hvd.HorovodInternalError) as error:
            hvd.allreduce(torch.ones(1), name="weight")
        said = str(error.value)
        (logged / f"given_up_{rank}").touch()
    assert hvd.allreduce(torch.ones(1), name="other").item() == 1.0  # the session goes on
    return said


def test_what_a_rank_does_not_submit_is_reported_and_fails_at_the_limit(tmp_path: Path) -> None:
    values = horovod_workers.start(tmp_path, 3, lambda rank, size: missing(rank, size, tmp_path)).values()
    for rank in (0, 2):
        assert "allreduce.weight" in values[rank]
        assert "ranks 1" in values[rank]
    assert "allreduce.weight has waited for" in (tmp_path / "log_0").read_text()


def leaves(rank: int, size: int) -> str:
    hvd.init()
    hvd.barrier()
    if rank == 1:
        hvd.shutdown()
        return ""
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    return str(error.value)


def test_a_rank_that_shuts_down_is_an_error_for_those_that_want_it(tmp_path: Path) -> None:
    values = horovod_workers.start(tmp_path, 3, leaves).values()
    assert "rank 1 has shut Horovod down" in values[0]
    assert "rank" in values[2]  # 1, or 0 if that has left by then


def program_ends(rank: int, size: int) -> float:
    hvd.init()
    hvd.barrier()
    program_worker._places.clear()  # as at the program's end, before its session is closed
    if rank == 1:
        time.sleep(2.5 * LOOK_S)  # rank 0 waits for this one, and its control thread looks twice meanwhile
    found = hvd.allreduce(torch.ones(1)).item()
    hvd.shutdown()
    return found


def test_what_is_under_way_while_the_program_ends_is_done(tmp_path: Path) -> None:
    """Rank 0 looks after what it waits for meanwhile."""
    assert horovod_workers.start(tmp_path, 2, program_ends).values() == [1.0, 1.0]


def coordinator_leaves(rank: int, size: int) -> float:
    pair = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[pair])
    if rank == 0:
        hvd.shutdown()
        while not (Path(os.environ["SCRATCH"]) / "done").exists():
            time.sleep(0.01)
        return 0.0
    found = [hvd.allreduce(torch.tensor([float(rank)]), process_set=pair, op=hvd.Sum).item() for _ in range(20)]
    hvd.shutdown()
    (Path(os.environ["SCRATCH"]) / "done").touch()
    return sum(found)


def test_others_go_on_after_the_coordinator_has_shut_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert horovod_workers.start(tmp_path, 3, coordinator_leaves).values() == [0.0, 60.0, 60.0]
