"""Find which layers can be split together, by one forward of the real model on a small input.

Each candidate layer marks the features that it returns: they become a `SplitTensor` in a group of one, so all numbers
stay right. The mark follows the features as far as the rules can split them:

- A mark that reaches the input features of another layer makes the two layers a pair.
- Where two marks meet in one operation (gate and up, queries and keys), their layers can only be split together.
- An operation that needs the whole (a norm over the features) rejects the mark, and every mark that it has met.
- Views tell which numbers must divide evenly: 96 features viewed as 6 x 16 allow 1, 2, 3 or 6 workers.

Layers whose marks met are a *family*. A fused projection is recognized when a rejected mark was split at certain
places: the next forward begins with these places as sections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.collectives import SingleTensorCollectives
from paceline.parallel.tensor.layers import Kind, kind_of, width_of
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.split_shapes import CannotSplit, Sections
from paceline.parallel.tensor.split_tensor import (
    SplitTensor,
    TensorGroupOps,
    mapped,
    name_of,
    on_parts,
    split_tensors_in,
    wrap,
)

__all__ = ["HARMLESS", "LayerFamily", "LayerSite", "LayerTrace", "sites_of", "trace_layers"]


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class LayerSite:
    """A layer that might be split."""

    name: str
    module: nn.Module
    kind: Kind
    num_calls: int = 0
    only_whole: str = ""  # why it cannot be split at all
    is_whole: bool = False  # the plan leaves it whole


@dataclasses.dataclass(kw_only=True, slots=True)
class LayerFamily:
    """Layers that can only be split together."""

    columns: dict[str, Sections]
    rows: dict[str, Sections]
    rejected: str  # why they cannot be split; "" where they can
    counts: dict[int, str]  # numbers that must divide by the number of workers (heads), and what they are


@dataclasses.dataclass(kw_only=True, slots=True)
class LayerTrace:
    """What a trial forward has shown."""

    sites: dict[str, LayerSite]
    families: list[LayerFamily]
    sections: dict[str, Sections]
    conflicts: list[set[str]]  # layers whose marks met in an operation without a rule


def sites_of(model: nn.Module) -> dict[str, LayerSite]:
    """Return the model's candidate layers by name; a module with several names has its first."""
    inside: set[nn.Module] = set()
    found: dict[str, LayerSite] = {}
    for name, module in model.named_modules():
        kind = None if module in inside else kind_of(module)
        if kind == "attention" or isinstance(module, nn.MultiheadAttention):
            inside.update(module.modules())
        if kind is not None:
            found[name] = LayerSite(name=name, module=module, kind=kind)
    return found


def trace_layers(model: nn.Module, sample: SampleInput, *, whole: Sequence[str] = ()) -> LayerTrace:
    """Run the model on `sample` and return how its layers depend on each other; the model is unchanged afterwards.

    `whole` names layers that must not be split.
    """
    sections: dict[str, Sections] = {}
    while True:
        sites = sites_of(model)
        for name in whole:
            sites[name].only_whole, sites[name].is_whole = "the plan leaves it whole", True
        tracer = _TracingOps(sites, sections)
        with _marking(sites, tracer), _Uses(sites, tracer), torch.enable_grad():
            sample.run(model)
        learned = tracer.wanted()
        if not learned:
            return LayerTrace(
                sites=sites, families=tracer.families(), sections=tracer.sections, conflicts=tracer.conflicts
            )
        sections = sections | learned  # each layer learns its sections once, so this ends


