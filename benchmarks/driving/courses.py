"""How jobs on far sites went, kept in a file, and the table that says how long each took to a held-out loss."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DDP", "ROUND", "UNLIMITED", "Course", "Matrix", "Task", "by_chance", "link_name", "shown_plan"]

DDP = "ddp"  # torch's own, in place of a plan
UNLIMITED = "0:0"
BY_CHANCE = ("staleness", "drop")  # of plans whose loss by step depends on which worker is faster when
ROUND = 16  # steps, or a divisor of it, between two agreements of the plans that are measured


def by_chance(plan: str) -> bool:
    """Whether the loss by step of a plan is another one on another network."""
    return any(word in plan for word in BY_CHANCE)


def link_name(link: str) -> str:
    """As a table says it."""
    return "unlimited" if link == UNLIMITED else "{} Mbit/s, {} ms".format(*link.split(":"))


def shown_plan(plan: str) -> str:
    """As a table says it."""
    return "DDP on gloo" if plan == DDP else plan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained: the fields of `programs/sites_work.py`."""

    steps: int
    batch: int
    lr: float
    every: int
    held_out: int
    target: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How a job went: by step what its workers say, and where the held-out loss was measured."""

    losses: dict[int, float]  # the mean over the workers
    seconds: dict[int, float]  # from the first step's begin to this one's end, held-out losses left out
    num_bytes: dict[int, float]  # sent by then, by one site in the mean
    held_out: dict[int, float]

    @property
    def last_step(self) -> int:
        return max(self.seconds)

    def steps_to(self, target: float) -> float | None:
        """Steps until the held-out loss was so low, on a line between two measurements; None: it never was."""
        before: tuple[int, float] | None = None
        for step, loss in sorted(self.held_out.items()):
            if loss <= target:
                share = 1.0 if before is None else (before[1] - target) / (before[1] - loss)
                return step if before is None else before[0] + share * (step - before[0])
            before = (step, loss)
        return None

    def seconds_at(self, step: float) -> float:
        """When that step ended; beyond the last one by the mean of a step."""
        low = min(int(step), self.last_step)
        return self.seconds.get(low, 0.0) + (step - low) * self.step_s

    def bytes_at(self, step: float) -> float:
        """What a site had sent when that step ended; beyond the last one by the mean of a step."""
        low = min(int(step), self.last_step)
        first, last = self._span
        mean = (self.num_bytes[last] - self.num_bytes.get(first, 0.0)) / (last - first)
        return self.num_bytes.get(low, 0) + (step - low) * mean

    @property
    def step_s(self) -> float:
        """The mean time of a step, without the first few."""
        first, last = self._span
        return (self.seconds[last] - self.seconds.get(first, 0.0)) / (last - first)

    @property
    def _span(self) -> tuple[int, int]:
        """The steps over which means are taken: whole rounds where there are two."""
        last = self.last_step
        return (ROUND, last - last % ROUND) if last >= 2 * ROUND else (min(4, last - 1), last)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """All that was measured: by link, the first one the reference, and by plan."""

    task: Task
    courses: dict[str, dict[str, Course]]

    def write(self, path: Path) -> None:
        """Keep it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Matrix:
        """Return what `write` has kept."""
        kept = json.loads(path.read_text(encoding="utf-8"))
        courses = {
            link: {
                plan: Course(**{name: _by_step(values) for name, values in one.items()}) for plan, one in row.items()
            }
            for link, row in kept["courses"].items()
        }
        return cls(task=Task(**kept["task"]), courses=courses)

    def seconds(self, link: str, plan: str) -> tuple[float, str] | None:
        """The time to the target, and a mark: "~" where it is the steps that the first link needed times the time of
        one here, ">" where it was not met by then; None: the plan failed."""
        if (course := self.courses[link].get(plan)) is None:
            return None
        if (steps := course.steps_to(self.task.target)) is not None:
            return course.seconds_at(steps), ""
        whole = next(iter(self.courses.values())).get(plan)
        steps = None if whole is None or by_chance(plan) else whole.steps_to(self.task.target)
        return (course.seconds[course.last_step], ">") if steps is None else (course.seconds_at(steps), "~")

    def best(self, link: str) -> tuple[float, str] | None:
        """The least time to the target on this link, and the plan."""
        found = ((self.seconds(link, plan), plan) for plan in self.courses[link])
        return min(((one[0], plan) for one, plan in found if one is not None and one[1] != ">"), default=None)

    def table(self) -> Iterator[str]:
        """The lines of a table: a row for each plan, times on each link, and by the best time on the first link."""
        first, target = next(iter(self.courses)), self.task.target
        heads = [
            "sync and wire",
            f"steps to {target}",
            "MB a site sends",
            *(f"{link_name(one)}, s" for one in self.courses),
        ]
        yield "| " + " | ".join(heads) + " |"
        yield "|---" * len(heads) + "|"
        for plan, whole in self.courses[first].items():
            steps = whole.steps_to(target)
            cells = (
                [f"{steps:.0f}", f"{whole.bytes_at(steps) / 1e6:.1f}"] if steps else [f"not in {whole.last_step}", ""]
            )
            cells += [self._cell(link, plan) for link in self.courses]
            yield "| " + " | ".join([f"`{plan}`" if plan != DDP else shown_plan(plan), *cells]) + " |"

    def _cell(self, link: str, plan: str) -> str:
        taken, best, base = self.seconds(link, plan), self.best(link), self.best(next(iter(self.courses)))
        if taken is None:
            return "failed"
        seconds, mark = taken
        text = f"{mark}{seconds:.1f}" + (f" ({seconds / base[0]:.2f}x)" if base is not None and mark != ">" else "")
        return f"**{text}**" if best is not None and best[1] == plan else text


def _by_step(values: dict[str, float]) -> dict[int, float]:
    return {int(step): value for step, value in values.items()}
