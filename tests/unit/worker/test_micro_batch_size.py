"""The size of micro-batches: halved rounded up, kept in the run's state, and never made larger by it."""

from __future__ import annotations

import pytest

from paceline.host_memory import is_out_of_memory
from paceline.plan import Batch
from paceline.worker.data.micro_batch_size import MicroBatchSize


def test_halves_are_rounded_up_and_others_hear_of_them() -> None:
    sizes, heard = MicroBatchSize(Batch(size=40, micro=5)), list[int]()
    sizes.changed = lambda: heard.append(sizes.samples)
    for _ in range(4):
        sizes.halve()
    assert heard == [3, 2, 1, 1]
    assert (sizes.batch.size, sizes.batch.num_micro) == (40, 40)
    assert MicroBatchSize(Batch(size=40)).samples == 5, "the plan's default"


@pytest.mark.parametrize(
    ("planned", "start", "state", "samples"),
    [
        (16, None, {"planned": 16, "samples": 4}, 4),
        (16, 8, {"planned": 16, "samples": 16}, 8),  # a snapshot of before
        (16, 8, {"planned": 16, "samples": 4}, 4),
        (8, None, {"planned": 16, "samples": 4}, 8),  # the plan is another one
        (2, 8, {"planned": 2, "samples": 2}, 2),
    ],
)
def test_a_state_makes_them_smaller_and_never_larger(
    planned: int, start: int | None, state: dict[str, int], samples: int
) -> None:
    sizes = MicroBatchSize(Batch(size=64, micro=planned), start=start)
    sizes.load_state_dict(state)
    assert sizes.samples == samples
    assert sizes.state_dict() == {"planned": planned, "samples": samples}


def test_a_programs_own_loader_says_another_batch_which_stays_halved() -> None:
    sizes = MicroBatchSize(Batch(size=32, micro=4), start=6)
    sizes.adopt(Batch(size=20, micro=8, shuffle=False), is_even=False)
    assert (sizes.batch.size, sizes.samples) == (20, 6), "a restart has found fewer samples to fit"
    assert [micro.num_samples for micro in sizes.cut(40, 60)] == [6, 6, 6, 2]
    sizes.halve()
    sizes.adopt(Batch(size=40, micro=8), is_even=True)
    assert sizes.samples == 3, "the same loader in its next epoch"
    assert [micro.num_samples for micro in sizes.cut(0, 8)] == [3, 3, 2]
    sizes.adopt(Batch(size=40, micro=4))
    assert sizes.samples == 4, "another loader"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError("Caught MemoryError in DataLoader worker process 0."), False),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_about_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
