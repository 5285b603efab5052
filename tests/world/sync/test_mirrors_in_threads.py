"""Mirrored parameter servers with threads for processes: killed at random, both sides of the protocol lose no bit."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import AdamW

import quick
from fake_listener import PretendedListener
from paceline.comm.messages.tensor_messages import TensorMessage, TensorServer
from paceline.errors import PlanError
from paceline.events import Event, ServerReplaced
from paceline.plan import ParameterServer
from paceline.sync.parameter_server import client, mirrored_client, mirrored_server
from paceline.sync.parameter_server.mirrored_client import MirroredServerClient, starter_of
from paceline.sync.parameter_server.mirrored_server import MirroredServer
from paceline.sync.parameter_server.served_parameters import ServerParameters, options_of
from paceline.sync.parameter_server.server import ServerFactory

SIZES = [3, 5, 2, 4]  # of the parameters; even ones are on server 0, odd ones on server 1
SERVERS, WORKERS, STEPS, FACTOR = 2, 3, 12, 0.25
LIMIT_S = 60.0
METHODS = ("_push", "_before_sum", "_before_step", "_after_step", "_send_weights", "_add_sums", "_step", "_copy")


class Counting(AdamW):
    """Counts its steps in its groups, as some do that correct by them, and takes smaller ones by and by."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for one in group["params"]:
                if one.grad is not None:
                    one.grad /= group["count"]
        return super().step(closure)


class Killed(BaseException):
    """What is left of a process."""


class Threads:
    """Servers that are threads. `deaths` are of whichever process comes by a method in a step, each once."""

    def __init__(self, deaths: Sequence[tuple[int, str, str]], *, until: threading.Event | None = None) -> None:
        """`until`: no loss is reported before that."""
        self._deaths, self._lock, self._until = list(deaths), threading.Lock(), until
        self._pids, self._all = itertools.count(1), list[threading.Thread]()
        self.failed: list[BaseException] = []

    def fork(
        self, make: Callable[[], ServerParameters], *, address: str, secret: bytes, server: ServerFactory
    ) -> tuple[int, str]:
        listener = TensorServer(address, secret)
        one = threading.Thread(target=self._serve, args=(server(make(), listener, is_deserted=lambda: False), listener))
        self._all.append(one)
        one.start()
        return next(self._pids), listener.endpoint

    def _serve(self, server: MirroredServer, listener: TensorServer) -> None:
        try:
            server.serve()
        except Killed:
            listener._socket.close(linger=0)
        except BaseException as error:
            self.failed.append(error)
        finally:
            if not listener._socket.closed:
                listener.close()
            else:
                listener._monitor.close(linger=0)
                listener._context.term()

    def strike(self, server: MirroredServer, method: str, moment: str) -> None:
        """Kill the server, where its hour has come: it says no last word."""
        death = (server.part.version, method, moment)
        with self._lock:
            if death not in self._deaths:
                return
            self._deaths.remove(death)
        if self._until is not None:
            self._until.wait(LIMIT_S)
        if server._mirror is not None:
            server._mirror.caller.close(at_once=True)
            server._mirror = None
        raise Killed

    def join(self) -> None:
        for one in self._all:
            one.join(LIMIT_S)
        assert not any(one.is_alive() for one in self._all), "a server is left, though all callers have gone"


def watched(threads: Threads, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(server: MirroredServer, *args: Any, **more: Any) -> Any:
        threads.strike(server, name, "before")
        result = function(server, *args, **more)
        threads.strike(server, name, "after")
        return result

    return call


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sequence[tuple[int, str, str]]], Threads]]:
    """Has threads take the place of processes, from then on."""
    made: list[Threads] = []

    def begin(deaths: Sequence[tuple[int, str, str]], *, until: threading.Event | None = None) -> Threads:
        threads = Threads(deaths, until=until)
        made.append(threads)
        monkeypatch.setattr(mirrored_client, "fork_server", threads.fork)
        for module in (
            mirrored_client,
            client,
        ):  # a thread cannot be killed from outside, and has nobody to wait for it
            monkeypatch.setattr(module, "reaped", lambda pid, within_s: "killed by signal 9")
            monkeypatch.setattr(module, "end_server", lambda pid: None)
        for name in METHODS:
            monkeypatch.setattr(MirroredServer, name, watched(threads, name, getattr(MirroredServer, name)))
        return threads

    yield begin
    for threads in made:
        threads.join()


