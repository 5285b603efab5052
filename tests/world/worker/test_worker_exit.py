"""What a worker of an elastic run says last: with its training function its part in the run is over."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from forked import World
from paceline.comm.messages.json_channel import Channel, ChannelClosed
from paceline.comm.rendezvous.kv_store import KeyValueStore
from paceline.elastic.membership_messages import FROM_WORKERS, PREEMPTED, Finish
from paceline.plan import Batch, Layout, Plan
from paceline.plan.job import Job
from paceline.worker.session import run_worker

pytestmark = pytest.mark.timeout(60)

PLAN = Plan(layout=Layout(replicas=(1, 2)), batch=Batch(size=4))


def train(worker: paceline.Worker, *, waits: bool = False) -> None:
    """`waits`: after its first step, until it is told to leave."""
    model = worker.prepare(nn.Linear(4, 2))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long)), epochs=2):
        step(batch)
        orders = worker._consensus._coordinator
        if waits and orders is not None and orders.finish is None:
            orders.wait_for_change(orders.newest)


def notices(world: World, function: Callable[[Any], None], answers: dict[str, Finish]) -> tuple[list[str], int]:
    """All that the only worker of an elastic run says before it closes its channel, and its exit status. `answers`:
    what it is told once it has said so."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        signal.alarm(0)
        ours.close()
        _be_the_worker(world, function, theirs)
    theirs.close()
    kv_store, channel, told = KeyValueStore(), Channel(ours), list[str]()
    try:
        while True:
            message = channel.receive()
            if message["op"] not in FROM_WORKERS:
                channel.send(kv_store.handle(message))
                continue
            told.append(message["op"])
            if message["op"] in answers:
                channel.send(answers[message["op"]].to_json())
    except ChannelClosed:
        pass
    finally:
        channel.close()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return told, status


def _be_the_worker(world: World, function: Callable[[Any], None], channel: socket.socket) -> None:
    status = 1
    try:
        job = Job(workers=1, tensorboard=False)
        assignment = dataclasses.replace(world._assignment(0, 1, job), channel_fd=channel.detach())
        run_worker(function, assignment, plan=PLAN)
        status = 0
    except SystemExit as leaving:
        status = int(str(leaving.code))
    finally:
        os._exit(status)


def test_its_last_word_is_that_it_is_over(tmp_path: Path) -> None:
    told, status = notices(World(tmp_path), train, {})
    assert (told[-1], told.count("over"), status) == ("over", 1, 0), told


def test_so_it_is_where_all_have_saved_and_leave(tmp_path: Path) -> None:
    finish = Finish(exit_code=PREEMPTED, reason="SIGTERM came")
    told, status = notices(World(tmp_path), functools.partial(train, waits=True), {"begun": finish})
    assert (told[-1], told.count("over"), status) == ("over", 1, PREEMPTED), told


def test_who_fails_says_nothing_of_the_kind(tmp_path: Path) -> None:
    def fail(worker: paceline.Worker) -> None:
        train(worker)
        raise ValueError("no")

    told, status = notices(World(tmp_path), fail, {})
    assert "over" not in told and status == 1, told
