"""What cannot be cut into stages is refused before anything runs, with the unit's name, the reason and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.model_units import find_units
from paceline.parallel.pipeline.stage_partition import partition_units, route
from paceline.parallel.pipeline.stage_replay import StageReplayer
from paceline.parallel.pipeline.tape import Tape
from paceline.parallel.pipeline.tape_recorder import record

CPU = torch.device("cpu")
X = torch.randn(4, 6)


class Net(nn.Module):
    """Three units, joined by `code`."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Holds(nn.Module):
    """A unit whose forward is given."""

    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.kept: Any = None
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def tape_of(model: nn.Module, micro: Any = X) -> Tape:
    return record(model, lambda m: model(m).sum(), micro, units=find_units(model), device=CPU)


def refusal(model: nn.Module, micro: Any = X) -> str:
    with pytest.raises(PlanError) as error:
        tape_of(model, micro)
    return str(error.value)


def asks(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h) if h.max() > 0 else net.c(h)


def picks(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x))
    return net.c(h[h[:, 0] > 0])


def counts(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    net.seen.add_(h.detach().sum(0))
    return net.c(net.b(h))


def fills_a_view(net: Any, x: Tensor) -> Tensor:
    out = torch.zeros(4, 12)
    left = out[:, :6]
    left.copy_(net.a(x))
    return net.c(net.b(out[:, :6]))


def sets_data(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    h.data = torch.zeros(4, 6)
    return net.c(net.b(h))


@pytest.mark.parametrize(
    "code, says",
    [
        (
            asks,
            r"__bool__\(\) at test_pipeline_refused.py:\d+, after a and before the next unit, asks for the contents",
        ),
        (picks, r"__getitem__\(\) at test_pipeline_refused.py:\d+, after b .* asks for the contents .* Do this inside"),
        (
            counts,
            r"add_\(\) at test_pipeline_refused.py:\d+ changes a buffer of the model .* Change it inside the unit",
        ),
        (fills_a_view, r"copy_\(\) at .* writes what a made into a view .* Write into the tensor itself"),
        (sets_data, r"an attribute of a tensor .* is set at test_pipeline_refused.py:\d+, after a"),
    ],
)
def test_root_level_code_that_other_stages_could_not_follow_is_refused(
    code: Callable[[Any, Tensor], Tensor], says: str
) -> None:
    assert re.search(says, refusal(Net(code)))


def test_all_refusals_come_at_once() -> None:
    def two(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        net.seen.add_(h.detach().sum(0))
        if h.max() > 0:
            return net.c(h)
        return net.b(h)

    model = Net(two)
    said = refusal(model, X.clone().requires_grad_())
    assert [line[:2] for line in said.splitlines()[1:]] == ["- "] * 3
    for part in ("the input requires a gradient", "changes a buffer", "__bool__()"):
        assert part in said


def test_a_unit_that_cannot_run_alone_is_named_with_both_reasons() -> None:
    def fails(unit: Any, x: Tensor) -> Tensor:
        if x.sum().item() < 1e9:
            raise ValueError("needs large inputs")
        return unit.inner(x)

    model = nn.Sequential(nn.Linear(6, 6), Holds(fails), nn.Linear(6, 6))
    said = refusal(model)
    assert "- 1 (Holds) cannot be run alone" in said
    assert "on invented numbers (ValueError: needs large inputs)" in said and "Name a module around it" in said


def test_a_unit_that_writes_to_other_modules_is_refused_and_the_attribute_is_put_back() -> None:
    def tells(unit: Any, x: Tensor) -> Tensor:
        unit.code.model.note = "written"
        return unit.inner(x)

    model = nn.Sequential(nn.Linear(6, 6), Holds(tells), nn.Linear(6, 6))
    tells.model = model  # type: ignore[attr-defined]  # any attribute
    assert "1 sets the attribute 'note' of the model, which is outside of it" in refusal(model)
    assert not hasattr(model, "note")


def hidden(net: Any, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x)))


def stages(model: nn.Module, num_stages: int, **more: Any) -> Any:
    return partition_units(model, tape_of(model), units=find_units(model), num_stages=num_stages, **more)


def test_too_many_stages_are_refused_with_the_number_that_can_be() -> None:
    with pytest.raises(
        PlanError, match=r"4 stages were asked for, but at most 3 .* units a, b, c. Use stages=3 or fewer"
    ):
        stages(Net(hidden), 4)


def test_values_that_flow_backwards_keep_units_on_one_stage() -> None:
    def back(net: Any, x: Tensor) -> Tensor:
        return net.c(net.a(net.b(net.a(x))))  # a is called again on what b made

    model = Net(back)
    assert [set(names) for names in stages(model, 2).stages] == [{"a", "b"}, {"c"}]
    with pytest.raises(PlanError) as error:
        stages(model, 3)
    assert "at most 2" in str(error.value)
    assert "these belong together: a (at" in str(error.value) and "takes an output of b, which comes later" in str(
        error.value
    )
    with pytest.raises(PlanError, match="a stage cannot begin with b: a"):
        stages(model, 2, starts=["b"])


def test_a_unit_that_uses_what_another_left_inside_stays_with_it() -> None:
    def leaves(unit: Any, x: Tensor) -> Tensor:
        unit.kept = [unit.inner(x)]
        return unit.kept[0] + 1

    first = Holds(leaves)
    second = Holds(lambda unit, x: unit.inner(x) + first.kept[0])
    model = nn.Sequential(first, second, nn.Linear(6, 6))
    joints = tape_of(model).joints
    assert [(joint.first, joint.last) for joint in joints] == [(0, 1)]
    assert (
        "1 (at" in joints[0].reason and "uses a tensor from inside 0 that is not among its results" in joints[0].reason
    )


@pytest.mark.parametrize("returns", [False, True])
def test_what_a_hook_inside_a_unit_hands_out_travels_unless_it_changes_it(returns: bool) -> None:
    seen: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        seen.append(output)
        return output * 2 if returns else None

    model = Net(lambda net, x: net.c(net.b(net.a(x))) + seen.pop())
    first = Holds(lambda unit, x: unit.inner(x).tanh())
    first.inner.register_forward_hook(hook)
    model.add_module("a", first)
    if returns:
        assert "a forward hook inside a hands out what stages without a need" in refusal(model)
        return
    tape = tape_of(model)
    ((name, _),) = tape.calls[0].hook_outputs
    assert name == "inner"
    crossing = route(tape, partition_units(model, tape, units=find_units(model), num_stages=3)).crossing
    assert [len(numbers) for numbers in crossing] == [2, 2], "the hidden value, and what was handed out"


@pytest.mark.parametrize(
    "starts, says",
    [
        (["b", "z"], "'z' is no unit that is called"),
        (["b"], "3 stages need 2 first units"),
        (["c", "b"], "in order"),
        (["a", "b"], "none of them the model's first"),
    ],
)
def test_wrong_first_units_are_refused(starts: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=f"{says}.*Units, in order: a, b, c"):
        stages(Net(hidden), 3, starts=starts)


@pytest.mark.parametrize(
    "named, says",
    [
        (["code.z"], "'code.z' is no module of Net"),
        (["b", "b.inner"], "'b.inner' is no module"),
    ],
)
def test_wrong_names_of_units_are_refused(named: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        find_units(Net(hidden), named=named)


def test_a_forward_that_goes_another_way_than_the_first_is_an_error_not_a_wrong_loss() -> None:
    def branches(net: Any, x: Tensor) -> Tensor:
        return net.c(net.b(net.a(x))) if x[0, 0] > 0 else net.c(net.a(x))

    model, units = Net(branches), find_units(Net(branches))
    units = find_units(model)
    forward = lambda m: F.mse_loss(model(m), m)  # noqa: E731  # as it is written where it is passed
    tape = record(model, forward, X.abs(), units=units, device=CPU)
    cut = partition_units(model, tape, units=units, num_stages=1)
    with pytest.raises(PlanError, match=r"differs from .* c\(\) came where b\(\) was expected"):
        StageReplayer(model, units, device=CPU).replay(
            forward, -X.abs(), tape=tape, route=route(tape, cut), stage=0, received={}
        )


def test_a_unit_whose_output_changes_its_shape_is_an_error() -> None:
    grown = Holds(lambda unit, x: unit.inner(x)[: 4 if unit.training else 2])
    model = nn.Sequential(nn.Linear(6, 6), grown, nn.Linear(6, 6))
    units, tape = find_units(model), tape_of(model)
    way = route(tape, partition_units(model, tape, units=units, num_stages=1))
    model.eval()
    with pytest.raises(PlanError, match=r"an output of 1 is float32 \[2, 6\], but float32 \[4, 6\] was expected"):
        StageReplayer(model, units, device=CPU).replay(
            lambda m: model(m).sum(), X, tape=tape, route=way, stage=0, received={}
        )