def parameters() -> list[Parameter]:
    return [Parameter(torch.arange(size, dtype=torch.float64) / 8) for size in SIZES]


def part_of(number: int) -> ServerParameters:
    model = parameters()
    here = {place: one for place, one in enumerate(model) if place % SERVERS == number}
    return ServerParameters(
        here, [Counting(model, lr=0.1)], elsewhere=[one for place, one in enumerate(model) if place not in here]
    )


def gradient(worker: int, step: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + place)
    return torch.randn(SIZES[place], generator=generator, dtype=torch.float64)


def oracle() -> list[torch.Tensor]:
    """What one process makes of the same gradients, added up in the same order."""
    model = parameters()
    optim = Counting(model, lr=0.1)
    for step in range(1, STEPS + 1):
        for place, one in enumerate(model):
            total = gradient(0, step, place)
            for worker in range(1, WORKERS):
                total += gradient(worker, step, place)
            one.grad = total * FACTOR
        optim.step()
    return [one.detach() for one in model]


class Worker(threading.Thread):
    """Takes all steps with the others, and keeps the newest weights."""

    def __init__(self, index: int, store: dist.Store, vote: threading.Barrier, *, timeout_s: float) -> None:
        super().__init__()
        self.index, self.told, self.error = index, list[Event](), None
        self._model = parameters()
        self._vote = vote
        self._options = [options_of(Counting(parameters(), lr=0.1))]
        self.servers = MirroredServerClient(
            SERVERS,
            tell=self.told.append,
            store=store,
            attempt=1,
            address="127.0.0.1",
            host="here",
            timeout_s=timeout_s,
            check=lambda: None,
        )
        self.error: BaseException | None

    @property
    def weights(self) -> list[torch.Tensor]:
        return [one.detach() for one in self._model]

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the thread's boundary
            self.error = error
            self._vote.abort()
        finally:
            self.servers._started = []  # nobody waits for threads
            self.servers.close()

    def _work(self) -> None:
        self.servers.meet(part_of, index=self.index, size=WORKERS)
        here = [[place for place in range(len(SIZES)) if place % SERVERS == number] for number in range(SERVERS)]
        for step in range(1, STEPS + 1):
            pass_key = (0, step, 0)
            self.servers.begin(pass_key, index=self.index, size=WORKERS)
            for number, some in enumerate(here):
                flat = torch.cat([gradient(self.index, step, one) for one in some])
                header = {"op": "push", "walk": pass_key, "replica": self.index, "places": some}
                self.servers.push(number, header, flat)()
            about: Mapping[str, Any] = {"walk": pass_key, "replicas": WORKERS}
            self.servers.ask([{**about, "op": "sum", "places": some} for some in here])
            self._vote.wait(LIMIT_S)
            about = {"walk": pass_key, "factor": FACTOR, "options": self._options}
            answers = self.servers.ask([{**about, "op": "step", "places": some} for some in here], checks=False)
            with torch.no_grad():
                for some, answer in zip(here, answers, strict=True):
                    self.servers.take(some, answer.tensors, self._model)


def drawn(seed: int) -> list[tuple[int, str, str]]:
    """Deaths some steps apart, so that there is another mirror in between; by updates that a process has."""
    draw = random.Random(seed)
    steps = range(draw.randint(1, 2), STEPS - 1, 3)
    return [(step, draw.choice(METHODS), draw.choice(["before", "after"])) for step in steps]


@pytest.mark.parametrize("seed", quick.spread(range(12)))
def test_no_bit_is_lost_whichever_process_is_killed_and_where(seed: int, hosted: Callable[..., Threads]) -> None:
    train(hosted(drawn(seed)))


# The server before it tells any worker of the step; the mirror when it gets sums; both in steps of their own.
STOPS = [(3, "_send_weights", "before"), (6, "_add_sums", "before")]


