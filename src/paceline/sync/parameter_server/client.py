"""A worker's client of the parameter servers: starts them, connects to them, and sends requests to all of them.

Workers start the servers host after host, and publish endpoints and secrets in the run's key-value store. A server
stays the same for the whole attempt, whichever workers join or leave.

A *held* request is one that a server answers only when other workers have done something. A silent server may be lost,
or may wait for a slow worker. So a worker that has waited for a while repeatedly asks it which workers it waits for,
which is never held. A server that answers this is alive, however long the request itself takes. The flight recorder
then shows the wait as a collective that the awaited workers have not entered. So the hang monitor names them, with
their stacks, and ends the wait when `timeout_s` is over.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.flight_recorder import HELD, FlightRecorder, spans
from paceline.comm.group import WorkerGroup
from paceline.comm.messages.tensor_messages import ServerLost, ServerTimeout, TensorClient, TensorMessage
from paceline.errors import SyncError
from paceline.processes import exit_text, process_state
from paceline.schedule.parameter_placement import in_turn
from paceline.sync.parameter_server.served_parameters import ServerParameters, write_option
from paceline.sync.parameter_server.server import PassKey, Server, ServerFactory
from paceline.sync.parameter_server.server_process import end_server, end_text, fork_server, reaped

__all__ = ["HeldRequest", "ServerClient", "ServerRequest", "starting_turn"]

KEY = "paceline/servers/{attempt}/{number}"
POLL_S = 0.005
END_S = 3.0  # for a server that this worker has started to notice that all clients have disconnected
REPORT_AFTER_S = 10.0  # a wait of this length is reported
STARTER_FIRST_S = 3.0  # for the worker that started a server, which knows the signal that killed it, to say so


ServerRequest = tuple[Mapping[str, Any], Sequence[Tensor]]


class ServerClient:
    """One worker's connections to all servers."""

    def __init__(
        self,
        count: int,
        *,
        store: dist.Store,
        attempt: int,
        address: str,
        host: str,
        timeout_s: float,
        check: Callable[[], None],
        say: Callable[[str], None] = lambda _: None,
        holds_back: bool = False,
        recorder: FlightRecorder | None = None,
    ) -> None:
        """`store`: the run's key-value store. `address`: this host's address as other hosts see it. `check()` is called
        in waits, and ends them by raising. `say` warns the user. `holds_back`: a server may have a good reason not to
        answer yet. `recorder`: this worker's flight recorder; None: one that is never read."""
        self.count = count
        self.silence_s: float | None = None  # a server gives up a worker, or its mirror, that is silent for so long
        self._store, self._attempt, self._address, self._host = store, attempt, address, host
        self._timeout_s, self._check = timeout_s, check
        self._say, self._holds_back = say, holds_back
        self._recorder = recorder or FlightRecorder.unread()
        self._callers: list[TensorClient] = []
        self._addresses: dict[str, Mapping[str, Any]] = {}  # by a server's name: endpoint, secret, pid and host
        self._started: list[int] = []  # process numbers
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # before `fetch_state`: each group, and its copy
        self._is_closed = False

    @property
    def are_there(self) -> bool:
        """Whether this worker has met all of them."""
        return len(self._callers) == self.count

    def meet(
        self, part: Callable[[int], ServerParameters], *, index: int, size: int, server: ServerFactory = Server
    ) -> None:
        """Start those that are this worker's to start, with what `part(number)` gives in them, and connect to all.

        `index` is this worker's turn among `size` of them (`starting_turn`).
        """
        for number in range(index, self.count, size):
            key = KEY.format(attempt=self._attempt, number=number)
            if not self._store.check([key]):
                secret = secrets.token_bytes(32)
                pid, endpoint = fork_server(
                    lambda number=number: part(number),
                    address=self._address,
                    secret=secret,
                    server=server,
                    silence_s=self.silence_s,
                )
                self._started.append(pid)
                about = {"endpoint": endpoint, "secret": secret.hex(), "pid": pid, "host": self._host}
                self._store.set(key, json.dumps(about))
        self.join()

    def join(self) -> None:
        """Connect to all servers; wait for those that other workers start."""
        self._require_open()
        for number in range(len(self._callers), self.count):  # after the loss of a member, some are connected already
            about = self._read_address(KEY.format(attempt=self._attempt, number=number), f"parameter server {number}")
            self._callers.append(self._connected(f"parameter server {number}", about))

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "the parameter servers have ended with this worker's run, and what they held with them: take it before "
                "the training function returns, by model.state_dict(), or from a checkpoint (paceline export)"
            )

    def begin(self, pass_key: PassKey, *, index: int, size: int) -> None:
        """Called when a gradient pass begins, on worker `index` of `size`."""

    def push(self, number: int, header: Mapping[str, Any], *tensors: Tensor) -> Callable[[], None]:
        """Send a message without an answer; return a function that waits until the tensors may be overwritten."""
        caller = self._callers[number]
        return functools.partial(caller.wait_sent, caller.send(header, tensors))

    def caller(self, number: int) -> TensorClient:
        return self._callers[number]

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[TensorMessage]:
        """Send each server its request, all at once; return the answers, in their order.

        Without `checks`, only the servers' end and the time limit end the wait, not the loss of another worker.
        """
        calls = [caller.begin(question) for caller, question in zip(self._callers, questions, strict=True)]
        return [caller.answer(call, checks=checks) for caller, call in zip(self._callers, calls, strict=True)]

    def ask_first(
        self,
        question: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        *,
        about: Mapping[str, Any],
        worker_rank: int,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> TensorMessage:
        """Send the first server a request that it may hold; `about` names the sender. `meanwhile()` is called in the
        wait."""
        caller = self.caller(0)
        held = HeldRequest(caller, about, recorder=self._recorder, worker_rank=worker_rank, timeout_s=self._timeout_s)

        def look() -> None:
            meanwhile()
            held.look()

        try:
            return caller.answer(caller.begin({**about, **question}, tensors), meanwhile=look, heard=held.heard)
        finally:
            held.close()

    def ask_some(self, questions: Mapping[int, ServerRequest]) -> dict[int, TensorMessage]:
        """Send requests to these servers, all at once, even if other workers are lost meanwhile; return the answers."""
        calls = {number: self._callers[number].begin(*question) for number, question in questions.items()}
        return {number: self._callers[number].answer(call, checks=False) for number, call in calls.items()}

    def take(self, places: Sequence[int], flats: Sequence[Tensor], parameters: Sequence[Parameter]) -> int:
        """Overwrite parameters with the weights that a server has sent; return how many tensors these were."""
        kinds = [*dict.fromkeys(parameters[place].dtype for place in places)]
        by_dtype, offsets = dict(zip(kinds, flats, strict=False)), dict.fromkeys(kinds, 0)
        for place in places:
            parameter = parameters[place]
            offset, count = offsets[parameter.dtype], parameter.numel()
            parameter.copy_(by_dtype[parameter.dtype][offset : offset + count].view(parameter.shape))
            offsets[parameter.dtype] += count
        return len(kinds)

    def fetch_state(self, optimizers: Sequence[Optimizer], parameters: Sequence[Parameter]) -> Sequence[Sequence[Any]]:
        """Fetch the state of the servers' optimizers into these, until `drop_state`; return state by rows of tables."""
        self._groups = [(group, {**group}) for optimizer in optimizers for group in optimizer.param_groups]
        answers = self.ask([{"op": "state"}] * self.count, checks=False)  # a member's loss does not end a save
        for answer in answers:
            tensors = iter(answer.tensors)
            for number, place, key, is_tensor, value in answer.header["entries"]:
                optimizers[number].state[parameters[place]][key] = next(tensors) if is_tensor else value
            for number, group, key, is_tensor, value in answer.header["written"]:  # all servers of a group count alike
                write_option(optimizers[number].param_groups[group], key, next(tensors) if is_tensor else value)
        return answers[0].header.get("rows", ())

    def drop_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Restore the optimizers to what they were before `fetch_state`."""
        for optimizer in optimizers:
            optimizer.state.clear()
        for group, before in self._groups:
            group.clear()
            group.update(before)
        self._groups = []

    def is_server_loss(self, error: BaseException) -> bool:
        """Whether an error reports that one of these servers was lost, or has not answered in time."""
        return isinstance(error, ServerLost) and error.listener in self._addresses

    def cause_of(self, error: BaseException | None, *, at_once: bool = False) -> str:
        """Return how a server was lost, if an error reports that: "parameter server 1 (pid 4711 on node1) killed by
        signal 9"; else "". A stopped server on this host is killed, because it gets no more requests. Unless `at_once`,
        workers that did not start the server wait a moment for the one that did."""
        if not isinstance(error, ServerLost) or error.listener not in self._addresses:
            return ""
        name, about = error.listener, self._addresses[error.listener]
        if isinstance(error, ServerTimeout):
            how = "stood still (SIGSTOP, or a debugger)" if self._is_stopped(about) else "gave no answer"
            cause = f"{name} {how} for {self._timeout_s:.0f} s (timeout_s)"
            if (known := self._given_up(about)) is not None:  # another worker may have killed it before this check
                return known
            self._give_up(about, cause)
            if about["host"] == self._host:
                end_server(about["pid"])
            return cause
        if (known := self._given_up(about)) is not None:
            return known
        if about["host"] == self._host and about["pid"] in self._started:
            how = reaped(about["pid"], within_s=END_S)
            if how:
                self._started.remove(about["pid"])
                self._give_up(about, f"{name} {how}")  # the others wait for that
            return f"{name} {how or 'was lost'}"
        if about["host"] == self._host and (how := end_text(about["pid"])):  # its starter may be long in a computation
            return f"{name} {how}"
        return (None if at_once else self._told_by_starter(about)) or f"{name} was lost"

    def _told_by_starter(self, about: Mapping[str, Any]) -> str | None:
        """Wait a moment for the worker that started a server to say how it ended; None if it does not."""
        deadline = time.monotonic() + STARTER_FIRST_S
        while (told := self._given_up(about)) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return told

    def close(self, *, others_stay: bool = False, at_once: bool = False) -> None:
        """Disconnect, and wait a moment for the servers that this worker has started; they end with the last client.
        There is no wait with `others_stay`, nor with `at_once` (after an error), when the last messages may be lost."""
        self._is_closed = True
        for caller in self._callers:
            caller.close(at_once=at_once)
        self._callers = []
        if others_stay or at_once:  # servers that end while this process lives are reaped nevertheless
            if self._started:
                threading.Thread(target=self._reap, name="paceline-reaper", daemon=True).start()
            return
        deadline = time.monotonic() + END_S
        while self._started and time.monotonic() < deadline:
            self._started = [pid for pid in self._started if os.waitpid(pid, os.WNOHANG)[0] == 0]
            if self._started:
                time.sleep(POLL_S)  # the end of a child in another session shows only in waitpid
        stopped = [pid for pid in self._started if process_state(pid) == "stopped"]
        for pid in stopped:  # the end of the others does not wake it
            end_server(pid)
            reaped(pid, within_s=END_S)

    def _reap(self) -> None:
        """Wait for the servers that this worker has started. How one was killed is told: none can see it after that."""
        abouts = {about["pid"]: (name, about) for name, about in self._addresses.items() if about["host"] == self._host}
        for pid in self._started:
            with contextlib.suppress(ChildProcessError):  # it was reaped elsewhere
                _, status = os.waitpid(pid, 0)
                if status and pid in abouts:
                    name, about = abouts[pid]
                    self._give_up(about, f"{name} {exit_text(os.waitstatus_to_exitcode(status))}")

    def _give_up(self, about: Mapping[str, Any], cause: str) -> None:
        """Publish why a server is given up, before it is killed: other workers see only that it has ended."""
        with contextlib.suppress(RuntimeError):  # the store may be closed; then the caller still reports the cause
            self._store.set(self._key_of_end(about), cause)

    def _given_up(self, about: Mapping[str, Any]) -> str | None:
        """Return why another worker has given a server up; None if none has."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._key_of_end(about)]):
                return self._store.get(self._key_of_end(about)).decode()
        return None

    def _key_of_end(self, about: Mapping[str, Any]) -> str:
        return f"{KEY.format(attempt=self._attempt, number='given_up')}/{about['host']}/{about['pid']}"

    def _connected(self, name: str, about: Mapping[str, Any]) -> TensorClient:
        """Connect to a server."""
        name = f"{name} (pid {about['pid']} on {about['host']})"
        self._addresses[name] = about
        return TensorClient(
            about["endpoint"],
            bytes.fromhex(about["secret"]),
            name=name,
            timeout_s=self._timeout_s,
            check=self._check_wait,
            waits=self._wait_reporter(name, about),
        )

    def _check_wait(self) -> None:
        """Called while waiting for a server; ends the wait by raising."""
        self._check()

    def _wait_reporter(self, name: str, about: Mapping[str, Any]) -> Callable[[float], None]:
        """Return a function that reports a long wait, once."""
        is_told, due_s = False, min(REPORT_AFTER_S, self._timeout_s / 2)

        def waits(seconds: float) -> None:
            nonlocal is_told
            if seconds < due_s:
                is_told = False  # another wait
            elif not is_told and ((is_still := self._is_stopped(about)) or not self._holds_back):
                is_told = True
                pid, host = about["pid"], about["host"]
                remedy = f"; `kill -CONT {pid}` on {host} has it go on" if is_still else ""
                self._say(
                    f"{name} {'is stopped (SIGSTOP, or a debugger)' if is_still else 'has not answered'}, and this "
                    f"worker has waited {seconds:.0f} s for it{remedy}. It is given up after {self._timeout_s:.0f} s "
                    "(timeout_s)"
                )

        return waits

    def _is_stopped(self, about: Mapping[str, Any]) -> bool:
        return about["host"] == self._host and process_state(about["pid"]) == "stopped"

    def _read_address(self, key: str, name: str) -> dict[str, Any]:
        return json.loads(self._read_key(key, f"where {name} is"))

    def _read_key(self, key: str, name: str) -> str:
        """Wait for a value that another worker stores in the key-value store."""
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            self._check()
            if time.monotonic() > deadline:
                raise SyncError(f"{name} was not told within {self._timeout_s:.0f} s (timeout_s)")
            time.sleep(POLL_S)  # the store's own wait would not check for lost members
        return self._store.get(key).decode()


def starting_turn(group: WorkerGroup) -> int:
    """Return this member's position in the order in which members start servers, from 0."""
    return in_turn(group.hosts).index(group.index)


ASK_S = 1.0  # interval of asking which workers are awaited; most waits are shorter
MARGIN_S = 15.0  # beyond `timeout_s`: the hang monitor knows more, and ends the wait before


class HeldRequest:
    """The wait for a held request, until `close`; `look` and `heard` are callbacks of `TensorClient.answer`."""

    def __init__(
        self,
        caller: TensorClient,
        about: Mapping[str, Any],
        *,
        recorder: FlightRecorder,
        worker_rank: int,
        timeout_s: float,
    ) -> None:
        """`about` names the sender and the stream."""
        self._caller, self._about = caller, about
        self._recorder, self._worker_rank, self._timeout_s = recorder, worker_rank, timeout_s
        self._since = time.monotonic()  # since when the wait is for the same workers
        self._next_at = self._since + ASK_S
        self._asked: int | None = None  # the call that asks which workers are awaited
        self._known: tuple[Sequence[int], int] = ([], 0)  # the awaited workers, and how many updates are done
        self._group = ""  # in the flight recorder

    def look(self) -> None:
        """Ask which workers are awaited, once per `ASK_S`. Raises SyncError if the wait has been too long."""
        now = time.monotonic()
        if self._asked is None and now >= self._next_at:
            self._asked = self._caller.begin({**self._about, "op": "awaited"})
        if now - self._since > self._timeout_s + MARGIN_S:
            ranks = ", ".join(map(str, self._known[0]))
            awaited = f"worker {ranks} to do its part" if ranks else "others"
            raise SyncError(
                f"{self._caller.name} has held an answer back for {now - self._since:.0f} s (timeout_s is "
                f"{self._timeout_s:g}): it waits for {awaited}"
            )

    def heard(self, message: TensorMessage) -> None:
        """Handle the answer to another request."""
        if message.header.get("call") != self._asked:
            return
        now = time.monotonic()
        self._asked, self._next_at = None, now + ASK_S
        known = message.header.get("awaited", []), message.header.get("done", 0)
        if known != self._known:
            self._since, self._known = now, known
            self._note()

    def close(self) -> None:
        """The wait is over."""
        if self._group:
            self._recorder.leave()
            self._recorder.part(self._group)
            self._group = ""

    def _note(self) -> None:
        self.close()
        awaited = [one for one in self._known[0] if one != self._worker_rank]
        if awaited:
            self._group = f"held by {spans(awaited).decode()}"
            self._recorder.join(self._group, sorted([*awaited, self._worker_rank]))
            self._recorder.wait(
                self._recorder.enter(HELD, "", group=self._group)
            )  # without details, so that no difference shows between workers
