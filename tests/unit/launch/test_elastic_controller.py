"""The controller reports losses, and only losses, of the workers that join and leave."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.elastic.membership_messages import Limits
from paceline.events import Event, WorkerLost
from paceline.launch.coordinator.elastic_controller import ElasticController
from paceline.launch.job.outcome import lost_worker


class Scene:
    """Two replicas of two workers. The second one has been lost, and others are about to be taken in for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.killed: list[int] = []
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.given_up: tuple[str, list[str], list[int]] | None = None
        worker_actions: Any = self
        limits = Limits(least=1, most=2, workers_each=2)
        self.controller = ElasticController(limits, workers=4, worker_actions=worker_actions, emit=self.events.append)
        for worker in range(4):
            self.controller.on_notice(worker, {"op": "formed", "generation": 0, "step": 0, "noticed": 0.0})
        self.controller.lost([lost_worker(3, host="a", pid=7, kind="Killed", message="by signal 9")])
        for worker in (0, 1):
            self.controller.on_notice(worker, {"op": "formed", "generation": 1, "step": 5, "noticed": 0.0})
        for worker in (2, 3):
            self.controller.on_notice(worker, {"op": "ready", "generation": 1, "step": 0})
        self.killed.clear()

    # What local workers do.

    def start(self, coming: Any, **_: Any) -> None: ...

    def publish(self) -> bool:
        return True

    def kill(self, worker: int) -> None:
        self.killed.append(worker)

    def send(self, worker: int, message: dict[str, Any]) -> None:
        self.told.append((worker, message))

    def host_of(self, worker: int) -> str:
        return "a"

    def new_generation(self, members: Any) -> bool:
        return False

    def generation_formed(self) -> None: ...

    def give_up(self, reason: str, *, causes: Any, lost: Any) -> None:
        self.given_up = (reason, list(causes), list(lost))

    @property
    def lost(self) -> list[int]:
        return [one.rank for one in self.events if isinstance(one, WorkerLost)]


@pytest.mark.parametrize("why", ["smaller", "over"])
def test_newcomers_that_are_not_wanted_any_more_are_not_lost(why: str) -> None:
    scene = Scene()
    assert scene.lost == [3, 2], "the one that was killed, and who was left of its replica"
    assert any(worker == 2 and message.get("generation") == 2 for worker, message in scene.told), "they were awaited"
    if why == "smaller":
        scene.controller.resize(1)
    else:
        scene.controller.stop(75, "SIGTERM came")
    assert sorted(scene.killed) == [2, 3] and scene.lost == [3, 2]


def test_members_that_are_silent_are_named_as_lost_by_silence_where_nobody_is_left() -> None:
    scene = Scene()
    scene.controller.tick(time.monotonic() + 3600.0)
    assert scene.given_up is not None
    _, causes, lost = scene.given_up
    assert lost == [0, 2] and "worker 0 said nothing for" in causes[0]
    assert sorted(scene.lost[2:]) == [0, 1, 2, 3], "and those that were ended with them"
