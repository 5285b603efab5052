"""Options of a benchmark: `--quick`, and a first line that says what the program does and how long it takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["first_sentence", "options_of"]


def options_of(
    parser: argparse.ArgumentParser, *, takes: str, quick: dict[str, object], words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line (or `words`), and print in one line what the program does and how long it takes.

    `takes` is the time with the options' defaults, on a machine with two cores. `--quick` puts the values of `quick` in
    place of the defaults, so that the program ends within a minute; an option that is given still counts. A quick run
    shows that the program works; its figures are rough.
    """
    given = sys.argv[1:] if words is None else list(words)
    parser.add_argument("--quick", action="store_true", help="end within a minute: fewer rounds, rough figures")
    unknown = [name for name in quick if all(name != action.dest for action in parser._actions)]
    if unknown:
        raise ValueError(f"--quick sets {', '.join(unknown)}, which the program has no option for")
    if "--quick" in given:
        parser.set_defaults(**quick)
    options = parser.parse_args(given)
    limit = "less than a minute, by --quick; its figures are rough" if options.quick else f"{takes} (--quick: a minute)"
    said = f"{parser.prog}: {first_sentence(parser.description or '')} It takes {limit}."
    print(said, file=sys.stderr, flush=True)  # not among the figures, which may go to a file
    return options


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    for end in (". ", "? "):
        first, found, _ = paragraph.partition(end)
        paragraph = first + end.strip() if found else paragraph
    return paragraph if paragraph.endswith((".", "?")) else f"{paragraph}."
