"""A worker's client of mirrored parameter servers: if a server is lost, its mirror takes over.

The processes of a server are numbered in the run's key-value store: 0 is the first one, and mirrors have the numbers
that follow. The store also has the number of the process that serves now; a server reports its mirror with its weights.
Workers are connected to both, so a mirror stays as long as they do.

A worker that loses a server asks the mirror to take over, pushes again what it has pushed in this gradient pass, and
repeats its request. Servers take a pass's sums and its step once, however often they are asked, so the time of the loss
does not matter. Then one worker starts another mirror: the first member on another host than the server, beginning with
the member half the group further on; or that member itself, if there is only one host.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.messages.tensor_messages import ServerLost, TensorClient, TensorMessage
from paceline.events import Event, Note, ServerReplaced
from paceline.sync.parameter_server.client import END_S, KEY, POLL_S, REPORT_AFTER_S, ServerClient, ServerRequest
from paceline.sync.parameter_server.mirrored_server import MirroredServer
from paceline.sync.parameter_server.served_parameters import ServerParameters
from paceline.sync.parameter_server.server import PassKey, Server, ServerFactory
from paceline.sync.parameter_server.server_process import end_server, fork_server, reaped

__all__ = ["MirroredServerClient", "starter_of"]

HOST = "paceline/servers/{attempt}/hosts/{generation}/{index}"  # of a member
RAREST = 10  # after failed starts, another mirror is tried at least every 2^10 gradient passes


def starter_of(number: int, *, hosts: Sequence[str], of_server: str) -> int:
    """Return the member that starts the mirror of a server on host `of_server`; `hosts` are those of the members."""
    size = len(hosts)
    rotation = [(number + size // 2 + place) % size for place in range(size)]
    return next((one for one in rotation if hosts[one] != of_server), rotation[0])


class MirroredServerClient(ServerClient):
    """One worker's connections to all servers and their mirrors."""

    def __init__(self, count: int, *, tell: Callable[[Event], None], **place: Any) -> None:
        """`tell` takes an event for the run's record; `place` are the arguments of `ServerClient`."""
        super().__init__(count, **place)
        self._tell = tell
        self._own: dict[tuple[int, int], int] = {}  # processes that this worker has started, by server and number
        self._processes: list[int] = []  # of each server, the number of the one that is asked
        self._versions = [0] * count  # updates that it had when it last told its weights
        self._mirror_of: list[int | None] = [None] * count  # as it told then
        self._mirrors: list[TensorClient | None] = [None] * count
        self._tried = [0] * count  # mirrors that were started, since there was one
        self._waits_until = [0] * count  # no other one is before this pass_key, as counted here
        self._num_passes, self._pass_key = 0, (-1, -1, -1)
        self._pushed: list[list[ServerRequest]] = [[] for _ in range(count)]  # in this pass_key
        self._sums: list[Mapping[str, Any]] = [{} for _ in range(count)]  # the newest question of this kind
        self._hosts: tuple[tuple[int, int, int], list[str]] = ((-1, -1, -1), [])  # of the members, and of which
        self._checks_others = True  # whether a wait ends where a member is lost
        self._fork: Callable[[int, bytes], tuple[int, str]] = _nothing

    def meet(
        self, part: Callable[[int], ServerParameters], *, index: int, size: int, server: ServerFactory = Server
    ) -> None:
        def fork(number: int, secret: bytes) -> tuple[int, str]:
            return fork_server(
                lambda: part(number),
                address=self._address,
                secret=secret,
                server=functools.partial(
                    MirroredServer, secret=secret, timeout_s=self._timeout_s, silence_s=self.silence_s
                ),
            )

        self._fork = fork
        for number in range(index, self.count, size):
            if not self._store.check([self._key(number, 0)]):
                self._start(number, 0)
        self.join()

    def join(self) -> None:
        self._require_open()
        for number in range(len(self._callers), self.count):
            if self._store.check([self._key(number, "count")]):  # others have taken steps: it may have a mirror
                self._waits_until[number] = 2
            process, caller = self._first(number)
            self._callers.append(caller)
            self._processes.append(process)

    def begin(self, pass_key: PassKey, *, index: int, size: int) -> None:
        self._pass_key, self._num_passes = pass_key, self._num_passes + 1
        self._pushed = [[] for _ in range(self.count)]
        members = pass_key[0], index, size
        if self._hosts[0] != members:
            self._store.set(HOST.format(attempt=self._attempt, generation=pass_key[0], index=index), self._host)
            self._hosts = members, []
        for number, mirror in enumerate(self._mirror_of):
            if mirror is not None or self._num_passes < self._waits_until[number]:
                continue
            of_server = self._addresses[self._callers[number].name]["host"]
            if index == starter_of(number, hosts=self._hosts_of(pass_key[0], size), of_server=of_server):
                self._waits_until[number] = self._num_passes + (1 << min(self._tried[number], RAREST))
                self._tried[number] += 1
                self._begin_mirror(number)

    def _hosts_of(self, generation: int, size: int) -> list[str]:
        """The hosts of all members, each of which says its own before its first pass_key."""
        members, hosts = self._hosts
        if not hosts:
            keys = [HOST.format(attempt=self._attempt, generation=generation, index=one) for one in range(size)]
            hosts = [self._read_key(key, f"the host of member {one}") for one, key in enumerate(keys)]
            self._hosts = members, hosts
        return hosts

    def _begin_mirror(self, number: int) -> None:
        """Start a mirror, and have the server tell it everything; where that cannot be, the run goes on without."""
        process = self._store.add(self._key(number, "count"), 1)
        try:
            about = self._start(number, process)
        except (OSError, RuntimeError) as error:
            self._say(f"parameter server {number} goes on without a mirror for now: {error}")
            return
        who = f"pid {about['pid']} on {about['host']}"
        self._callers[number].send(
            {"op": "mirror", "number": process, "endpoint": about["endpoint"], "name": f"its mirror ({who})"}
        )
        if process > 1:
            self._tell(Note(text=f"parameter server {number} gets another mirror ({who})"))

    def push(self, number: int, header: Mapping[str, Any], *tensors: Tensor) -> Callable[[], None]:
        caller = self._callers[number]
        self._pushed[number].append((header, tensors))
        sent = caller.send(header, tensors)

        def wait() -> None:
            if self._callers[number] is caller:  # otherwise it has gone, and what was on its way to it
                try:
                    caller.wait_sent(sent)
                except ServerLost as lost:
                    self._move(number, lost)

        return wait

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[TensorMessage]:
        calls = [caller.begin(question) for caller, question in zip(self._callers, questions, strict=True)]
        for number, question in enumerate(questions):
            if question["op"] == "sum":
                self._sums[number] = question
        answers = [
            self._answered(number, question, call, checks=checks)
            for number, (question, call) in enumerate(zip(questions, calls, strict=True))
        ]
        for number, answer in enumerate(answers):
            if "mirror" in answer.header:
                self._learn(number, answer.header)
        return answers

    def close(self, *, others_stay: bool = False, at_once: bool = False) -> None:
        self._callers += [mirror for mirror in self._mirrors if mirror is not None]
        self._mirrors = [None] * self.count
        super().close(others_stay=others_stay, at_once=at_once)

    def ask_some(self, questions: Mapping[int, ServerRequest]) -> dict[int, TensorMessage]:
        calls = {number: self._callers[number].begin(*question) for number, question in questions.items()}
        return {
            number: self._answered(number, question, calls[number], checks=False, tensors=tensors)
            for number, (question, tensors) in questions.items()
        }

    def _answered(
        self, number: int, question: Mapping[str, Any], call: int, *, checks: bool, tensors: Sequence[Tensor] = ()
    ) -> TensorMessage:
        """Return the answer of the process that serves in the end."""
        while True:
            try:
                return self._callers[number].answer(call, checks=checks)
            except ServerLost as lost:
                self._move(number, lost)
            if question["op"] == "step":  # where the one that is asked now has no sums, all push them again first
                again = self._sums[number]
                self._answered(number, again, self._callers[number].begin(again), checks=checks)
            call = self._callers[number].begin(question, tensors)

    def _move(self, number: int, lost: ServerLost) -> None:
        """Make the mirror of a lost server take over, or use the process that did. Raises `lost` if there is none."""
        began, how = time.perf_counter(), self.cause_of(lost, at_once=True)
        question = {"op": "take_over", "version": self._versions[number]}
        for process, caller in self._candidates(number):
            try:
                told = caller.answer(caller.begin(question), checks=False).header
            except ServerLost:
                told = {"lacks": True}
            if told["lacks"]:
                caller.close(at_once=True)
                continue
            self._callers[number].close(at_once=True)
            self._callers[number], self._processes[number] = caller, process
            self._mirrors[number] = self._mirror_of[number] = None
            self._tried[number] = self._waits_until[number] = 0
            self._store.set(self._key(number, "serving"), str(process))
            for header, tensors in self._pushed[number]:
                caller.send(header, tensors)
            if told["is_first"]:
                about, took_s = self._addresses[caller.name], round(time.perf_counter() - began, 4)
                by = f"pid {about['pid']} on {about['host']}"
                how = (
                    self._given_up(self._addresses[lost.listener]) or how
                )  # its starter may have seen the signal by now
                self._tell(ServerReplaced(server=number, lost=how, by=by, step=self._pass_key[1], took_s=took_s))
            return
        raise lost

    def _candidates(self, number: int) -> Iterator[tuple[int, TensorClient]]:
        """Yield processes that may answer instead of a lost server: the serving one, the mirror, and all others."""
        own, mirror, process = self._mirror_of[number], self._mirrors[number], self._processes[number]
        self._mirrors[number] = None
        serving = self._serving(number)
        if mirror is not None and own is not None and serving in (own, process):
            yield own, mirror
        elif mirror is not None:
            mirror.close(at_once=True)
        newest = self._store.add(self._key(number, "count"), 0)
        for other in dict.fromkeys([serving, *range(newest, process, -1)]):
            caller = self._try_connect(number, other) if other != process else None
            if caller is not None:
                yield other, caller

    def _learn(self, number: int, told: Mapping[str, Any]) -> None:
        """Keep what a server has reported about itself, and connect to its mirror."""
        self._versions[number], mirror = told["version"], told["mirror"]
        if mirror != self._mirror_of[number]:
            before, self._mirror_of[number] = self._mirrors[number], mirror
            if before is not None:
                before.close(at_once=True)
            self._mirrors[number] = None if mirror is None else self._try_connect(number, mirror)
            self._tried[number] = self._waits_until[number] = 0  # if it is lost later, another one may be started
        for (server, process), pid in [*self._own.items()]:
            if server == number and process not in (mirror, self._processes[number]):
                del self._own[server, process]
                if pid in self._started:  # no worker asks it any more
                    end_server(pid)
                    reaped(pid, within_s=END_S)
                    self._started.remove(pid)

    def _first(self, number: int) -> tuple[int, TensorClient]:
        """Connect to the process that serves now; if it was just lost, wait until the others have asked its mirror."""
        about = self._read_address(self._key(number, 0), f"parameter server {number}")
        deadline = time.monotonic() + REPORT_AFTER_S
        while True:
            process = self._serving(number)
            if process:
                about = json.loads(self._store.get(self._key(number, process)))
            try:
                return process, self._connected(f"parameter server {number}", about)
            except ServerLost:
                self._check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)  # the store's own wait would not check for lost members

    def _try_connect(self, number: int, process: int) -> TensorClient | None:
        """Connect to one of a server's processes, even if other workers are lost meanwhile; None if it is not there."""
        key = self._key(number, process)
        if not self._store.check([key]):
            return None
        self._checks_others = False
        try:
            return self._connected(f"parameter server {number}", json.loads(self._store.get(key)))
        except ServerLost:
            return None
        finally:
            self._checks_others = True

    def _start(self, number: int, process: int) -> dict[str, Any]:
        """Start a process, and publish its address."""
        drawn = secrets.token_bytes(32).hex()
        secret = bytes.fromhex(self._store.compare_set(self._key(number, "secret"), "", drawn).decode())
        pid, endpoint = self._fork(number, secret)
        self._started.append(pid)
        self._own[number, process] = pid
        about = {"endpoint": endpoint, "secret": secret.hex(), "pid": pid, "host": self._host}
        self._store.set(self._key(number, process), json.dumps(about))
        return about

    def _serving(self, number: int) -> int:
        key = self._key(number, "serving")
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _check_wait(self) -> None:
        if self._checks_others:
            self._check()

    def _key(self, number: int, what: int | str) -> str:
        return f"{KEY.format(attempt=self._attempt, number=number)}/{what}"


def _nothing(number: int, secret: bytes) -> tuple[int, str]:
    raise RuntimeError(f"parameter server {number} cannot be started before there are optimizers for it")
