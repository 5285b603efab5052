"""The folder through which a drilled run and the process that started it exchange messages.

programme.json      the faults, and what may be asked for
fault_0.json        fault 0 has come: when and where. The first worker there creates it, so a fault comes once
fault_0.cut         the worker asks for the cable to be cut, and waits
fault_0.cut.done    it is cut
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline import clock
from paceline.testing.faults import Programme

__all__ = ["Came", "DrillFolder"]

LOOK_S = 0.005  # nothing tells when a file appears


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Came:
    """That a fault came."""

    step: int  # that was in hand
    place: str
    time: float  # clock.now()
    pid: int


class DrillFolder:
    """One programme's folder, for either side; `path` is that of its programme.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = json.loads(path.read_text(encoding="utf-8"))
        self.programme = Programme.parse(fields["faults"])
        self._outside = frozenset(fields["outside"])

    @classmethod
    def begin(cls, folder: Path, programme: Programme, *, outside: Collection[str]) -> DrillFolder:
        """Write the programme into the folder. `outside`: kinds of faults that a process outside the run carries
        out.
        """
        path = folder / "programme.json"
        path.write_text(json.dumps({"faults": str(programme), "outside": sorted(outside)}), encoding="utf-8")
        return cls(path)

    def asks_for(self, kind: str) -> bool:
        """Whether a process outside the run carries out faults of this kind."""
        return kind in self._outside

    def came(self, number: int, *, step: int, place: str) -> bool:
        """Note that a fault comes now; False where it came before."""
        told = Came(step=step, place=place, time=clock.now(), pid=os.getpid())
        try:
            with open(self._file(number, "json"), "x", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(told)))
        except FileExistsError:
            return False
        return True

    def when(self, number: int) -> Came | None:
        """How a fault came; None: it did not."""
        try:
            return Came(**json.loads(self._file(number, "json").read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):  # not yet, or it is just being written
            return None

    def ask(self, number: int, deed: str, *, limit_s: float) -> None:
        """Ask for a deed, and wait until it is done; TimeoutError."""
        self._file(number, deed).touch()
        deadline = time.monotonic() + limit_s
        while not self._file(number, f"{deed}.done").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no process did what fault {number} needs ({deed}) within {limit_s:.0f} s")
            time.sleep(LOOK_S)

    def asked(self) -> Iterator[tuple[int, str]]:
        """What is asked for and not done: the fault's number, and the deed."""
        for path in self.path.parent.glob("fault_*.*"):
            name, _, deed = path.name.partition(".")
            if deed != "json" and not deed.endswith("done") and not path.with_name(f"{path.name}.done").exists():
                yield int(name.removeprefix("fault_")), deed

    def done(self, number: int, deed: str) -> None:
        """Say that a deed is done."""
        self._file(number, f"{deed}.done").touch()

    def _file(self, number: int, suffix: str) -> Path:
        return self.path.with_name(f"fault_{number}.{suffix}")
