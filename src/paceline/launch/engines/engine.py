"""What every engine can do; `paceline.launch.engines.catalog` has them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal, Protocol, TypeAlias

from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.submission import Document, Submission

__all__ = ["Answer", "Console", "Engine", "EngineState", "Refusal", "Say"]

Say: TypeAlias = Callable[[str], None]
Phase: TypeAlias = Literal["waiting", "running", "ended"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """How the engine sees the job."""

    phase: Phase  # waiting: for hosts, or to be started again
    says: str  # for people: "job 17: pending (Resources)"
    exit_code: int | None = None  # once it has ended, where the engine knows it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """How a command ended on the coordinator's host."""

    exit_code: int
    output: bytes
    errors: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A rule by which an engine refuses a job."""

    says: str  # what cannot work, with the values
    fix: str

    def __str__(self) -> str:
        return f"{self.says} {self.fix}"


class Console(Protocol):
    """What the job's hosts print."""

    def read(self) -> str:
        """Return what is new; never waits."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """An engine with its settings: a frozen dataclass."""

    title: ClassVar[str]  # for people: "Slurm"
    may_detach: ClassVar[bool]  # the job goes on without the command that has submitted it
    takes_functions: ClassVar[bool]  # of notebooks, too; others need a script that the hosts see
    may_resize: ClassVar[bool]  # hosts may be added and given back
    reads_ended: ClassVar[bool]  # `at_head` also reaches the run's directory when the job has ended
    begins_with_all: ClassVar[bool]  # an elastic run begins with all hosts, and not with the least that its plan needs

    def refusals(self, submission: Submission) -> Iterator[Refusal]:
        """Yield why this engine cannot run the job; before anything is sent."""
        ...

    def render(self, submission: Submission) -> Sequence[Document]:
        """Return all that would be sent, as text; the token is not in it."""
        ...

    def start(self, submission: Submission, record: EngineRecord, *, token: str, say: Say, detach: bool) -> int:
        """Submit the job and follow it to its end, unless `detach`; return its exit status (0 if detached)."""
        ...

    def state(self, record: EngineRecord) -> EngineState: ...

    def console(self, record: EngineRecord) -> Console: ...

    def resize(self, record: EngineRecord, hosts: int) -> str:
        """Have more or fewer hosts; return a sentence on what happens. Raises PlanError where the engine cannot."""
        ...

    def stop(self, record: EngineRecord) -> None:
        """Have the run finish its step, save and end, and keep the engine from starting it again."""
        ...

    def at_head(self, record: EngineRecord, words: Sequence[str]) -> Answer:
        """Run a command on the coordinator's host, in the job's folder. Raises LaunchError where there is none."""
        ...
