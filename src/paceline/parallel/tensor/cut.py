"""`Cut`: a tensor of which each worker holds a part, while code that uses it sees the shape of the whole.

An ordinary model's attention says `x.view(B, T, self.n_head, C // self.n_head)`, with C from the shape of its input.
Such code breaks when layers simply return fewer features, unless somebody edits its numbers; and nobody can know which
of a module's integers count heads. So the model's code stays as it is and its *tensors* know: a layer that is cut by
columns returns a `Cut`, whose shape is that of the whole, and whose data are this worker's part in an ordinary tensor.
Each torch function that meets one follows a rule (`rules.py`) on how to do it on the parts alone: a view finds the dim
in which the cut goes on, a product over batches of heads stays with its heads. Where there is no rule, or the
operation needs the whole, the parts are gathered first, so that an unforeseen line of code costs time and never
changes a result. Below torch functions nothing differs: kernels, autograd and recomputation see plain tensors.
DTensor does the same one floor lower, for each operator; here a composite (attention, say) is one rule, which also
works where its kernels have no sharding rule.

Sequences that are shared are cut in the same way, along tokens. Where layers are cut as well, a tensor may be cut
twice: its part of the features is `under`stood as a tensor that is cut along tokens (`twice.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from paceline.parallel.tensor.shapes import NotCut, Sections

if TYPE_CHECKING:
    from paceline.parallel.tensor.team import Team

__all__ = ["Cut", "Sliced", "Way", "cuts_in", "mapped", "on_parts", "tensors_in", "whole", "wrap"]

# Within it a Cut is the plain tensor of the part. torch documents it, and has no public name for it.
on_parts: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]  # see above


class Way(NamedTuple):
    """How a tensor is cut: by whom, along which dim, in which sections, and behind which layer."""

    team: Team
    dim: int
    sections: Sections
    site: str


class Cut(Tensor):
    """This worker's part of a tensor that is cut along `dim` in `sections`; made by `wrap` only."""

    team: Team
    dim_cut: int
    sections: Sections
    site: str  # the layer where the cut began, for messages
    under: Way | None = None  # how the part is cut once more, along tokens

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with on_parts():
            cut = args[0] if args and isinstance(args[0], Cut) else next(cuts_in((args, kwargs)))
            follow = cut.team.follow if cut.team.beside is None else cut.team.beside.follow
            return follow(func, args, kwargs)


class Sliced(Tensor):
    """A tensor that is cut along tokens alone, as those who cut layers see it: it is no Cut of theirs."""

    team: Team
    dim_cut: int
    sections: Sections
    site: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        one = next(one for one in tensors_in((args, kwargs)) if isinstance(one, Sliced))
        if one.team.beside is None:
            raise RuntimeError("a tensor is seen as whole that nobody cuts along features")
        return one.team.beside.follow_in_layer(func, args, kwargs or {})


def wrap(part: Tensor, *, team: Team, dim: int, sections: Sections, site: str) -> Tensor:
    """Make a fresh tensor a Cut, in place: no copy, and no node in autograd's graph.

    What is cut already, by the other team, is cut twice then; raises NotCut where that would be along one dim.
    """
    cut: Any = part
    under = None
    if isinstance(part, (Cut, Sliced)):
        if part.team is not team and part.dim_cut == dim:
            raise NotCut("tokens and features would be cut in one dim")
        if isinstance(part, Sliced):
            under = Way(part.team, part.dim_cut, part.sections, part.site)
        elif part.team is team:  # it was changed in place
            under = part.under
        else:
            part.under = Way(team, dim, sections, site)
            return part
    cut.__class__ = Cut
    cut.team, cut.dim_cut, cut.sections, cut.site, cut.under = team, dim, sections, site, under
    return part


def whole(tensor: Tensor, by: Team | None = None) -> Tensor:
    """Return the whole of a tensor that may be cut: a torch function, so that whoever watches a forward sees it.

    `by`: only what this team has cut is put together.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(whole, (tensor,), tensor, by)
    return tensor


def cuts_in(value: Any) -> Iterator[Cut]:
    """Yield every Cut in nested tuples, lists and dictionaries."""
    if isinstance(value, Cut):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for one in inside:
            if not isinstance(one, (str, int, float)):
                yield from cuts_in(one)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to everything in its tuples, lists and dictionaries."""
    if isinstance(value, dict):
        changed = {key: mapped(one, change) for key, one in value.items()}
        if type(value) is dict:
            return changed
        for key, one in changed.items():  # a dictionary of the user's own class keeps its class
            if one is not value[key]:
                value[key] = one
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(one, change) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(one, change) for one in value)
    return change(value)
