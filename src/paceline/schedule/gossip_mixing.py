"""Who mixes weights with whom: a pure function of the step, whose mixing matrices are doubly stochastic.

Row i says with which weights replica i takes the weights of others. That rows add up to 1 keeps equal weights as they
are; that columns do keeps the average of all replicas where it is (Lian et al. 2017, assumption 1.2).
"""

from __future__ import annotations

from typing import Literal

from paceline.schedule.sample_order import mix

__all__ = ["mixing_row"]


def mixing_row(peers: Literal["ring", "random"], index: int, *, count: int, step: int, seed: int) -> dict[int, float]:
    """Return the weights of replica `index` of `count` in a mixing after `step`, by the number of the replica that they
    are for, its own among them.

    "ring": the mean of itself and its two neighbours. "random": pairs are drawn anew for each step, and are averaged;
    of an odd number one stays alone.
    """
    if peers == "ring":
        members = sorted({(index - 1) % count, index, (index + 1) % count})
    else:
        drawn = sorted(range(count), key=lambda one: (mix(seed, step, one), one))
        place = drawn.index(index) // 2 * 2
        members = sorted(drawn[place : place + 2])
    return dict.fromkeys(members, 1 / len(members))
