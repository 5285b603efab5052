"""Find how the layers of an ordinary model are split among n workers: `find_plan(model, size=n)`.

The search has five steps. A trial forward shows which layers can be split together (`layer_trace.py`). A plan of the
user, or one that the model carries, decides about the layers that it names. Of the rest, pairs are taken, the larger
first, and the vocabulary's embedding with the output head; heads that do not divide are refused, all at once. Each
block is then verified (`verify.py`); a block that does not compute the same stays whole. At last a dry run records the
collectives (`dry_run.py`).

All of it is a pure function of model, sample and size, so all workers find the same plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.errors import PlanError, Reason
from paceline.host_memory import give_back_freed
from paceline.parallel.sample_input import SampleInput, as_sample, guess_sample
from paceline.parallel.spared_products import sparing_products
from paceline.parallel.tensor.choose_layers import LayerChoice, LayerChooser
from paceline.parallel.tensor.dry_run import TensorDryRun, dry_run_plan
from paceline.parallel.tensor.huggingface_plans import REPLICATED, huggingface_plan, match_layers
from paceline.parallel.tensor.layer_trace import LayerTrace, trace_layers
from paceline.parallel.tensor.layers import Layer, split_dims
from paceline.parallel.tensor.plan import ModuleRow, TensorPlan
from paceline.parallel.tensor.split_shapes import num_held, shared_out
from paceline.parallel.tensor.verify import call_of, disagreement

__all__ = ["find_plan", "refuse_empty"]

MOST_SHOWN = 8  # how many legal sizes a refusal lists


def find_plan(
    model: nn.Module,
    *,
    size: int,
    plan: Mapping[str, str] | Literal["auto", "found"] = "auto",
    sample: Any = None,
    sequence: bool = False,
    verifies: bool = True,
) -> TensorPlan:
    """Return how `model` is split among `size` workers; raises PlanError with everything that cannot work.

    plan: "auto" follows the plan that the model carries, if any, and finds the rest; "found" ignores it; a mapping from
    names to roles is the user's own (see `huggingface_plans.py`). sample: arguments of a small forward, (x,) or
    {"input_ids": x}; guessed where it is None. sequence: between pairs of layers each worker holds a part of the tokens
    (sequence parallelism). Norms, dropout and the activations kept for backward are then split as well. verifies: False
    leaves the comparison of numbers out, for a model on the meta device.
    """
    if size < 1:
        raise PlanError(f"Layout(tensor={size}): it must be at least 1.")
    if isinstance(plan, str) and plan not in ("auto", "found"):
        raise PlanError(f"plan={plan!r}: it must be 'auto', 'found' or a mapping from layers' names to their roles.")
    run = guess_sample(model, size=size) if sample is None else as_sample(sample)
    finder = _TensorPlanFinder(model, run, size=size, sequence=sequence, plan=plan)
    finder.refuse()
    if verifies:
        finder.verify()
    found = finder.plan()
    with (
        torch.no_grad()
    ):  # a value that modules keep of a forward (their own loss) then holds no graph of whole weights
        sparing_products(model, lambda: run.run(model))
    return found


def refuse_empty(plan: TensorPlan, model: nn.Module) -> None:
    """Raise PlanError if a plan splits nothing, with the reason of each layer."""
    if plan.layers:
        return
    reasons: dict[str, Reason] = {}
    for row in plan.rows:
        name = _general(row.name)
        remedy = f"Use shard={plan.size} in place of tensor, which splits any model."
        reasons.setdefault(name, Reason(module=name, what=f"{name} stays whole: {row.why}.", remedy=remedy))
    raise PlanError(
        f"Layout(tensor={plan.size}) found no layers of {type(model).__name__} that can be split among {plan.size} "
        f"workers:\n{plan}\nUse shard={plan.size} in its place, which splits any model.",
        reasons=list(reasons.values()),
    )


class _TensorPlanFinder:
    """The state of one search."""

    def __init__(
        self,
        model: nn.Module,
        sample: SampleInput,
        *,
        size: int,
        sequence: bool,
        plan: Mapping[str, str] | Literal["auto", "found"],
    ) -> None:
        self.model, self.sample, self.size, self.sequence = model, sample, size, sequence
        self.refusals: list[Reason] = []
        self._seen: tuple[tuple[Layer, ...], TensorDryRun] | None = None
        first = self._traced(())
        self.is_own = not isinstance(plan, str)
        roles: dict[str, str] = {}
        if not isinstance(plan, str):
            modules = [name for name, _ in model.named_modules()]
            roles, wrong = match_layers(plan, first.sites, modules=modules)
            self.refusals += wrong
        elif plan == "auto":
            followed, _ = huggingface_plan(model, first.sites)
            roles, _ = match_layers(followed, first.sites)
        self.roles = roles
        whole = [name for name, role in roles.items() if role == REPLICATED]
        self.trace: LayerTrace = self._traced(whole) if whole else first
        self.shared: list[str] = []
        self._share_single_heads(whole)
        self.sites = self.trace.sites
        self.chosen = LayerChooser(self.trace, roles, size=size, is_own=self.is_own)

    def _traced(self, whole: Sequence[str]) -> LayerTrace:
        return sparing_products(self.model, lambda: trace_layers(self.model, self.sample, whole=whole))

    def _share_single_heads(self, whole: list[str]) -> None:
        """Keep keys and values whole where one head serves all queries: it cannot be split, but the queries can."""
        shared: list[str] = []
        for names in self.trace.conflicts:
            widths = {name: sum(self.trace.sections[name]) for name in names}
            shared += [name for name, width in sorted(widths.items()) if width < max(widths.values())]
        if shared:
            again = self._traced([*whole, *shared])
            if _num_pairs(again) > _num_pairs(self.trace):
                self.trace, self.shared = again, shared

    def refuse(self) -> None:
        """Raise PlanError with everything that is wrong with the user's plan, and every number that does not divide."""
        found: dict[tuple[str, str], list[str]] = {}
        for choice in self.chosen.choices:
            even, uneven = self._counts(choice)
            last = f"leave the last of {self.size} workers without any"
            bad = {number: f"{what} {last}" for number, what in uneven.items() if not shared_out(number, self.size)}
            among = f"do not divide among {self.size} workers"
            bad |= {number: f"{what} {among}" for number, what in even.items() if number % self.size}
            if bad:
                legal = _legal(even, uneven, near=self.size)
                _, what = min(bad.items())
                first = choice.layers[0].name
                name = first if first.isdigit() else _general(first)  # "*" by itself would match every layer
                whole = f"worker.prepare(model, cut={{{name!r}: 'replicated'}})"
                remedy = f"Use tensor={' or '.join(legal)}, or {whole} to leave it whole."
                said = f"{_general(what)}."
                found.setdefault((said, remedy), []).append(name)
        refusals = [*self.refusals, *self.chosen.refusals]
        for (said, remedy), names in found.items():
            blocks = "" if len(names) == 1 else f" ({len(names)} blocks.)"
            refusals.append(Reason(module=names[0], what=said, remedy=remedy + blocks))
        refusals = refusals or self._dry_run().refusals
        if refusals:
            listed = "".join(f"\n  - {one}" for one in refusals)
            headline = f"Layout(tensor={self.size}) cannot split {type(self.model).__name__}"
            raise PlanError(f"{headline}:{listed}", reasons=refusals)

    def _counts(self, choice: LayerChoice) -> tuple[dict[int, str], dict[int, str]]:
        """Return the numbers that must divide evenly, and those of which each worker must get at least one."""
        even: dict[int, str] = {}
        uneven: dict[int, str] = {}
        columns = {layer.name for layer in choice.layers if layer.role == "column"}
        for layer in choice.layers:
            noun = {"attention": "heads", "vocabulary": "tokens", "head": "tokens"}.get(layer.role, "features")
            for length in layer.sections:
                counts = even if layer.role == "attention" else uneven
                counts.setdefault(length, f"the {length} {noun} of {layer.name}")
        for family in self.trace.families:
            if columns & set(family.columns):
                even = family.counts | even
        return even, uneven

    def verify(self) -> None:
        """Leave blocks whole whose parts do not compute the same; raises PlanError where the user asked for the
        split.
        """
        if self.size == 1:
            return
        give_back_freed()  # of the forwards before
        blocks: dict[str, list[LayerChoice]] = {}
        for choice in self.chosen.choices:
            blocks.setdefault(self._block_of(choice), []).append(choice)
        modules = dict(self.model.named_modules())
        order = sorted(blocks, key=lambda name: -len(name.split(".")) if name else 0)
        known: dict[object, str | None] = {}
        for number, name in enumerate(order):
            within = [one for one in order[:number] if not name or one.startswith(f"{name}.")]
            inside = [one for one in self.chosen.choices if self._is_inside(one, name)]
            layers = [
                dataclasses.replace(layer, name=_below(layer.name, name)) for one in inside for layer in one.layers
            ]
            key = self._signature(modules[name], layers)
            if key not in known:
                call = self.sample if not name else self._call_of(name)
                known[key] = (
                    "the sample does not use it"
                    if call is None
                    else disagreement(
                        modules[name],
                        layers,
                        call,
                        size=self.size,
                        sequence=self.sequence,
                        verified=[modules[one] for one in within],
                    )
                )
            if (reason := known[key]) is not None:
                for choice in [one for one in blocks[name] if one in self.chosen.choices]:
                    self.chosen.choices.remove(choice)
                    self.chosen.cannot(
                        [layer.name for layer in choice.layers],
                        f"split, {name or 'the model'} does not compute the same ({reason})",
                        is_explicit=choice.is_explicit,
                    )
        self.chosen.drop_conflicting_splits()
        self.refuse()

    def _call_of(self, name: str) -> SampleInput | None:
        return sparing_products(self.model, lambda: call_of(name, self.model, self.sample))

    def _block_of(self, choice: LayerChoice) -> str:
        """Return the smallest module around the layers that the model itself calls."""
        parts = [layer.name.split(".") for layer in choice.layers]
        common: list[str] = []
        for same in zip(*parts, strict=False):
            if len(set(same)) > 1:
                break
            common.append(same[0])
        modules = dict(self.model.named_modules())
        while common and isinstance(modules[".".join(common)], (nn.ModuleList, nn.ModuleDict)):
            common.pop()
        return ".".join(common)

    def _is_inside(self, choice: LayerChoice, block: str) -> bool:
        return not block or all(f"{layer.name}.".startswith(f"{block}.") for layer in choice.layers)

    def _signature(self, block: nn.Module, layers: Sequence[Layer]) -> object:
        """Return a key that is equal for blocks that need to be verified only once."""
        shapes = tuple((name, tuple(one.shape)) for name, one in block.named_parameters())
        numbers = tuple(
            (name, key, value)
            for name, module in block.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str)) and not key.endswith(("_idx", "layer_id", "layer_index"))
        )
        return type(block), shapes, numbers, tuple(layers)

    def _dry_run(self) -> TensorDryRun:
        """Return what the chosen layers do, which is found again only when others are chosen."""
        layers = tuple(self.chosen.layers())
        if self._seen is None or self._seen[0] != layers:
            self._seen = (
                layers,
                sparing_products(
                    self.model,
                    lambda: dry_run_plan(self.model, layers, self.sample, size=self.size, sequence=self.sequence),
                ),
            )
        return self._seen[1]

    def plan(self) -> TensorPlan:
        layers = tuple(sorted(self.chosen.layers(), key=lambda one: list(self.sites).index(one.name)))
        dry_run = self._dry_run()
        rows, seen = [], set[int]()
        by_name = {layer.name: layer for layer in layers}
        saved = 0
        for name, site in self.sites.items():
            split: dict[int, int] = {}
            if name in by_name:
                for one, dim, sections in split_dims(site.module, site.kind, by_name[name]):
                    held = num_held(sections, size=self.size, index=0)
                    split[id(one)] = _bytes(one) // one.shape[dim] * held
            num_bytes = worker_bytes = 0
            for one in site.module.parameters():
                if id(one) not in seen:
                    seen.add(id(one))
                    num_bytes += _bytes(one)
                    worker_bytes += split.get(id(one), _bytes(one))
            saved += num_bytes - worker_bytes
            role = by_name[name].role if name in by_name else "whole"
            rows.append(
                ModuleRow(
                    name=name,
                    role=role,
                    why="" if role != "whole" else self._why(name),
                    num_bytes=num_bytes,
                    worker_bytes=worker_bytes,
                )
            )
        for name, module in self.model.named_modules():
            own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
            if own:
                seen.update(map(id, own))
                num_bytes = sum(map(_bytes, own))
                rows.append(
                    ModuleRow(
                        name=name or type(module).__name__,
                        role="whole",
                        why=f"{type(module).__name__} is no layer that can be split",
                        num_bytes=num_bytes,
                        worker_bytes=num_bytes,
                    )
                )
        total_bytes = sum(map(_bytes, self.model.parameters()))
        return TensorPlan(
            size=self.size,
            sequence=self.sequence,
            layers=layers,
            rows=tuple(rows),
            crossings=tuple(dry_run.crossings),
            summed=tuple(dry_run.summed),
            gathered=tuple(dry_run.gathered),
            sample=str(self.sample),
            total_bytes=total_bytes,
            worker_bytes=total_bytes - saved,
        )

    def _why(self, name: str) -> str:
        site = self.sites[name]
        if self.roles.get(name) == REPLICATED:
            return "the plan says so"
        if name in self.shared:
            return "one head for all queries: every worker holds it"
        if site.num_calls == 0:
            return "the sample does not use it"
        return site.only_whole or self.chosen.why.get(name, "no pair was found for it")


def _legal(even: Collection[int], uneven: Collection[int], *, near: int) -> list[str]:
    """Return the numbers of workers that would do; if there are many, those nearest to `near`."""
    fits = range(1, math.gcd(*even) + 1 if even else min(uneven) + 1)
    legal = [
        one
        for one in fits
        if all(number % one == 0 for number in even) and all(shared_out(number, one) for number in uneven)
    ]
    return [str(one) for one in sorted(sorted(legal, key=lambda one: abs(one - near))[:MOST_SHOWN])]


def _num_pairs(seen: LayerTrace) -> int:
    return sum(bool(family.rows and family.columns and not family.rejected) for family in seen.families)


def _below(name: str, block: str) -> str:
    """Return the name of a layer relative to a block around it; "" for the block itself."""
    return name if not block else name[len(block) + 1 :]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _general(text: str) -> str:
    """Return the text with the numbers in dotted names replaced by "*"."""
    return ".".join("*" if part.isdigit() else part for part in text.split("."))
