"""What an engine is asked to run, and the command that each of its hosts runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.launch.engines.sent_function import SentFunction
from paceline.plan.command_plan import CommandPlan
from paceline.plan.job import AUTO, Job, flag_of
from paceline.plan.own_programs import sent_program
from paceline.plan.program_tasks import asked_workers

__all__ = ["Document", "Submission"]

# Given to each host by the engine, not by the user.
ENGINES_OWN = frozenset({"program", "args", "hosts", "workers", "head", "slots", "token_file", "run_dir", "fresh"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A piece of what is sent to an engine, as a user would write it by hand."""

    name: str  # what it is: "job script", "manifests"
    text: str
    language: str  # "bash", "yaml"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job for an engine. Paths are absolute, and the same on all hosts."""

    job: Job  # with workers and run_dir; `hosts` is how many the user asked for
    plan: CommandPlan
    given: tuple[str, ...]  # Job fields that the command sets, which win over the script's
    folder: Path  # where the command was given: the hosts run there, too
    python: str  # the interpreter on the hosts, unless the engine says another one
    least_hosts: int  # with so many the run begins; more join it. Of a run that is not elastic: all
    workers_each: int = 1  # of a replica
    function: SentFunction | None = None  # what runs, where it is no script

    @property
    def name(self) -> str:
        """What people call the job: the name of the script, or of the function."""
        if self.function is not None:
            return self.function.name
        return Path(self.job.program).stem or "paceline"

    @property
    def run_dir(self) -> Path:
        return Path(str(self.job.run_dir))

    @property
    def slots(self) -> int:
        """Workers of one host, at least."""
        return max(1, (self.job.workers or 1) // self.job.hosts)

    @property
    def first_workers(self) -> int:
        """Workers with which the run begins."""
        return self.job.workers or 1 if self.least_hosts == self.job.hosts else self.least_hosts * self.slots

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come and go while the run goes on, as far as the command or the script's text says."""
        return self.least_hosts < self.job.hosts

    def host_options(self) -> dict[str, Any]:
        """Return the arguments of `paceline.run` with which every host runs a function, but for `head`."""
        return {"hosts": self.least_hosts, "workers": self.first_workers, "run_dir": str(self.run_dir)}

    def host_command(
        self,
        *,
        python: str | None = None,
        head: str = AUTO,
        token_file: str | None = None,
        run_dir: str | None = None,
        program: str | None = None,
    ) -> list[str]:
        """Return the words of the command that every host runs; `run_dir` and `program` where they lie elsewhere."""
        words = [python or self.python, "-m", "paceline", "run", program or sent_program(self.job.program)]
        workers = asked_workers(self.first_workers, self.job.servers)
        words += ["--hosts", str(self.least_hosts), "--workers", str(workers), "--head", head]
        words += ["--run-dir", run_dir or str(self.run_dir)]
        if token_file is not None:
            words += ["--token-file", token_file]
        for field in dataclasses.fields(Job):
            if field.name in self.given and field.name not in ENGINES_OWN:
                words += _option(field, getattr(self.job, field.name))
        if self.plan.whole is not None:
            words += ["--plan", str(self.plan.whole)]
            words += [word for text in self.plan.given_defaults for word in ("--set", text)]
        for setting in self.plan.settings:
            words += ["--set", f"plan.{setting}"]
        return [*words, "--", *self.job.args] if self.job.args else words


def _option(field: dataclasses.Field[Any], value: Any) -> Sequence[str]:
    if isinstance(field.default, bool):
        return [] if value == field.default else [flag_of(field)]
    return [] if value is None else [flag_of(field), str(value)]
