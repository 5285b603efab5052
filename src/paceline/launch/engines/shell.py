"""Runs the engines' own commands, and writes shell scripts."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence

from paceline import environment
from paceline.errors import LaunchError
from paceline.launch.engines.engine import Answer

__all__ = ["ask", "script_command", "tell"]

ASK_S = 60.0  # a controller that is busy answers within that


def tell(words: Sequence[str], *, what: str, limit_s: float = ASK_S, env: Mapping[str, str] | None = None) -> str:
    """Run a command of the engine's to its end and return what it printed; LaunchError with its words if it fails."""
    answer = ask(words, what=what, limit_s=limit_s, env=env)
    if answer.exit_code != 0:
        said = (answer.errors or answer.output.decode(errors="replace")).strip()
        raise LaunchError(f"{what}: {said or f'{words[0]} ended with {answer.exit_code}'}")
    return answer.output.decode(errors="replace")


def ask(words: Sequence[str], *, what: str, limit_s: float = ASK_S, env: Mapping[str, str] | None = None) -> Answer:
    """Run a command of the engine's to its end. Raises LaunchError where there is no such command, or it takes too
    long. It gets our environment, without the token."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            env=environment.child_environment(**(env or {})),
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{what}: there is no program {words[0]} here. Give the command on a host that has it."
        ) from None
    except PermissionError as error:
        raise LaunchError(f"{what}: {words[0]} cannot be run ({error.strerror}).") from error
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{what}: {words[0]} did not answer within {limit_s:.0f} s.") from None
    return Answer(exit_code=done.returncode, output=done.stdout, errors=done.stderr.decode(errors="replace"))


def script_command(*commands: Sequence[str]) -> str:
    """Return a command, and those that it starts in turn, as a script has it: an option with its value on each line."""
    lines = list[str]()
    for words in commands:
        line = list[str]()
        for word in words:
            if word.startswith("--") and line:
                lines.append(" ".join(line))
                line = []
            line.append(shlex.quote(word))
        lines.append(" ".join(line))
    return " \\\n    ".join(lines)
