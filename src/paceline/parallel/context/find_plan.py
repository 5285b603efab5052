"""Find how the sequence of an ordinary model is split among n workers: `find_plan(model, size=n)`.

Only one thing is guessed: which dim of the hidden tensors counts tokens. The guess is tried with emulated workers
(`verify.py`). It is taken if attention turns out to be split and everything agrees with the whole model. A wrong guess
costs time and does not change a result, because operations that need all tokens gather them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.errors import PlanError, Reason
from paceline.parallel.context.group_ops import AttentionKind
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.context.verify import (
    USER_ERRORS,
    ContextTrial,
    GatheredOperation,
    WholeModelRun,
    run_whole,
    try_plan,
)
from paceline.parallel.recompute import repeated_blocks
from paceline.parallel.sample_input import SampleInput, as_sample, guess_sample
from paceline.parallel.tensor.plan import TensorPlan
from paceline.parallel.trial_types import types_to_try

__all__ = ["find_plan"]

DIMS = (-2, -3)  # of tokens in (batch, tokens, features), and in (tokens, batch, features)
ROUNDS = 6


def find_plan(
    model: nn.Module,
    *,
    size: int,
    kind: Literal["auto", "heads", "ring"] = "auto",
    sample: Any = None,
    tokenwise: Sequence[str] = (),
    layers: TensorPlan | None = None,
) -> ContextPlan:
    """Return how `size` workers split the sequence of `model`; raises PlanError where they cannot.

    kind: "auto" uses heads (all-to-all) where they divide among the workers, and a ring elsewhere; "ring" always uses a
    ring; "heads" refuses heads that do not divide. sample: arguments of a small forward with at least 2 tokens per
    worker, (x,) or {"input_ids": x}; guessed where it is None. It is run several times in double precision, in a copy
    of the model. tokenwise: names of modules, with "*" for any part, that treat each token by itself although torch
    functions in them cannot be followed (routed experts, for example). They are verified, too. Experts of transformers
    are known. layers: the tensor parallel plan of the same model; both are tried together by size x layers.size
    emulated workers.
    """
    if size < 1:
        raise PlanError(f"Layout(context={size}): it must be at least 1.")
    if kind not in ("auto", "heads", "ring"):
        raise PlanError(f"kind={kind!r}: it must be 'auto', 'heads' or 'ring'.")
    if sample is not None:
        tries = [(as_sample(sample), DIMS)]
    else:  # a few samples of many tokens, and the same transposed for models whose first dim is the tokens
        guessed = guess_sample(model, size=2 * size)
        tries = [(guessed, DIMS[:1]), (_transposed(guessed), DIMS[1:])]
    refusals: list[str] = []
    for one, dims in tries:
        finder = _ContextPlanFinder(model, size=size, kind=kind, sample=one, tokenwise=tokenwise, layers=layers)
        try:
            found = finder.find(dims)
        except (RuntimeError, ValueError, IndexError):
            if not refusals:
                raise
            continue  # the model does not take the transposed guess
        if isinstance(found, ContextPlan):
            return found
        refusals.append(found)
    what, _, remedy = refusals[0].rpartition(". ")  # each refusal ends in its remedy
    name = type(model).__name__
    reason = Reason(module=name, what=f"Layout(context={size}): {name}: {what}.", remedy=remedy)
    raise PlanError(f"Layout(context={size}): {name}: {refusals[0]}", reasons=[reason])


class _ContextPlanFinder:
    def __init__(
        self,
        model: nn.Module,
        *,
        size: int,
        kind: Literal["auto", "heads", "ring"],
        sample: SampleInput,
        tokenwise: Sequence[str],
        layers: TensorPlan | None,
    ) -> None:
        self.model, self.size, self.kind, self.sample, self.layers = model, size, kind, sample, layers
        self.tokenwise = tuple(name for name, module in model.named_modules() if _is_tokenwise(name, module, tokenwise))
        unknown = [one for one in tokenwise if not any(fnmatchcase(name, one) for name, _ in model.named_modules())]
        if unknown:
            raise PlanError(f"tokenwise={unknown[0]!r} names no module of {type(model).__name__}; see named_modules().")

    def find(self, dims: Sequence[int]) -> ContextPlan | str:
        """Try a split; return why there is none where none agrees."""
        embeddings = self._embeddings()
        samples = [self.sample, *self._padded()]
        self.num_samples = len(samples)
        found: ContextPlan | str | None = None
        failed: Exception | None = None
        for dtype in types_to_try(self.model):
            try:
                whole = run_whole(self.model, samples, dtype)
            except USER_ERRORS as error:
                if found is None and failed is None and not isinstance(error, RuntimeError):
                    raise
                failed = error  # some kernels have no double precision
                continue
            found = self._find(dims, embeddings, whole)
            if isinstance(found, ContextPlan) or dtype is torch.float64:
                return found
        if found is not None:
            return found
        lines = str(failed).strip().splitlines()
        raise PlanError(
            f"{type(self.model).__name__} has to be tried in double or single precision before its sequence is split, "
            f"and cannot be run so on {samples[0]} ({type(failed).__name__}: {lines[0] if lines else ''}). Pass a "
            "sample of your own, sample=(x,), or use attention that runs in any precision (in transformers, "
            "attn_implementation='sdpa')."
        ) from failed

    def _find(self, dims: Sequence[int], embeddings: tuple[str, ...], whole: WholeModelRun) -> ContextPlan | str:
        """Try the dims in order; the first one that splits attention and agrees is taken. Otherwise return why none
        is.
        """
        kind: AttentionKind = "ring" if self.kind == "ring" else "heads"
        refusals: list[str] = []
        for dim in dims:
            plan = ContextPlan(
                size=self.size,
                kind=kind,
                dim=dim,
                embeddings=embeddings,
                blocks=_blocks(self.model),
                sample=str(self.sample),
            )
            first = try_plan(whole, plan, self.layers)
            # Blocks without attention, experts for example, may get only some of the tokens, so they must not be
            # sliced.
            around = {name for one in first.attentions for name in one.modules}
            blocks = tuple(name for name in plan.blocks if name in around)
            is_same = blocks == plan.blocks and not self.tokenwise
            plan = dataclasses.replace(plan, blocks=blocks, tokenwise=self.tokenwise)
            found = self._grown(plan, whole, first if is_same else try_plan(whole, plan, self.layers))
            if isinstance(found, ContextPlan):
                return found
            refusals.append(found)
        return refusals[0]

    def _grown(self, plan: ContextPlan, whole: WholeModelRun, trial: ContextTrial) -> ContextPlan | str:
        """Give whole inputs to modules that need them, until the trial shows no more; returns a refusal where that
        fails."""
        for _ in range(ROUNDS):
            lost = _outermost(trial)
            more = tuple(sorted({name for _, name in lost if name} - {*plan.gathered}))
            refused = next((one.why for one, name in lost if one.is_refused and not name), None)
            if more:
                plan = dataclasses.replace(plan, gathered=(*plan.gathered, *more))
            elif refused is not None:
                return refused
            elif trial.disagreement is None:
                return self._checked(plan, trial, lost)
            elif plan.tokenwise:
                plan = dataclasses.replace(plan, tokenwise=(), gathered=(*plan.gathered, *plan.tokenwise))
            else:
                return f"on slices it does not compute what it does on the whole ({trial.disagreement}). {REMEDY}"
            trial = try_plan(whole, plan, self.layers)
        return f"it needs the whole sequence in too many places. {REMEDY}"

    def _checked(
        self, plan: ContextPlan, trial: ContextTrial, lost: list[tuple[GatheredOperation, str]]
    ) -> ContextPlan | str:
        kinds: dict[str, int] = {}
        for one in trial.attentions:
            kinds[one.kind] = kinds.get(one.kind, 0) + 1
        kinds = {kind: count // self.num_samples for kind, count in kinds.items()}
        if not kinds:
            return (
                "no attention over its tokens was found, so there is no sequence to split. Use "
                f"Layout(replicas={self.size}), or pass an input that has one: worker.prepare(model, sample=(x,))."
            )
        fewest = min(one.length for one in trial.attentions)
        if fewest <= self.size and self.size > 1:
            return (
                f"the sample ({self.sample}) has attention over {fewest} tokens, too few to verify a plan for "
                f"{self.size} workers. Pass one with at least {2 * self.size}: sample=(x,)."
            )
        if self.kind == "heads" and "ring" in kinds:
            return (
                f"kind='heads' needs heads that divide among {self.size} workers, and some do not. Use kind='auto', "
                "which passes their keys round a ring, or as many workers as divide the heads."
            )
        operations = sorted({f"{one.operation} in {one.modules[-1] or 'the model'}: {one.why}" for one, _ in lost})
        return dataclasses.replace(plan, attentions=kinds, operations=tuple(operations))

    def _embeddings(self) -> tuple[str, ...]:
        """Return embeddings of tokens, or of something per token; also records how many dims their input has."""
        self.ids: dict[str, int] = {}
        shapes: dict[str, torch.Size] = {}
        modules = [(name, one) for name, one in self.model.named_modules() if isinstance(one, nn.Embedding)]

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if args and isinstance(args[0], Tensor):
                    shapes.setdefault(name, args[0].shape)

            return hook

        with contextlib.ExitStack() as stack:
            for name, module in modules:
                stack.callback(module.register_forward_pre_hook(note(name)).remove)
            with torch.no_grad():
                self.sample.run(self.model)
        main = next((shape for shape in shapes.values() if len(shape) == 2 and shape in self._shapes()), None)
        if main is None:
            return ()
        self.ids = {
            name: len(shape)
            for name, shape in shapes.items()
            if len(shape) == 2 and all(length in (1, whole) for length, whole in zip(shape, main, strict=True))
        }
        return tuple(self.ids)

    def _shapes(self) -> list[torch.Size]:
        values = (*self.sample.args, *self.sample.kwargs.values())
        return [one.shape for one in values if isinstance(one, Tensor)]

    def _padded(self) -> Iterator[SampleInput]:
        """Yield the sample with a mask that pads its samples differently, if the model takes such a mask."""
        tokens = next((one for one in self.sample.kwargs.values() if isinstance(one, Tensor) and one.ndim == 2), None)
        known = inspect.signature(self.model.forward).parameters
        if tokens is None or "attention_mask" not in known or "attention_mask" in self.sample.kwargs:
            return
        mask = torch.ones_like(tokens, dtype=torch.long)
        for number in range(1, len(mask)):
            mask[number, -(number % max(1, mask.shape[1] - 1)) :] = 0
        yield SampleInput(args=copy.copy(self.sample.args), kwargs={**self.sample.kwargs, "attention_mask": mask})


REMEDY = (
    "Name modules that treat each token by itself, tokenwise=('name',), pass a sample of your own, sample=(x,), or use "
    "Layout(context=1)."
)


def _transposed(sample: SampleInput) -> SampleInput:
    """Return the sample with the first two dims of each tensor exchanged, for models whose first dim is the tokens."""

    def transpose(value: Any) -> Any:
        is_known = isinstance(value, Tensor) and value.ndim == (3 if value.is_floating_point() else 2)
        return value.transpose(0, 1).contiguous() if is_known else value

    return SampleInput(
        args=tuple(map(transpose, sample.args)), kwargs={key: transpose(one) for key, one in sample.kwargs.items()}
    )


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the repeated blocks; where there are none, the members of lists of modules."""
    found = tuple(name for name, _ in repeated_blocks(model))
    lists = [(name, one) for name, one in model.named_modules() if isinstance(one, (nn.ModuleList, nn.Sequential))]
    return found or tuple(f"{name}.{key}".lstrip(".") for name, one in lists for key, _ in one.named_children())


def _outermost(trial: ContextTrial) -> list[tuple[GatheredOperation, str]]:
    """Pair each gathered operation with the largest module around it without attention; "" where there is none."""
    around = {name for one in trial.attentions for name in one.modules}
    return [(one, next((name for name in one.modules if name and name not in around), "")) for one in trial.lost]


def _is_tokenwise(name: str, module: nn.Module, patterns: Sequence[str]) -> bool:
    """Return whether a module is named as tokenwise, or is a transformers Experts module, which gets tokens and
    routes.
    """
    is_known = type(module).__module__.startswith("transformers.models.") and type(module).__name__.endswith("Experts")
    return is_known or any(fnmatchcase(name, one) for one in patterns)
