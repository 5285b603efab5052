"""Gradient hooks of user code on parameters: each sees the whole gradient of the global batch, once for each pass.

A hook that autograd runs sees the gradient of one micro-batch on one worker: a part of the gradient that one process
would have shown it. Under tensor parallel it sees a slice, and fully sharded parameters never run it. So hooks wait.
Within a gradient pass autograd runs none of them. When the gradients are summed, each hook is called once, with the
whole gradient, before norms and clipping. What it returns, or writes, becomes the gradient. Outside of gradient passes
hooks run as always.

Hooks must be on the same parameters of all workers, because a split gradient is gathered for them. A hook may not
change the parameter itself (an optimizer that steps inside backward): the step could still be dropped, or done again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.sharded_tensors import TensorSlice, fill_local, is_sharded, local_part
from paceline.errors import PlanError, SyncError
from paceline.sync.allreduce.buckets import NamedParameter
from paceline.sync.allreduce.gradient_reducer import GradientReducer

__all__ = ["DeferredHook", "ParameterHooks", "carry_hooks", "hooks_of"]

MARKS = 256  # a digest of hooks is below this: sums of squares over workers stay exact in single precision
# (whole tensor, this worker's part of it along a split dim) of a tensor that is like the parameter of this name
Gather = Callable[[str, Tensor], tuple[Tensor, TensorSlice | None]]
KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # torch's dicts on a tensor: number -> hook


class DeferredHook:
    """Stands in for a user's hook in torch's own dict, so that the user's handle still removes it."""

    __slots__ = ("_hooks", "has_run", "hook")

    def __init__(self, hook: Callable[[Tensor], Any], hooks: ParameterHooks) -> None:
        self.hook, self._hooks, self.has_run = hook, hooks, False

    def __call__(self, value: Tensor) -> Any:
        return None if self._hooks.is_deferring else self.hook(value)


class ParameterHooks:
    """The hooks of one worker's parameters, during one gradient pass at a time."""

    def __init__(self, *, refusal: str = "") -> None:
        """`refusal`: why hooks cannot be right under the plan; "" where they can."""
        self.is_deferring = False
        self.gather: Gather = lambda _, tensor: (tensor, None)
        self._refusal = refusal
        self._hooked: list[NamedParameter] = []
        self._looked_at: Sequence[NamedParameter] = ()  # in which `_hooked` were found
        self._num_registered = -1  # torch's count of all hooks, when they were found

    def begin(self, named: Sequence[NamedParameter]) -> None:
        """Have the hooks on these parameters wait. Raises PlanError where the plan cannot show them whole gradients."""
        if named is self._looked_at and RemovableHandle.next_id == self._num_registered:
            self._hooked = [pair for pair in self._hooked if _defer(pair[1], self)]  # some may have been removed
        else:
            self._hooked = [pair for pair in named if _defer(pair[1], self)]
            self._looked_at = named
        self._num_registered = RemovableHandle.next_id
        if self._hooked and self._refusal:
            raise PlanError(f"{self._hooked[0][0]} has a gradient hook (register_hook), but {self._refusal}")
        self.is_deferring = True

    def end(self) -> None:
        """The pass is over, or was left early: hooks run in backward again."""
        self.is_deferring = False

    def marks(self) -> tuple[float, float]:
        """A digest of which parameters have hooks, and its square: to be summed over the workers."""
        texts = (f"{name} {' '.join(str(len(_users(p, kind))) for kind in KINDS)}" for name, p in self._hooked)
        digest = zlib.crc32("\n".join(texts).encode()) % (MARKS - 1) + 1 if self._hooked else 0
        return float(digest), float(digest**2)

    def compare(self, marks: float, squares: float, *, size: int) -> None:
        """Compare the sums of all workers' `marks`. Raises SyncError, on all, where workers have other hooks."""
        if size * squares != marks**2:
            here = ", ".join(name for name, _ in self._hooked) or "none"
            raise SyncError(
                "the workers have gradient hooks (register_hook) on other parameters than each other; on this worker "
                f"on: {here}. A hook that only some run changes gradients on those, and split gradients are gathered "
                "for it from all: register the same hooks on all workers, and write or print on worker.is_first inside"
            )

    def apply(self, gradients: GradientReducer, seen: Iterable[NamedParameter] = ()) -> None:
        """Call each hook with the whole gradient, now that it is summed; the parameters are those of `begin`.

        `seen`: what forwards saw in place of sharded parameters.

        Raises RuntimeError for hooks that came during the pass, for what torch refuses, and for those that changed the
        parameter.
        """
        late = None
        if RemovableHandle.next_id != self._num_registered:
            late = next((name for name, one in itertools.chain(gradients.named, seen) if _is_late(one)), None)
        if late is not None:
            raise RuntimeError(
                f"a gradient hook (register_hook) was put on {late} within a pass over a batch, say in the model's "
                "forward: it would see the part of a gradient that one worker has. Register it once, before the loop "
                "over the batches; or put it on an activation"
            )
        if not self._hooked:
            return
        for name, parameter in self._hooked:
            if not parameter.is_meta and parameter.grad is not None:
                for hook in _users(parameter, "_backward_hooks"):
                    self._show_gradient(name, parameter, hook)
                for hook in _users(parameter, "_post_accumulate_grad_hooks"):
                    self._show_parameter(name, parameter, hook)
        gradients.changed()

    @torch.no_grad()
    def _show_gradient(self, name: str, parameter: nn.Parameter, hook: DeferredHook) -> None:
        """Run a hook of `register_hook`."""
        gradient = parameter.grad
        if gradient is None:
            return
        whole, cut = self.gather(name, gradient)
        version = whole._version
        with _unchanged(name, hook, parameter):
            found = hook.hook(whole)
        if found is not None and (not isinstance(found, Tensor) or found.shape != whole.shape):
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise RuntimeError(
                f"the hook on {name} returned {what} for a gradient of shape {tuple(whole.shape)}: return a tensor "
                "like the gradient, or None"
            )
        result = whole if found is None else found
        if result is not gradient and (found is not None or whole._version != version):
            fill_local(gradient, result, cut)

    def _show_parameter(self, name: str, parameter: nn.Parameter, hook: DeferredHook) -> None:
        """Run a hook of `register_post_accumulate_grad_hook`; of a split parameter it gets a whole copy."""
        own = parameter.grad
        if own is None:
            return
        with torch.no_grad():
            gradient, cut = self.gather(name, own)
            is_split = cut is not None or is_sharded(parameter)
            shown: Any = parameter
            if is_split:
                shown = nn.Parameter(self.gather(name, parameter.detach())[0].clone())
                shown.grad = gradient
            with _unchanged(name, hook, parameter, shown):
                found = _called_with_stand_in(name, hook, shown) if is_split else hook.hook(shown)
            if found is not None:
                raise RuntimeError(f"the hook on {name} (register_post_accumulate_grad_hook) must return None")
            left = shown.grad  # the hook may have removed it
            if is_split and left is None:
                parameter.grad = None
            elif is_split:
                fill_local(own, left, cut)


