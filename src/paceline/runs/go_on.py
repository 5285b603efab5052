"""The command that goes on with an interrupted run, in the run's own directory.

A command without `--run-dir` makes a new directory each time, and `fresh` starts over: the same words would begin
again. So the command that is printed names the directory, and leaves `fresh` out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import environment
from paceline.runs.own_script import is_option, is_program, own_script
from paceline.units import shell_text

__all__ = [
    "command_of_script",
    "command_of_words",
    "command_of_world",
    "later_call",
    "script_command",
    "words_to_go_on",
]

FRESH_IN_SCRIPT = re.compile(r"\bfresh\s*=\s*True\b")
ENGINES = ("torchrun", "mpirun", "mpiexec", "mpiexec.hydra", "prterun")


def command_of_words(words: Sequence[str], run_dir: Path, *, script: Path | None, names_dir: bool) -> str:
    """Return the `paceline run` command that goes on, made of the words of the one that began.

    `names_dir`: the command, or its job file, has named the run directory.

    Example::

        command_of_words(["run", "train.py", "--lr", "1"], Path("runs/a"), script=None, names_dir=False)
        # "paceline run --run-dir runs/a train.py --lr 1"
    """
    return shell_text(*_program(), *words_to_go_on(words, run_dir, script=script, names_dir=names_dir))


def words_to_go_on(words: Sequence[str], run_dir: Path, *, script: Path | None, names_dir: bool) -> list[str]:
    """Return the words of that command, from "run" on."""
    kept, is_ours = list[str](), True
    for word in words:
        is_ours = is_ours and word != "--"
        if not (is_ours and word == "--fresh"):
            kept.append(word)
    more = [] if names_dir else ["--run-dir", str(run_dir)]
    if script is not None and _says_fresh(script):
        more += ["--set", "fresh=false"]
    return [kept[0], *more, *kept[1:]]


def command_of_script(run_dir: Path, *, script: Path | None, names_dir: bool) -> str:
    """Return the command that runs this process's script again, and goes on in the run directory.

    `script` is None where the command has its text (`python -c`). `names_dir`: the script itself names the directory.
    """
    words = [*_interpreter(), *sys.orig_argv[1:]]
    if names_dir and script is not None and not _says_fresh(script):
        return shell_text(*words)
    return f"{_setting(run_dir)} {shell_text(*words)}"


def script_command(run_dir: Path, *, names_dir: bool, is_first: bool) -> str:
    """Return what goes on with a run of a function of this process. `is_first`: no run was before it here."""
    script = own_script()
    if not is_first or not is_program():
        return later_call(run_dir)
    if not is_option() and (script is None or script.is_relative_to("/dev")):  # python /dev/stdin, python <(...)
        return _words_of_input(run_dir)
    return command_of_script(run_dir, script=script, names_dir=names_dir)


def later_call(run_dir: Path) -> str:
    """What goes on where no command alone does: a cell of a notebook, or not the first run of a script."""
    return f"the same call with run_dir={str(run_dir)!r}, fresh=False"


def _words_of_input(run_dir: Path) -> str:
    """Return how a script goes on that came by standard input, which no command can name."""
    return f"the same script by standard input, which has no file to name here, and {_setting(run_dir)} before python"


def command_of_world(run_dir: Path) -> str:
    """Return the same where another launcher has started this process, as far as its command can be seen from here."""
    setting = _setting(run_dir)
    try:
        line = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        line = b""
    words = [os.fsdecode(word) for word in line.split(b"\0")[:-1]]
    names = [Path(word).name for word in words[:4]]
    for number, name in enumerate(names):
        if name in ENGINES:
            return f"{setting} {shell_text(name, *words[number + 1 :])}"
        if name in ("torch.distributed.run", "torch.distributed.launch"):
            return f"{setting} {shell_text(*words)}"
    return f"the same one, with {setting} in the environment of all workers"


def _setting(run_dir: Path) -> str:
    return f"{environment.RUN_DIR}={shell_text(str(run_dir))}"


def _says_fresh(script: Path) -> bool:
    try:
        return FRESH_IN_SCRIPT.search(script.read_text()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _program() -> list[str]:
    return ["paceline"] if Path(sys.argv[0]).name == "paceline" else [*_interpreter(), "-m", "paceline"]


def _interpreter() -> list[str]:
    return [sys.orig_argv[0] if sys.orig_argv else "python"]
