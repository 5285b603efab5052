"""What the configuration file of another framework says in Paceline's words: a plan, a job, and what not."""

from __future__ import annotations

import dataclasses

__all__ = ["ConfigConversion"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConfigConversion:
    """A configuration that was read: every key of it is in one of the three lists, with its value or the reason.

    `plan` is a plan's text, "" for the default. `job` has options of `paceline run` by their names: {"workers": "8"}.
    """

    plan: str = ""
    job: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    taken: list[tuple[str, str]] = dataclasses.field(default_factory=list["tuple[str, str]"])
    ignored: list[tuple[str, str]] = dataclasses.field(default_factory=list["tuple[str, str]"])
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list["tuple[str, str]"])
