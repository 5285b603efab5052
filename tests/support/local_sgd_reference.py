"""Local SGD in one process, as short as can be: replicas in a loop, each with a model and an optimizer of its own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.plan import Nesterov
from paceline.schedule.micro_batches import micro_batches, split_evenly

__all__ = ["Reference"]


@dataclasses.dataclass(kw_only=True)
class Reference:
    """R replicas over the same shares of the same batches. `weights` and `buffers` are those that all agreed on."""

    model: nn.Module
    make: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Tensor
    targets: Tensor
    batch: int
    micro: int
    replicas: int
    every: int
    outer: Nesterov | None = None
    clip_norm: float | None = None
    fragments: int = 1  # of runs of parameters, `cut` says where; with overlap and mixing
    cut: int = 0  # the number of parameters of the first of two
    overlap: int = 0
    mixing: float = 0.0
    keep_moves: bool = False

    def __post_init__(self) -> None:
        self.models = [copy.deepcopy(self.model) for _ in range(self.replicas)]
        self.optimizers = [self.make(model) for model in self.models]
        self.momentum = [torch.zeros_like(p) for p in self.model.parameters()]
        self.used = [0] * self.replicas  # samples, in the round
        places = list(range(len(self.momentum)))
        self.parts = [places] if self.fragments == 1 else [places[: self.cut], places[self.cut :]]
        self.used_of = [[0] * self.replicas for _ in self.parts]
        self.sent: dict[tuple[int, int], Tensor] = {}  # weights under way, by replica and place

    def run(self, steps: int) -> list[list[float]]:
        """Take steps; returns the replicas' losses in each."""
        losses: list[list[float]] = []
        count = len(self.inputs)
        starts = [start for _ in range(steps) for start in range(0, count, self.batch)][:steps]
        for step, start in enumerate(starts, 1):
            micros = micro_batches(start, min(start + self.batch, count), self.micro)
            shares = [[micros[place] for place in run] for run in split_evenly(len(micros), self.replicas)]
            ranges = [[(micro.start, micro.stop) for micro in share] for share in shares]
            losses.append([self._step(replica, some) for replica, some in enumerate(ranges)])
            if self.fragments == 1 and not self.overlap and not self.mixing:
                if step % self.every == 0 or step == steps:
                    self.agree()
                continue
            self.stream(step, is_last=step == steps)
        return losses

    def _step(self, replica: int, ranges: Sequence[tuple[int, int]]) -> float:
        """One inner step of a replica, on the mean over its own samples."""
        model, total = self.models[replica], sum(stop - start for start, stop in ranges)
        before = [buffer.clone() for buffer in model.buffers()]
        after = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in before]
        mean = 0.0
        model.zero_grad()
        for start, stop in ranges:
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            loss = F.cross_entropy(model(self.inputs[start:stop]), self.targets[start:stop])
            weight = (stop - start) / total
            (loss * weight).backward()
            mean += float(loss.detach()) * weight
            for buffer, found in zip(model.buffers(), after, strict=True):
                found += buffer * weight
        if total:
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
            self.optimizers[replica].step()
            _set(model.buffers(), after)
        for used in (self.used, *self.used_of):
            used[replica] += total
        return mean if total else float("nan")

    @torch.no_grad()
    def stream(self, step: int, *, is_last: bool) -> None:
        """Fragments land, and others are sent: their outer step is taken then."""
        for number, part in enumerate(self.parts):
            offset = number * self.every // len(self.parts)
            if self.overlap and step > self.overlap and (step - self.overlap) % self.every == offset:
                self.land(part, self.mixing)
            if step % self.every == offset:
                self.outer_step(part, self.used_of[number])
                if not self.overlap:
                    self.land(part, self.mixing)
        if is_last:
            for number, part in enumerate(self.parts):
                sent = range(max(1, step - self.overlap + 1), step + 1)  # and has not landed
                if self.overlap and any(one % self.every == number * self.every // len(self.parts) for one in sent):
                    self.land(part, 0.0)
                if sum(self.used_of[number]):
                    self.outer_step(part, self.used_of[number])
                self.land(part, 0.0, keeps=False)
            self.average_buffers()

    def outer_step(self, part: Sequence[int], used: list[int]) -> None:
        for place in part:
            agreed = list(self.model.parameters())[place]
            owns = [list(model.parameters())[place] for model in self.models]
            self.sent |= {(replica, place): own.clone() for replica, own in enumerate(owns)}
            moved = _sum((agreed - own) * n / sum(used) for own, n in zip(owns, used, strict=True))
            if self.outer is not None:
                self.momentum[place].mul_(self.outer.momentum).add_(moved)
                moved = self.outer.lr * (moved + self.outer.momentum * self.momentum[place])
            agreed.sub_(moved)
        used[:] = [0] * self.replicas

    def land(self, part: Sequence[int], mixing: float, *, keeps: bool = True) -> None:
        for replica, model in enumerate(self.models):
            for place in part:
                own, agreed = list(model.parameters())[place], list(self.model.parameters())[place]
                if self.keep_moves and keeps:
                    own.copy_(agreed + own - self.sent[replica, place])
                else:
                    own.copy_(mixing * own + (1 - mixing) * agreed)

    @torch.no_grad()
    def agree(self) -> None:
        """The average of the replicas, or an outer step on how far they have moved; all go on from there."""
        shares = [used / sum(self.used) for used in self.used]
        for place, agreed in enumerate(self.model.parameters()):
            owns = [list(model.parameters())[place] for model in self.models]
            moved = _sum((agreed - own) * share for own, share in zip(owns, shares, strict=True))
            if self.outer is not None:
                self.momentum[place].mul_(self.outer.momentum).add_(moved)
                moved = self.outer.lr * (moved + self.outer.momentum * self.momentum[place])
            agreed.sub_(moved)
            for own in owns:
                own.copy_(agreed)
        self.average_buffers()
        self.used = [0] * self.replicas

    def average_buffers(self) -> None:
        shares = [used / sum(self.used) for used in self.used]
        means = [
            _sum(buffer.double() * share for buffer, share in zip(each, shares, strict=True))
            for each in zip(*(model.buffers() for model in self.models), strict=True)
        ]
        for model in (self.model, *self.models):
            _set(model.buffers(), means)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _set(buffers: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value.round() if not buffer.is_floating_point() else value)
