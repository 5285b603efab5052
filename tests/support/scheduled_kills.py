"""Where workers of a test's program are lost: at chosen points of chosen steps, each fault once, never by the clock.

FAULTS     JSON: a list of {"worker": 2, "step": 5, "where": "forward", "signal": 9}; with "target": "supervisor" it is
           the supervisor that is killed, by that worker, with "server" the parameter server that it has started;
           with "after": "open" not before that file is there. where: data, forward, backward, evaluate, average
           (the program calls `fault` there), weights (the first worker's are sent), sum (its part of a sum over
           replicas is handed over), vote (it has the sums, others may not know), committed, save (its part of a
           checkpoint is on its way), regroup (during the recovery from another); with OPTIONS["turns"]: permitted
           (its update may be applied), half (one of two servers has it), applied (all have it, and it is not in
           the ledger)
OPTIONS    JSON: what the programs take beside it, each its own
FAULT_DIR  a folder for what they leave: which faults came, and the weights at the end
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor

import paceline
from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.worker.membership import generation_builder
from paceline.worker.membership.consensus import Consensus

FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("FAULTS", "[]"))
OPTIONS: dict[str, Any] = json.loads(os.environ.get("OPTIONS", "{}"))
STRUCK: set[int] = set()  # processes that this worker has sent a signal to


def left(name: str) -> Path:
    """A file that the program leaves, or waits for."""
    return Path(os.environ["FAULT_DIR"], name)


def fault(worker: paceline.Worker, where: str) -> None:
    """Be lost, where this worker's hour has come."""
    for number, one in enumerate(FAULTS):
        marker = left(f"fault_{number}")
        is_due = one["where"] == where and one["worker"] == worker.rank and worker.step + 1 >= one["step"]
        is_due = is_due and ("after" not in one or left(one["after"]).exists())
        if is_due and not marker.exists():
            targets = {"": lambda _: os.getpid(), "supervisor": lambda _: supervisor(), "server": server_of}
            if (target := targets[one.get("target", "")](worker)) in STRUCK:
                continue  # this one is for its successor
            marker.write_text(f"{worker.step} {time.time()}")
            STRUCK.add(target)
            time.sleep(one.get("pause_s", 0.0))
            os.kill(target, one.get("signal", signal.SIGKILL))


def supervisor() -> int:
    """The process number of the process that keeps the run's record."""
    return int(json.loads(Path(OPTIONS["job"]["run_dir"], "run.json").read_text())["pid"])


def server_of(worker: Any) -> int:
    """The process number of the first parameter server that this worker has started."""
    return worker._servers._started[0]


def arm(worker: paceline.Worker, *, sums: tuple[str, ...], save: tuple[type, str]) -> None:
    """Put the faults where only Paceline itself comes by.

    `sums`: words for what a worker hands over when it is lost at "sum". `save`: the method in which it is at "save".
    """
    hand_over: Any = ElasticGroup.all_reduce
    vote: Any = Consensus.vote

    @functools.wraps(hand_over)
    def lost_after(members: ElasticGroup, tensor: Tensor, *, what: str) -> Any:
        transfer = hand_over(members, tensor, what=what)
        if any(word in what for word in sums):
            fault(worker, "sum")
        return transfer

    sends: Any = ElasticGroup.broadcast

    @functools.wraps(sends)
    def lost_before_weights(members: ElasticGroup, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        if what == "state from worker 0":
            fault(worker, "weights")
        sends(members, tensor, source=source, what=what)

    @functools.wraps(vote)
    def lost_around(consensus: Consensus) -> bool:
        fault(worker, "vote")
        passed = vote(consensus)
        fault(worker, "committed")
        return passed

    patched: list[tuple[Any, str, Any]] = [
        (ElasticGroup, "all_reduce", lost_after),
        (ElasticGroup, "broadcast", lost_before_weights),
        (Consensus, "vote", lost_around),
        (*save, _lost_before(worker, "save", getattr(*save))),
        (generation_builder, "connect_backend", _lost_before(worker, "regroup", generation_builder.connect_backend)),
    ]
    if OPTIONS.get("turns"):
        from paceline.sync.parameter_server.async_updates import AsyncGradients
        from paceline.worker.record.sample_ledger import SampleLedger

        flats: Any = AsyncGradients._flats

        @functools.wraps(flats)
        def lost_between(gradients: AsyncGradients, server: int) -> Any:
            fault(worker, "half" if server == 0 else "permitted")
            return flats(gradients, server)

        patched += [
            (AsyncGradients, "_flats", lost_between),
            (SampleLedger, "committed", _lost_before(worker, "applied", SampleLedger.committed)),
        ]
    for owner, name, function in patched:
        setattr(owner, name, function)


def _lost_before(worker: paceline.Worker, where: str, function: Any) -> Any:
    @functools.wraps(function)
    def lost(*args: Any, **fields: Any) -> Any:
        fault(worker, where)
        return function(*args, **fields)

    return lost
