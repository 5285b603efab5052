"""Commands about a run that was given to an engine, from where it was submitted: status, logs, stop, resize, report.

Where the run's directory is on a disk that this machine sees, its files are read here; otherwise the command runs on
the coordinator's host, by the engine. `RUN/engine.json` says which engine that is.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from pathlib import Path

from paceline.errors import LaunchError, PlanError, writing
from paceline.launch.engines.catalog import read_engine
from paceline.launch.engines.engine import Engine, EngineState
from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.follow import follow
from paceline.launch.engines.run_state import is_readable, paceline_words, workers_at_work

__all__ = ["SubmittedRun"]

LOOK_S = 0.3
END_S = 60.0  # beyond the time that the workers have to save: until the engine says that the job has ended


@dataclasses.dataclass(frozen=True, slots=True)
class SubmittedRun:
    """A run with an engine."""

    record: EngineRecord
    engine: Engine

    @classmethod
    def find(cls, run_dir: Path) -> SubmittedRun | None:
        """Return the run of this directory; None where no engine has it. Raises PlanError where its file is damaged."""
        record = EngineRecord.load(run_dir)
        return None if record is None else cls(record, read_engine(record.engine))

    @property
    def is_readable(self) -> bool:
        """Whether its files are on a disk that this machine sees."""
        return is_readable(self.record.run_dir)

    def state(self) -> EngineState:
        """How the engine sees it. Raises LaunchError where the engine does not answer."""
        return self.engine.state(self.record)

    def run_there(self, *words: str) -> int:
        """Run a paceline command on the coordinator's host, and print what it prints; return its exit status."""
        state = self.state()
        is_gone = state.phase == "ended" and not (self.is_readable or self.engine.reads_ended)
        if state.phase == "waiting" or is_gone:
            print(state.says)
            return 0 if state.phase == "waiting" else 2
        answer = self.engine.at_head(self.record, paceline_words(self.record, *words))
        sys.stdout.write(answer.output.decode(errors="replace"))
        sys.stderr.write(answer.errors)
        return answer.exit_code

    def fetch(self, name: str, place: Path) -> None:
        """Bring a file of the run's directory here. Raises LaunchError, and RunFileError where it cannot be written."""
        answer = self.engine.at_head(self.record, ["cat", f"{self.record.run_dir_there}/{name}"])
        if answer.exit_code != 0:
            raise LaunchError(f"{name} cannot be brought here: {answer.errors.strip()}")
        with writing(place):
            place.write_bytes(answer.output)

    def follow(self) -> int:
        """Show the hosts' console until the job has ended."""
        return follow(self.engine, self.record, say=lambda text: print(f"paceline: {text}", flush=True))

    def stop(self) -> int:
        """Have the run save and end, and wait until it has; return the exit status of `paceline stop`."""
        state = self.state()
        if state.phase == "ended":
            print(state.says)
            return 0
        print(f"stopping: {state.says}", flush=True)
        self.engine.stop(self.record)
        deadline = time.monotonic() + self.record.grace_s + END_S
        while (state := self.state()).phase != "ended":
            if time.monotonic() > deadline:
                print(f"paceline: it has not ended yet: {state.says}", file=sys.stderr)
                return 1
            time.sleep(LOOK_S)  # engines tell nobody
        print(state.says)
        return 0

    def resize(self, replicas: int) -> int:
        """Have more or fewer replicas, and hosts for them; return the exit status of `paceline resize`."""
        record = self.record
        each = record.slots // record.workers_each  # replicas on a host
        if replicas < 1:
            raise PlanError(f"{replicas} replicas are too few: at least 1.")
        if each < 1 or record.slots % record.workers_each or replicas <= record.hosts * each:
            code = self.run_there("resize", self.record.run_dir_there, str(replicas))
            if (
                code == 0
                and self.engine.may_resize
                and each >= 1
                and (hosts := max(1, math.ceil(replicas / each))) < record.hosts
            ):
                self._wait_until_left(replicas)
                print(self.engine.resize(record, hosts))
            return code
        if replicas % each:
            low = replicas // each * each
            raise PlanError(
                f"A host runs {each} replicas, so {replicas} would leave a part of one unused: "
                f"use {low} or {low + each}."
            )
        print(self.engine.resize(record, replicas // each))
        return 0

    def _wait_until_left(self, replicas: int) -> None:
        """Wait until the run has no more replicas than these, so that a host of those that left can be given back."""
        deadline = time.monotonic() + self.record.grace_s
        while workers_at_work(self.engine, self.record) > replicas * self.record.workers_each:
            if time.monotonic() > deadline:
                raise LaunchError("The replicas that are to leave have not left yet: resize once more to free hosts.")
            time.sleep(LOOK_S)
