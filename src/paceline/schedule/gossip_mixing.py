"""Gossip: which replicas average their weights after a step, as rows of a doubly stochastic mixing matrix.

Row i has the factors with which replica i adds up the weights of others. Rows add up to 1, so equal weights stay as
they are. Columns add up to 1, so the average of all replicas stays as it is (Lian et al. 2017, assumption 1.2).
"""

from __future__ import annotations

from typing import Literal

from paceline.schedule.sample_order import mix

__all__ = ["mixing_row"]


def mixing_row(peers: Literal["ring", "random"], index: int, *, count: int, step: int, seed: int) -> dict[int, float]:
    """Return the factors of replica `index` of `count` after `step`, by replica number, including its own.

    "ring": the mean of itself and its two neighbors. "random": pairs are drawn anew for each step, and averaged; with
    an odd number of replicas, one stays alone.
    """
    if peers == "ring":
        members = sorted({(index - 1) % count, index, (index + 1) % count})
    else:
        drawn = sorted(range(count), key=lambda one: (mix(seed, step, one), one))
        place = drawn.index(index) // 2 * 2
        members = sorted(drawn[place : place + 2])
    return dict.fromkeys(members, 1 / len(members))
