"""Ray: a placement group with a bundle for each host, and on each bundle an actor that starts `paceline host`.

The process that has started the run is its driver. A node that is lost takes its actor and that host's processes with
it; Ray gives the bundle another place, where a new actor starts the host again, and it joins the run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from paceline import config, environment
from paceline.errors import LaunchError, PlanError
from paceline.launch.engines.console_files import ConsoleFiles
from paceline.launch.engines.driver_process import LOG, driver_handle, driver_state, end_driver, signals_to
from paceline.launch.engines.engine import Answer, Console, EngineState, Refusal, Say
from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.host_driver import LOST, HostDriver
from paceline.launch.engines.ray_host import HostProcess
from paceline.launch.engines.run_state import coordinators_host
from paceline.launch.engines.sent_function import Answers
from paceline.launch.engines.submission import Document, Submission

__all__ = ["Ray"]

EXTRA = "pip install 'paceline[ray]'"
NAMESPACE = "paceline"
PLACED_S = 600.0  # until the cluster has room for all hosts
TELL_S = 5.0
ANSWER_S = 60.0
ELSEWHERE = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ray:
    """Settings of a job on a Ray cluster.

    Example::

        engine = paceline.Ray(cpus=8, gpus=1)

    :param address: of the cluster: "auto" (the one that this machine is in), "ray://HOST:PORT", or "local" for a new
        one on this machine.
    :param cpus: that each host takes of its node (1); `gpus`, and `resources` as ("a100=1",), too.
    :param strategy: how hosts are placed on nodes, as Ray's placement groups name it ("SPREAD").
    :param python: the interpreter on the nodes (that of Ray's workers).
    :param folder: where the script runs on the nodes (where the command was given).
    :param env: variables of this machine that the hosts get: "HF_HOME", or with a value, "NCCL_DEBUG=INFO".
    :raises PlanError: a setting is out of range.
    """

    title: ClassVar[str] = "Ray"
    may_detach: ClassVar[bool] = False
    takes_functions: ClassVar[bool] = True
    may_resize: ClassVar[bool] = False
    reads_ended: ClassVar[bool] = False
    begins_with_all: ClassVar[bool] = True

    address: str = "auto"
    cpus: int | float = 1
    gpus: int | float | None = None
    resources: tuple[str, ...] = ()
    strategy: Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"] = "SPREAD"
    python: str | None = None
    folder: str | None = None
    env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        config.check_fields(self)
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise PlanError(f"Ray.{name} is {value}; it must be more than 0.")
        for each in self.resources:
            name, _, amount = each.partition("=")
            if not name or not _is_number(amount):
                raise PlanError(f"Ray.resources has {each!r}; each must be a resource with its amount: 'a100=1'.")

    @property
    def bundle(self) -> dict[str, float]:
        """What each host takes of its node, in Ray's words."""
        found: dict[str, float] = {"CPU": float(self.cpus)}
        if self.gpus is not None:
            found["GPU"] = float(self.gpus)
        return found | {each.partition("=")[0]: float(each.partition("=")[2]) for each in self.resources}

    def refusals(self, submission: Submission) -> Iterator[Refusal]:
        """Yield why Ray cannot run the job."""
        slots, extra = divmod(submission.job.workers or 1, submission.job.hosts)
        if self.gpus is not None and self.gpus < slots + bool(extra) and submission.job.device == "cuda":
            yield Refusal(
                says=f"A host has {slots + bool(extra)} workers and {self.gpus} GPUs.",
                fix=f"Use ray(gpus={slots + bool(extra)}), or fewer workers on each host.",
            )

    def render(self, submission: Submission) -> Sequence[Document]:
        """Return the placement group, and what each host's actor starts."""
        group = f"placement_group([{self.bundle}] * {submission.job.hosts}, strategy={self.strategy!r})"
        told = f"cd {shlex.quote(self._folder(submission))}\n{shlex.join(_words(submission))}"
        return (
            Document(name="placement group", text=group, language="python"),
            Document(
                name="what `paceline host` is told on each bundle, besides the token and where to meet",
                text=told,
                language="bash",
            ),
        )

    def start(self, submission: Submission, record: EngineRecord, *, token: str, say: Say, detach: bool) -> int:
        """Place the hosts, and stay with the run to its end."""
        ray = self._connect()
        group = self._place(ray, submission.job.hosts, say)
        try:
            return self.run_in(group, submission, record, token=token, say=say)
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(group)

    def run_in(
        self,
        group: Any,
        submission: Submission,
        record: EngineRecord,
        *,
        token: str,
        say: Say,
        on_row: Callable[[dict[str, Any]], None] | None = None,
        shows: bool = True,
    ) -> int:
        """Run on the first bundles of a placement group. `on_row` gets each row of `metrics.jsonl`; `shows`: what the
        hosts print is shown here, too."""
        ray = self._connect()
        handle = {**driver_handle(), "actors": f"paceline-{secrets.token_hex(8)}"}
        record = record.changed(handle=handle, folder=self._folder(submission))
        log = record.files / LOG
        log.unlink(missing_ok=True)
        about = {
            "token": token,
            "folder": self._folder(submission),
            "env": environment.for_hosts(self.env),
            "engine": "ray",
            "address": None,
            "mark": secrets.token_hex(16),
            "tells_rows": on_row is not None,
        }
        answers = Answers(on_row=on_row)
        driver = HostDriver(
            [
                (RayHost(ray, self, group, index, actor=f"{handle['actors']}-{index}"), None)
                for index in range(submission.job.hosts)
            ],
            runs=lambda _: _told(submission),
            about=about,
            say=say,
            log=log,
            grace_s=submission.job.grace_s,
            shows=shows,
            on_answer=answers.take,
        )

        def note_names(names: dict[str, str]) -> None:
            record.changed(handle={**handle, "names": names})

        driver.on_names = note_names
        with signals_to(driver):
            code = driver.run()
        answers.save(record.files)
        record.changed(handle={**handle, "exit_code": code})
        return code

    def state(self, record: EngineRecord) -> EngineState:
        """Look for the command that has started the run."""
        return driver_state(record, f"the run of {record.hosts} hosts on Ray")

    def console(self, record: EngineRecord) -> Console:
        """The driver keeps a copy of what the hosts print."""
        return ConsoleFiles(record.files, LOG)

    def resize(self, record: EngineRecord, hosts: int) -> str:
        """The placement group keeps its size. Raises PlanError."""
        raise PlanError(
            f"The run has a placement group of {record.hosts} hosts, and gets no others: stop it, and go on with more "
            "--hosts."
        )

    def stop(self, record: EngineRecord) -> None:
        """Have the driver, and so the run, end."""
        end_driver(record)

    def at_head(self, record: EngineRecord, words: Sequence[str]) -> Answer:
        """Run a command beside the coordinator, by the actor of its host; where nobody here knows which one that is,
        by the first that has the run's record."""
        ray = self._connect()
        names = [f"{record.handle['actors']}-{index}" for index in range(record.hosts)]
        leader = record.handle.get("names", {}).get(coordinators_host(record.run_dir) or "")
        names.sort(key=lambda name: not str(leader).endswith(f" {name.rpartition('-')[2]}"))
        answer, failed = None, f"Ray runs no host of {record.run_dir} now."
        for name in names:
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
                code, output, errors = ray.get(actor.run.remote(list(words), record.folder), timeout=ANSWER_S)
            except Exception as error:  # Ray has many; all mean that this host does not answer
                failed = f"The host {name} does not answer: {error}"
                continue
            answer = Answer(exit_code=int(code), output=output, errors=errors)
            if answer.exit_code != ELSEWHERE:
                return answer
        if answer is None:
            raise LaunchError(failed)
        return answer

    def _folder(self, submission: Submission) -> str:
        return self.folder or str(submission.folder)

    def _connect(self) -> Any:
        """Join the cluster, unless this process has."""
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise PlanError(f"--on ray needs Ray: {EXTRA}") from error
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise LaunchError(
                    f"There is no Ray cluster at {self.address!r}: {error}. Start one (`ray start --head`), name it "
                    "(ray(address=...)), or have one on this machine: ray(address=local)."
                ) from error
        return ray

    def _place(self, ray: Any, hosts: int, say: Say) -> Any:
        """Return the placement group once all bundles have a place."""
        group = ray.util.placement_group([self.bundle] * hosts, strategy=self.strategy)
        began, tell_at = time.monotonic(), time.monotonic() + TELL_S
        ready = group.ready()
        try:
            while not ray.wait([ready], timeout=0.2)[0]:
                now = time.monotonic()
                if now - began > PLACED_S:
                    raise LaunchError(
                        f"Ray has found no place for {hosts} hosts of {self.bundle} within {PLACED_S:.0f} s; it has "
                        f"{ray.available_resources()} free.",
                        is_accident=True,
                    )
                if now >= tell_at:
                    tell_at = now + TELL_S
                    say(f"waiting for Ray to place {hosts} hosts of {self.bundle} ({now - began:.0f} s)")
        except BaseException:
            ray.util.remove_placement_group(group)
            raise
        return group


class RayHost:
    """A host by the actor on one bundle."""

    def __init__(self, ray: Any, engine: Ray, group: Any, index: int, *, actor: str) -> None:
        self.name, self._actor_name = f"host {index}", actor
        self._ray, self._engine, self._group, self._index = ray, engine, group, index
        self._actor: Any = None
        self._answer: Any = None  # what the actor is being asked
        self._code: int | None = LOST
        self._last = collections.deque[str]()

    def begin(self) -> None:
        """Have an actor made on the bundle, when that has a place, which starts the host."""
        self.end()
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._index
        )
        options: dict[str, Any] = {
            "num_cpus": self._engine.cpus,
            "num_gpus": self._engine.gpus or 0,
            "scheduling_strategy": strategy,
            "max_concurrency": 4,
            "max_restarts": 0,
            "name": self._actor_name,
            "namespace": NAMESPACE,
        }
        self._code = None
        with self._lost():
            self._actor = self._ray.remote(HostProcess).options(**options).remote(self._engine.python)
            self._answer = self._actor.poll.remote()

    def send(self, line: str) -> None:
        """Write to the host's standard input."""
        if self._actor is not None:
            with self._lost():
                self._actor.send.remote(line)

    def read(self) -> list[str]:
        """Return the lines that the actor has answered, and ask it for more."""
        if self._answer is None:
            return []
        with self._lost():
            if not self._ray.wait([self._answer], timeout=0)[0]:
                return []
            lines, code = self._ray.get(self._answer)
            self._answer = self._actor.poll.remote() if code is None else None
            self._code = code
            return list(lines)
        return [self._last.popleft()] if self._last else []

    def exit_code(self) -> int | None:
        return self._code

    def end(self) -> None:
        """End the host's process, and the actor."""
        actor, self._actor, self._answer = self._actor, None, None
        if actor is not None:
            with contextlib.suppress(Exception):  # it is gone already
                self._ray.get(actor.end.remote(), timeout=5.0)
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        """The node, or the actor's process, may be gone at any call."""
        try:
            yield
        except Exception as error:  # Ray has many kinds, of several modules
            self._last.append(f"its actor has ended ({type(error).__name__}): the node may be lost")
            self._code, self._answer = LOST, None


def _told(submission: Submission) -> dict[str, Any]:
    """What a host is told to run."""
    if submission.function is not None:
        return submission.function.told(submission.host_options())
    return {"words": _words(submission)}


def _words(submission: Submission) -> list[str]:
    """The words after `paceline` on each host."""
    words = submission.host_command()[3:]
    at = words.index("--head")
    return words[:at] + words[at + 2 :]


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
