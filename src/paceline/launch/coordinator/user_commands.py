"""What `paceline stop` and `paceline resize` ask of the coordinator, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.coordinator.elastic_controller import ElasticController
from paceline.launch.coordinator.job_end import JobEnd
from paceline.launch.coordinator.remote_hosts import RemoteHosts
from paceline.plan.job import Job

__all__ = ["UserCommands"]


class UserCommands:
    """Answers users' commands, which come through the control socket of the coordinator's host."""

    def __init__(self, job: Job, remote_hosts: RemoteHosts, end: JobEnd, *, stop: Callable[[], None]) -> None:
        """`stop()` ends the run on all hosts."""
        self._job, self._remote_hosts, self._end, self._stop = job, remote_hosts, end, stop

    def answer(
        self, request: Mapping[str, Any], *, controller: ElasticController | None, has_begun: bool
    ) -> dict[str, Any]:
        """Do what a request asks, and return what has come of it. `controller`: that of an elastic run."""
        if request.get("op") == "stop":
            self._stop()
            return {"says": "it ends"}
        if request.get("op") != "resize" or not isinstance(request.get("replicas"), int):
            return {"error": f"this run does not understand {dict(request)}"}
        if self._job.run_for is not None:
            return {
                "error": f"the run is a program of {self._job.run_for}, which divides its work by itself: stop it, and "
                "start it with other --workers"
            }
        if controller is None and "hosts" in request and not has_begun:
            return {"says": "it has not begun"}
        if controller is None:
            return {
                "error": "the run has a fixed number of replicas (or has not begun): only "
                "Layout(replicas=(least, most)) can be resized while it goes on",
                "has_begun": has_begun,
            }
        if self._end.is_under_way:
            return {"error": "the run is ending"}
        if "hosts" in request:
            return self._share_out(controller, request["hosts"])
        return controller.answer_command(request)

    def _share_out(self, controller: ElasticController, shares: Any) -> dict[str, Any]:
        """Have so many replicas on each of these hosts, and none on others. One that is still to join counts then."""
        each = controller.workers_each
        if not isinstance(shares, dict) or not all(isinstance(count, int) and count >= 0 for count in shares.values()):
            return {"error": f"hosts must say how many replicas each host has, by its name, and not {shares!r}"}
        granted = self._remote_hosts.granted(shares)
        replicas = sum(granted.values())
        if refusal := controller.refusal(replicas):
            return {"error": refusal}
        excess = self._remote_hosts.limit(granted, workers_each=each)
        return controller.answer_shares(replicas, sorted(excess), room=self._remote_hosts.room(each))