@pytest.mark.further
def test_who_only_stands_still_is_given_up_and_no_bit_is_lost(hosted: Callable[..., Threads]) -> None:
    until = threading.Event()
    try:
        workers = train(hosted(STOPS, until=until), timeout_s=10.0)  # half of it for mirrors: no stall is so long
    finally:
        until.set()
    (told,) = [event for one in workers for event in one.told if isinstance(event, ServerReplaced)]
    assert told.lost.endswith("gave no answer for 10 s (timeout_s)")


def train(threads: Threads, *, timeout_s: float = LIMIT_S) -> list[Worker]:
    """Have the workers take all steps, and look whether they have the weights of one process."""
    store, vote = dist.HashStore(), threading.Barrier(WORKERS)
    workers = [Worker(index, store, vote, timeout_s=timeout_s) for index in range(WORKERS)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(LIMIT_S)
    assert [one.error for one in workers] == [None] * WORKERS
    assert threads.failed == []
    expected = oracle()
    for one in workers:
        assert all(torch.equal(*pair) for pair in zip(one.weights, expected, strict=True))
    return workers


def server(part: ServerParameters | None = None, said: Sequence[tuple[bytes, TensorMessage]] = ()) -> MirroredServer:
    listener = PretendedListener(said)
    return MirroredServer(
        part or part_of(0), listener, is_deserted=lambda: True, secret=b"s", timeout_s=1.0, silence_s=None
    )


def told(one: MirroredServer, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Mapping[str, Any]:
    """What it answers."""
    assert isinstance(one.listener, PretendedListener)
    one._handle(b"somebody", TensorMessage({"call": 1, **header}, tuple(tensors)))
    return one.listener.told[-1][1]


def copied(one: MirroredServer) -> tuple[Mapping[str, Any], list[torch.Tensor]]:
    kept, tensors = one.part.state()
    weights = one.part.weights(one.part.places)
    about = {"op": "copy", "version": one.part.version, "num_weights": len(weights), **kept}
    return {**about, "walks": [], "generation": 0, "stepped": (0, 1, 0), "squared": 0.0}, [*weights, *tensors]


def test_a_mirror_takes_over_once_it_has_all_that_a_worker_knows_of_and_then_hears_the_other_no_more() -> None:
    first, mirror = server(), server()
    options = [options_of(Counting(parameters(), lr=0.1))]
    first.part.step({0: torch.ones(3, dtype=torch.float64)}, options)
    assert told(mirror, {"op": "take_over", "version": 0}) == {"call": 1, "lacks": True, "is_first": False}
    assert "refused" not in told(mirror, *copied(first))
    assert torch.equal(*(one.part.weights([0])[0] for one in (first, mirror)))
    assert told(mirror, {"op": "take_over", "version": 2})["lacks"]
    assert told(mirror, {"op": "take_over", "version": 1}) == {"call": 1, "lacks": False, "is_first": True}
    assert told(mirror, {"op": "take_over", "version": 1}) == {"call": 1, "lacks": False, "is_first": False}
    assert told(mirror, {"op": "sums", "walk": (0, 2, 0), "places": [], "squared": 1.0})["refused"]
    assert told(mirror, *copied(first))["refused"]


class Refusing:
    """A connection to a mirror that has taken over."""

    def begin(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> int:
        return 1

    def answer(self, call: int) -> TensorMessage:
        return TensorMessage({"call": call, "refused": True})

    def send(self, header: Mapping[str, Any]) -> None: ...

    def close(self, *, at_once: bool = False) -> None: ...


def test_who_was_only_cut_off_ends_without_a_word() -> None:
    push = {"op": "push", "walk": (0, 1, 0), "places": [0], "replica": 0}
    asked = {"op": "sum", "walk": (0, 1, 0), "places": [0], "replicas": 1, "call": 1}
    said = [(b"one", TensorMessage(push, (torch.ones(3, dtype=torch.float64),))), (b"one", TensorMessage(asked))]
    one = server(said=[*said, (b"one", TensorMessage({"op": "nonsense"}))])
    one._mirror = mirrors_of(Refusing())
    one.serve()
    assert isinstance(one.listener, PretendedListener)
    assert one.listener.told == [] and len(one.listener.said) == 1, "it ended before the next word"


class Failing(Refusing):
    """A connection to a mirror that cannot hold a copy."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def answer(self, call: int) -> TensorMessage:
        raise RuntimeError("its mirror failed: no memory")


def test_a_mirror_that_fails_while_it_copies_leaves_its_server_as_it_was_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mirrored_server, "TensorClient", Failing)
    begin = TensorMessage({"op": "mirror", "number": 1, "endpoint": "tcp://nowhere", "name": "its mirror"})
    asked = TensorMessage({"op": "take_over", "version": 0, "call": 1})
    one = server(said=[(b"one", begin), (b"one", begin), (b"one", asked)])
    one._mirror, gone = mirrors_of(Refusing()), list[Any]()
    monkeypatch.setattr(one, "_release_mirror", lambda: gone.append(None))
    one.serve()
    assert isinstance(one.listener, PretendedListener)
    assert [header["call"] for _, header, _ in one.listener.told] == [1]
    assert len(gone) == 1, "its mirror was let go of before its end"
    assert capsys.readouterr().err.count("without a mirror for now: its mirror failed: no memory") == 1


@pytest.mark.parametrize(
    ("number", "hosts", "of_server", "starter"),
    [
        (0, "aaaa", "a", 2),  # one host: half of them further on
        (1, "aaaa", "a", 3),
        (0, "aabb", "a", 2),
        (0, "aabb", "b", 0),  # after a takeover the server is where its mirror was
        (0, "aaab", "a", 3),  # uneven hosts
        (1, "aaab", "a", 3),
        (1, "baaa", "a", 0),
        (5, "ab", "a", 1),
        (0, "a", "a", 0),
    ],
)
def test_a_mirror_is_started_on_another_host_where_there_is_one(
    number: int, hosts: str, of_server: str, starter: int
) -> None:
    assert starter_of(number, hosts=hosts, of_server=of_server) == starter


class StoreClient(MirroredServerClient):
    """One that notes which mirrors it begins."""

    def __init__(self, store: dist.Store, host: str) -> None:
        place: dict[str, Any] = {"attempt": 1, "address": "", "timeout_s": LIMIT_S, "check": lambda: None}
        super().__init__(1, tell=lambda _: None, store=store, host=host, **place)
        self.begun: list[int] = []

    def _first(self, number: int) -> tuple[int, Any]:
        self._addresses["server"] = {"host": "a"}
        return 0, Named()

    def _begin_mirror(self, number: int) -> None:
        self.begun.append(self._num_passes)


class Named:
    name = "server"


def test_who_comes_later_asks_for_a_mirror_only_where_it_was_told_that_there_is_none() -> None:
    store = dist.HashStore()
    first, second, newcomer = (StoreClient(store, host) for host in "aab")
    for one in (first, second):
        one.join()
    threads = [
        threading.Thread(target=one.begin, args=((0, 1, 0),), kwargs={"index": index, "size": 2})
        for index, one in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (first.begun, second.begun) == ([], [1])
    store.add(second._key(0, "count"), 1)
    newcomer.join()
    for one in (first, second):
        one._mirror_of = [1]
        one.begin((1, 2, 0), index=0 if one is first else 1, size=3)
    newcomer.begin((1, 2, 0), index=2, size=3)
    assert newcomer.begun == []
    newcomer.begin((1, 3, 0), index=2, size=3)  # it was told of none
    assert newcomer.begun == [2]


def mirrors_of(caller: Any) -> Any:
    from paceline.sync.parameter_server.mirrored_server import _Mirror

    return _Mirror(1, caller)


def test_mirrors_are_for_steps_that_all_share() -> None:
    with pytest.raises(PlanError, match=r"mirrored is True with staleness=3: .*Leave one of the two out"):
        ParameterServer(mirrored=True, staleness=3)
    with pytest.raises(PlanError, match=r"mirrored is True with drop=1: "):
        ParameterServer(mirrored=True, drop=1)
