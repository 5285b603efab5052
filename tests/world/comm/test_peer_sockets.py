"""Groups over sockets that admit no stranger: what they compute, who gets in, and what is left of a lost member."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm.peer_sockets import meeting, process_group
from shared_memory_workers import Workers

LIMIT_S = 60.0
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def join(workers: Workers, rank: int, size: int, address: str | None) -> Any:
    process_group.listen_at(address)
    store = dist.FileStore(str(workers.scratch / "store"), size)
    name = process_group.register_peer_backend()
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    return dist.group.WORLD


def listening_sockets() -> list[str]:
    """The TCP sockets at which this process listens."""
    paths = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    own = {str(path.readlink()) for path in paths if path.is_symlink()}
    rows = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def collectives(rank: int, size: int) -> list[str]:
    """What is wrong; every rank's tensor of each type and length is known."""
    wrong: list[str] = []

    def check(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(f"{what} {found.dtype} {found.shape}")

    def of(member: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return ((torch.arange(numel) + member) % 3).to(dtype)

    for dtype in DTYPES:
        for numel in (0, 1, 7, 40_000):
            whole = [of(member, numel, dtype) for member in range(size)]
            summed = torch.stack(whole).sum(0).to(dtype)
            one = whole[rank].clone()
            if dtype != torch.bool:
                dist.all_reduce(one)
                check("all_reduce", one, summed)
            rows = [torch.empty_like(one) for _ in range(size)]
            dist.all_gather(rows, whole[rank])
            check("all_gather", torch.stack(rows), torch.stack(whole))
            for source in range(size):
                sent = whole[rank].clone()
                dist.broadcast(sent, src=source)
                check("broadcast", sent, whole[source])
    table = torch.arange(size * size * 3.0).view(size, size, 3)
    out = torch.empty(size, 3)
    dist.all_to_all_single(out, table[rank].contiguous())
    check("all_to_all", out, table[:, rank])
    part = torch.empty(3)
    dist.reduce_scatter(part, list((table[rank] + rank).unbind()))
    check("reduce_scatter", part, (table + torch.arange(float(size)).view(-1, 1, 1)).sum(0)[rank])
    kinds = ((dist.ReduceOp.MAX, torch.amax), (dist.ReduceOp.MIN, torch.amin), (dist.ReduceOp.AVG, torch.mean))
    for op, reduce in kinds:
        one = table[rank].clone()
        dist.all_reduce(one, op=op)
        check(str(op), one, reduce(table, 0))
    turned = table[rank].t()  # not contiguous
    dist.all_reduce(turned)
    check("transposed", table[rank], torch.arange(size * size * 3.0).view(size, size, 3).sum(0))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    if objects != [{"rank": member} for member in range(size)]:
        wrong.append("objects")
    to, source = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(5)
    works = [dist.irecv(received, source), dist.isend(torch.full((5,), float(rank)), to)]
    for work in works:
        if work is not None:
            work.wait()
    check("sent", received, torch.full((5,), float(source)))
    half = dist.new_group([0, 1])
    if rank < 2:
        one = torch.ones(2)
        dist.all_reduce(one, group=half)
        check("of a subgroup", one, torch.full((2,), 2.0))
    dist.barrier()
    return wrong


@pytest.mark.parametrize(("size", "address"), [(3, None), (2, "127.0.0.1")], ids=["one host", "between hosts"])
def test_collectives_are_right_and_no_port_is_left_open(tmp_path: Path, size: int, address: str | None) -> None:
    def work(workers: Workers, rank: int) -> Any:
        torch.set_num_threads(1)
        before = listening_sockets()
        join(workers, rank, size, address)
        wrong = collectives(rank, size)
        ports = [one for one in listening_sockets() if one not in before]
        dist.barrier()
        if rank == 1:
            os._exit(0)
        lost = ""
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            lost = str(error)
        return wrong, ports, "connection closed by peer 1" in lost

    values = Workers(tmp_path, size, _but(1, work)).values()
    assert [value for rank, value in enumerate(values) if rank != 1] == [([], [], True)] * (size - 1)


def _but(rank: int, work: Callable[[Workers, int], Any]) -> Callable[[Workers, int], Any]:
    """Worker `rank` ends in the middle, and leaves a value before."""

    def wrapped(workers: Workers, own: int) -> Any:
        if own == rank:
            torch.save(None, workers.scratch / f"value_{own}")
        return work(workers, own)

    return wrapped


class Exploit:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_strangers_at_a_members_port_take_no_place_run_nothing_and_delay_nobody(tmp_path: Path) -> None:
    """Between hosts there is a port while members meet: strangers claim ranks, send pickles, or only stay."""
    store, proof = dist.HashStore(), tmp_path / "executed"
    groups: dict[int, Any] = {}

    def member(index: int) -> None:
        groups[index] = process_group.create_peer_group(
            store, index=index, size=2, address="127.0.0.1", timeout_s=30, check=lambda: None
        )

    first = threading.Thread(target=member, args=(0,))
    first.start()
    while not store.check(["peer_0"]):
        time.sleep(0.002)
    host, port = json.loads(store.get("peer_0"))
    garbage = [
        struct.pack(">i", 1),  # "I am member 1"
        b"PACELIN2" + bytes(64) + struct.pack(">i", 1),
        pickle.dumps(Exploit(str(proof))),
        struct.pack("<qQ", (1 << 62) + 1, 8) + b"x" * 8,
        os.urandom(4096),
        b"",
    ]
    strangers = []
    for number in range(60):
        stranger = socket.create_connection((host, port))
        stranger.sendall(garbage[number % len(garbage)])
        strangers.append(stranger)
    began = time.monotonic()
    second = threading.Thread(target=member, args=(1,))
    second.start()
    for one in (first, second):
        one.join()
    assert time.monotonic() - began < 5.0 and not proof.exists()
    ones = {index: torch.full((4,), float(index + 1)) for index in groups}
    works = [group.allreduce([ones[index]]) for index, group in groups.items()]
    sums = threading.Thread(target=works[1].wait)
    sums.start()
    works[0].wait()
    sums.join()
    assert all(torch.equal(one, torch.full((4,), 3.0)) for one in ones.values())
    for group in groups.values():
        group.shutdown()
    for stranger in strangers:
        stranger.close()


def test_on_one_host_only_this_user_reaches_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    listener = meeting._Listener(None, store, index=0)
    place = Path(str(listener.place))
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(meeting, "user_of", lambda _: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(place))
        other.settimeout(10)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            other.sendall(struct.pack(">i", 1))
            assert other.recv(1) == b"", "it is closed unread"
    assert listener.proved.empty()
    listener.close()
    assert not place.parent.exists()
