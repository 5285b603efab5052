"""The supervisor's end of the warm parent (`paceline.launch.fork.warm_parent`): started early, then asked for
workers.
"""

from __future__ import annotations

import contextlib
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

from paceline.environment import child_environment
from paceline.errors import LaunchError
from paceline.launch.fork import process_lifetime
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.plan.job import Assignment, assignment_to_json

__all__ = ["ENTRY", "MODULES", "WarmParent"]

ENTRY = "paceline.worker.main:work"  # what a worker runs, by name: this room knows nothing of workers
MODULES = ("torch", "torch.distributed", "numpy", "paceline.worker.main")
END_S = 4.0  # more than the warm parent gives to what the workers left behind
LAST_S = 2.0  # after SIGKILL

FAMILY_VARIABLE = "PACELINE_FAMILY"  # environment variable that marks the warm parent and all that comes of it

# The interpreter's search path comes first: Paceline itself may be found through what the user's program added to it.
BOOTSTRAP_CODE = """
import json, sys
start = json.loads(sys.argv[1])
sys.path[:] = start["paths"]
from paceline.launch.fork.warm_parent import main
main(start)
"""


class WarmParent:
    """A process that imports what workers need, and then forks them. Close it on every path."""

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, output: IO[bytes], *, entry: str, family: str
    ) -> None:
        self.entry = entry
        self._process, self._sock, self._output, self._family = process, sock, output, family
        self._link: MessageStream | None = None
        self._ready: dict[str, Any] | None = None  # what it said when it was
        self._asked = False  # for any worker
        self._closed = False

    @classmethod
    def start(cls, *, modules: Sequence[str] = MODULES, entry: str = ENTRY) -> WarmParent:
        """Start it and return at once, while it imports `modules`. Raises LaunchError where no process can start."""
        if not sys.executable:
            raise LaunchError(
                "Python does not know its own executable: start the program with `python` (sys.executable)."
            )
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        start = {"fd": theirs.fileno(), "supervisor": os.getpid(), "modules": list(modules), "paths": _paths()}
        family = secrets.token_hex(8)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        try:
            process = subprocess.Popen(
                [sys.executable, *flags, "-P", "-c", BOOTSTRAP_CODE, json.dumps(start)],
                env=child_environment(**{FAMILY_VARIABLE: family}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the supervisor
            )
        except OSError as error:
            ours.close()
            output.close()
            raise LaunchError(f"Cannot start {sys.executable}: {error.strerror}.") from error
        finally:
            theirs.close()
        return cls(process, ours, output, entry=entry, family=family)

    def __enter__(self) -> WarmParent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def attach(
        self, loop: EventLoop, *, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[str], None]
    ) -> None:
        """Hear what it says (see `paceline.launch.fork.warm_parent`) from `loop`; `on_lost(how)` when it has ended by
        itself. Who comes after somebody else hears at once that it is ready.
        """

        def gone(_: Exception) -> None:
            how = self._how_it_ended()
            self._kill()
            on_lost(how)

        def heard(message: dict[str, Any]) -> None:
            if message["op"] == "ready":
                self._ready = message
            on_message(message)

        self._link = MessageStream(self._sock, loop, on_message=heard, on_close=gone)
        if self._ready is not None:
            on_message(self._ready)

    def detach(self) -> None:
        """Nobody listens any more, until somebody else attaches; all its workers must have ended."""
        self._attached().release()
        self._link = None

    def fork(self, assignment: Assignment, channel: socket.socket, *, memory_checkpoint: Sequence[int] = ()) -> None:
        """Ask for a worker; `channel` is its end of the socket to the supervisor, and is closed here.
        `memory_checkpoint`: files that it is handed as well, which stay open here. OSError where this process may open
        no more files.
        """
        self._asked = True
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
        """Send a signal to a worker's process group, or to it alone, where the worker has not ended."""
        self._attached().send({"op": "signal", "worker": worker, "signal": signum, "alone": alone})

    def let_orphans_finish(self, grace_s: float) -> None:
        """From now on the workers may outlive this process, should it be lost, by so much: to save and leave."""
        self._attached().send({"op": "orphans", "grace_s": grace_s})

    def output(self) -> str:
        """What it has written so far (warnings while importing, a crash): nothing of the workers."""
        if self._output.closed:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="backslashreplace").strip()

    def close(self) -> None:
        """End it and everything below it; bounded in time, and safe to repeat."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._link is None:
                self._sock.close()
            else:
                self._link.send({"op": "end"})  # otherwise they are orphans
                self._link.close()
            if not self._asked:
                self._process.kill()  # still importing, perhaps: there is nobody else to end
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass  # it does not answer any more
        finally:
            self._kill()
            self._output.close()

    def _kill(self) -> None:
        """Kill what is left when it did not end in good order: itself, and what its workers have started."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        if self._process.returncode == 0 or not self._asked:
            return
        # Its workers died with it. Their children have nobody left who knows of them, but carry the family's name.
        deadline = time.monotonic() + LAST_S
        while (
            left := process_lifetime.pids_with_variable(FAMILY_VARIABLE, self._family)
        ) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)  # nothing tells when a process ends that is not one's own child

    def _attached(self) -> MessageStream:
        if self._link is None:
            raise LaunchError("The warm parent is not attached to a supervisor's loop: call attach() first.")
        return self._link

    def _how_it_ended(self) -> str:
        """Say how, in words; it closed its end of the socket, so its end is near."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its socket but goes on"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"was killed by signal {-code} ({name})"


class _PassedFile:
    """An open file on its way to a worker."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def _paths() -> list[str]:
    """This process's search path; what is no text in it is not searched anyway."""
    return [path for path in sys.path if isinstance(path, str)]
