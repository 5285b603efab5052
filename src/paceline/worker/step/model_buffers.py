"""Buffers (batch-norm statistics and the like) across micro-batches.

Every micro-batch starts from the buffers of the step's beginning. What each one makes of them is combined at the end by
its share of real samples, over all workers: new = sum_i w_i buffer_i / sum_i w_i, where a micro-batch that left a
buffer alone counts with the old value. So the result is the same however micro-batches are dealt; with one micro-batch
it is exactly what the module wrote. Integers are averaged exactly and rounded to nearest, which gives "one more" for
batch-norm's counter of batches.

Most changes are seen by the tensor's version counter, so large buffers that never change (masks, tables) cost a
comparison of two numbers. torch's batch-norm kernels write running statistics without counting it: those of norm
modules in training are always taken as changed, and other floating buffers of one dim are compared by value, all at
once, because each answer is waited for on a GPU.

Buffers on the meta device are of other stages, and left alone: they have their places in what all workers tell.

A buffer that does not persist (`persistent=False`) and changes its shape, or comes and goes (None), is a cache: each
worker keeps its own. A persistent one may begin as None and be filled, with the same shape everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  # the class that all batch norms share has no other name

from paceline.comm.group import WorkerGroup

__all__ = ["BufferAverager", "persistent_buffers"]

LOW_BITS = 32  # a 64-bit integer travels as two numbers: 2^32 high + low


class BufferAverager:
    """Rewinds and combines the buffers of the models that a worker has prepared."""

    def __init__(self) -> None:
        self._slots: list[_BufferSlot] = []
        self._modules: dict[nn.Module, str] = {}
        self._names: dict[nn.Module, tuple[str, ...]] = {}  # of buffers that are followed, or are known not to be
        self._num_captured = 0  # samples, in this walk

    def add(self, model: nn.Module) -> None:
        """Watch the buffers of `model`, by their names: a module may replace them by new tensors, and fill None."""
        tensors = {id(slot.current()): slot for slot in self._slots if slot.current() is not None}
        for prefix, module in model.named_modules():
            if module in self._modules:
                continue
            self._modules[module] = prefix
            self._names[module] = _buffer_names(module)
            for name in self._names[module]:
                slot = _BufferSlot(module, name, prefix)
                known = tensors.get(id(slot.current()))
                if known is not None:  # a buffer that modules share is followed once
                    known.others.append((module, name))
                    continue
                self._slots.append(slot)
                if slot.current() is not None:
                    tensors[id(slot.current())] = slot

    def begin(self) -> None:
        """Remember the buffers of the step's beginning."""
        for module, name in self._new_names():  # registered between steps, on all workers alike
            self._slots.append(_BufferSlot(module, name, self._modules[module]))
        for slot in self._slots:
            slot.remember()
        self._num_captured = 0

    def rewind(self, *, afresh: bool = False) -> None:
        """Give the next micro-batch the buffers of the step's beginning.

        `afresh`: as new tensors, because backward of the micro-batches before may still want theirs.
        """
        if self._num_captured:
            for slot in self._slots:
                if afresh:
                    slot.renew()
                else:
                    slot.rewind()

    def undo(self, *, afresh: bool = False) -> None:
        """Put back what a run made of the buffers that counts for nothing; `afresh` as for `rewind`."""
        self._look()
        for slot in self._slots:
            if afresh:
                slot.renew()
            else:
                slot.rewind()

    def capture(
        self, num_samples: int, *, among: Callable[[nn.Module], bool] = lambda _: True, is_new: bool = True
    ) -> None:
        """Add what this micro-batch made of the buffers, weighted by its real samples.

        Where it comes by in several parts, `among` says whose buffers this part is about, and `is_new` that it is the
        first.
        """
        self._num_captured += num_samples if is_new else 0
        self._look()
        for slot in self._slots:
            if slot.has_moved() and among(slot.module):
                slot.capture(num_samples)

    def capture_anew(self, num_samples: int) -> None:
        """Take the buffers as they are for what so many samples have made of them, in place of what was captured."""
        for slot in self._slots:
            slot.forget()
        self._num_captured = 0
        self.capture(num_samples)

    def floating(self) -> list[Tensor]:
        """The buffers that are followed, and are no counts."""
        found = (slot.current() for slot in self._slots if not slot.is_cache)
        return [buffer for buffer in found if buffer is not None and buffer.is_floating_point()]

    def changed(self) -> list[bool]:
        """Which buffers changed here, in an order that is the same on all workers."""
        return [slot.num_changed > 0 or slot.has_news for slot in self._slots]

    def combine(
        self, changed: Sequence[bool], *, num_samples: int, groups: Sequence[WorkerGroup], counts: bool = True
    ) -> Callable[[], None]:
        """Combine the buffers that changed anywhere, and return what sets them; all must call it, with the same
        `changed`. `groups`: over which the micro-batches were spread, one after the other. `counts`: whether this
        worker's word does; of those that ran the same samples one's must."""
        self._refuse_new_names()
        pairs = zip(self._slots, changed, strict=True)
        slots = [slot for slot, is_changed in pairs if is_changed and not slot.is_absent]
        _agree_on_forms([slot for slot in slots if not slot.is_certain], groups)
        by_device: dict[torch.device, list[_BufferSlot]] = {}
        for slot in (slot for slot in slots if not slot.is_cache):
            by_device.setdefault(slot.known_form().device, []).append(slot)
        combined: list[tuple[_BufferSlot, Tensor]] = []
        for some in by_device.values():
            shares = [slot.share(self._num_captured, num_samples) for slot in some]
            flat = torch.cat(shares)
            if not counts:
                flat.zero_()
            for group in groups:
                group.all_reduce(flat, what="all_reduce of buffers").wait()
            combined += zip(some, flat.split([share.numel() for share in shares]), strict=True)

        def commit() -> None:
            for slot, share in combined:
                slot.commit(share, num_samples)

        return commit

    def give_up(self) -> None:
        """Put back the buffers of the step's beginning, for a step that is not taken."""
        self._look()
        for slot in self._slots:
            slot.rewind()
            slot.forget()
        self._num_captured = 0

    def _look(self) -> None:
        """Compare by value the buffers that may have been written without being counted."""
        pairs: dict[torch.device, list[tuple[_BufferSlot, Tensor, Tensor]]] = {}
        for slot in self._slots:
            current = slot.current()
            if current is not None and slot.saved is not None and slot.may_be_written_unseen(current):
                pairs.setdefault(current.device, []).append((slot, current, slot.saved))
        for device, some in pairs.items():
            if device.type == "cpu":
                differs = [not torch.equal(now, then) for _, now, then in some]
            else:  # one answer to wait for
                differs = torch.stack([(now != then).any() for _, now, then in some]).tolist()
            for (slot, _, _), is_different in zip(some, differs, strict=True):
                slot.is_written_unseen |= is_different

    def _new_names(self) -> list[tuple[nn.Module, str]]:
        """Buffers registered since the last look, which are known from then on. Without those that do not persist."""
        found: list[tuple[nn.Module, str]] = []
        for module, known in self._names.items():
            names = _buffer_names(module)
            if names != known:
                found += [(module, name) for name in names if name not in known and _is_persistent(module, name)]
                self._names[module] = tuple(dict.fromkeys([*known, *names]))
        return found

    def _refuse_new_names(self) -> None:
        for module, name in self._new_names():
            raise ValueError(
                f"buffer {_full_name(self._modules[module], name)} was registered within a step, so workers without "
                f"a micro-batch lack it. Call register_buffer({name!r}, None) in {type(module).__name__}.__init__ "
                "and fill it in forward, or use persistent=False for a cache"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _BufferForm:
    """What a buffer's combination looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _BufferSlot:
    """One buffer: its value at the step's beginning, and the weighted sum of what micro-batches made of it."""

    def __init__(self, module: nn.Module, name: str, prefix: str) -> None:
        self.module, self.name, self.full_name = module, name, _full_name(prefix, name)
        self.others: list[tuple[nn.Module, str]] = []  # who have the same tensor
        self.is_persistent = _is_persistent(module, name)
        self.is_absent = self._is_on_meta()  # it is of another stage
        self.is_cache = self.is_absent  # each worker keeps its own
        self.has_news = False  # the other workers do not know yet that it is a cache
        self.is_written_unseen = False  # its version counter is not to be trusted
        self.saved: Tensor | None = None  # a copy of the value at the step's beginning
        self._tensor: Tensor | None = None  # what held it then
        self._version = -1
        self._is_statistic = isinstance(module, _NormBase) and name in ("running_mean", "running_var")
        self.remember()

    @property
    def is_certain(self) -> bool:
        """Whether every worker knows, without asking, that there is something to combine, and its shape."""
        return self.is_persistent and self.saved is not None

    def current(self) -> Tensor | None:
        return getattr(self.module, self.name, None)

    def remember(self) -> None:
        """Save the value; of what may be written unseen, without asking."""
        self.forget()
        if self.is_cache:
            return
        current = self.current()
        if current is None:
            self.saved = None
        elif self._is_other(current) or _is_small(current):
            self.saved = current.detach().clone()
        self._tensor, self._version = current, _version(current)
        self.form = None if self.saved is None else _BufferForm(self.saved.shape, self.saved.dtype, self.saved.device)

    def forget(self) -> None:
        """Drop what micro-batches made of the buffer."""
        self.num_changed = 0  # samples of the micro-batches that changed it
        self._only: Tensor | None = None  # what the only one of them made of it
        self._sum: Tensor | None = None  # of several: widened, weighted by samples
        if self.saved is None:
            self.form: _BufferForm | None = None

    def known_form(self) -> _BufferForm:
        if self.form is None:
            raise RuntimeError(f"buffer {self.full_name} changed on no worker and cannot be combined")
        return self.form

    def may_be_written_unseen(self, current: Tensor) -> bool:
        """Whether only its values can tell if it changed."""
        return _is_small(current) and not self.is_cache and not self.has_moved()

    def has_moved(self) -> bool:
        """Whether it may hold another value than at the step's beginning."""
        if self.is_cache:
            return False
        if self.is_written_unseen or (self._is_statistic and self.module.training):
            return True
        return self._is_other(self.current())

    def rewind(self) -> None:
        if not self.has_moved():
            return
        current = self.current()
        if not self.is_persistent and not _is_alike(current, self.saved):
            self.leave_alone()
        elif self.saved is None:
            setattr(self.module, self.name, None)
        elif current is self._tensor or _version(self._tensor) != self._version:
            self._put(self.saved)
            self._version = _version(self._tensor)
        else:  # it was replaced, and is as it was
            self._set(self._tensor)

    def renew(self) -> None:
        """Rewind, to a new tensor: `remember` and `commit` know the one of the step's beginning."""
        if not self.has_moved():
            return
        if self.saved is None or not _is_alike(self.current(), self.saved):
            self.rewind()
        else:
            self._set(self.saved.clone())

    def capture(self, num_samples: int) -> None:
        current = self.current()
        if not self.is_persistent and not _is_alike(current, self.saved):
            self.leave_alone()
            return
        if current is None or (self.form is not None and current.shape != self.form.shape):
            then = "None" if self.form is None else list(self.form.shape)
            now = "None" if current is None else list(current.shape)
            raise ValueError(
                f"buffer {self.full_name} went from {then} to {now} within a step: a persistent buffer must keep its "
                f"shape, to be combined over micro-batches. For a cache, use register_buffer({self.name!r}, ..., "
                "persistent=False)"
            )
        self.form = self.form or _BufferForm(current.shape, current.dtype, current.device)
        value = current.detach()
        if self.num_changed == 0:
            self._only = value.clone()
        else:
            self._sum = self._weighted_sum() + _widened(value) * num_samples
            self._only = None
        self.num_changed += num_samples

    def share(self, num_captured: int, num_samples: int) -> Tensor:
        """This worker's part of the combination, widened, 1-D; `num_captured` of the step's samples were here.

        Integers are left to be divided by the number of samples, exactly, once they are summed. A buffer that began
        as None has one more number: the samples that its new value stands for.
        """
        form = self.known_form()
        num_unchanged = num_captured - self.num_changed if self.saved is not None else 0
        if self._only is not None and not num_unchanged and not _is_integer(form.dtype):
            share = _widened(self._only) * (self.num_changed / num_samples)  # exactly itself where it is all
        else:
            share = self._weighted_sum()
            if num_unchanged and self.saved is not None:
                share = share + _widened(self.saved) * num_unchanged
            if not _is_integer(form.dtype):
                share = share / num_samples
        share = share.to(form.device)
        return share if self.saved is not None else torch.cat([share, share.new_tensor([float(self.num_changed)])])

    def commit(self, total: Tensor, num_samples: int) -> None:
        """Set the buffer to its combination; `total` is the sum of all shares."""
        weight = num_samples
        if self.saved is None:
            total, weight = total[:-1], int(total[-1])
        self._put(_narrowed(total, self.known_form(), num_samples=num_samples, weight=weight))
        self.forget()

    def leave_alone(self) -> None:
        """From now on it is a cache."""
        self.is_cache = self.has_news = True
        self.saved = self._tensor = None
        self.forget()

    def agree(self, forms: Sequence[_BufferForm | None], *, is_cache: bool) -> None:
        """Learn what the buffer became on each worker, and whether it is a cache on one; raises ValueError."""
        known = [form for form in forms if form is not None]
        is_of_one_shape = len({form.shape for form in known}) == 1
        if is_cache or (not self.is_persistent and not is_of_one_shape):
            self.leave_alone()
            self.has_news = False
        elif not is_of_one_shape:
            raise ValueError(
                f"buffer {self.full_name}, which began as None, was filled with different shapes: "
                f"{', '.join(str(list(form.shape)) for form in known)}. A persistent buffer must have one shape; for "
                f"a cache, use register_buffer({self.name!r}, None, persistent=False)"
            )
        elif self.form is None:
            self.form = dataclasses.replace(known[0], device=_local_device(known[0].device))

    def _weighted_sum(self) -> Tensor:
        """The widened sum of what micro-batches made of the buffer, weighted by their samples."""
        if self._sum is not None:
            return self._sum
        if self._only is not None:
            return _widened(self._only) * self.num_changed
        form = self.known_form()
        return torch.zeros_like(_widened(torch.zeros(form.shape, dtype=form.dtype, device=form.device)))

    def _set(self, value: Tensor | None) -> None:
        """Make it another tensor, for all who have it."""
        for module, name in [(self.module, self.name), *self.others]:
            setattr(module, name, value)

    def _put(self, value: Tensor) -> None:
        """Make it the same tensor as at the step's beginning (where it was one), with this value."""
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


def persistent_buffers(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the buffers of a model that are saved, those that are None, too: full name, module, and name there."""
    return [
        (_full_name(prefix, name), module, name)
        for prefix, module in model.named_modules()
        for name in _buffer_names(module)
        if _is_persistent(module, name)
    ]


def _agree_on_forms(slots: Sequence[_BufferSlot], groups: Sequence[WorkerGroup]) -> None:
    """Let all workers know what buffers that some changed have become; these are few or none."""
    if not slots:
        return
    told = [[(slot.form, slot.is_cache) for slot in slots]]
    for group in groups:
        told = [one for some in group.gather_objects(told) for one in some]
    for slot, answers in zip(slots, zip(*told, strict=True), strict=True):
        slot.agree([form for form, _ in answers], is_cache=any(is_cache for _, is_cache in answers))


def _widened(value: Tensor) -> Tensor:
    """The numbers of a tensor in float64, 1-D, so that weighted sums are exact, or nearly so."""
    flat = value.detach().reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat.to(torch.complex128)).reshape(-1)
    if flat.is_floating_point():
        return flat.double()
    high = flat.long() >> LOW_BITS
    return torch.cat([high, flat.long() - (high << LOW_BITS)]).double()


def _narrowed(total: Tensor, form: _BufferForm, *, num_samples: int, weight: int) -> Tensor:
    """The combination in the buffer's own form, for samples that weigh `weight` of the step's `num_samples`."""
    if _is_integer(form.dtype):
        size = form.shape.numel()
        return _rounded_mean(total[:size].long(), total[size:].long(), weight).to(form.dtype).view(form.shape)
    mean = total if weight == num_samples else total * (num_samples / weight)
    if form.dtype.is_complex:
        mean = torch.view_as_complex(mean.view(-1, 2))
    return mean.to(form.dtype).view(form.shape)


def _rounded_mean(high: Tensor, low: Tensor, count: int) -> Tensor:
    """(2^32 high + low) / count in integers, rounded to nearest and halves to even; for fewer than 2^21 samples."""
    whole = torch.div(high, count, rounding_mode="floor")
    rest = ((high - whole * count) << LOW_BITS) + low
    part = torch.div(rest, count, rounding_mode="floor")
    twice = 2 * (rest - part * count)
    is_up = (twice > count) | ((twice == count) & (part % 2 == 1))
    return (whole << LOW_BITS) + part + is_up


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _is_small(tensor: Tensor) -> bool:
    """Of the kind that kernels write without counting it, and cheap to copy."""
    return tensor.dim() == 1 and tensor.is_floating_point()


def _is_alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else one.shape == other.shape


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _local_device(device: torch.device) -> torch.device:
    """A peer's device, as this worker has it."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def _buffer_names(module: nn.Module) -> tuple[str, ...]:
    # torch lists buffers that are None, and says which persist, nowhere else
    return tuple(module._buffers.keys())  # pyright: ignore[reportPrivateUsage]  # see above


def _is_persistent(module: nn.Module, name: str) -> bool:
    return name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  # see above


def _full_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
