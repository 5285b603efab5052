"""Choose which layers are split, from what a trial forward showed: layers named by a plan, column-row pairs, and the
vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast

from paceline.errors import Reason
from paceline.parallel.tensor.huggingface_plans import REPLICATED
from paceline.parallel.tensor.layer_trace import LayerFamily, LayerSite, LayerTrace
from paceline.parallel.tensor.layers import Layer, Role, split_dims, width_of
from paceline.parallel.tensor.split_shapes import shared_out

__all__ = ["LayerChoice", "LayerChooser"]


@dataclasses.dataclass(kw_only=True, slots=True)
class LayerChoice:
    """Layers that are split together or not at all."""

    layers: list[Layer]
    is_explicit: bool = False  # the user named them


class LayerChooser:
    """Makes all choices when it is created; callers may remove some later."""

    def __init__(self, trace: LayerTrace, roles: Mapping[str, str], *, size: int, is_own: bool) -> None:
        self.trace, self.sites, self.roles, self.size, self.is_own = trace, trace.sites, roles, size, is_own
        self.choices: list[LayerChoice] = []
        self.why: dict[str, str] = {}  # layers that stay whole
        self.refusals: list[Reason] = []
        self._choose_named()
        self._choose_pairs()
        self._choose_vocabulary()
        self.drop_conflicting_splits()

    def _choose_named(self) -> None:
        """Layers to which a plan gives a role, together with their family where they belong to one."""
        named: dict[str, Role] = {name: cast(Role, role) for name, role in self.roles.items() if role != REPLICATED}
        if not named:
            return
        groups: list[list[str]] = []
        for family in self.trace.families:
            members = [name for name in (*family.columns, *family.rows) if name in named]
            pair = [name for name in members if (name in family.rows) == (named[name] == "row")]
            if any(named[name] == "row" for name in pair):
                groups.append(pair)
        done = {name for group in groups for name in group}
        groups += [[name] for name in named if name not in done]
        seen: set[str] = set()
        for group in groups:
            layers = [self._layer(name, named[name]) for name in group if name not in seen]
            seen.update(group)
            for name in group:
                if reason := self.sites[name].only_whole:
                    self.cannot([name], reason, is_explicit=self.is_own)
                    break
            else:
                if layers:
                    self.choices.append(LayerChoice(layers=layers, is_explicit=self.is_own))

    def _layer(self, name: str, role: Role) -> Layer:
        site = self.sites[name]
        if role == "row":
            read = [family.rows[name] for family in self.trace.families if name in family.rows]
            whole = (width_of(site.module, site.kind, side="in"),)
            return Layer(name=name, role=role, sections=read[0] if read else whole)
        if role == "vocabulary":
            return Layer(name=name, role=role, sections=(width_of(site.module, site.kind, side="in"),))
        if role == "attention":
            return Layer(name=name, role=role, sections=(_heads(site),))
        return Layer(name=name, role=role, sections=self.trace.sections[name])

    def _choose_pairs(self) -> None:
        """Families with columns and rows, the largest first, as long as no layer is wanted twice."""
        taken = set(self.roles)
        families = sorted(self.trace.families, key=lambda one: -_num_parameters(self.sites, _names(one)))
        for family in families:
            names = _names(family)
            if len(names) == 1 and self.sites[names[0]].kind == "attention" and names[0] not in taken:
                if not self.sites[names[0]].only_whole:
                    self.choices.append(LayerChoice(layers=[self._layer(names[0], "attention")]))
                    taken.update(names)
                continue
            if family.rejected or not family.rows or not family.columns:
                if not family.rows:
                    reason = "no other layer reads its features" if not family.rejected else family.rejected
                else:
                    reason = family.rejected or "nothing feeds it"
                for name in family.columns:
                    self.why.setdefault(name, reason)
                continue
            if taken & set(names) or set(family.rows) & set(family.columns):
                for name in names:
                    self.why.setdefault(name, "a layer that it needs is split with others")
                continue
            taken.update(names)
            layers = [Layer(name=name, role="column", sections=split) for name, split in family.columns.items()]
            layers += [Layer(name=name, role="row", sections=split) for name, split in family.rows.items()]
            self.choices.append(LayerChoice(layers=layers))

    def _choose_vocabulary(self) -> None:
        """The output head, which returns one number per token of the vocabulary, and the embeddings with one row per
        token."""
        taken = {layer.name for layer in self.layers()} | set(self.roles)
        tables = {name: site for name, site in self.sites.items() if site.kind == "embedding"}
        sizes = {width_of(site.module, "embedding", side="in") for site in tables.values()}
        heads = [
            name
            for name, site in self.sites.items()
            if site.kind in ("linear", "conv1d") and width_of(site.module, site.kind, side="out") in sizes
        ]
        heads = [name for name in heads if self.roles.get(name) == "head" or self._is_free(name, taken)]
        for width in sorted({width_of(self.sites[name].module, self.sites[name].kind, side="out") for name in heads}):
            names = [name for name in heads if self.trace.sections[name] == (width,) and name not in taken]
            embeddings = [
                name
                for name, site in tables.items()
                if width_of(site.module, "embedding", side="in") == width and self._is_free(name, taken)
            ]
            if not shared_out(width, self.size):
                for name in (*names, *embeddings):
                    self.why[name] = f"{width} tokens leave the last of {self.size} workers without any"
                continue
            layers = [Layer(name=name, role="head", sections=(width,)) for name in names]
            layers += [Layer(name=name, role="vocabulary", sections=(width,)) for name in embeddings]
            self.choices += [LayerChoice(layers=[layer]) for layer in layers]

    def _is_free(self, name: str, taken: set[str]) -> bool:
        site = self.sites[name]
        is_tied = site.num_calls == 0 and site.kind == "embedding"
        return name not in taken and not site.only_whole and (site.num_calls > 0 or is_tied)

    def drop_conflicting_splits(self) -> None:
        """Drop choices that would split a shared weight in two different ways."""
        while conflict := self._conflicting_split():
            names, weight = conflict
            for choice in [one for one in self.choices if any(layer.name in names for layer in one.layers)]:
                self.choices.remove(choice)
                self.cannot(
                    [layer.name for layer in choice.layers],
                    f"{weight} is shared with {' and '.join(sorted(names))}, "
                    "which would have to be split in the same way",
                    is_explicit=choice.is_explicit,
                )

    def _conflicting_split(self) -> tuple[list[str], str] | None:
        ways: dict[int, dict[str, object]] = {}
        shown: dict[int, str] = {}
        layers = {layer.name: layer for layer in self.layers()}
        for name, site in self.sites.items():
            ways_here: dict[int, object] = {id(one): None for one in site.module.parameters()}
            if name in layers:
                for parameter, dim, sections in split_dims(site.module, site.kind, layers[name]):
                    ways_here[id(parameter)] = (dim, sections)
            for key, parameter in site.module.named_parameters():
                ways.setdefault(id(parameter), {})[name] = ways_here[id(parameter)]
                shown.setdefault(id(parameter), f"{name}.{key}")
        for one, by_name in ways.items():
            if len(set(by_name.values())) > 1:
                return list(by_name), shown[one]
        return None

    def layers(self) -> list[Layer]:
        return [layer for choice in self.choices for layer in choice.layers]

    def cannot(self, names: Iterable[str], reason: str, *, is_explicit: bool) -> None:
        for name in names:
            self.why[name] = reason
            if is_explicit:
                what = f"plan[{name!r}] cannot be followed: {reason}."
                self.refusals.append(Reason(module=name, what=what, remedy="Leave it out of cut=."))


def _names(family: LayerFamily) -> list[str]:
    return [*family.columns, *family.rows]


def _heads(site: LayerSite) -> int:
    module: Any = site.module
    return module.num_heads


def _num_parameters(sites: Mapping[str, LayerSite], names: Iterable[str]) -> int:
    return sum(one.numel() for name in names for one in sites[name].module.parameters())
