"""What became of another framework's configuration: a plan, options of the job, and an answer to each of its keys."""

from __future__ import annotations

import dataclasses

__all__ = ["ConfigConversion"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConfigConversion:
    """`plan` is a plan's text, `job` has options of `paceline run` by their names. Each other entry is a key of the
    configuration, with dots for its sections, and a sentence: what it became, why it does nothing here, or why it is
    refused and what there is in its place."""

    plan: str
    job: dict[str, str]
    taken: list[tuple[str, str]]
    ignored: list[tuple[str, str]]
    refused: list[tuple[str, str]]
