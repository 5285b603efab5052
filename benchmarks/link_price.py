"""What authentication and encryption between hosts cost: Paceline's ways from one worker to another, against gloo.

    python benchmarks/link_price.py [--rounds 15] [--sizes "4 KB,64 MB"]

Two workers of one thread each, over loopback. They connect as workers of two hosts do (TLS), as those of one host do
(Unix sockets), and over plain TCP, which Paceline does not offer: it shows what TLS adds. The first table has their
all-reduce. The second one has a tensor that goes to another process and comes back: over those connections, and between
a worker and a parameter server, over a Unix socket as on one host and by ZeroMQ with CURVE as between hosts. The third
one has the time until two workers have met.

All ways take turns within every round, in one run; the tables give medians, and ratios of medians. One loopback serves
both workers and there are no cables, so encryption shows more than between hosts: a network that is slower than the
cipher hides it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from driving.forks import measured_by
from driving.options import options_of
from driving.progress import doing
from paceline.comm.messages import tensor_messages
from paceline.comm.messages.tensor_messages import TensorClient, TensorServer
from paceline.comm.peer_sockets.links import PeerLinks
from paceline.comm.peer_sockets.process_group import PeerProcessGroup, create_peer_group

SIZES = {  # bytes, repetitions in a round
    "4 KB": (4 << 10, 100),
    "64 KB": (64 << 10, 50),
    "1 MB": (1 << 20, 20),
    "64 MB": (64 << 20, 2),
}
GLOO, PLAIN, UNIX, TLS, SERVER, CURVE = "gloo", "plain TCP", "Unix", "TLS", "server, Unix", "server, CURVE"
REDUCING, RETURNING = (GLOO, PLAIN, UNIX, TLS), (GLOO, PLAIN, TLS, SERVER, CURVE)
ADDRESS, LIMIT_S = "127.0.0.1", 60.0
Took = dict[str, dict[str, float]]  # by size and way: median seconds
Found = tuple[Took, Took, dict[str, float]]  # all-reduce; there and back; meeting
Way = Callable[[torch.Tensor], None]


class Pair:
    """This worker's connections to the other one, of every kind."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self._store, self._num_met = rank, store, 0
        dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2)
        groups = {GLOO: dist.group.WORLD, PLAIN: self._plain(), UNIX: self.meet(None), TLS: self.meet(ADDRESS)}
        self.groups: dict[str, Any] = groups
        self._servers, self._clients = dict[str, TensorServer](), dict[str, TensorClient]()
        for way in (SERVER, CURVE):
            self._serve_at(way)

    def meet(self, address: str | None) -> PeerProcessGroup:
        """Meet the other worker as Paceline's workers do: on one host (None), or between hosts."""
        self._num_met += 1
        store = dist.PrefixStore(f"met {self._num_met}", self._store)
        about: dict[str, Any] = {"index": self.rank, "size": 2, "timeout_s": LIMIT_S, "check": lambda: None}
        return create_peer_group(store, address=address, **about)

    def meet_by_gloo(self) -> Any:
        return dist.new_group([0, 1])

    def gather_at_gate(self) -> None:
        """Both workers go on together."""
        self.groups[UNIX].barrier().wait()

    def reduce(self, way: str, tensor: torch.Tensor) -> None:
        self.groups[way].allreduce([tensor]).wait()

    def send_and_get_back(self, way: str, tensor: torch.Tensor) -> None:
        """Worker 0 sends a tensor; worker 1 sends what it got."""
        if way in self._clients:
            client = self._clients[way]
            client.answer(client.begin({"op": "x"}, [tensor]))
        elif way in self._servers:
            server = self._servers[way]
            while (asked := server.receive(LIMIT_S)) is None:
                pass
            peer, message = asked
            server.send(peer, {"call": message.header["call"]}, message.tensors)
        elif self.rank == 0:
            self.groups[way].send([tensor], 1, 0).wait()
            self.groups[way].recv([tensor], 1, 0).wait()
        else:
            self.groups[way].recv([tensor], 0, 0).wait()
            self.groups[way].send([tensor], 0, 0).wait()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self.gather_at_gate()
        for server in self._servers.values():
            server.close()
        for way in (PLAIN, UNIX, TLS):
            self.groups[way].shutdown()

    def _plain(self) -> PeerProcessGroup:
        """Two workers over a TCP connection that proves nothing."""
        if self.rank == 0:
            with socket.create_server((ADDRESS, 0)) as listener:
                self._store.set("plain", str(listener.getsockname()[1]))
                sock, _ = listener.accept()
        else:
            sock = socket.create_connection((ADDRESS, int(self._store.get("plain"))))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return PeerProcessGroup(PeerLinks({1 - self.rank: sock}), index=self.rank, size=2, timeout_s=LIMIT_S)

    def _serve_at(self, way: str) -> None:
        """Worker 1 has a server, and worker 0 is its client."""
        if self.rank == 0:
            endpoint, secret = json.loads(self._store.get(way))
            self._clients[way] = TensorClient(endpoint, bytes.fromhex(secret), name="the server", timeout_s=LIMIT_S)
            return
        is_near, secret = tensor_messages.is_loopback, secrets.token_bytes(32)
        if way == CURVE:  # as at an address that other hosts reach
            tensor_messages.is_loopback = lambda _: False
        self._servers[way] = server = TensorServer(ADDRESS, secret)
        tensor_messages.is_loopback = is_near
        self._store.set(way, json.dumps([server.endpoint, secret.hex()]))
        while server.num_connected < 1:
            server.receive(0.05)