def hooks_of(parameter: Tensor, kind: str) -> Mapping[int, Any]:
    """torch's dict of a tensor's hooks of one of `KINDS`."""
    return getattr(parameter, kind, None) or {}


def carry_hooks(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Give the hooks on the parameters `before`, by name, to those that took their places in a model.

    Old and new share torch's dicts, so that handles, and references from before, go on to work.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        old: Any = before.get(name)
        if old is None or old is parameter or not old.requires_grad or not parameter.requires_grad:
            continue
        for kind in KINDS:
            found = getattr(old, kind, None)
            if found is None:
                found = OrderedDict[int, Any]()
                setattr(old, kind, found)
            setattr(parameter, kind, found)


def _is_own(hook: Any) -> bool:
    """Whether a hook is one of this package's own, such as those that send buckets."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(inner, "__module__", "")).partition(".")[0] == "paceline" and not isinstance(hook, DeferredHook)


def _defer(parameter: Tensor, hooks: ParameterHooks) -> bool:
    """Have a parameter's hooks wait; returns whether it has any of user code."""
    found = False
    for kind in KINDS:
        held: Any = getattr(parameter, kind, None)
        for number, hook in list(held.items()) if held else ():
            if getattr(getattr(hook, "__code__", None), "co_qualname", "").startswith("register_multi_grad_hook."):
                raise PlanError(
                    "register_multi_grad_hook() has a hook on parameters. It waits for gradients of one backward, "
                    "which are of one micro-batch on one worker. Use parameter.register_hook(fn) on each: it sees "
                    "the whole gradient of the step; or read parameter.grad after the loop over the batch"
                )
            if not isinstance(hook, DeferredHook) and not _is_own(hook):
                held[number] = hook = DeferredHook(hook, hooks)
            found = found or isinstance(hook, DeferredHook)
    return found


def _users(parameter: Tensor, kind: str) -> list[DeferredHook]:
    return [hook for hook in hooks_of(parameter, kind).values() if isinstance(hook, DeferredHook)]


def _is_late(parameter: Tensor) -> bool:
    """Whether a parameter has a hook that is not deferred."""
    return any(
        not isinstance(hook, DeferredHook) and not _is_own(hook)
        for kind in KINDS
        for hook in hooks_of(parameter, kind).values()
    )


@contextlib.contextmanager
def _unchanged(name: str, hook: DeferredHook, *tensors: Tensor) -> Iterator[None]:
    """Refuse a hook that changes these tensors; in its first call, a trial, also by `.data`, and it is taken back."""
    versions = [one._version for one in tensors]
    before = [] if hook.has_run else [local_part(one).clone() for one in tensors]
    yield
    hook.has_run = True
    has_changed = versions != [one._version for one in tensors]
    for old, one in zip(before, map(local_part, tensors) if before else (), strict=True):
        if old.shape != one.shape or not torch.allclose(old, one, rtol=0, atol=0, equal_nan=True):
            has_changed = True
            one.copy_(old)
    if has_changed:
        raise _steps_in_backward(name)


def _called_with_stand_in(name: str, hook: DeferredHook, shown: nn.Parameter) -> Any:
    try:
        return hook.hook(shown)
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
        if isinstance(error, KeyError) and error.args and error.args[0] is shown:
            what = "it looked the parameter up in a dictionary of its own, as hooks do that step an optimizer"
        raise RuntimeError(
            f"the hook on {name} (register_post_accumulate_grad_hook) failed: {what}. The "
            "parameter is split over workers, so the hook is given a whole copy of it, with the whole gradient: use "
            "the hook's argument and its .grad, and no other reference to the parameter"
        ) from error


def _steps_in_backward(name: str) -> PlanError:
    return PlanError(
        f"a gradient hook changed the parameter {name} itself, as an optimizer does that steps inside backward. That "
        "cannot be taken back where a step is dropped or done again, and no checkpoint has that optimizer's state: "
        "leave the hook out, prepare one optimizer over all parameters, and give it to worker.stepper()"
    )
