"""Embeddings whose tables are elsewhere: a forward fetches the rows of its words, and computes on these.

They are torch's own modules, `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`, which say by it that of their
matrix only the rows of the words that came matter. They get a class of their own that forwards in this way as soon as
the table is away (`paceline.comm.remote_tensors`), and as ever before. The gradient is sparse, as torch makes it, so
hooks on gradients of parameters see it arrive. Only rows can be read. Code that reads the whole matrix is refused by
name: before anything starts where a module shares it, otherwise when it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.remote_tensors import is_remote, is_without_fetching, sparse_rows
from paceline.errors import Reason
from paceline.plan import Plan

__all__ = ["RowSource", "tables_of", "unfit_tables", "use_remote_tables"]

REMEDY = "Use sparse=False (and an optimizer for dense gradients)."


class RowSource(Protocol):
    """Where the rows are."""

    def add(self, parameter: Parameter) -> None:
        """Rows of this table will be asked for."""
        ...

    def rows(self, parameter: Parameter, numbers: Tensor) -> Tensor:
        """Return rows by their numbers, which are sorted and of which none comes twice."""
        ...

    def whole(self, parameter: Parameter) -> Tensor:
        """Return the whole table."""
        ...


def tables_of(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the modules of a model that look rows up and make sparse gradients, by name; shared ones once."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def unfit_tables(model: nn.Module, plan: Plan) -> Iterator[Reason]:
    """Everything that stands against having a model's tables elsewhere."""
    found = tables_of(model)
    for name, module in found.items():
        what = _why_unfit(module, plan)
        if what is not None:
            yield Reason(module=name or "the model", what=f"{name or 'the model'} = {module}: {what}", remedy=REMEDY)
    tables = {id(_parameters(module).get("weight")): name for name, module in reversed(found.items())}  # the first name
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in _parameters(module).items() if module not in found.values() else ():
            if id(parameter) in tables:
                table, path = tables[id(parameter)], f"{name}.{key}" if name else key
                yield Reason(
                    module=path,
                    what=f"{path} is the matrix of {table}, of which a worker would have those rows that it looks up.",
                    remedy=f"Use sparse=False in {table} (and an optimizer for dense gradients).",
                )


def use_remote_tables(model: nn.Module, source: RowSource) -> None:
    """Have the model's tables ask `source` for rows, from when they are away."""
    for module in tables_of(model).values():
        if not isinstance(module, RemoteEmbeddingModule):
            cast("Any", module).__class__ = _class_of(type(module))
            module.__dict__[SOURCE] = source
            source.add(_table(module))


def _class_of(kind: type[nn.Embedding | nn.EmbeddingBag]) -> type[nn.Module]:
    mixed = _Embedding if issubclass(kind, nn.Embedding) else _EmbeddingBag
    if kind in (nn.Embedding, nn.EmbeddingBag):
        return mixed
    bases: tuple[Any, ...] = (mixed, kind)
    return type(kind.__name__, bases, {})  # has a name and methods of its own, and no forward


def _why_unfit(module: nn.Embedding | nn.EmbeddingBag, plan: Plan) -> str | None:
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    if "weight" not in _parameters(module):
        return "its weight is no parameter of its own, but computed (a parametrization)."
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} has a forward of its own, and what it asks of the matrix is not known."
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} changes rows in the forward, where they are copies."
    if module.scale_grad_by_freq:
        return "torch has no sparse gradients with scale_grad_by_freq=True."
    if getattr(module, "mode", "sum") == "max":
        return "torch has no sparse gradients with mode='max'."
    if plan.compute.compile:
        return "the compiler does not see through rows that come from servers (Compute(compile=True))."
    return None


SOURCE = "_paceline_rows"  # of a module, outside of what torch's modules register


class RemoteEmbeddingModule(nn.Module):
    """What the modules have in common whose tables may be away."""

    def _get_name(self) -> str:
        return type(self).__name__.removeprefix("_")

    @property
    def weight(self) -> Parameter:
        """The table. Raises RuntimeError where it is away: only a lookup may use it."""
        parameter = _table(self)
        if is_remote(parameter):
            raise RuntimeError(
                f"weight of {self} was read, and it is not here: under ParameterServer(...) the rows of an embedding "
                "with sparse=True lie on the servers, and a worker gets those that it looks up. A head that is tied to "
                f"it needs the whole. {REMEDY} What it is at present model.state_dict() gathers"
            )
        return parameter

    def __getstate__(self) -> dict[str, Any]:
        if is_remote(_table(self)):
            raise RuntimeError(
                f"{self} cannot be copied or pickled: its rows are on the parameter servers. Take model.state_dict(), "
                "which gathers them"
            )
        return {key: value for key, value in self.__dict__.items() if key != SOURCE}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_remote(_table(self)) and not is_without_fetching():
            destination[f"{prefix}weight"] = self._source.whole(_table(self))

    @property
    def _source(self) -> RowSource:
        return self.__dict__[SOURCE]

    def _rows(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers that come in `words`, sorted, their rows, and `words` as places among these."""
        table = _table(self)
        numbers, places = torch.unique(words, return_inverse=True)
        rows = _RowLookup.apply(table, numbers, self._source.rows(table, numbers), self.padding_idx)
        return numbers, rows, places


class _Embedding(RemoteEmbeddingModule, nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]: that is what it is for
    def forward(self, input: Tensor) -> Tensor:
        if not is_remote(_table(self)):
            return super().forward(input)
        _, rows, places = self._rows(input)
        return F.embedding(places, rows)


class _EmbeddingBag(RemoteEmbeddingModule, nn.EmbeddingBag):  # pyright: ignore[reportIncompatibleVariableOverride]: the same
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if not is_remote(_table(self)):
            return super().forward(input, offsets, per_sample_weights)
        numbers, rows, places = self._rows(input)
        padding = None
        if self.padding_idx is not None and bool((numbers == self.padding_idx).any()):
            padding = int(torch.searchsorted(numbers, self.padding_idx))
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


class _RowLookup(torch.autograd.Function):
    """Rows of a table, whose gradient is a sparse one of the table; that of a row for padding is left out."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, numbers: Tensor, rows: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.shape, ctx.padding = table.shape, padding
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (numbers,), (gradient,) = ctx.saved_tensors, grad_outputs
        if ctx.padding is not None:
            counts = numbers != ctx.padding
            numbers, gradient = numbers[counts], gradient[counts]
        return sparse_rows(numbers, gradient, ctx.shape), None, None, None


def _table(module: nn.Module) -> Parameter:
    """The table itself, also where it is away."""
    return _parameters(module)["weight"]


def _parameters(module: nn.Module) -> dict[str, Parameter]:
    """A module's own parameters, without those of modules in it."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))
