"""SSH: the system's OpenSSH client starts `paceline host` on each of the hosts that the user names.

The token goes over the connection's standard input. The command that has started the run stays with it: when it ends,
the run saves and leaves. A host that is lost is tried again, and joins the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from paceline import config, environment
from paceline.errors import LaunchError, PlanError
from paceline.launch.engines.console_files import ConsoleFiles
from paceline.launch.engines.driver_process import LOG, driver_handle, driver_state, end_driver, signals_to
from paceline.launch.engines.engine import Answer, Console, EngineState, Refusal, Say
from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.host_driver import LOST, HostDriver
from paceline.launch.engines.run_state import coordinators_host
from paceline.launch.engines.shell import ask
from paceline.launch.engines.submission import Document, Submission

__all__ = ["Ssh"]

HOST = re.compile(r"(?P<name>(?:[^\s:@]+@)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+))(?::(?P<slots>[1-9][0-9]*))?")
# No questions; a host that is gone is noticed within 15 s; no terminal, whose end would be a signal.
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ssh:
    """Settings of a job over SSH.

    Example::

        engine = paceline.Ssh(hosts=("gpu1:8", "gpu2:8"))

    :param hosts: as `ssh` takes them, with the workers of each: "gpu1", "me@gpu2:4"; without numbers, an even share.
    :param python: the interpreter on the hosts (the one that starts the run).
    :param folder: where the script runs on the hosts (where the command was given).
    :param address: of the first host, as the others reach it (where SSH has reached it).
    :param env: variables of this machine that the hosts get: "HF_HOME", or with a value, "NCCL_DEBUG=INFO".
    :param options: of the client: ("-p", "2222").
    :param client: the OpenSSH client ("ssh").
    :raises PlanError: what is no host, or a host that is named twice.
    """

    title: ClassVar[str] = "SSH"
    may_detach: ClassVar[bool] = False
    takes_functions: ClassVar[bool] = False
    may_resize: ClassVar[bool] = False
    reads_ended: ClassVar[bool] = True
    begins_with_all: ClassVar[bool] = True

    hosts: tuple[str, ...] = ()
    python: str | None = None
    folder: str | None = None
    address: str | None = None
    env: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    client: str = "ssh"

    def __post_init__(self) -> None:
        config.check_fields(self)
        for host in self.hosts:
            if HOST.fullmatch(host) is None or host.startswith("-"):
                raise PlanError(
                    f"Ssh.hosts has {host!r}; a host is written as ssh takes it, with its number of workers if it is "
                    "not an even share: 'gpu1', 'me@gpu2:4'."
                )
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise PlanError(f"Ssh.hosts has {name!r} twice: name each host once, with all its workers: '{name}:2'.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_match(host)["name"] for host in self.hosts)

    @property
    def slots(self) -> tuple[int | None, ...]:
        """The workers of each host; None: an even share of the others."""
        return tuple(int(found["slots"]) if (found := _match(host))["slots"] else None for host in self.hosts)

    @property
    def workers(self) -> int | None:
        """The workers of all hosts, where each says its number."""
        known = [each for each in self.slots if each is not None]
        return sum(known) if known and len(known) == len(self.hosts) else None

    def refusals(self, submission: Submission) -> Iterator[Refusal]:
        """Yield why the job cannot run over SSH."""
        if not self.hosts:
            yield Refusal(says="SSH needs the names of the hosts.", fix="Use --hosts a,b, or --hosts a:4,b:4.")
        elif len(self.hosts) != submission.job.hosts:
            yield Refusal(
                says=f"hosts={submission.job.hosts}, and SSH was given {len(self.hosts)} names.",
                fix=f"Use --hosts {','.join(self.hosts)}.",
            )
        elif self.workers not in (None, submission.job.workers):
            yield Refusal(
                says=f"The hosts have {self.workers} workers ({','.join(self.hosts)}), and the job has "
                f"{submission.job.workers}.",
                fix=f"Use --workers {self.workers}, or leave the numbers at the hosts out.",
            )

    def render(self, submission: Submission) -> Sequence[Document]:
        """Return the commands, and what each host is told."""
        commands = "\n".join(shlex.join(self._ssh(name, self._host_words(submission))) for name in self.names)
        told = "\n".join(shlex.join(self._words(submission, slots)) for slots in dict.fromkeys(self.slots))
        return (
            Document(name="one connection to each host", text=commands, language="bash"),
            Document(
                name="what `paceline host` is told by standard input, besides the token and where to meet",
                text=f"cd {shlex.quote(self._folder(submission))}\n{told}",
                language="bash",
            ),
        )

    def start(self, submission: Submission, record: EngineRecord, *, token: str, say: Say, detach: bool) -> int:
        """Start the hosts, and stay with the run to its end."""
        handle = driver_handle()
        record = record.changed(handle=handle)
        log = record.files / LOG
        log.unlink(missing_ok=True)
        words = self._host_words(submission)
        about = {
            "token": token,
            "folder": self._folder(submission),
            "env": environment.for_hosts(self.env),
            "engine": "ssh",
            "address": self.address,
        }
        driver = HostDriver(
            list(zip([SshHost(name, self._ssh(name, words)) for name in self.names], self.slots, strict=True)),
            runs=lambda slots: {"words": self._words(submission, slots)},
            about=about,
            say=say,
            log=log,
            grace_s=submission.job.grace_s,
        )

        def note_names(names: dict[str, str]) -> None:
            record.changed(handle={**handle, "names": names})

        driver.on_names = note_names
        with signals_to(driver):
            code = driver.run()
        record.changed(handle={**handle, "exit_code": code})
        return code

    def state(self, record: EngineRecord) -> EngineState:
        """Look for the command that has started the run."""
        return driver_state(record, f"the run over SSH on {', '.join(self.hosts)}")

    def console(self, record: EngineRecord) -> Console:
        """The driver keeps a copy of what the hosts print."""
        return ConsoleFiles(record.files, LOG)

    def resize(self, record: EngineRecord, hosts: int) -> str:
        """SSH has the hosts that it was given. Raises PlanError."""
        raise PlanError(
            f"SSH runs on the {record.hosts} hosts that were named, and gets no others: stop the run, and go on with "
            "more names in --hosts."
        )

    def stop(self, record: EngineRecord) -> None:
        """Have the driver, and so the run, end."""
        end_driver(record)

    def at_head(self, record: EngineRecord, words: Sequence[str]) -> Answer:
        """Run a command on the coordinator's host; where nobody here knows which one that is, on the first that has
        the run's record."""
        known = record.handle.get("names", {})
        leader = known.get(coordinators_host(record.run_dir) or "")
        answer = Answer(exit_code=LOST, output=b"", errors="")
        for name in [leader] if leader else self.names:
            command = f"cd {shlex.quote(record.folder)} && {shlex.join(words)}"
            answer = ask([self.client, *OPTIONS, *self.options, name, command], what=f"SSH asks {name}")
            if answer.exit_code not in (2, LOST):
                return answer
        if answer.exit_code == LOST:
            raise LaunchError(f"No host can be reached: {answer.errors.strip()}")
        return answer

    def _folder(self, submission: Submission) -> str:
        return self.folder or str(submission.folder)

    def _host_words(self, submission: Submission) -> list[str]:
        return [*environment.path_words(), self.python or submission.python, "-m", "paceline", "host"]

    def _words(self, submission: Submission, slots: int | None) -> list[str]:
        """The words after `paceline`, for a host with so many workers."""
        words = submission.host_command()[3:]
        at = words.index("--head")
        del words[at : at + 2]
        return words if slots is None else [*words[:2], "--slots", str(slots), *words[2:]]

    def _ssh(self, name: str, words: Sequence[str]) -> list[str]:
        return [self.client, *OPTIONS, *ALIVE, *self.options, name, f"exec {shlex.join(words)}"]