def measure(rank: int, store: dist.Store, *, rounds: int, sizes: Sequence[str]) -> Found:
    """As one of the two workers: what each way takes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.filterwarnings("ignore", module="torch.distributed")
    pair = Pair(rank, store)
    reduced, returned = Took(), Took()
    for size in sizes:
        num_bytes, repetitions = SIZES[size]
        tensor = torch.zeros(num_bytes // 4)
        if rank == 0:
            doing(f"all-reduce of {size}, {rounds} rounds of each way")
        reduced[size] = in_turns(pair, _of(pair.reduce, REDUCING), tensor, rounds, repetitions)
        if rank == 0:
            doing(f"{size} there and back")
        returned[size] = in_turns(pair, _of(pair.send_and_get_back, RETURNING), tensor, rounds, repetitions)
    meetings: dict[str, Way] = {
        GLOO: lambda _: pair.meet_by_gloo(),
        UNIX: lambda _: pair.meet(None).shutdown(),
        TLS: lambda _: pair.meet(ADDRESS).shutdown(),
    }
    met = in_turns(pair, meetings, torch.zeros(1), rounds, 1)
    pair.close()
    return reduced, returned, met


def _of(do: Callable[[str, torch.Tensor], None], names: Sequence[str]) -> dict[str, Way]:
    return {name: lambda tensor, name=name: do(name, tensor) for name in names}


def in_turns(pair: Pair, ways: dict[str, Way], tensor: torch.Tensor, rounds: int, repetitions: int) -> dict[str, float]:
    """Median seconds of one call, by way; both workers begin together, and are done together."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in ways if turn % 2 else reversed(ways):
            pair.gather_at_gate()
            began = time.perf_counter()
            for _ in range(repetitions):
                ways[name](tensor)
            pair.gather_at_gate()
            took[name].append((time.perf_counter() - began) / repetitions)
    return {name: statistics.median(times[1:]) for name, times in took.items()}  # the first round warms up


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def told(size: str, seconds: float, *, times: int = 1) -> str:
    """The time, and the rate of the tensor's bytes; `times`: as often they travel."""
    num_bytes = SIZES[size][0]
    rate = f" ({times * num_bytes / seconds / 1e9:.2g} GB/s)" if num_bytes >= 1 << 20 else ""
    return time_text(seconds) + rate


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def tables(found: Found) -> str:
    """The three tables."""
    reduced, returned, met = found
    sums = [
        [size, *(told(size, took[way]) for way in REDUCING), *(_ratio(took, TLS, way) for way in (PLAIN, GLOO))]
        for size, took in reduced.items()
    ]
    backs = [
        [
            size,
            *(told(size, took[way], times=2) for way in RETURNING),
            _ratio(took, TLS, PLAIN),
            _ratio(took, TLS, GLOO),
            _ratio(took, CURVE, SERVER),
            _ratio(took, CURVE, GLOO),
        ]
        for size, took in returned.items()
    ]
    meeting = [[*(time_text(met[way]) for way in (GLOO, UNIX, TLS)), _ratio(met, TLS, UNIX), _ratio(met, TLS, GLOO)]]
    back_head = ["there and back", *RETURNING, "TLS / plain", "TLS / gloo", "CURVE / Unix", "CURVE / gloo"]
    return "\n\n".join(
        [
            table(["all-reduce", *REDUCING, "TLS / plain", "TLS / gloo"], sums),
            table(back_head, backs),
            table(["two workers meet: gloo", UNIX, TLS, "TLS / Unix", "TLS / gloo"], meeting),
        ]
    )


def _ratio(took: dict[str, float], way: str, other: str) -> str:
    """The time of one way by that of another."""
    return f"**{took[way] / took[other]:.2f}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    options = options_of(parser, takes="about a minute", quick={"rounds": 3, "sizes": "4 KB,64 MB"})
    sizes = options.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        parser.error(f"--sizes: {unknown} are none of {list(SIZES)}")
    found = measured_by(2, lambda rank, store: measure(rank, store, rounds=options.rounds, sizes=sizes))
    print(tables(found), flush=True)


if __name__ == "__main__":
    main()
