"""Captures for `paceline parity`: whether what a wire with error feedback sends and keeps adds up to the gradients.

Error feedback promises that nothing is lost, and nothing comes twice: summed over the replicas, what was kept before
and the gradients are what came and what is kept now. Each worker checks this for its own parts, with one exact sum.

    wire_worker_<rank>.jsonl    one line per step and parameter: {"step": 1, "name": "model.w", "difference": 1e-7}

A difference is relative to the parameter's largest number, or 1 % of the largest of its bucket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.plan import AllReduce, Int8, OneBit, Plan, TopK
from paceline.sync.allreduce.buckets import WireShares

__all__ = ["WireCapture"]

FLOOR = 0.01


class WireCapture:
    """Writes the check of one worker's buckets. It remembers what was kept, in case that is changed between steps."""

    def __init__(self, directory: Path, worker_rank: int) -> None:
        self._path = directory / f"wire_worker_{worker_rank}.jsonl"
        self._kept: dict[str, Tensor] = {}
        self.step = 0

    @staticmethod
    def can_check(plan: Plan) -> bool:
        """Whether a plan's wire adds up exactly; others round the sum, too, to 16 bits, which no replica keeps."""
        return isinstance(plan.sync, AllReduce) and isinstance(plan.wire, (Int8, OneBit, TopK)) and plan.wire.feedback

    def settled(self, shares: Mapping[str, WireShares], group: WorkerGroup) -> None:
        """A bucket's step is taken; all workers of `group` call it, with the same parameters."""
        names = list(shares)
        if not names:
            return
        due = [shares[name].given.double() - shares[name].kept.double() for name in names]
        for place, name in enumerate(names):
            if name in self._kept:
                due[place] += self._kept[name]
            self._kept[name] = shares[name].kept.double()
        flat = torch.cat([one.reshape(-1) for one in due])
        group.all_reduce(flat, what="the exact sum, for parity").wait()
        sums = flat.split([one.numel() for one in due])
        floor = FLOOR * float(flat.abs().max())
        with open(self._path, "a", encoding="utf-8") as file:
            for name, right in zip(names, sums, strict=True):
                distance = float((shares[name].came.double().reshape(-1) - right).abs().max())
                size = max(float(right.abs().max()), floor)
                row = {"step": self.step, "name": name, "difference": distance / size if size else distance}
                file.write(json.dumps(row) + "\n")