class _TracingOps(TensorGroupOps):
    """Operations of a group of one that record what the rules tell."""

    def __init__(self, sites: dict[str, LayerSite], sections: dict[str, Sections]) -> None:
        super().__init__(SingleTensorCollectives(), rules=rule_of)
        self.sites = sites
        self.sections = {
            name: sections.get(name, (width_of(site.module, site.kind, side="out"),)) for name, site in sites.items()
        }
        self.is_inside = False  # whether a candidate's own forward is running
        self._parent = {name: name for name in sites}
        self._rejected: dict[str, str] = {}
        self._counts: dict[str, dict[int, str]] = {}
        self._rows: dict[str, list[tuple[str, Sections]]] = {}
        self._tried = set(sections)
        self.conflicts: list[set[str]] = []
        self._bounds: dict[str, set[Fraction]] = {}

    def join(self, splits: Sequence[SplitTensor]) -> None:
        roots = {self._root(split.site) for split in splits}
        first = min(roots)
        for root in roots - {first}:
            self._parent[root] = first

    def constrain(self, split: SplitTensor, sections: Sections, noun: str) -> None:
        counts = self._counts.setdefault(split.site, {})
        for length in sections:
            counts.setdefault(length, f"the {length} {noun} of {split.site}")
        for length in split.sections:
            counts.setdefault(length, f"the {length} features of {split.site}")

    def without_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit
    ) -> Any:
        splits = list(split_tensors_in((args, kwargs)))
        self.conflicts.append({split.site for split in splits})
        for split in splits:
            self.reject(split, f"its features reach {name_of(func)}: {reason}")
            if reason.bounds and split.site not in self._tried:
                self._bounds.setdefault(split.site, set()).update(Fraction(*bound) for bound in reason.bounds)
        return func(*_plain(args), **_plain(kwargs))

    def reject(self, split: SplitTensor, why: str) -> None:
        self._rejected.setdefault(split.site, why)

    def row(self, name: str, split: SplitTensor) -> None:
        """Record that the mark of `split` has reached the input features of a layer."""
        self._rows.setdefault(split.site, []).append((name, split.sections))

    def wanted(self) -> dict[str, Sections]:
        """Return new sections for layers whose mark was split at places that are whole numbers of their features."""
        found: dict[str, Sections] = {}
        for name, bounds in self._bounds.items():
            [width] = self.sections[name] if len(self.sections[name]) == 1 else (0,)
            places = sorted({0, width, *(int(bound * width) for bound in bounds)})
            exact = all((bound * width).denominator == 1 for bound in bounds)
            sections = tuple(b - a for a, b in itertools.pairwise(places))
            if width and exact and 1 < len(sections) < width:
                found[name] = sections
        return found

    def families(self) -> list[LayerFamily]:
        members: dict[str, list[str]] = {}
        for name in self.sites:
            members.setdefault(self._root(name), []).append(name)
        return [self._family(names) for names in members.values()]

    def _family(self, names: list[str]) -> LayerFamily:
        columns = {name: self.sections[name] for name in names if self.sites[name].num_calls}
        rejected = next((f"{self._rejected[name]}" for name in names if name in self._rejected), "")
        counts: dict[int, str] = {}
        rows: dict[str, Sections] = {}
        for name in names:
            counts.update(self._counts.get(name, {}))
            for row, sections in self._rows.get(name, []):
                if rows.setdefault(row, sections) != sections:
                    rejected = rejected or f"{row} reads features that are split in different ways"
        for name in (*columns, *rows):
            rejected = rejected or self.sites[name].only_whole
        return LayerFamily(columns=columns, rows=rows, rejected=rejected, counts=counts)

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name


class _Uses(TorchFunctionMode):
    """Notices code that uses a candidate's weight directly: it would break if the weight were only a part."""

    def __init__(self, sites: dict[str, LayerSite], tracer: _TracingOps) -> None:
        super().__init__()
        self._owners: dict[int, list[LayerSite]] = {}
        for site in sites.values():
            for parameter in site.module.parameters(recurse=site.kind == "attention"):
                self._owners.setdefault(id(parameter), []).append(site)
        self._tracer = tracer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = name_of(func)
        if not self._tracer.is_inside and not name.startswith("get:") and name not in HARMLESS:
            for value in (*args, *(kwargs or {}).values()):
                for site in self._owners.get(id(value), ()) if isinstance(value, nn.Parameter) else ():
                    site.only_whole = f"code outside of it uses its weight ({name})"
        return func(*args, **(kwargs or {}))


HARMLESS = frozenset(("size", "dim", "numel", "is_floating_point", "hash", "requires_grad", "is_complex", "data_ptr"))


@contextlib.contextmanager
def _marking(sites: dict[str, LayerSite], tracer: _TracingOps) -> Iterator[None]:
    """Give every candidate a forward that marks what it returns, and remove it afterwards."""
    try:
        for site in sites.values():
            site.module.forward = _marked_forward(site, tracer)
        yield
    finally:
        for site in sites.values():
            del site.module.forward


def _marked_forward(site: LayerSite, tracer: _TracingOps) -> Callable[..., Any]:
    original = type(site.module).forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        tracer.is_inside = True
        try:
            return original(site.module, *args, **kwargs)
        finally:
            tracer.is_inside = False

    def run(*args: Any, **kwargs: Any) -> Any:
        site.num_calls += 1
        if site.is_whole:
            return inside(*args, **kwargs)
        if site.kind == "attention":
            for split in split_tensors_in((args, kwargs)):
                tracer.reject(split, f"{site.name} takes whole features")
            return inside(*_plain(args), **_plain(kwargs))
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(x, SplitTensor):
            if site.kind == "embedding":
                tracer.reject(x, f"{site.name} takes whole numbers")
            elif x.split_dim == x.ndim - 1:
                tracer.row(site.name, x)
            else:
                return inside(x)
            x = _plain(x)
        out: Tensor = inside(x)
        return wrap(out, ops=tracer, dim=out.ndim - 1, sections=tracer.sections[site.name], site=site.name)

    return run


def _plain(value: Any) -> Any:
    """Return the same tensors without their marks."""
    with on_parts():
        return mapped(value, lambda one: one.view_as(one) if isinstance(one, SplitTensor) else one)
