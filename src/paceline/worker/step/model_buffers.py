"""Combines what a step's micro-batches write to module buffers, over micro-batches and workers.

Every micro-batch starts from the buffers of the step's beginning. What they wrote is combined by the buffer's rule (see
`buffer_rules`): as a mean weighted by samples, as a sum, from the first micro-batch, or as a queue. So the result does
not depend on how micro-batches are spread over workers; with one micro-batch it is exactly what the module wrote.

A mean is new = sum_i w_i buffer_i / sum_i w_i, where a micro-batch that did not write the buffer counts with the old
value. Integers are averaged exactly and rounded to nearest, which gives "one more" for batch-norm's counter of batches.

Most changes show in the tensor's version counter, so large buffers that never change (masks, tables) cost a
comparison of two numbers. torch's batch-norm kernels write running statistics without counting it, and user code may
write through `.data`. So statistics of norm modules in training always count as changed. Small buffers, and in the
first passes all, are compared by value: all at once, because each answer is waited for on a GPU.

Buffers on the meta device belong to other pipeline stages and are skipped; they keep their positions in the metadata.

A buffer that does not persist (`persistent=False`) and changes its shape, or comes and goes (None), is a cache: each
worker keeps its own. A persistent one may begin as None and be filled, with the same shape everywhere: as a mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup
from paceline.parallel.class_name import class_name
from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.step.buffer_rules import given_rules, unknown_rule_text
from paceline.worker.step.tracked_buffer import (
    BufferKey,
    FoundRules,
    TrackedBuffer,
    buffer_names,
    full_name,
    is_persistent,
)

__all__ = ["UNKNOWN", "BufferAverager", "persistent_buffers"]

UNKNOWN = 4096.0  # more than there are workers; so many times it is still exact in single precision
NOT_FIRST = MicroBatch(1, 0, 0)  # stands for the steps of another replica than the first one
ALL_COMPARED = 4  # passes in which buffers of all sizes are compared by value


class BufferAverager:
    """Rewinds and combines the buffers of the models that a worker has prepared."""

    def __init__(self, rules: FoundRules | None = None) -> None:
        """`rules`: those of another one that tracks the same models."""
        self.rules = FoundRules() if rules is None else rules
        self._buffers: list[TrackedBuffer] = []
        self._by_key: dict[BufferKey, TrackedBuffer] = {}
        self._modules: dict[nn.Module, str] = {}
        self._names: dict[nn.Module, tuple[str, ...]] = {}  # of buffers that are tracked, or are known not to be
        self.models: list[nn.Module] = []
        self._compared: set[BufferKey] = set()  # whose rules are known to be those of the other replicas
        self._num_passes = 0
        self._num_captured = 0  # samples, in this pass
        self._here: list[int] = []  # the indices of their micro-batches

    def add(self, model: nn.Module, given: Mapping[str, str] | None = None) -> None:
        """Track the buffers of `model` by their names: a module may replace them by new tensors, and fill None.

        `given`: rules by patterns of names. Raises ValueError for those that fit nothing.
        """
        self.models.append(model)
        held = {
            full_name(prefix, name): BufferKey(module, name)
            for prefix, module in model.named_modules()
            for name in buffer_names(module)
        }
        self.rules.rules.update((held[name], rule) for name, rule in given_rules([*held], given or {}).items())
        tensors = {id(buffer.current()): buffer for buffer in self._buffers if buffer.current() is not None}
        for prefix, module in model.named_modules():
            if module in self._modules:
                continue
            self._modules[module] = prefix
            self._names[module] = buffer_names(module)
            for name in self._names[module]:
                buffer = self._tracked(module, name, prefix)
                known = tensors.get(id(buffer.current()))
                if known is not None:  # a buffer that modules share is tracked once
                    known.others.append((module, name))
                    continue
                self._buffers.append(buffer)
                if buffer.current() is not None:
                    tensors[id(buffer.current())] = buffer

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Meanwhile passes neither write nor combine buffers: the caller keeps them equal on all workers."""
        kept, self._buffers = self._buffers, []
        try:
            yield
        finally:
            self._buffers = kept

    @property
    def modules(self) -> Mapping[nn.Module, str]:
        """The modules of the models whose buffers these are, with their names."""
        return self._modules

    def begin(self) -> None:
        """Save the buffers at the beginning of a step."""
        for module, name in self._new_names():  # registered between steps, on all workers alike
            self._buffers.append(self._tracked(module, name, self._modules[module]))
        for buffer in self._buffers:
            buffer.save()
        self._num_passes += 1
        self._num_captured, self._here = 0, []

    def _tracked(self, module: nn.Module, name: str, prefix: str) -> TrackedBuffer:
        buffer = TrackedBuffer(module, name, prefix, self.rules)
        buffer.tracked, self._by_key[buffer.key] = self._by_key, buffer
        return buffer

    @property
    def is_settled(self) -> bool:
        """Whether it is known of all buffers how they are combined."""
        return all(buffer.is_settled for buffer in self._buffers)

    def unsettled_modules(self) -> list[nn.Module]:
        """The modules that have buffers of which it is not known how they are combined, once each."""
        return [*dict.fromkeys(buffer.module for buffer in self._buffers if not buffer.is_settled)]

    def marks(self) -> list[float]:
        """For each buffer a number to be summed over the workers: whether it has changed here, and knows no rule."""
        return [
            float(is_changed) + UNKNOWN * (not one.has_rule)
            for one, is_changed in zip(self._buffers, self.changed(), strict=True)
        ]

    def rules_of_tensors(self) -> dict[int, str]:
        """The rules that are known, by the ids of the tensors that hold the buffers now."""
        return {id(one.current()): one.rule for one in self._buffers if one.rule is not None}

    def marks_of_replica(self) -> list[float]:
        """As `marks`, where replicas take steps by themselves: whether it has changed here, and knows a rule that was
        not compared with those of the other replicas."""
        return [
            float(is_changed) + UNKNOWN * (one.rule is not None and one.key not in self._compared)
            for one, is_changed in zip(self._buffers, self.changed(), strict=True)
        ]

    def compare_rules(self, marks: Sequence[float], group: WorkerGroup) -> None:
        """Have all replicas use the same rules; all workers call it, with the same summed marks of replicas.

        Each replica finds rules by itself, and none of a buffer that only others have changed so far. Raises
        ValueError, on all, where they have found different ones.
        """
        new = [one for one, mark in zip(self._buffers, marks, strict=True) if mark >= UNKNOWN]
        if not new:
            return
        for one, found in zip(new, zip(*group.gather_objects([each.rule for each in new]), strict=True), strict=True):
            rules = sorted({rule for rule in found if rule is not None})
            if len(rules) > 1:
                why = f"by trial it is {' and '.join(rules)} in different replicas"
                raise ValueError(
                    unknown_rule_text(one.full_name, [] if one.saved is None else list(one.saved.shape), why)
                )
            self.rules.rules.update((one.key, rule) for rule in rules)
            self._compared.add(one.key)

    def without_rule(self, marks: Sequence[float]) -> list[TrackedBuffer]:
        """The buffers that have changed anywhere, and of which some worker knows no rule; by the summed marks."""
        return [one for one, mark in zip(self._buffers, marks, strict=True) if mark >= UNKNOWN and mark % UNKNOWN]

    def integers_beside(self, buffer: TrackedBuffer) -> dict[str, TrackedBuffer]:
        """The integers of the same module, which may be a queue's pointer."""
        return {
            one.name: one
            for one in self._buffers
            if one.module is buffer.module and one.saved is not None and _is_one_integer(one.saved)
        }

    def rewind(self, *, afresh: bool = False) -> None:
        """Give the next micro-batch the buffers of the step's beginning.

        `afresh`: as new tensors, because backward of earlier micro-batches may still need theirs.
        """
        if self._num_captured:
            for buffer in self._buffers:
                if afresh:
                    buffer.rewind_to_new_tensor()
                else:
                    buffer.rewind()

    def undo(self, *, afresh: bool = False) -> None:
        """Undo what a void run wrote to the buffers; `afresh` as for `rewind`."""
        self._compare_values()
        for buffer in self._buffers:
            if afresh:
                buffer.rewind_to_new_tensor()
            else:
                buffer.rewind()

    def capture(
        self,
        num_samples: int,
        micro: MicroBatch | None = None,
        *,
        among: Callable[[nn.Module], bool] = lambda _: True,
        is_new: bool = True,
    ) -> None:
        """Add what this micro-batch wrote to the buffers, weighted by its real samples.

        A micro-batch may run in several parts: `among` selects the modules of this part, and `is_new` marks the first.
        """
        if is_new:
            self._num_captured += num_samples
            self._here += [] if micro is None else [micro.index]
        self._compare_values()
        for buffer in self._buffers:
            if among(buffer.module) and (buffer.may_have_changed() or self._has_moved(buffer)):
                buffer.capture(num_samples, micro)

    def _has_moved(self, buffer: TrackedBuffer) -> bool:
        """Whether rows were written to a queue, though they may be equal to those that were there."""
        form = buffer.queue
        if form is None or form.kind != "ring":
            return False
        return self._by_key[BufferKey(buffer.module, form.pointer)].may_have_changed()

    def capture_anew(self, num_samples: int, *, is_first: bool = True) -> None:
        """Capture the present values for so many samples, in place of what was captured before. `is_first`: whether
        they count where the first is asked for."""
        for buffer in self._buffers:
            buffer.drop_captures()
        self._num_captured, self._here = 0, []
        self.capture(num_samples, None if is_first else NOT_FIRST)
        self._here = [0] if is_first else []

    def floating(self) -> list[Tensor]:
        """The tracked buffers of floating-point numbers that are means."""
        found = (buffer.current() for buffer in self._buffers if not buffer.is_cache and buffer.rule in (None, "mean"))
        return [buffer for buffer in found if buffer is not None and buffer.is_floating_point()]

    def changed(self) -> list[bool]:
        """For each buffer, whether it changed on this worker; in the same order on all workers."""
        return [buffer.num_changed > 0 or buffer.is_cache_unannounced for buffer in self._buffers]

    def combine(
        self,
        changed: Sequence[bool],
        *,
        num_samples: int,
        groups: Sequence[WorkerGroup],
        counts: bool = True,
        micros: Sequence[MicroBatch] = (),
    ) -> Callable[[], None]:
        """Combine the buffers that changed on any worker, and return what sets them; all must call it, with the same
        `changed`. `groups`: over which the step's `micros` were spread, one after the other. `counts`: whether this
        worker adds its values; of workers that ran the same samples exactly one does."""
        self._refuse_new_names()
        pairs = zip(self._buffers, changed, strict=True)
        buffers = [buffer for buffer, is_changed in pairs if is_changed and not buffer.is_on_other_stage]
        _exchange_specs([buffer for buffer in buffers if not buffer.is_certain], groups)
        by_device: dict[torch.device, list[TrackedBuffer]] = {}
        for buffer in (buffer for buffer in buffers if not buffer.is_cache):
            by_device.setdefault(buffer.known_spec().device, []).append(buffer)
        combined: list[tuple[TrackedBuffer, Tensor]] = []
        for some in by_device.values():
            for buffer in some:
                buffer.settle()
            shares = [buffer.share(self._num_captured, num_samples, micros, self._here) for buffer in some]
            flat = torch.cat(shares)
            if not counts:
                flat.zero_()
            for group in groups:
                group.all_reduce(flat, what="all_reduce of buffers").wait()
            combined += zip(some, flat.split([share.numel() for share in shares]), strict=True)

        def commit() -> None:
            for buffer, share in combined:
                buffer.commit(share, num_samples, micros)

        return commit

    def give_up(self) -> None:
        """Put back the buffers of the step's beginning, for a step that is not taken."""
        self._compare_values()
        for buffer in self._buffers:
            buffer.rewind()
            buffer.drop_captures()
        self._num_captured, self._here = 0, []

    def _compare_values(self) -> None:
        """Compare by value the buffers that may have been written without a new version count."""
        pairs: dict[torch.device, list[tuple[TrackedBuffer, Tensor, Tensor]]] = {}
        for buffer in self._buffers:
            current = buffer.current()
            is_early = self._num_passes <= ALL_COMPARED
            if current is None or buffer.saved is None:
                continue
            if buffer.needs_comparison(current, also_large=is_early):
                pairs.setdefault(current.device, []).append((buffer, current, buffer.saved))
        for device, some in pairs.items():
            if device.type == "cpu":
                differs = [not torch.equal(now, then) and bool(_differs(now, then)) for _, now, then in some]
            else:  # one answer to wait for
                differs = torch.stack([_differs(now, then) for _, now, then in some]).tolist()
            for (buffer, _, _), is_different in zip(some, differs, strict=True):
                buffer.is_changed_by_value |= is_different

    def _new_names(self) -> list[tuple[nn.Module, str]]:
        """Buffers registered since the last call, except those that do not persist."""
        found: list[tuple[nn.Module, str]] = []
        for module, known in self._names.items():
            names = buffer_names(module)
            if names != known:
                found += [(module, name) for name in names if name not in known and is_persistent(module, name)]
                self._names[module] = tuple(dict.fromkeys([*known, *names]))
        return found

    def _refuse_new_names(self) -> None:
        for module, name in self._new_names():
            raise ValueError(
                f"buffer {full_name(self._modules[module], name)} was registered within a step, so workers without "
                f"a micro-batch lack it. Call register_buffer({name!r}, None) in {class_name(module)}.__init__ "
                "and fill it in forward, or use persistent=False for a cache"
            )


