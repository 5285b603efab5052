"""How fast very many hosts join one coordinator, and what they cost it, with hosts that only speak the protocol.

    python benchmarks/many_hosts.py [--hosts 1000] [--processes 8]

A real `paceline run` here is the coordinator, with one worker that trains. The hosts are connections of a few
processes: each proves the token, encrypts, says hello, is welcomed, and sends its ping each second, as a host does.
Printed: until the last host is in, and the coordinator's processor time and memory while they join, and afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from driving.options import options_of
from paceline.elastic.lease import seconds_since_boot
from paceline.launch.coordinator.join_request import JobTerms
from paceline.launch.io.authentication import AuthenticatedConnection
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.plan import Job, Plan

LIMIT_S = 120.0
WATCHED_S = 10.0  # with all hosts there
PING_S = 1.0
AT_ONCE = 32  # connections that one process opens at a time
PLAN = "replicas=1-{most}+batch(size=8,micro=4)"
PROGRAM = """
import time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import paceline

def forward(model, micro):
    time.sleep(0.05)
    return F.cross_entropy(model(micro[0]), micro[1])

def train(worker):
    model = worker.prepare(nn.Linear(4, 2))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), forward=forward)
    for batch in worker.batches(TensorDataset(torch.randn(8000, 4), torch.zeros(8000, dtype=torch.long)), epochs=100):
        step(batch)

paceline.run(train)
"""


class PretendedHosts:
    """Some hosts of one process."""

    def __init__(self, count: int, terms: JobTerms) -> None:
        self._terms, self._left, self._loop = terms, count, EventLoop()
        self._calls: dict[AuthenticatedConnection, None] = {}
        self._links: dict[MessageStream, float] = {}  # welcomed ones: when they ping next
        self._waiting: set[MessageStream] = set()
        self.refused: list[str] = []

    def turn(self) -> int:
        """Do what is to be done; return how many hosts are in."""
        while self._left and len(self._calls) + len(self._waiting) < AT_ONCE:
            self._left -= 1
            self._call()
        self._loop.turn(0.02)
        now = time.monotonic()
        for call in list(self._calls):
            call.tick(now)
        for link, ping_at in self._links.items():
            if now >= ping_at:
                self._links[link] = now + PING_S
                link.send({"op": "ping", "asked": seconds_since_boot()})
        return len(self._links)

    def _call(self) -> None:
        call: AuthenticatedConnection

        def proved(sock: socket.socket) -> None:
            del self._calls[call]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = MessageStream(sock, self._loop, on_message=received, on_close=lambda error: closed(link, error))

            self._waiting.add(link)
            hello = {"op": "hello", "host": f"host{os.getpid()}", "address": "127.0.0.1", "port": 0, "slots": None}
            link.send({**hello, "job": self._terms.essentials, "host_index": None})
            links.append(link)

        links: list[MessageStream] = []

        def received(message: Mapping[str, Any]) -> None:
            if message.get("op") == "welcome":
                self._waiting.discard(links[0])
                self._links[links[0]] = time.monotonic() + PING_S
            elif message.get("op") == "refused":
                self.refused.append(str(message.get("reason")))
                self._left += 1

        def closed(link: MessageStream, error: Exception) -> None:
            self._waiting.discard(link)
            self._links.pop(link, None)

        def failed(reason: str, final: bool) -> None:
            self._calls.pop(call, None)
            self.refused.append(reason)
            self._left += 1

        call = AuthenticatedConnection(self._terms.token, self._loop, on_proved=proved, on_failed=failed)
        self._calls[call] = None
        call.begin(socket.AF_INET, self._terms.at)


def pretend(count: int, terms: JobTerms, begin: Any, joined: Any, end: Any) -> None:
    """Be some hosts, in a process of its own."""
    hosts = PretendedHosts(count, terms)
    begin.wait()
    while not end.is_set():
        joined.value = hosts.turn()
    if hosts.refused:
        print(f"refused: {sorted(set(hosts.refused))[:3]}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8)
    asked = options_of(parser, takes="half a minute", quick={"hosts": 200})
    token, port = secrets.token_hex(32), free_port()
    with tempfile.TemporaryDirectory(prefix="paceline-hosts-") as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM)
        words = [sys.executable, "-m", "paceline", "run", str(program), "--hosts", "1", "--workers", "1"]
        words += ["--head", f"127.0.0.1:{port}", "--run-dir", f"{folder}/run", "--plan", PLAN.format(most=1)]
        words += ["--no-tensorboard"]
        log = (Path(folder) / "log").open("w")
        head = subprocess.Popen(words, env={**os.environ, "PACELINE_TOKEN": token}, stdout=log, stderr=log)
        try:
            metrics = Path(folder) / "run" / "metrics.jsonl"
            wait(lambda: metrics.exists() and metrics.stat().st_size > 500, "the run is at work")
            job = Job(program=str(program), hosts=1, workers=1, head=f"127.0.0.1:{port}")
            terms = JobTerms(
                job=job,
                asked=job,
                plan=str(Plan.parse(PLAN.format(most=1))),
                attempt=1,
                run_dir="",
                host="pretended",
                at=("127.0.0.1", port),
                token=token.encode(),
            )
            report(asked.hosts, asked.processes, terms, psutil.Process(head.pid))
        except TimeoutError:
            print((Path(folder) / "log").read_text()[-2000:])
            raise
        finally:
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(60)
            head.kill()
            head.wait()
            log.close()
    return 0


def report(hosts: int, processes: int, terms: JobTerms, head: psutil.Process) -> None:
    """Have the hosts join, and print what was seen."""
    shares = [hosts // processes + (number < hosts % processes) for number in range(processes)]
    begin, end = multiprocessing.Event(), multiprocessing.Event()
    joined = [multiprocessing.Value("i", 0) for _ in shares]
    children = [
        multiprocessing.Process(target=pretend, args=(share, terms, begin, counter, end))
        for share, counter in zip(shares, joined, strict=True)
    ]
    for child in children:
        child.start()
    try:
        time.sleep(1.0)
        before = head.memory_info().rss
        began, used = time.monotonic(), cpu_s(head)
        begin.set()
        wait(lambda: sum(counter.value for counter in joined) == hosts, f"{hosts} hosts are in")
        took, joining = time.monotonic() - began, cpu_s(head) - used
        print(f"{hosts} hosts are in after {took:.2f} s; the coordinator used {joining:.2f} s of a core")
        began, used = time.monotonic(), cpu_s(head)
        time.sleep(WATCHED_S)
        share = (cpu_s(head) - used) / (time.monotonic() - began)
        there = sum(counter.value for counter in joined)
        print(f"{there} of them are there {WATCHED_S:.0f} s later; the coordinator uses {share:.2f} of a core")
        memory = head.memory_info().rss
        print(f"its memory: {memory / 1e6:.0f} MB ({before / 1e6:.0f} MB without them)")
    finally:
        end.set()
        for child in children:
            child.join(10)
            child.kill()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait(holds: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:.0f} s: {what}")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
