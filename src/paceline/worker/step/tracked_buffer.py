"""One module buffer within a step: its value at the beginning, and what micro-batches wrote, by the buffer's rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  # the class that all batch norms share has no other name

from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.step.buffer_captures import (
    LOW_BITS,
    BufferSpec,
    FirstCapture,
    QueueCapture,
    SumCapture,
    first_index,
    is_integer,
    widened,
    zeros,
)
from paceline.worker.step.buffer_queue import QueueForm, moved_pointer
from paceline.worker.step.buffer_rules import BufferRule, known_rule

__all__ = ["BufferKey", "BufferSpec", "FoundRules", "TrackedBuffer", "buffer_names", "full_name", "is_persistent"]


SMALL = 1024  # numbers
COMPARABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)


class BufferKey(NamedTuple):
    """A buffer, by the first module that has it."""

    module: nn.Module
    name: str


class FoundRules:
    """The rules of all buffers, and the forms of queues; shared by all that track the same models."""

    def __init__(self) -> None:
        self.rules: dict[BufferKey, BufferRule] = {}
        self.queues: dict[BufferKey, QueueForm] = {}
        self.pointers: dict[BufferKey, BufferKey] = {}  # of rings: pointer to queue


class TrackedBuffer:
    """One buffer: its value at the step's beginning, and what micro-batches wrote."""

    def __init__(self, module: nn.Module, name: str, prefix: str, found: FoundRules) -> None:
        self.key, self._found = BufferKey(module, name), found
        rule = found.rules.get(self.key) or known_rule(module, name)
        if rule is not None:
            found.rules[self.key] = rule
        self.module, self.name, self.full_name = module, name, full_name(prefix, name)
        self.others: list[tuple[nn.Module, str]] = []  # modules that share the tensor, and its name there
        self.tracked: Mapping[BufferKey, TrackedBuffer] = {}  # all buffers, by which a queue finds its pointer
        self.is_persistent = is_persistent(module, name)
        self.is_on_other_stage = self._is_on_meta()  # another pipeline stage has it
        self.is_cache = self.is_on_other_stage  # each worker keeps its own
        self.is_cache_unannounced = False  # the other workers do not know yet that it is a cache
        self.is_changed_by_value = False  # though its version counter did not change
        self.saved: Tensor | None = None  # a copy of the value at the step's beginning
        self._tensor: Tensor | None = None  # the tensor that held it then
        self._version = -1
        self._is_statistic = isinstance(module, _NormBase) and name in ("running_mean", "running_var")
        self.save()

    @property
    def rule(self) -> BufferRule | None:
        """How what micro-batches wrote is combined; None: not known yet."""
        return self._found.rules.get(self.key)

    @property
    def is_pointer(self) -> bool:
        """Whether it is the pointer of a queue, and moves with that."""
        return self.key in self._found.pointers

    @property
    def queue(self) -> QueueForm | None:
        """How rows are written, if it is a queue, once that is known."""
        return self._found.queues.get(self.key)

    @property
    def has_rule(self) -> bool:
        """Whether it is known how what micro-batches wrote is combined; equal on all workers."""
        if self.is_pointer:
            return True
        return self.queue is not None if self.rule == "gather" else self.rule is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing has to be known any more."""
        return self.is_cache or self.has_rule

    @property
    def is_certain(self) -> bool:
        """Whether every worker knows, without communication, that there is something to average, and its shape."""
        return self.is_persistent and self.saved is not None

    def current(self) -> Tensor | None:
        return getattr(self.module, self.name, None)

    def save(self) -> None:
        """Save the value; a small one even where its version has not changed."""
        self.drop_captures()
        if self.is_cache:
            return
        current = self.current()
        if current is None:
            self.saved = None
        elif self._is_other(current) or _is_small(current) or self.is_changed_by_value:
            self.saved = current.detach().clone()
        self._tensor, self._version = current, _version(current)
        self.spec = None if self.saved is None else BufferSpec(self.saved.shape, self.saved.dtype, self.saved.device)

    def drop_captures(self) -> None:
        """Drop what micro-batches wrote."""
        self.num_changed = 0  # samples of the micro-batches that changed it
        self._only: Tensor | None = None  # what the only one of them wrote
        self._sum: Tensor | None = None  # of several: widened, weighted by samples
        self.each: list[tuple[MicroBatch | None, int, Tensor]] = []  # all of them, as long as no rule is known
        self._by_rule: SumCapture | FirstCapture | QueueCapture | None = None
        if self.saved is None:
            self.spec: BufferSpec | None = None

    def known_spec(self) -> BufferSpec:
        if self.spec is None:
            raise RuntimeError(f"buffer {self.full_name} changed on no worker and cannot be combined")
        return self.spec

    def needs_comparison(self, current: Tensor, *, also_large: bool) -> bool:
        """Whether only its values show if it changed."""
        if self.is_cache or self.may_have_changed():
            return False
        return _is_small(current) or (also_large and _is_comparable(current))

    def may_have_changed(self) -> bool:
        """Whether it may hold another value than at the step's beginning."""
        current = self.current()
        if self.is_cache or (current is None and self.saved is None):  # a norm that tracks no statistics has None
            return False
        if self.is_changed_by_value or (self._is_statistic and self.module.training):
            return True
        return self._is_other(current)

    def rewind(self) -> None:
        if not self.may_have_changed():
            return
        current = self.current()
        if not self.is_persistent and not _is_alike(current, self.saved):
            self.make_cache()
        elif self.saved is None:
            setattr(self.module, self.name, None)
        elif current is self._tensor or _version(self._tensor) != self._version:
            self._put(self.saved)
            self._version = _version(self._tensor)
        else:  # the module replaced the tensor, which has its old value
            self._set(self._tensor)

    def rewind_to_new_tensor(self) -> None:
        """Rewind to a new tensor; `save` and `commit` use the one of the step's beginning."""
        if not self.may_have_changed():
            return
        if self.saved is None or not _is_alike(self.current(), self.saved):
            self.rewind()
        else:
            self._set(self.saved.clone())

    def capture(self, num_samples: int, micro: MicroBatch | None = None) -> None:
        """Add what a micro-batch wrote; None: the mean of several."""
        current = self.current()
        if not self.is_persistent and not _is_alike(current, self.saved):
            self.make_cache()
            return
        if current is None or (self.spec is not None and current.shape != self.spec.shape):
            then = "None" if self.spec is None else list(self.spec.shape)
            now = "None" if current is None else list(current.shape)
            raise ValueError(
                f"buffer {self.full_name} went from {then} to {now} within a step: a persistent buffer must keep its "
                f"shape, to be combined over micro-batches. For a cache, use register_buffer({self.name!r}, ..., "
                "persistent=False)"
            )
        self.spec = self.spec or BufferSpec(current.shape, current.dtype, current.device)
        if self.is_settled or self.saved is None:
            self._add(current.detach(), num_samples, micro)
        else:
            self.each.append((micro, num_samples, current.detach().clone()))
        self.num_changed += num_samples

    def settle(self) -> None:
        """Add what was captured while no rule was known. Where there is none still, it is one micro-batch's value."""
        if not self.each:
            return
        each, self.each, self.num_changed = self.each, [], 0
        for micro, num_samples, value in each:
            self._add(value, num_samples, micro)
            self.num_changed += num_samples

    def _add(self, value: Tensor, num_samples: int, micro: MicroBatch | None) -> None:
        if self.is_pointer:
            return
        by_rule = self._capture_by_rule()
        if by_rule is not None and self.saved is not None:
            by_rule.add(value, self.saved, micro)
        elif self.num_changed == 0:
            self._only = value.clone()
        else:
            self._sum = self._weighted_sum() + widened(value) * num_samples
            self._only = None

    def _capture_by_rule(self) -> SumCapture | FirstCapture | QueueCapture | None:
        """What collects captures; None: a mean."""
        if self._by_rule is None and self.saved is not None:
            if self.rule == "sum":
                self._by_rule = SumCapture()
            elif self.rule == "first":
                self._by_rule = FirstCapture()
            elif self.queue is not None:
                self._by_rule = QueueCapture(self.queue, self.full_name, self._pointer)
        return self._by_rule

    def _pointer(self) -> Tensor | None:
        """The pointer of this queue at the step's beginning."""
        form = self.queue
        return self.tracked[BufferKey(self.module, form.pointer)].saved if form is not None and form.pointer else None

    def share(self, num_captured: int, num_samples: int, micros: Sequence[MicroBatch], here: Sequence[int]) -> Tensor:
        """This worker's part of what the step makes of the buffer, widened, 1-D; `num_captured` of the step's samples
        ran here, in those of its `micros` that have the indices `here`.

        Integers are left to be divided by the number of samples, exactly, once they are summed. A buffer that began
        as None has one more number: the samples that its new value stands for.
        """
        spec = self.known_spec()
        if self.is_pointer:
            return torch.empty(0, dtype=torch.float64, device=spec.device)
        by_rule = self._capture_by_rule()
        if by_rule is not None:
            if isinstance(by_rule, QueueCapture) and self.num_changed:
                by_rule.require_all(len(here))
            if isinstance(by_rule, FirstCapture) and self.saved is not None:
                first = first_index(micros)
                if first in here and not by_rule.has_written(first):
                    return widened(self.saved).to(spec.device)  # the first one left it as it was
            return by_rule.share(spec, micros).to(spec.device)
        num_unchanged = num_captured - self.num_changed if self.saved is not None else 0
        if self._only is not None and not num_unchanged and not is_integer(spec.dtype):
            share = widened(self._only) * (self.num_changed / num_samples)  # exactly itself where it is all
        else:
            share = self._weighted_sum()
            if num_unchanged and self.saved is not None:
                share = share + widened(self.saved) * num_unchanged
            if not is_integer(spec.dtype):
                share = share / num_samples
        share = share.to(spec.device)
        return share if self.saved is not None else torch.cat([share, share.new_tensor([float(self.num_changed)])])

    def commit(self, total: Tensor, num_samples: int, micros: Sequence[MicroBatch]) -> None:
        """Set the buffer to what the step makes of it; `total` is the sum of all shares."""
        by_rule = self._capture_by_rule()
        if self.is_pointer and self.saved is not None:
            self._put(self._moved_pointer(self.saved, micros))
        elif by_rule is not None and self.saved is not None:
            self._put(by_rule.combined(total, self.saved, self.known_spec(), micros))
        else:
            self._commit_mean(total, num_samples)
        self.drop_captures()

    def _moved_pointer(self, start: Tensor, micros: Sequence[MicroBatch]) -> Tensor:
        key = self._found.pointers[self.key]
        form, queue = self._found.queues[key], key.module.get_buffer(key.name)
        num = sum(form.rows * (micro.num_samples if form.is_per_sample else 1) for micro in micros)
        return moved_pointer(start, num, queue.shape[form.dim])

    def _commit_mean(self, total: Tensor, num_samples: int) -> None:
        weight = num_samples
        if self.saved is None:
            total, weight = total[:-1], int(total[-1])
        self._put(_narrowed(total, self.known_spec(), num_samples=num_samples, weight=weight))

    def make_cache(self) -> None:
        """From now on this buffer is a cache."""
        self.is_cache = self.is_cache_unannounced = True
        self.saved = self._tensor = None
        self.drop_captures()

    def settle_spec(self, specs: Sequence[BufferSpec | None], *, is_cache: bool) -> None:
        """Take over what the buffer became on the other workers, or that it is a cache on one; raises ValueError."""
        known = [spec for spec in specs if spec is not None]
        is_of_one_shape = len({spec.shape for spec in known}) == 1
        if is_cache or (not self.is_persistent and not is_of_one_shape):
            self.make_cache()
            self.is_cache_unannounced = False
        elif not is_of_one_shape:
            raise ValueError(
                f"buffer {self.full_name}, which began as None, was filled with different shapes: "
                f"{', '.join(str(list(spec.shape)) for spec in known)}. A persistent buffer must have one shape; for "
                f"a cache, use register_buffer({self.name!r}, None, persistent=False)"
            )
        elif self.spec is None:
            self.spec = dataclasses.replace(known[0], device=_local_device(known[0].device))

    def _weighted_sum(self) -> Tensor:
        """The widened sum of what micro-batches wrote, weighted by their samples."""
        if self._sum is not None:
            return self._sum
        if self._only is not None:
            return widened(self._only) * self.num_changed
        return zeros(self.known_spec())

    def _set(self, value: Tensor | None) -> None:
        """Make it another tensor, in all modules that share it."""
        for module, name in [(self.module, self.name), *self.others]:
            setattr(module, name, value)

    def _put(self, value: Tensor) -> None:
        """Put the tensor of the step's beginning back (where there was one), with this value."""
        if self._tensor is None:
            setattr(self.module, self.name, value)
            return
        if self.current() is not self._tensor:
            self._set(self._tensor)
        with torch.no_grad():
            self._tensor.copy_(value)

    def _is_on_meta(self) -> bool:
        current = self.current()
        return current is not None and current.is_meta

    def _is_other(self, current: Tensor | None) -> bool:
        return current is not self._tensor or _version(current) != self._version


