"""Compares the weights of all replicas, names the workers that differ, and gives them the state of the majority.

Replicas start equal, get the same sums of gradients, and take the same steps: their weights are equal to the last bit,
as long as every processor and memory works. One all-reduce of 8 bytes per worker compares digests. Where they differ,
the workers exchange more, and a strict majority counts as right. The whole state of its first member (models,
optimizers, schedulers) is broadcast, tensor by tensor into new memory; the workers that differ take it over once all
have it. So a member that is lost meanwhile leaves no worker with half a state: the comparison is done again as a whole.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.errors import BadNumbersError
from paceline.events import WeightsDiffer
from paceline.worker.health.weight_digest import WeightDigester, combined_digest
from paceline.worker.membership.consensus import RunTogether
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.local_tensors import named_tensors, optimizer_layouts, restore_tensors
from paceline.worker.state.state_registry import StateRegistry

__all__ = ["ReplicaComparison", "ReplicaMismatch", "WeightReport", "majority_verdict"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """The digests of one worker's weights."""

    worker_rank: int
    host: str
    pid: int
    digests: tuple[int, ...]  # of its tensors

    def __str__(self) -> str:
        return f"worker {self.worker_rank} ({self.host}, pid {self.pid})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMismatch:
    """Which workers differ from the majority."""

    differing: tuple[int, ...]  # indices in the group
    source: int | None  # index of the majority's first member; None: there is no majority
    num_equal: int  # members of the largest group of equal ones
    first: int  # the first tensor that is not equal everywhere


def majority_verdict(reports: Sequence[WeightReport]) -> ReplicaMismatch:
    """Return which of unequal reports are wrong: those that differ from more than half of all."""
    counts = collections.Counter(report.digests for report in reports)
    right, num_equal = counts.most_common(1)[0]
    differing = tuple(index for index, report in enumerate(reports) if report.digests != right)
    by_tensor = zip(*(report.digests for report in reports), strict=True)
    first = next(number for number, digests in enumerate(by_tensor) if len(set(digests)) > 1)
    if 2 * num_equal <= len(reports):
        return ReplicaMismatch(differing=tuple(range(len(reports))), source=None, num_equal=num_equal, first=first)
    source = next(index for index, report in enumerate(reports) if report.digests == right)
    return ReplicaMismatch(differing=differing, source=source, num_equal=num_equal, first=first)


class ReplicaComparison:
    """Compares one worker's weights with those of the others; all must call `run`, between two steps."""

    def __init__(
        self,
        *,
        worker_rank: int,
        host: str,
        group: WorkerGroup,
        together: RunTogether,
        registry: StateRegistry,
        files: RunFiles,
    ) -> None:
        self._worker_rank, self._host, self._group, self._together = worker_rank, host, group, together
        self._registry, self._files = registry, files
        self._digester = WeightDigester()

    def run(self, step: int, *, since_step: int) -> None:
        """Compare, and give the workers that differ the majority's state. They were equal after `since_step`.

        Raises BadNumbersError on all workers where there is no majority.
        """
        if self._group.size == 1:
            return
        names, (reports, finding, state) = self._together(self._compared)
        if finding is None:
            return
        differing = [reports[index] for index in finding.differing]
        self._files.emit(
            WeightsDiffer(
                workers=[report.worker_rank for report in differing],
                who=list(map(str, differing)),
                step=step,
                since_step=since_step,
                first=names[finding.first],
                source=None if finding.source is None else reports[finding.source].worker_rank,
                num_alike=finding.num_equal,
            )
        )
        if finding.source is None:
            raise BadNumbersError(_no_majority(differing, names[finding.first], step=step, since_step=since_step))
        if state is not None:
            tensors, plain = state
            restore_tensors(self._registry, tensors, optimizer_layouts(self._registry), plain)

    def _compared(
        self,
    ) -> tuple[list[str], tuple[list[WeightReport], ReplicaMismatch | None, tuple[dict[str, Tensor], Any] | None]]:
        """Names of the tensors; all reports, the mismatch, and, where this worker differs, the state to take over."""
        tensors = self._weights()
        digests = self._digester.digests(tensors.values())
        combined = torch.zeros(self._group.size, dtype=torch.int64)
        combined[self._group.index] = _signed(combined_digest(digests))
        self._group.all_reduce(combined, what="digests of the weights").wait()
        names = list(tensors)
        if len(set(combined.tolist())) == 1:
            return names, ([], None, None)
        own = WeightReport(worker_rank=self._worker_rank, host=self._host, pid=os.getpid(), digests=tuple(digests))
        reports: list[WeightReport] = self._group.gather_objects(own)
        finding = majority_verdict(reports)
        state = None
        if finding.source is not None:
            state = self._broadcast_state(finding.source, takes=self._group.index in finding.differing)
        return names, (reports, finding, state)

    def _weights(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of the models that an optimizer trains.

        Others (an average of the weights, say) may exist on one worker only.
        """
        groups = [group for optimizer in self._registry.optimizers.values() for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        prefixes = tuple(
            f"{name}."
            for name, model in self._registry.models.items()
            if any(id(parameter) in trained for parameter in model.parameters())
        )
        tensors = named_tensors(self._registry, with_caches=False)
        states = tuple(f"{name}.state." for name in self._registry.optimizers)
        return {k: v for k, v in tensors.items() if k.startswith(prefixes) and not k.startswith(states)}

    def _broadcast_state(self, source: int, *, takes: bool) -> tuple[dict[str, Tensor], Any] | None:
        is_source = self._group.index == source
        received: dict[str, Tensor] = {}
        for name, tensor in named_tensors(self._registry, with_caches=False).items():
            # Never into the live tensor: a transfer that breaks off would leave it half written.
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._group.broadcast(copy, source=source, what=f"the state of {name}")
            if takes:
                received[name] = copy
        plain = self._group.broadcast_object(self._registry.plain() if is_source else None, source=source)
        return (received, plain) if takes else None


def _signed(digest: int) -> int:
    return digest - (1 << 64) if digest >> 63 else digest


def _no_majority(differing: Sequence[WeightReport], first: str, *, step: int, since_step: int) -> str:
    return (
        f"step {step}: the weights of the workers are not equal any more, and no majority shows which are right: "
        f"{', '.join(map(str, differing))}, first in {first}. They were equal after step {since_step}. Memory or a "
        "processor has failed, or the program treats workers differently; with three or more workers the wrong one is "
        f"named and repaired. Start again with the same run_dir; checkpoints after step {since_step} may hold wrong "
        "weights."
    )
