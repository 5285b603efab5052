"""Functions of the program that are called when a state is saved or loaded, such as those that write a model's own
files beside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import PlanError
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["StateHooks"]


class StateHooks:
    """The functions of one accelerator."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._before_save: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._before_load: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def add_before_save(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called before a state is saved, on all workers. Raises PlanError
        under a layout that splits models, whose parts are no model's own files."""
        self._require_whole_models("save")
        return _added(self._before_save, hook)

    def add_before_load(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, input_dir)` called before a state is loaded. Raises PlanError as `add_before_save`."""
        self._require_whole_models("load")
        return _added(self._before_load, hook)

    def call_before_save(self, models: Iterable[nn.Module], directory: Path) -> None:
        """Call the functions with lists of their own: what they take out of them is in the state all the same."""
        if not self._before_save:
            return
        given = list(models)
        weights = [model.state_dict() for model in given]
        directory.mkdir(parents=True, exist_ok=True)
        for hook in self._before_save.values():
            hook(given, weights, str(directory))

    def call_before_load(self, models: Iterable[nn.Module], directory: Path) -> None:
        """Call the functions; what they load is loaded from the state again."""
        given = list(models)
        for hook in self._before_load.values():
            hook(given, str(directory))

    def _require_whole_models(self, when: str) -> None:
        if parts_of(self._worker).place.axes.is_split:
            raise PlanError(
                f"register_{when}_state_pre_hook(...) under {self._worker.plan.layout}: each worker holds a part of "
                "the model, and a function of the program would be given that part. States hold the model without it: "
                "leave it out, and write the whole model with accelerator.save_model(model, directory); or use "
                "replicas=n."
            )


def _added(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
