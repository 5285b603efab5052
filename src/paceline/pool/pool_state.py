"""What a pool knows of its runs beyond their own files, in `POOL/pool.json`: it outlives the pool's process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import PlanError
from paceline.monitor.records.run_files import replace_text
from paceline.plain_data import fitted, read_object
from paceline.processes import is_same_process, this_host
from paceline.regular_files import read_regular

__all__ = ["ENDED", "PoolRecord", "RunEntry"]

FILE = "pool.json"
ENDED = ("finished", "failed", "stopped")


@dataclasses.dataclass(kw_only=True, slots=True)
class RunEntry:
    """`phase`: waiting (nothing runs), running, leaving (it saves and ends, and will wait), or one of `ENDED`.

    `replicas` and their `devices`: that it has been given. `attained`: device-seconds so far. `changes`: of its
    replicas, with starts. `step_s`: measured seconds of a step, by replicas. `since`: the last change, and `let_in`:
    when it got devices after it had none, in seconds since 1970. `why`: the last decision in words. `losses`: how often
    its supervisor was lost since its last step. `pid`: of its command.

    Where the batch may grow, `step_s` is of the least one. `batch`: the present one, in samples. `samples_s`: measured
    worker-seconds of a step that grow with the batch, for the least one. `noise_scale`: what it measured last. `moves`:
    replicas with which it starts again at once, with another batch; it keeps its devices meanwhile.
    """

    phase: str = "waiting"
    replicas: int = 0
    devices: int = 0
    attained: float = 0.0
    changes: int = 0
    step_s: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    batch: int = 0
    samples_s: float = 0.0
    noise_scale: float | None = None
    moves: int = 0
    since: float = 0.0
    let_in: float = 0.0
    why: str = ""
    exit_code: int | None = None
    ended: float | None = None
    step: int = 0
    last_step: int | None = None
    losses: int = 0
    pid: int = 0
    pid_started_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.phase in ENDED

    @property
    def measured(self) -> dict[int, float]:
        return {int(replicas): seconds for replicas, seconds in self.step_s.items()}


@dataclasses.dataclass(kw_only=True, slots=True)
class PoolRecord:
    """The pool's process, its devices, and its runs by name."""

    host: str = ""
    pid: int = 0
    pid_started_s: float = 0.0
    slots: int = 0
    runs: dict[str, RunEntry] = dataclasses.field(default_factory=dict[str, RunEntry])

    @classmethod
    def load(cls, pool: Path) -> PoolRecord:
        """Read it; an empty one where the pool has not been started. Raises PlanError for a damaged file."""
        try:
            fields = read_object(read_regular(pool / FILE))
            runs: Mapping[str, object] = fields.pop("runs", {})
            found = fitted(cls, {**fields, "runs": {}})
            found.runs = {name: fitted(RunEntry, one) for name, one in runs.items()}  # pyright: ignore[reportArgumentType]
            return found
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, AttributeError) as error:
            raise PlanError(
                f"{pool / FILE} cannot be read ({error}): it is damaged or of another version. Move it away; the queue "
                "and the runs stay."
            ) from error

    def save(self, pool: Path) -> None:
        replace_text(pool / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def is_alive(self) -> bool:
        """Whether the pool's process is at work on this host."""
        return self.host == this_host() and is_same_process(self.pid, self.pid_started_s)
