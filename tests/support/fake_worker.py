"""A worker without torch, for tests of processes: does what the job's arguments tell its rank to do.

`job.args` are words "RANK:BEHAVIOUR" (`*` for every rank); a rank without one ends well at once. Each worker first adds
one to the key-value store's counter "here", so that they can wait for each other. A path in a behaviour is a named pipe
into which the worker writes a line when it has come so far: its process numbers, mostly.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from paceline.comm.messages.json_channel import Channel
from paceline.plan.job import Assignment

GRANDCHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
)


def work(assignment: Assignment) -> int:
    channel = Channel.inherited(assignment.channel_fd)
    try:
        channel.call("add", key="here", amount=1)
        for word in assignment.job.args:
            ranks, _, behaviour = word.partition(":")
            if ranks in ("*", str(assignment.rank)):
                return behave(behaviour, assignment, channel)
        return 0
    finally:
        channel.close()


def behave(behaviour: str, assignment: Assignment, channel: Channel) -> int:
    name, _, detail = behaviour.partition("=")
    match name:
        case "wait":  # for everybody to be here, then for ever
            wait_for_all(assignment, channel)
            announce(detail, [os.getpid()])
            wait_for_ever()
        case "early":  # as wait, but for nobody
            announce(detail, [os.getpid()])
            wait_for_ever()
        case "stubborn":  # as wait, and SIGTERM does not end it
            signal.signal(signal.SIGTERM, lambda *_: announce(detail, "SIGTERM"))
            wait_for_all(assignment, channel)
            announce(detail, [os.getpid()])
            wait_for_ever()
        case "raise":
            wait_for_all(assignment, channel)
            raise RuntimeError(f"worker {assignment.rank} has had enough")
        case "usage":
            fields = {"kind": "PlanError", "message": "no such plan", "usage": True, "echo": False}
            Path(assignment.worker_dir, "error.json").write_text(json.dumps(fields))
            return 2
        case "kill":
            wait_for_all(assignment, channel)
            os.kill(os.getpid(), signal.SIGKILL)
        case "ctrl-c":
            wait_for_all(assignment, channel)
            raise KeyboardInterrupt
        case "exit":
            sys.exit(int(detail))
        case "quit":  # without a word to the process that forked it
            wait_for_all(assignment, channel)
            os._exit(int(detail))
        case "late":  # the function has returned, and what runs behind it ends the process
            atexit.register(os._exit, int(detail))
        case "family":  # a child in the own group, and one in a session of its own; both deaf to SIGTERM
            children = [grandchild(own_session=False), grandchild(own_session=True)]
            wait_for_all(assignment, channel)
            announce(detail, [os.getpid(), *(child.pid for child in children)])
            wait_for_ever()
        case "leave":  # as family, but the worker itself ends well
            children = [grandchild(own_session=False), grandchild(own_session=True)]
            announce(detail, [os.getpid(), *(child.pid for child in children)])
            return 0
        case "memory":
            block = bytearray(int(detail))
            block[::4096] = b"x" * len(block[::4096])
        case "tell":  # what this process is like
            announce(detail, describe(assignment))
        case "garbage":
            with socket.socket(fileno=os.dup(assignment.channel_fd)) as sock:
                sock.sendall(b"this is not JSON\n")
                return len(sock.recv(1))  # 0: the supervisor has closed the channel
        case "large":
            value = "A" * 4 * (int(detail) // 4)
            channel.call("set", key="large", value=value)
            return int(channel.call("get", key="large") != value)
        case _:
            raise ValueError(f"unknown behaviour {behaviour!r}")
    return 0


def wait_for_all(assignment: Assignment, channel: Channel) -> None:
    while channel.call("add", key="here", amount=0) < assignment.workers:
        time.sleep(0.002)


def wait_for_ever() -> None:
    while True:
        signal.pause()


def announce(path: str, what: object) -> None:
    if path:
        with open(path, "w") as pipe:
            pipe.write(json.dumps(what) + "\n")  # one write, short enough to stay in one piece


def grandchild(*, own_session: bool) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE, start_new_session=own_session)
    if child.stdout is not None:
        child.stdout.readline()  # it is deaf now
    return child


def describe(assignment: Assignment) -> dict[str, object]:
    print("said on stdout", flush=True)
    print("said on stderr", file=sys.stderr)
    return {
        "rank": assignment.rank,
        "local": [assignment.local_rank, assignment.local_workers],
        "host": [assignment.host_index, assignment.host, assignment.address],
        "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
        "channel_fd": assignment.channel_fd,
        "session": os.getsid(0) == os.getpid(),
        "group": os.getpgid(0) == os.getpid(),
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "interrupt": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": len(os.listdir("/proc/self/task")),
        "folder": os.getcwd(),
        "torch": "torch" in sys.modules,
        "token": "PACELINE_TOKEN" in os.environ,
        "stdin": os.readlink("/proc/self/fd/0"),
    }