def _differs(now: Tensor, then: Tensor) -> Tensor:
    """Whether any numbers differ; what is no number in both does not."""
    if now.shape != then.shape:
        return torch.ones((), dtype=torch.bool, device=now.device)
    return ((now != then) & ~((now != now) & (then != then))).any()


def _is_one_integer(value: Tensor) -> bool:
    is_whole = not value.is_floating_point() and not value.is_complex() and value.dtype is not torch.bool
    return is_whole and value.numel() == 1


def persistent_buffers(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the buffers of a model that are saved, those that are None as well: full name, module, and name there."""
    return [
        (full_name(prefix, name), module, name)
        for prefix, module in model.named_modules()
        for name in buffer_names(module)
        if is_persistent(module, name)
    ]


def _exchange_specs(buffers: Sequence[TrackedBuffer], groups: Sequence[WorkerGroup]) -> None:
    """Tell all workers the specs of changed buffers that not all of them know; these are few or none."""
    if not buffers:
        return
    known = [[(buffer.spec, buffer.is_cache) for buffer in buffers]]
    for group in groups:
        known = [one for some in group.gather_objects(known) for one in some]
    for buffer, answers in zip(buffers, zip(*known, strict=True), strict=True):
        buffer.settle_spec([spec for spec, _ in answers], is_cache=any(is_cache for _, is_cache in answers))