class SshHost:
    """A host at the other end of a client's process."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self._command = name, list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._partial, self._is_read = b"", False

    def begin(self) -> None:
        """Start the client. Raises LaunchError where there is none."""
        self.end()
        self._partial, self._is_read = b"", False
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the driver's, which passes it on
                env=environment.child_environment(),
            )
        except OSError as error:
            raise LaunchError(
                f"{self._command[0]} cannot be run ({error.strerror}): install an OpenSSH client."
            ) from error
        for pipe in (self._process.stdout, self._process.stdin):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def send(self, line: str) -> None:
        """Write a line; it is short enough for the pipe."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(process.stdin.fileno(), (line + "\n").encode())

    def read(self) -> list[str]:
        process = self._process
        if process is None or process.stdout is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(process.stdout.fileno(), 1 << 16):
                self._partial += data
            self._is_read = True
            self._partial += b"\n" if self._partial and not self._partial.endswith(b"\n") else b""
        *whole, self._partial = self._partial.split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in whole]

    def exit_code(self) -> int | None:
        process = self._process
        if process is None:
            return LOST
        code = process.poll() if self._is_read else None
        return None if code is None else code if code >= 0 else LOST

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        process.terminate()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _match(host: str) -> dict[str, Any]:
    found = HOST.fullmatch(host)
    return {"name": host, "slots": None} if found is None else found.groupdict()
