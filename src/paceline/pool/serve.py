"""What `paceline pool` does on one host: be the pool, or one of its nodes.

The process that has the lock of the pool's folder is the pool, and a node beside it. Where one process is started on
each of several hosts, the others are nodes, and one of them becomes the pool where that is killed.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from paceline import environment, run_lock
from paceline.errors import PlanError
from paceline.pool import pool_lock
from paceline.pool.devices import NodeOffer
from paceline.pool.node_agent import NodeAgent
from paceline.pool.node_files import node_dir, node_name
from paceline.pool.pool_state import PoolRecord
from paceline.pool.service import Pool
from paceline.private_files import make_own_directory
from paceline.processes import this_host

__all__ = ["serve", "serve_node"]

LOOK_S = 0.25
POOL_LOOK_S = 1.0  # between two looks whether the pool is there


def serve(pool: Path, offer: NodeOffer, *, say: Callable[[str], None]) -> None:
    """Be the pool until SIGTERM or Ctrl-C; raises PlanError where another process is it."""
    make_own_directory(pool)
    if not pool_lock.hold(pool):
        before = PoolRecord.load(pool)
        raise PlanError(
            f"{pool} is in use: process {before.pid} on {before.host} is its pool. To give it this host's devices: "
            f"paceline pool {pool} --node"
        )
    with Asked() as asked:
        agent = None
        if run_lock.is_held(node_dir(pool, node_name(this_host()))):
            say("another process offers this host's devices: this one has the pool alone")
        else:
            agent = NodeAgent(pool, offer, say=say)
        _be_pool(pool, agent, asked, say)


def serve_node(pool: Path, offer: NodeOffer, *, say: Callable[[str], None]) -> None:
    """Be a node until SIGTERM or Ctrl-C, or until the pool ends in good order; and the pool, where none is there."""
    with Asked() as asked:
        agent = NodeAgent(pool, offer, say=say)
        look_at, has_served, is_told, known = 0.0, False, False, PoolRecord.file(pool)
        while not asked:
            agent.look()
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + POOL_LOOK_S
                has_ended, may_lead = False, False
                with contextlib.suppress(OSError):  # the disk is away: all goes on as it is
                    has_ended = known.read().has_ended
                    may_lead = not (has_served and has_ended) and pool_lock.hold(pool)
                if has_served and has_ended:
                    say("the pool has ended")
                    break
                has_served = has_served or not has_ended
                if may_lead:
                    say(f"{agent.name} is the pool, and its first node")
                    _be_pool(pool, agent, asked, say)
                    return
                if not is_told:
                    say(f"{agent.name} is a node of the pool")
                    is_told = True
            time.sleep(LOOK_S)
        agent.leave(asked.more_than_once)


def _be_pool(pool: Path, agent: NodeAgent | None, asked: Asked, say: Callable[[str], None]) -> None:
    serving = Pool(pool, agent=agent, say=say)
    try:
        serving.run(asked.once, asked.more_than_once)
        if agent is not None:  # after an error runs go on, as after kill -9
            agent.leave(asked.more_than_once)
    finally:
        serving.close()


class Asked:
    """A context manager that counts the requests to end: SIGTERM, Ctrl-C, and an engine's warning."""

    def __init__(self) -> None:
        self._count, self._before = 0, dict[int, Any]()

    def __bool__(self) -> bool:
        return self._count > 0

    def once(self) -> bool:
        return self._count > 0

    def more_than_once(self) -> bool:
        return self._count > 1

    def __enter__(self) -> Asked:
        for number in (signal.SIGTERM, signal.SIGINT, *environment.notice_signals()):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
