"""Models that are wrapped, packed or closed are refused by name, where the plan would have to take them apart."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.errors import PlanError
from paceline.parallel.check.model_check import check_model
from paceline.parallel.check.model_support import require_open
from paceline.plan import Compute, Layout, Plan

CPU = torch.device("cpu")
PARTS = [Layout(shard=2), Layout(tensor=2), Layout(context=2), Layout(experts=2)]
ALL = [Layout(replicas=2), *PARTS, Layout(stages=2)]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        return torch.jit.script(model)


def holding(inner: Callable[[nn.Module], Any]) -> nn.Sequential:
    model = net()
    model[1] = inner(model[1])
    return model


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        return torch.ao.quantization.quantize_dynamic(net(), {nn.Linear})


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place() -> nn.Module:
    model = net()
    model.compile(backend="eager")
    return model


class Scaled(Tensor):
    """A tensor that keeps its numbers in another one, as quantized weights of other packages do."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Scaled:
        return Scaled(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map(lambda one: one.held if isinstance(one, Scaled) else one, args), **(kwargs or {}))
        return Scaled(out) if isinstance(out, Tensor) else out


def with_a_tensor_of_its_own() -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(Scaled(torch.ones(8, 4)))
    return model


MODULE = "Prepare the module inside (its .module)"
CASES: dict[str, tuple[Callable[[], nn.Module], list[Layout], str, str]] = {
    "wrapped": (lambda: nn.DataParallel(net()), ALL, "the model", f"is a DataParallel, .* {re.escape(MODULE)}"),
    "wrapped-inside": (lambda: holding(nn.DataParallel), ALL, "1", "1 is a DataParallel, which divides batches"),
    "quantized": (quantized, ALL, "0", "0 is quantized .* Train the model before it is quantized"),
    "script": (lambda: scripted(net()), ALL[1:], "the model", "cannot be taken apart for Layout"),
    "script-inside": (lambda: holding(scripted), PARTS, "1", r"1 is a \w*ScriptModule \(torch\.jit\)"),
    "compiled": (compiled_in_place, ALL[2:], "the model", "is compiled .* Prepare the model without torch.compile"),
    "compiled-inside": (lambda: holding(compiled), PARTS[1:], "1", "the compiler does not see through Layout"),
    "tensor": (with_a_tensor_of_its_own, ALL[1:], "0.weight", r"0\.weight is a Scaled, a tensor of a class of its own"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name_where_it_would_be_taken_apart_and_nowhere_else(case: str) -> None:
    make, refused, module, says = CASES[case]
    model = make()
    for layout in ALL:
        if layout not in refused:
            require_open(model, Plan(layout=layout))
            continue
        found = check_model(model, Plan(layout=layout), device=CPU)
        assert found.refusals[0].module == module
        assert re.search(says, str(found.error()))


def test_parameters_that_are_split_already_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    monkeypatch.setattr("paceline.parallel.check.model_support.is_sharded", lambda tensor: tensor is model[0].weight)
    with pytest.raises(PlanError, match=r"0 has parameters that are split already .* before anything splits it"):
        require_open(model, Plan())


def test_offloaded_parameters_are_rows_too() -> None:
    with pytest.raises(PlanError, match=r"cannot be taken apart for Compute\(offload='all'\)"):
        require_open(scripted(net()), Plan(compute=Compute(offload="all")))
