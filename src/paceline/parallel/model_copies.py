"""Copies of a prepared model of which each worker holds a part are refused: a copy would be of that part alone."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from paceline.errors import PlanError
from paceline.parallel.class_name import class_name

__all__ = ["refuse_copies"]


def refuse_copies(module: nn.Module, layout: str, what: str) -> None:
    """Refuse `copy.deepcopy(module)`, and pickling: torch.save(model). `what`: of which a worker has no more than its
    own."""

    def refuse(*_: Any) -> NoReturn:
        raise PlanError(
            f"a copy of {class_name(module)} (copy.deepcopy, AveragedModel(model), pickle) under {layout}: each "
            f"worker has no {what} to copy. For an average of the weights use "
            "worker.prepare(paceline.ExponentialMovingAverage(model, decay=0.999)). Other copies are made before "
            "worker.prepare(model), and prepared, too. To write weights: worker.save_model(path)"
        )

    vars(module)["__deepcopy__"] = refuse
    vars(module)["__reduce_ex__"] = refuse