def _narrowed(total: Tensor, spec: BufferSpec, *, num_samples: int, weight: int) -> Tensor:
    """The average in the buffer's own spec, for samples that weigh `weight` of the step's `num_samples`."""
    if is_integer(spec.dtype):
        size = spec.shape.numel()
        return _rounded_mean(total[:size].long(), total[size:].long(), weight).to(spec.dtype).view(spec.shape)
    mean = total if weight == num_samples else total * (num_samples / weight)
    if spec.dtype.is_complex:
        mean = torch.view_as_complex(mean.view(-1, 2))
    return mean.to(spec.dtype).view(spec.shape)


def _rounded_mean(high: Tensor, low: Tensor, count: int) -> Tensor:
    """(2^32 high + low) / count in integers, rounded to nearest and halves to even; for fewer than 2^21 samples."""
    whole = torch.div(high, count, rounding_mode="floor")
    rest = ((high - whole * count) << LOW_BITS) + low
    part = torch.div(rest, count, rounding_mode="floor")
    twice = 2 * (rest - part * count)
    is_up = (twice > count) | ((twice == count) & (part % 2 == 1))
    return (whole << LOW_BITS) + part + is_up


def _is_small(tensor: Tensor) -> bool:
    """Whether it may be written without a new version, and it is cheap to copy and to compare: by torch's kernels of
    norms, which write floating-point numbers of one dim, or by user code, through `.data`."""
    return _is_comparable(tensor) and (tensor.numel() <= SMALL or (tensor.dim() == 1 and tensor.is_floating_point()))


def _is_comparable(tensor: Tensor) -> bool:
    """Whether torch compares such tensors."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dtype in COMPARABLE


def _is_alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else one.shape == other.shape


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _local_device(device: torch.device) -> torch.device:
    """This worker's device of the same kind as a peer's."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def buffer_names(module: nn.Module) -> tuple[str, ...]:
    # torch lists buffers that are None, and which persist, nowhere else
    return tuple(module._buffers.keys())  # pyright: ignore[reportPrivateUsage]  # see above


def is_persistent(module: nn.Module, name: str) -> bool:
    return name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  # see above


def full_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
