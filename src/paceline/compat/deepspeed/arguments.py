"""`deepspeed.add_config_arguments`: the arguments of a program that name its configuration. No torch here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["add_config_arguments", "config_in_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "the configuration of the training")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (for the program's own use)")
    group.add_argument("--deepspeed_config", metavar="FILE", type=str, help="the configuration, as JSON")
    return parser


def config_in_arguments(words: Sequence[str]) -> str | None:
    """The file that a program's words name by `--deepspeed_config`."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--deepspeed_config", "--deepspeed-config"):
            return value if equals else (words[number + 1] if number + 1 < len(words) else None)
    return None
