"""What an experiment tracker is given of a run: the protocol `RunLogger`, and the plain data that travels to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline import config
from paceline.plan import Plan

__all__ = ["LoggedRun", "RunLogger", "ScalarPoint", "arguments_by_name"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """The run that a `RunLogger` is to log, as it is known when its first step has been committed.

    Its `parameters` raise PlanError where `plan` is no plan's text.

    Example::

        run = paceline.LoggedRun(name="digits", run_dir="runs/digits", plan="replicas=2+batch(size=64)", workers=2)
        assert run.parameters["plan.batch.size"] == 64
    """

    name: str  # of the run's directory
    run_dir: str
    attempt: int = 1
    program: str = ""  # the script, or the function
    plan: str = ""  # resolved, as text
    workers: int = 1
    hosts: tuple[str, ...] = ()  # by name, of the workers whose files this host has
    devices: tuple[str, ...] = ()
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # of the script, by name
    is_fresh: bool = False  # the directory's earlier attempts do not count

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything that may have changed the numbers, by dotted name: plan.batch.size, arg.lr, workers, ..."""
        found: dict[str, Any] = {"program": self.program, "plan": self.plan, "workers": self.workers}
        found |= {"hosts": ", ".join(self.hosts), "devices": ", ".join(self.devices)}
        if self.plan:
            found |= _flat("plan", config.to_table(Plan.parse(self.plan)))
        return found | {f"arg.{name}": value for name, value in self.arguments.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScalarPoint:
    """Numbers by name at a committed step; `time` is that of its commit, in seconds since 1970. Raises nothing.

    Example::

        point = paceline.ScalarPoint(step=10, time=1750000000.0, values={"loss": 0.5, "lr": 0.001})
        assert point.values["loss"] == 0.5
    """

    step: int
    time: float
    values: Mapping[str, float]


class RunLogger(Protocol):
    """Takes the numbers of a run to an experiment tracker. Objects of your own go to `paceline.run(loggers=[...])`.

    It lives in the process that supervises the run, in a thread of its own, and never in a worker: no step waits for
    it. All calls come from that thread, one after the other. What a method raises ends the logging, with one warning;
    the run goes on. The names of the values are TensorBoard's tags: loss, samples_per_second, eval/accuracy, ...

    Example::

        class Printer(paceline.RunLogger):
            def start(self, run):
                print(run.name, run.plan)

            def log(self, points):
                for point in points:
                    print(point.step, point.values)

            def end(self, state):
                print(state)

        def begin(train):
            return paceline.run(train, workers=2, loggers=[Printer()])
    """

    def start(self, run: LoggedRun) -> int | None:
        """Begin, or go on with, the tracker's run. Return the last step that it has: no later attempt logs it again."""
        ...

    def log(self, points: Sequence[ScalarPoint]) -> None:
        """Take points in the order of their commits; each step comes once, also after a restart or a rollback."""
        ...

    def end(self, state: str) -> None:
        """Send what is left; `state` is "finished", "failed" or "stopped". What takes over 30 seconds is given up."""
        ...


def arguments_by_name(words: Sequence[str]) -> dict[str, str]:
    """Return a script's arguments by name: "--lr 0.1" and "--lr=0.1" are lr; a switch is "true"; others are numbered.

    A word behind an option is taken for its value, unless it begins with a dash that is not a minus.
    """
    found: dict[str, str] = {}
    position, index = 0, 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_option(word):
            found[str(position)] = word
            position += 1
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            has_value = index < len(words) and not _is_option(words[index])
            value = words[index] if has_value else "true"
            index += has_value
        found[name] = value
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and bool(word.lstrip("-")) and not word.lstrip("-")[0].isdigit() and word[1:2] != "."


def _flat(prefix: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted names."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}.{name}", value)
        else:
            found[f"{prefix}.{name}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return found


def name_of_run(run_dir: Path | str) -> str:
    """The name of a run: that of its directory."""
    return Path(run_dir).resolve().name
