"""Starts the warm parent (`paceline.launch.fork.warm_parent`) for the supervisor, and requests workers from it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from paceline.comm.messages.socket_directory import remove_socket_directories
from paceline.environment import FAMILY as FAMILY_VARIABLE
from paceline.environment import PRELOADS, child_environment
from paceline.errors import LaunchError
from paceline.launch.fork import process_lifetime
from paceline.launch.fork.parent_watch import ParentWatch
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.plan.job import Assignment, Job, assignment_to_json
from paceline.plan.program_tasks import ENTRIES

__all__ = ["ENTRY", "MODULES", "WarmParent"]

ENTRY = "paceline.worker.main:work"  # what a worker runs, by name: launch imports nothing of worker
MODULES = ("torch", "torch.distributed", "numpy", "paceline.worker.main")
END_S = 4.0  # longer than the warm parent takes to end what the workers left behind
KILL_S = 2.0  # limit on killing leftover processes


# Set the search path first: Paceline itself may only be found through a path that the user's program added.
BOOTSTRAP_CODE = """
import json, sys
start = json.loads(sys.argv[1])
sys.path[:] = start["paths"]
from paceline.launch.fork.warm_parent import main
main(start)
"""


class WarmParent:
    """The warm parent process, as its supervisor sees it. Close it on every path."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        output: IO[bytes],
        *,
        modules: Sequence[str] = MODULES,
        entry: str,
        family: str,
    ) -> None:
        self.entry, self._modules = entry, tuple(modules)
        self._process, self._sock, self._output, self._family = process, sock, output, family
        self._link: MessageStream | None = None
        self._ready: dict[str, Any] | None = None  # its "ready" message
        self._has_forked = False  # a worker was requested
        self._closed = False
        self._watch = ParentWatch(process.pid, self._ping)

    @classmethod
    def start(cls, *, modules: Sequence[str] = MODULES, entry: str = ENTRY) -> WarmParent:
        """Start it and return at once, while it imports `modules`. Raise LaunchError if no process can be started."""
        if not sys.executable:
            raise LaunchError(
                "Python does not know its own executable: start the program with `python` (sys.executable)."
            )
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  # must live as long as the process
        start = {"fd": theirs.fileno(), "supervisor": os.getpid(), "modules": list(modules), "paths": _paths()}
        family = secrets.token_hex(8)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        try:
            process = subprocess.Popen(
                [sys.executable, *flags, "-P", "-c", BOOTSTRAP_CODE, json.dumps(start)],
                env=child_environment(**{FAMILY_VARIABLE: family, PRELOADS: "1"}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the supervisor
            )
        except OSError as error:
            ours.close()
            output.close()
            is_accident = error.errno in (errno.EAGAIN, errno.ENOMEM)
            raise LaunchError(f"Cannot start {sys.executable}: {error.strerror}.", is_accident=is_accident) from error
        finally:
            theirs.close()
        return cls(process, ours, output, modules=modules, entry=entry, family=family)

    @classmethod
    def start_for(cls, job: Job) -> WarmParent:
        """Start what forks the workers of this job: without torch, where another framework's program does the work."""
        module = ENTRIES.get(job.run_for or "")
        return cls.start() if module is None else cls.start(modules=(module,), entry=f"{module}:work")

    def __enter__(self) -> WarmParent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def was_killed(self) -> bool:
        """Whether it was ended from outside, by SIGKILL or SIGTERM."""
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    def restart(self) -> None:
        """Start it again after it was lost with all its workers; then `attach` it. Raise LaunchError if that fails."""
        fresh = type(self).start(modules=self._modules, entry=self.entry)
        self._output.close()
        self._process, self._sock, self._output, self._family = (
            fresh._process,
            fresh._sock,
            fresh._output,
            fresh._family,
        )
        self._link = self._ready = None
        self._has_forked = False
        self._watch = ParentWatch(self.pid, self._ping)

    @property
    def pid(self) -> int:
        return self._process.pid

    def attach(
        self, loop: EventLoop, *, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[str], None]
    ) -> None:
        """Receive its messages (see `paceline.launch.fork.warm_parent`) in `loop`. `on_lost(how)` is called if it ends
        by itself. If it is ready already, `on_message` gets its "ready" message again at once.
        """

        def lost(_: Exception) -> None:
            how = self._how_it_ended()
            self._kill()
            on_lost(how)

        def received(message: dict[str, Any]) -> None:
            if message["op"] == "pong":
                self._watch.answered()
                return
            if message["op"] == "ready":
                self._ready = message
            on_message(message)

        self._link = MessageStream(self._sock, loop, on_message=received, on_close=lost)
        if self._ready is not None:
            on_message(self._ready)

    def detach(self) -> None:
        """Stop receiving, until the next `attach`; all its workers must have ended."""
        self._attached().release()
        self._link = None
        self._watch = ParentWatch(self.pid, self._ping)  # an answer may be under way

    def fork(self, assignment: Assignment, channel: socket.socket, *, memory_checkpoint: Sequence[int] = ()) -> None:
        """Request a worker. `channel` is the worker's end of its socket to the supervisor, and is closed here.

        `memory_checkpoint` are further file descriptors for the worker, which stay open here. Raise OSError if this
        process may open no more files.
        """
        self._has_forked = True
        request = {
            "op": "fork",
            "worker": assignment.rank,
            "assignment": assignment_to_json(assignment),
            "entry": self.entry,
            "folder": os.getcwd(),
            "paths": _paths(),
            "argv": sys.argv,
            "num_files": len(memory_checkpoint),
        }
        with contextlib.ExitStack() as unsent:
            unsent.enter_context(channel)
            files = [unsent.enter_context(contextlib.closing(_PassedFile(os.dup(fd)))) for fd in memory_checkpoint]
            unsent.pop_all()
        self._attached().send(request, passing=[channel, *files])

    def signal(self, worker: int, signum: int, *, alone: bool = False) -> None:
        """Send a signal to a worker's process group, or with `alone` only to the worker; ignored if it has ended."""
        self._attached().send({"op": "signal", "worker": worker, "signal": signum, "alone": alone})

    @property
    def is_silent(self) -> bool:
        """Whether it was asked and has not answered: what it knows of its workers is not known here."""
        return self._watch.is_silent

    def tick(self, now: float, *, owes: bool, say: Callable[[str], None]) -> None:
        """Look after it while it `owes` a report: continue it if it is stopped, and kill it if it does not answer."""
        self._watch.tick(now, owes=owes, is_ready=self._ready is not None, say=say)

    def _ping(self) -> None:
        self._attached().send({"op": "ping"})

    def let_orphans_finish(self, grace_s: float) -> None:
        """From now on, if this process is lost, the workers have `grace_s` seconds to save and leave."""
        self._attached().send({"op": "orphans", "grace_s": grace_s})

    def output(self) -> str:
        """Return what it has written so far, such as import warnings or a crash; workers' output is elsewhere."""
        if self._output.closed:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="backslashreplace").strip()

    def close(self) -> None:
        """End it and all its descendants, in bounded time; safe to repeat."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._link is None:
                self._sock.close()
            else:
                self._link.send({"op": "end"})  # without this message its workers would count as orphans
                self._link.close()
            if not self._has_forked:
                self._process.kill()  # it may still be importing, and has no workers to end
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass  # it hangs, and is killed below
        finally:
            self._kill()
            self._output.close()

    def _kill(self) -> None:
        """If it did not end in good order, kill it and what its workers have started."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        if self._process.returncode == 0 or not self._has_forked:
            remove_socket_directories(self._family)
            return
        # The kernel killed its workers with it. Their children are found by the environment variable they inherited.
        deadline = time.monotonic() + KILL_S
        while (
            left := process_lifetime.pids_with_variable(FAMILY_VARIABLE, self._family)
        ) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)  # the end of a process that is not a child cannot be waited for, so poll
        remove_socket_directories(self._family)

    def _attached(self) -> MessageStream:
        if self._link is None:
            raise LaunchError("The warm parent is not attached to a supervisor's loop: call attach() first.")
        return self._link

    def _how_it_ended(self) -> str:
        """Say in words how it ended; it has closed its end of the socket, so it should end soon."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its socket but is still running"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"was killed by signal {-code} ({name})"


class _PassedFile:
    """An open file that is being passed to a worker."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def _paths() -> list[str]:
    """Return this process's import search path; Python ignores entries that are not strings."""
    return [path for path in sys.path if isinstance(path, str)]
