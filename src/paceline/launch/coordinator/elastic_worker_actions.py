"""What the elastic controller has done to workers on any host: the coordinator's `WorkerActions`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from paceline.elastic.lease import UnreachableHosts
from paceline.launch.coordinator.remote_hosts import RemoteHosts
from paceline.launch.coordinator.restart import JobRestart
from paceline.launch.job.outcome import WorkerExits

__all__ = ["ElasticWorkerActions"]


class ElasticWorkerActions:
    """Starts, kills and messages workers wherever they are, and notes which ends are expected."""

    def __init__(
        self,
        exits: WorkerExits,
        remote_hosts: RemoteHosts,
        *,
        unreachable: UnreachableHosts,
        restart: JobRestart,
        publish: Callable[[], bool],
    ) -> None:
        self._exits, self._remote_hosts, self.publish = exits, remote_hosts, publish
        self._unreachable, self._restart = unreachable, restart

    def send(self, worker: int, message: Mapping[str, Any]) -> None:
        self._remote_hosts.send(worker, message)

    def start(self, replica: Sequence[int], *, workers: int, incarnation: int) -> None:
        self._exits.expect(replica)
        self._remote_hosts.start(replica, workers=workers, incarnation=incarnation)

    def kill(self, worker: int) -> None:
        """Kill a worker that may not go on; its end is not reported as a failure."""
        self._exits.forget(worker)
        self._remote_hosts.kill(worker)
        self._remote_hosts.forget(worker, for_good=False)

    def host_of(self, worker: int) -> str:
        return self._remote_hosts.host_of(worker)

    def new_generation(self, members: Collection[int]) -> bool:
        hosts = self._remote_hosts.hosts_of(members)
        self._unreachable.told(hosts)
        return len(hosts) > 1

    def generation_formed(self) -> None:
        self._unreachable.formed()

    def give_up(self, reason: str, *, causes: Sequence[str], lost: Sequence[int]) -> None:
        self._restart.give_up(reason, causes=causes, lost=lost)
