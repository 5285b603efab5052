"""`ContextPlan`: where a model's tokens are split into slices, and how attention combines them. Plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paceline.parallel.context.group_ops import AttentionKind

__all__ = ["ContextPlan"]

KINDS = {
    "heads": "all-to-all between tokens and heads",
    "ring": "keys and values are passed round a ring",
    "rows": "keys and values are gathered for the rows of scores",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContextPlan:
    """How `size` workers split one sequence."""

    size: int
    kind: AttentionKind
    dim: int  # of the tokens, in what blocks take and embeddings return, counted from the end
    embeddings: tuple[str, ...]  # each worker looks up its own tokens only
    blocks: tuple[str, ...]  # their inputs are sliced, where they are not yet
    # modules that work on each token by itself; they get this worker's tokens as a plain tensor
    tokenwise: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()  # modules that get the whole sequence
    attentions: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])  # calls in one forward, by kind
    operations: tuple[str, ...] = ()  # single operations for which tokens are gathered, and why
    sample: str = ""

    def __str__(self) -> str:
        """Return the report."""
        lines = [f"context={self.size}: tokens are sliced in dim {self.dim} of {len(self.blocks)} blocks"]
        for kind, count in self.attentions.items():
            lines.append(f"  attention   {count} x {kind}: {KINDS[kind]}")
        rows = {"embedding": self.embeddings, "token by token": self.tokenwise, "whole": self.gathered}
        for what, names in rows.items():
            for name in sorted({".".join("*" if part.isdigit() else part for part in one.split(".")) for one in names}):
                lines.append(f"  {what}: {name}")
        lines += [f"  gathered for {one}" for one in self.operations]
        return "\n".join(lines)
