"""How names of another framework's checkpoint become those of the script's model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from paceline.errors import PlanError

__all__ = ["Naming"]

T = TypeVar("T")

# What wrappers of torch put into names: DistributedDataParallel, torch.compile, FSDP, activation checkpointing.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Naming:
    """Takes prefixes off, and renames parts."""

    def __init__(self, prefixes: Sequence[str], renames: Sequence[str]) -> None:
        """`renames`: "OLD=NEW" each; an empty OLD stands for the beginning. Raises PlanError for other texts."""
        self._prefixes = tuple(prefixes)
        self._renames: list[tuple[str, str]] = []
        for text in renames:
            old, equals, new = text.partition("=")
            if not equals or old == new:
                raise PlanError(f"--rename {text} renames nothing: write OLD=NEW, or =NEW to put NEW before each name.")
            self._renames.append((old, new))

    def apply(self, name: str, wanted: Collection[str]) -> str:
        """Return the new name. What wrappers put into it goes, too, unless it is `wanted` as it is."""
        for prefix in self._prefixes:
            name = name.removeprefix(prefix)
        if name not in wanted and not wanted_with_wrapper(name, wanted):
            for word in WRAPPERS:
                name = name.removeprefix(word) if word == "module." else name.replace(word, "")
        for old, new in self._renames:
            name = name.replace(old, new) if old else f"{new}{name}"
        return name

    def apply_all(self, named: Mapping[str, T], wanted: Collection[str]) -> dict[str, T]:
        """Return the same under new names. PlanError where two get one name."""
        found: dict[str, T] = {}
        origin: dict[str, str] = {}
        for name, value in named.items():
            new = self.apply(name, wanted)
            if new in found:
                raise PlanError(
                    f"{origin[new]} and {name} would both be {new}: with these --prefix-strip and --rename two names "
                    "become one."
                )
            found[new], origin[new] = value, name
        return found


def wanted_with_wrapper(name: str, wanted: Collection[str]) -> bool:
    """Whether the script's own model has such a word in its names."""
    return any(word in name and any(word in one for one in wanted) for word in WRAPPERS)


def likely_prefix(names: Collection[str], wanted: Collection[str]) -> str | None:
    """A prefix without which all of the names that begin with it are wanted, where that is most of them."""
    ends = {one: name for name in names for one in _tails(name)}
    hits = [ends[one].removesuffix(one) for one in wanted if one in ends]
    best = max(set(hits), key=hits.count, default=None)
    return best if best and hits.count(best) > len(wanted) / 2 else None


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[at:]) for at in range(1, len(parts))]
