"""How the batch of a run of a pool may grow with its replicas, where its user allows it."""

from __future__ import annotations

import dataclasses

from paceline.errors import PlanError

__all__ = ["BatchGrowth", "parsed_growth"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchGrowth:
    """`least` samples a step on the fewest replicas, and at most `most`; `micro` samples of a micro-batch on any."""

    least: int
    most: int
    micro: int

    def sizes(self, replicas: int, *, fewest: int) -> list[int]:
        """The batches to choose from: `least`, doubled while each replica has no more samples than on the `fewest`
        ones, and no more than `most`.
        """
        bound = min(self.most, self.least * replicas // max(1, fewest))
        found = [self.least]
        while found[-1] * 2 <= bound:
            found.append(found[-1] * 2)
        return found

    def efficiency(self, batch: int, noise_scale: float) -> float:
        """What a sample brings in a batch of that size, relative to one of `least`."""
        return (noise_scale + self.least) / (noise_scale + batch)


def parsed_growth(text: str, *, size: int, micro: int) -> BatchGrowth:
    """Read `--batch-grows MOST` for a plan with batches of `size` samples; PlanError where that is no larger one."""
    try:
        most = int(text)
    except ValueError:
        raise PlanError(
            f"--batch-grows is {text!r}; give the largest batch in samples: --batch-grows {8 * size}."
        ) from None
    if most < 2 * size:
        raise PlanError(
            f"--batch-grows is {most}, and the plan's batch {size}: batches are doubled, so give {2 * size} or more."
        )
    return BatchGrowth(least=size, most=most, micro=micro)
