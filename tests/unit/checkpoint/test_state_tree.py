"""The tree of plain values: what goes in comes back, what cannot come back is refused by name."""

from __future__ import annotations

import collections
import enum
import math
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from paceline.checkpoint.state_tree import decode_state, encode_state, freeze
from paceline.errors import CheckpointError


def round_trip(tree: Any) -> Any:
    return decode_state(encode_state(freeze(tree)))


def test_plain_values_come_back_with_their_types() -> None:
    tree = {
        "text": "ä",
        "numbers": (1, 2.5, -math.inf, True, None, 10**30),
        "nested": [{"x": [1, (2,)]}, []],
        0: {1.5: "float key", (1, "a"): "tuple key", None: 1},
        "bytes": b"\x00\xff",
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "milestones": collections.Counter({30: 1, 80: 2}),
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    back = round_trip(tree)
    assert back == tree
    assert type(back["milestones"]) is collections.Counter
    assert type(back["ordered"]) is collections.OrderedDict
    assert type(back["numbers"]) is tuple and type(back["numbers"][3]) is bool


def test_tensors_come_back_equal_and_alone() -> None:
    base = torch.arange(1000.0)
    data = encode_state(freeze({"part": base[10:13], "parameter": torch.nn.Parameter(torch.ones(2))}))
    back = decode_state(data)
    assert torch.equal(back["part"], torch.tensor([10.0, 11.0, 12.0]))
    assert type(back["parameter"]) is torch.Tensor
    assert len(data) < 4000  # the view's thousand elements were not stored


def test_a_frozen_tree_does_not_see_later_changes() -> None:
    tree = {"list": [1, 2], "tensor": torch.zeros(3)}
    frozen = freeze(tree)
    tree["list"].append(3)
    tree["tensor"].add_(1)
    assert frozen["list"] == [1, 2] and torch.equal(frozen["tensor"], torch.zeros(3))


def test_the_schedulers_of_torch_are_plain() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.MultiStepLR(optimizer, [3, 5]),
        schedulers.OneCycleLR(optimizer, max_lr=1.0, total_steps=10),
        schedulers.ReduceLROnPlateau(optimizer),
        schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    ):
        state = scheduler.state_dict()
        assert round_trip(state) == state


class Colour(enum.IntEnum):
    RED = 1


def test_subclasses_of_numbers_are_stored_as_the_value_they_equal() -> None:
    back = round_trip({"lr": numpy.float64(0.5), "colour": Colour.RED, "shape": torch.Size([2, 3])})
    assert back == {"lr": 0.5, "colour": 1, "shape": (2, 3)}
    assert type(back["lr"]) is float and type(back["colour"]) is int


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"scheduler": {"lr_lambdas": [lambda epoch: 1.0]}}, r"scheduler\.lr_lambdas\[0\]: <function>"),
        ({"noise": {"table": numpy.ones(2)}}, r"noise\.table: <numpy\.ndarray>"),
        ({"seen": {"ids": {1, 2}}}, r"seen\.ids: <set>"),
        ({"a key": {0: object()}}, r"\['a key'\]\[0\]: <object>"),
        ({frozenset((1,)): 1}, r"the key \[frozenset\(\{1\}\)\]: <frozenset>"),
        ({"counts": collections.defaultdict(int)}, r"counts: <collections\.defaultdict>"),
        ({"sparse": torch.eye(2).to_sparse()}, r"sparse: <torch\.Tensor>"),
    ],
)
def test_what_cannot_be_read_back_is_refused_by_its_path(tree: dict[Any, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        freeze(tree)


def test_all_refused_values_are_listed_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"v0: <object>.*v9: <object>; and 7 more"):
        freeze({f"v{index}": object() for index in range(17)})


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match=r"loop\[0\]: it contains itself"):
        freeze({"loop": loop})
    shared = [1]
    assert round_trip({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_bytes_that_would_run_code_are_refused_and_run_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    pickle.loads(pickle.dumps(Touch(touched)))
    assert touched.exists(), "the attack works on a plain unpickler"
    touched.unlink()
    for data in (encode_state({"x": Touch(touched)}), pickle.dumps(Touch(touched)), b"", b"nonsense"):
        with pytest.raises(CheckpointError, match="more than plain values, or is damaged"):
            decode_state(data)
    assert not touched.exists()
