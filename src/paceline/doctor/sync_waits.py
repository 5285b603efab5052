"""How long workers wait for each other after they have computed, on CPUs that they share.

Each is held up now and then: others have its core, memory is busy. These delays are independent, so their spread grows
with the square root of time. By so much workers come apart since the last collective, and all wait for the slowest.
Measured on 2 cores: 0.25, 0.5 and 1.0 ms after 1.3, 5.4 and 22 ms with two workers, three times as much with four.
"""

from __future__ import annotations

import statistics
import time

import torch

import paceline
from paceline.worker.run_member import parts_of

__all__ = ["sync_wait_s"]

SIDE, PRODUCTS = 384, (2, 8)  # products of so large matrices between two all-reduces: some milliseconds in all
EACH = 16  # all-reduces that are timed together
REPEATS = 5  # of which the first is not counted
UNIT_S = 1e-3  # of work, to which the result applies


def sync_wait_s(worker: paceline.Worker) -> float | None:
    """Return the seconds that workers wait for each other after a millisecond of work, beyond what the collective takes
    by itself; after n milliseconds it is sqrt(n) times as much. None with one worker, and on other devices.
    """
    if worker.workers == 1 or worker.device.type != "cpu":
        return None
    found = [one for products in PRODUCTS for part in worker.gather(_waits(worker, products)) for one in part]
    return max(0.0, statistics.median(found))


def _waits(worker: paceline.Worker, products: int) -> list[float]:
    """This worker's waits, each scaled to a millisecond of work."""
    group, tensor, matrix = parts_of(worker).place.group, torch.ones(256), torch.randn(SIDE, SIDE)
    product, found = torch.empty_like(matrix), list[float]()

    def seconds(*, work: int, collectives: int) -> float:
        worker.wait()
        began = time.perf_counter()
        for _ in range(EACH):
            for _ in range(work):
                torch.mm(matrix, matrix, out=product)
            for _ in range(collectives):
                group.all_reduce(tensor, what="doctor").wait()
        return (time.perf_counter() - began) / EACH

    for _ in range(REPEATS):
        work_s = seconds(work=products, collectives=0)
        alone_s = seconds(work=0, collectives=1)
        both_s = seconds(work=products, collectives=1)
        found.append((both_s - work_s - alone_s) / (work_s / UNIT_S) ** 0.5)
    return found[1:]
