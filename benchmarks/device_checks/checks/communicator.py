"""One worker over NCCL: the communicator that elastic runs abort and make anew, and a run of one worker."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from device_checks.bench import Bench


def check(bench: Bench) -> None:
    with bench.row(
        "NCCL communicator of one member: connect, sum, abort, make anew",
        asked="2 made, each sums, none after its abort",
    ):
        if bench.on_gpu:
            from paceline.comm.devices.nccl import NcclCommunicator as Made
        else:
            from fake_nccl import FakeNccl as Made  # the stand-in that the tests use
        device = torch.device("cuda", 0) if bench.on_gpu else torch.device("cpu")
        took = [_life(Made, device, dist.HashStore()) for _ in range(2)]
        name = "NCCL" if bench.on_gpu else "stand-in"
        said = (
            f"{name}: connected in {took[0][0]:.2f} s, aborted in {took[0][1]:.3f} s; the second in {took[1][0]:.2f} s"
        )
        bench.tell(
            "communicator: connect, sum, abort, make anew",
            asked="each sums, and refuses after its abort",
            measured=said,
            verdict=True,
        )


def _life(made: Any, device: torch.device, store: Any) -> tuple[float, float]:
    began = time.perf_counter()
    one = made(store, index=0, size=1, device=device, timeout_s=60.0)
    one.connect()
    numbers = torch.full((1 << 16,), 3.0, device=device)
    work = one.all_reduce(numbers)
    work.wait()
    deadline = time.perf_counter() + 10
    while not work.is_completed():
        if time.perf_counter() > deadline:
            raise ValueError("a sum over one member does not end")
        time.sleep(0.001)
    if float(numbers.sum()) != 3.0 * numbers.numel():
        raise ValueError("a sum over one member changed its numbers")
    if one.error() is not None:
        raise ValueError(f"an error without a cause: {one.error()}")
    connected = time.perf_counter() - began
    began = time.perf_counter()
    one.abort()
    aborted = time.perf_counter() - began
    try:
        one.all_reduce(numbers)
    except RuntimeError:
        return connected, aborted
    raise ValueError("an aborted communicator takes one more collective")
