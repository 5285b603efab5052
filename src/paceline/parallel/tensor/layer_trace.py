"""Find which layers can be cut together, by one forward of the real model on a small input.

Each candidate layer dyes the features that it returns: a `SplitTensor` in a group of one, so that all numbers are
right. The dye goes where the rules let a cut go. Where it reaches the input features of another layer, those two are a
pair; where two dyes meet in one operation (gate and up, queries and keys), their layers can only be cut together; where
an operation needs the whole (a norm over the features, say), the dye is spoilt, and so is everything that it met. Views
say which numbers must divide evenly: a view of 96 features as 6 x 16 allows 1, 2, 3 or 6 workers. Layers whose dyes are
joined are a *family*. A fused projection shows itself when a spoilt dye was split at certain places: the next forward
begins with these as sections.
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
    """A layer that might be cut."""

    name: str
    module: nn.Module
    kind: Kind
    num_calls: int = 0
    only_whole: str = ""  # why it cannot be cut at all
    is_whole: bool = False  # it is not to be cut


@dataclasses.dataclass(kw_only=True, slots=True)
class LayerFamily:
    """Layers that can only be cut together."""

    columns: dict[str, Sections]
    rows: dict[str, Sections]
    spoilt: str  # why they cannot be cut; "" where they can
    counts: dict[int, str]  # numbers that must divide by the number of workers (heads), and what they are


@dataclasses.dataclass(kw_only=True, slots=True)
class LayerTrace:
    """What a forward has shown."""

    sites: dict[str, LayerSite]
    families: list[LayerFamily]
    sections: dict[str, Sections]
    conflicts: list[set[str]]  # layers whose dyes met in an operation without a rule for it


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
    """Run the model on `sample`, unchanged in the end, and return what its layers mean to each other.

    `whole` names layers that are not to be cut.
    """
    sections: dict[str, Sections] = {}
    while True:
        sites = sites_of(model)
        for name in whole:
            sites[name].only_whole, sites[name].is_whole = "the plan leaves it whole", True
        tracer = _TracingOps(sites, sections)
        with _dyed(sites, tracer), _Uses(sites, tracer), torch.enable_grad():
            sample.run(model)
        learnt = tracer.wanted()
        if not learnt:
            return LayerTrace(
                sites=sites, families=tracer.families(), sections=tracer.sections, conflicts=tracer.conflicts
            )
        sections = sections | learnt  # each layer learns once, so this ends


class _TracingOps(TensorGroupOps):
    """A group of one that writes down what rules tell."""

    def __init__(self, sites: dict[str, LayerSite], sections: dict[str, Sections]) -> None:
        super().__init__(SingleTensorCollectives(), rules=rule_of)
        self.sites = sites
        self.sections = {
            name: sections.get(name, (width_of(site.module, site.kind, side="out"),)) for name, site in sites.items()
        }
        self.is_inside = False  # of a candidate's own forward
        self._parent = {name: name for name in sites}
        self._spoilt: dict[str, str] = {}
        self._counts: dict[str, dict[int, str]] = {}
        self._rows: dict[str, list[tuple[str, Sections]]] = {}
        self._tried = set(sections)
        self.conflicts: list[set[str]] = []
        self._bounds: dict[str, set[Fraction]] = {}

    def join(self, cuts: Sequence[SplitTensor]) -> None:
        roots = {self._root(cut.site) for cut in cuts}
        first = min(roots)
        for root in roots - {first}:
            self._parent[root] = first

    def constrain(self, cut: SplitTensor, sections: Sections, noun: str) -> None:
        counts = self._counts.setdefault(cut.site, {})
        for length in sections:
            counts.setdefault(length, f"the {length} {noun} of {cut.site}")
        for length in cut.sections:
            counts.setdefault(length, f"the {length} features of {cut.site}")

    def without_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit
    ) -> Any:
        cuts = list(split_tensors_in((args, kwargs)))
        self.conflicts.append({cut.site for cut in cuts})
        for cut in cuts:
            self.spoil(cut, f"its features reach {name_of(func)}: {reason}")
            if reason.bounds and cut.site not in self._tried:
                self._bounds.setdefault(cut.site, set()).update(Fraction(*bound) for bound in reason.bounds)
        return func(*_plain(args), **_plain(kwargs))

    def spoil(self, cut: SplitTensor, why: str) -> None:
        self._spoilt.setdefault(cut.site, why)

    def row(self, name: str, cut: SplitTensor) -> None:
        """The dye of `cut` has reached the input features of a layer."""
        self._rows.setdefault(cut.site, []).append((name, cut.sections))

    def wanted(self) -> dict[str, Sections]:
        """Return new sections for layers whose dye was split at places that make sense in their features."""
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
        spoilt = next((f"{self._spoilt[name]}" for name in names if name in self._spoilt), "")
        counts: dict[int, str] = {}
        rows: dict[str, Sections] = {}
        for name in names:
            counts.update(self._counts.get(name, {}))
            for row, sections in self._rows.get(name, []):
                if rows.setdefault(row, sections) != sections:
                    spoilt = spoilt or f"{row} reads features that are cut in different ways"
        for name in (*columns, *rows):
            spoilt = spoilt or self.sites[name].only_whole
        return LayerFamily(columns=columns, rows=rows, spoilt=spoilt, counts=counts)

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name


class _Uses(TorchFunctionMode):
    """Notices when code uses a candidate's weight by itself, which its part would not stand."""

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
def _dyed(sites: dict[str, LayerSite], tracer: _TracingOps) -> Iterator[None]:
    """Give every candidate a forward that dyes what it returns, and take it away again."""
    try:
        for site in sites.values():
            site.module.forward = _dyeing(site, tracer)
        yield
    finally:
        for site in sites.values():
            del site.module.forward


def _dyeing(site: LayerSite, tracer: _TracingOps) -> Callable[..., Any]:
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
            for cut in split_tensors_in((args, kwargs)):
                tracer.spoil(cut, f"{site.name} takes whole features")
            return inside(*_plain(args), **_plain(kwargs))
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(x, SplitTensor):
            if site.kind == "embedding":
                tracer.spoil(x, f"{site.name} takes whole numbers")
            elif x.split_dim == x.ndim - 1:
                tracer.row(site.name, x)
            else:
                return inside(x)
            x = _plain(x)
        out: Tensor = inside(x)
        return wrap(out, team=tracer, dim=out.ndim - 1, sections=tracer.sections[site.name], site=site.name)

    return run


def _plain(value: Any) -> Any:
    """The same tensors without their dyes."""
    with on_parts():
        return mapped(value, lambda one: one.view_as(one) if isinstance(one, SplitTensor) else one)
