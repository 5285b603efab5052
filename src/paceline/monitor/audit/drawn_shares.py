"""How many samples a mixture has taken of each dataset, as the ledgers say, beside its shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.plain_data import text_of, whole

__all__ = ["DrawnShares", "drawn_lines", "read_drawn"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnShares:
    """Of one stream, up to a step, over all attempts."""

    until_step: int
    counts: Mapping[str, int]
    shares: Mapping[str, float]  # that it was to have, since the newest start


def read_drawn(line: Mapping[str, Any]) -> tuple[str, DrawnShares]:
    """Return the stream, and what a line of a ledger says of it; raises KeyError, TypeError or ValueError."""
    told = {text_of(name): (whole(count), float(share)) for name, (count, share) in line["drawn"].items()}
    return text_of(line["of"]), DrawnShares(
        until_step=whole(line["until"]),
        counts={name: count for name, (count, _) in told.items()},
        shares={name: share for name, (_, share) in told.items()},
    )


def drawn_lines(stream: str, drawn: DrawnShares) -> Iterator[str]:
    """For people: a line for each dataset."""
    total = sum(drawn.counts.values())
    yield f"  {stream}, a mixture: {total:,} samples up to step {drawn.until_step:,}"
    width = max(map(len, drawn.counts), default=0)
    for name, count in drawn.counts.items():
        part = count / total if total else 0.0
        yield f"    {name:{width}}  {count:,} samples, {part:.2%} (its share: {drawn.shares[name]:.2%})"
