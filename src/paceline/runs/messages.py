"""What the process that a user started prints on standard error, as how a run that was interrupted goes on."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from paceline import environment
from paceline.checkpoint.checkpoint_dir import find
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.processes import this_host
from paceline.units import printable, shell_text

if TYPE_CHECKING:
    from paceline.runs.attempt import Attempt

__all__ = ["tell", "tell_go_on", "tell_of_new_coordinator"]


def tell(text: str) -> None:
    """Print a sentence with the program's name before it."""
    print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)


def tell_go_on(command: str, exit_code: object, *, is_there: bool) -> None:
    """Print the command that goes on, as the last line of a run that was interrupted; an engine does that itself."""
    if is_there and environment.engine() is None:
        with contextlib.suppress(OSError):  # the terminal may have been closed
            tell(f"{'once the error is mended, ' if exit_code == 1 else ''}go on with: {command}")


def tell_of_new_coordinator(attempt: Attempt, exit_code: int) -> None:
    """Say how this host goes on where the coordinator's machine is gone for good, and from which step."""
    head = attempt.job.head
    if attempt.is_head or head is None or exit_code not in (PREEMPTED, TOO_FEW) or environment.engine():
        return
    step = find(attempt.run_dir / "checkpoints").step
    saved = f"from step {step}, the newest saved here" if step else "from the beginning: nothing is saved here"
    address, run_dir = f"{this_host()}:{head.rpartition(':')[2]}", shell_text(str(attempt.run_dir))
    with contextlib.suppress(OSError):
        tell(
            f"if the coordinator's machine ({head}) is gone for good, this one goes on {saved}, by the same command "
            f"with --hosts 1 --head {address} --run-dir {run_dir}"
        )
