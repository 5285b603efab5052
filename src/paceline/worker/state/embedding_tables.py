"""Embedding tables whose rows lie on parameter servers: which they are, and which optimizers may train them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.parallel.check.optimizer_requirements import why_not_by_rows

if TYPE_CHECKING:
    from paceline.sync.parameter_server.embedding_tables import EmbeddingTables

__all__ = ["require_row_updates", "server_table_names"]


def server_table_names(model: nn.Module, tables: EmbeddingTables | None) -> frozenset[str]:
    """Return the names of the embedding tables whose rows will lie on the servers; none without servers."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, one in named if tables is not None and one in tables)


def require_row_updates(optimizer: Optimizer, tables: EmbeddingTables | None, names: Mapping[int, str]) -> None:
    """Raise PlanError where an optimizer holds a table that it cannot update row by row. `names` are by ids."""
    if tables is None:
        return
    for group in optimizer.param_groups:
        table = next((one for one in group["params"] if one in tables), None)
        why = None if table is None else why_not_by_rows(optimizer, table)
        if why is not None:
            raise PlanError(
                f"{type(optimizer).__name__} holds {names.get(id(table))}, an embedding with sparse=True, whose rows "
                f"lie on the parameter servers, but {why}. Give it an optimizer of its own, SparseAdam, Adagrad or SGD "
                "without momentum, or use sparse=False."
            )
