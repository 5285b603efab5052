"""What the sub-commands share: a parser that fails in one line, and the split between our options and the script's."""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from paceline.errors import PlanError

__all__ = ["Commands", "Parser", "add_command", "split_script"]

WIDTH = 100  # of help, at most
NEAR = 0.8  # an unknown option this similar to one of ours is taken for a slip, not for the script's


class Parser(argparse.ArgumentParser):
    """Raises PlanError where argparse would print its usage and exit: one clear message, made in one place."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{message}\nSee `{self.prog} --help`.")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # pyright: ignore[reportPrivateUsage]  # what add_subparsers() returns has no public name


def add_command(
    commands: Commands, name: str, *, summary: str, description: str, usage: str | None = None, examples: str = ""
) -> Parser:
    """Declare a sub-command; `summary` is its line in `paceline --help`."""
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, WIDTH),  # examples stay as they are written, so nothing else is filled
        usage=usage,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def split_script(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], tuple[str, ...]]:
    """Split a command's words into those for `parser` and the script's own arguments, which follow the script's name.

    After the script, our options are ours wherever they stand; everything else goes to the script in its order, and
    after "--" really everything. An option that looks like a misspelt one of ours is refused, because passing it on
    would hide the mistake, unless the script's text has that very word: then it is the script's own. Where an option
    takes several values, all words NAME=VALUE behind it are its own.
    """
    takes_value = {option: action.nargs != 0 for action in _options(parser) for option in action.option_strings}
    takes_several = {one for action in _options(parser) if action.nargs == "+" for one in action.option_strings}
    ours: list[str] = []
    script_args: list[str] = []
    script: str | None = None
    left = collections.deque(words)
    while left:
        word = left.popleft()
        option, equals, _ = word.partition("=")
        if word == "--" and script is not None:
            script_args += left
            break
        if option in takes_several and not equals:
            ours += [f"{option}={left.popleft()}" for _ in range(_num_assignments(left))] or [word]
        elif option in takes_value:
            ours.append(word)
            if takes_value[option] and not equals:
                ours += [left.popleft()] if left else []
        elif script is None:
            _refuse_unknown(word, option, takes_value, command=parser.prog)
            ours.append(word)
            script = word
        else:
            if not _has_word(script, option):
                _refuse_slip(option, takes_value)
            script_args.append(word)
    return ours, tuple(script_args)


def _num_assignments(words: Iterable[str]) -> int:
    """How many words NAME=VALUE come first."""
    return sum(1 for _ in itertools.takewhile(lambda word: "=" in word and not word.startswith("-"), words))


def _refuse_unknown(word: str, option: str, ours: Iterable[str], *, command: str) -> None:
    if word.startswith("-"):
        near = _nearest(option, ours)
        raise PlanError(
            f"unknown option {option}.{f' Did you mean {near}?' if near else ''} "
            f"The script's own arguments follow its name. See `{command} --help`."
        )


def _refuse_slip(option: str, ours: Iterable[str]) -> None:
    near = _nearest(option, ours)
    if near:
        raise PlanError(
            f"unknown option {option}: did you mean {near}? "
            f"If it is the script's own, write it after '--', as in `train.py -- {option}`."
        )


def _has_word(script: str, option: str) -> bool:
    """Whether a script's text has an option, in quotation marks or not, as a word by itself."""
    try:
        text = Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:  # reported when it is started
        return False
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


def _nearest(option: str, ours: Iterable[str]) -> str | None:
    import difflib

    near = difflib.get_close_matches(option, list(ours), n=1, cutoff=NEAR) if option.startswith("--") else []
    return near[0] if near else None


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]
