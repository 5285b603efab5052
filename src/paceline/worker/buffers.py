"""Buffers (batch-norm statistics and the like) across micro-batches.

Every micro-batch starts from the buffers of the step's beginning. What each one makes of them is combined at the end by
its share of real samples, over all workers: new = old + sum_i w_i (buffer_i - old) / sum_i w_i. So the result is the
same however micro-batches are dealt. Integer buffers are rounded to nearest, which gives "one more" for batch-norm's
counter of batches.

A change is seen by the tensor's version counter, so large buffers that never change (masks, tables) cost a comparison
of two numbers. torch's batch-norm kernels write running statistics without counting it, so floating buffers of one dim
are compared by their values, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup

__all__ = ["BufferCombiner"]


class BufferCombiner:
    """Rewinds and combines the buffers of the models that a worker has prepared."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def add(self, model: nn.Module) -> None:
        """Watch the buffers of `model`; a buffer that a module replaces by a new tensor is followed by its name."""
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if all(slot.current() is not buffer for slot in self._slots):
                    self._slots.append(_Slot(module, name, f"{prefix}.{name}" if prefix else name))

    def begin(self) -> None:
        """Remember the buffers of the step's beginning."""
        for slot in self._slots:
            slot.remember()

    def rewind(self) -> None:
        """Give the next micro-batch the buffers of the step's beginning."""
        for slot in self._slots:
            slot.rewind()

    def capture(self, num_samples: int) -> None:
        """Add what this micro-batch made of the buffers, weighted by its real samples."""
        for slot in self._slots:
            slot.capture(num_samples)

    def changed(self) -> list[bool]:
        """Which buffers changed here, in an order that is the same on all workers."""
        return [slot.drift is not None for slot in self._slots]

    def combine(self, changed: Sequence[bool], *, num_samples: int, group: WorkerGroup) -> None:
        """Set the buffers that changed anywhere to their combination; all must call it, with the same `changed`."""
        slots = [slot for slot, is_changed in zip(self._slots, changed, strict=True) if is_changed]
        if not slots:
            return
        drifts = [slot.take_drift().reshape(-1) for slot in slots]
        flat = torch.cat(drifts)
        group.all_reduce(flat, what="all_reduce of buffers").wait()
        flat /= num_samples
        for slot, drift in zip(slots, flat.split([drift.numel() for drift in drifts]), strict=True):
            slot.commit(drift)

    def give_up(self) -> None:
        """Put back the buffers of the step's beginning, for a step that is not taken."""
        for slot in self._slots:
            slot.rewind()
            slot.drift = None


class _Slot:
    """One buffer: its value at the step's beginning, and the weighted sum of its changes (float64)."""

    def __init__(self, module: nn.Module, name: str, full_name: str) -> None:
        self.module, self.name, self.full_name = module, name, full_name
        self.drift: Tensor | None = None
        self._saved = self.current().detach().clone()
        self._tensor, self._version = self.current(), self.current()._version

    def current(self) -> Tensor:
        return getattr(self.module, self.name)

    def moved(self) -> bool:
        current = self.current()
        if current is not self._tensor or current._version != self._version:
            return True
        return current.dim() == 1 and current.is_floating_point() and not torch.equal(current, self._saved)

    def remember(self) -> None:
        if self.moved():
            self._saved = self.current().detach().clone()
            self._mark()
        self.drift = None

    def rewind(self) -> None:
        if self.moved():
            with torch.no_grad():
                if self.current().shape == self._saved.shape:
                    self.current().copy_(self._saved)
                else:
                    setattr(self.module, self.name, self._saved.clone())
            self._mark()

    def capture(self, num_samples: int) -> None:
        if self.moved():
            if self.current().shape != self._saved.shape:
                raise ValueError(
                    f"buffer {self.full_name} changed its shape from {list(self._saved.shape)} to "
                    f"{list(self.current().shape)} within a step; "
                    "buffers whose shape depends on the data cannot be combined over workers"
                )
            change = (self.current().detach().double() - self._saved.double()) * num_samples
            self.drift = change if self.drift is None else self.drift + change

    def take_drift(self) -> Tensor:
        return torch.zeros_like(self._saved, dtype=torch.float64) if self.drift is None else self.drift

    def commit(self, drift: Tensor) -> None:
        value = self._saved.double() + drift.view(self._saved.shape)
        if not self._saved.is_floating_point():
            value = value.round()
        with torch.no_grad():
            self.current().copy_(value)
        self.drift = None

    def _mark(self) -> None:
        self._tensor, self._version = self.current(), self.current()._version
