"""A function that an engine's hosts run, where there is no script: how it goes to them, and what comes back.

The function travels pickled, in the first line that a host is told. The host answers by lines of its standard output
that begin with a mark, which only the driver and the host know: what the function returned or raised, and the rows of
`metrics.jsonl`, where they are wanted.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, WorkerError
from paceline.private_files import read_private, write_private
from paceline.processes import this_host

__all__ = ["Answers", "SentFunction", "read_outcome", "tell_outcome", "tell_row", "unpack"]

OUTCOME = "outcome.pkl"  # of the run's engine directory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SentFunction:
    """A function, with the arguments of `paceline.run` that the engine does not give."""

    name: str
    pickled: bytes  # (function, arguments)

    def told(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a host is told; `options`: the engine's own arguments of `paceline.run`."""
        return {"function": base64.b64encode(self.pickled).decode(), "options": dict(options)}


def unpack(asked: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function and the arguments of `paceline.run`, on a host. Raises PlanError where the host lacks what
    the function needs."""
    import cloudpickle

    try:
        function, fields = cloudpickle.loads(base64.b64decode(asked["function"]))
    except Exception as error:  # of an import, or of any class's own code
        raise PlanError(
            f"The function cannot be read on host {this_host()} ({type(error).__name__}: {error}). It needs the "
            "modules that it uses, and the same Python, torch and Paceline as where it was sent."
        ) from error
    return function, {**fields, **asked["options"]}


def tell_outcome(mark: str, *, value: Any = None, error: BaseException | None = None) -> None:
    """Give what the function returned, or why it did not, to the driver."""
    import cloudpickle

    pickled = cloudpickle.dumps((value, error))
    _tell(mark, f"outcome {base64.b64encode(pickled).decode()}")


def tell_row(mark: str, row: Mapping[str, Any]) -> None:
    """Give a row of `metrics.jsonl` to the driver."""
    _tell(mark, f"row {json.dumps(row)}")


class Answers:
    """What the hosts of one run answer, in the driver."""

    def __init__(self, *, on_row: Callable[[dict[str, Any]], None] | None) -> None:
        self._on_row, self._last_step = on_row, 0
        self._outcomes = list[tuple[Any, BaseException | None]]()

    def take(self, text: str) -> None:
        """Take in a line, without its mark."""
        kind, _, rest = text.partition(" ")
        if kind == "outcome":
            import cloudpickle

            self._outcomes.append(cloudpickle.loads(base64.b64decode(rest)))
        elif kind == "row" and self._on_row is not None:
            row = json.loads(rest)
            if row["step"] > self._last_step:  # some steps are taken again after a restart
                self._last_step = row["step"]
                self._on_row(row)

    def save(self, directory: Path) -> None:
        """Write down how the run ended, for the process that has asked for it."""
        import cloudpickle

        write_private(directory / OUTCOME, cloudpickle.dumps(_best(self._outcomes)))


def read_outcome(directory: Path) -> tuple[Any, BaseException | None]:
    """Return what a run's function returned, and what it raised; (None, None) where no host said anything."""
    import cloudpickle

    try:
        return cloudpickle.loads(read_private(directory / OUTCOME))
    except FileNotFoundError:
        return None, None


def _best(outcomes: Sequence[tuple[Any, BaseException | None]]) -> tuple[Any, BaseException | None]:
    """Hosts that do not lead return None, or say less about an error."""
    for value, _ in reversed(outcomes):
        if value is not None:
            return value, None
    errors = [error for _, error in outcomes if error is not None]
    errors.sort(key=lambda error: not (isinstance(error, WorkerError) and error.traceback))
    return None, errors[0] if errors and len(errors) == len(outcomes) else None


def _tell(mark: str, text: str) -> None:
    sys.stdout.write(f"{mark} {text}\n")
    sys.stdout.flush()
