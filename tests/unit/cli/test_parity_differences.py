"""What `paceline parity` calls a difference, by captures made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from paceline.cli.parity.compare import CaptureReader, compare
from paceline.worker.record.parity_capture import ParityCapture as Writer


class Made:
    """Captures made by hand; `model.w` is large, `model.b` is only rounding."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def losses(self, *losses: float) -> Made:
        rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
        (self.directory / "losses.jsonl").write_text("\n".join(rows))
        return self

    def gradients(self, step: int, **tensors: list[float]) -> Made:
        return self._save(f"gradients_{step}", tensors)

    def buffers(self, **tensors: list[float]) -> Made:
        return self._save("buffers", tensors)

    def optimizers(self, **tensors: list[float]) -> Made:
        """The momentum of each parameter."""
        arrays = {f"momentum of model.{key}": np.asarray(value, dtype=np.float32) for key, value in tensors.items()}
        save_file(arrays, self.directory / "optimizers.safetensors")
        return self

    def weights(self, **tensors: list[float]) -> CaptureReader:
        self._save("weights", tensors)
        return CaptureReader(self.directory)

    def _save(self, name: str, tensors: dict[str, list[float]]) -> Made:
        arrays = {f"model.{key}": np.asarray(value, dtype=np.float32) for key, value in tensors.items()}
        save_file(arrays, self.directory / f"{name}.safetensors")
        return self


@pytest.fixture
def two(tmp_path: Path) -> tuple[Made, Made]:
    return Made(tmp_path / "a"), Made(tmp_path / "b")


def test_a_difference_is_relative_to_the_largest_element_of_its_tensor(two: tuple[Made, Made]) -> None:
    a, b = two
    found = compare(
        a.losses(2.0, 1.1).gradients(1, w=[1.0, 4.0], v=[0.50, 1.0]).weights(w=[1.0, 2.0], v=[1.0, 1.01]),
        b.losses(2.0, 1.0).gradients(1, w=[1.0, 4.0], v=[0.51, 1.0]).weights(w=[1.0, 2.0], v=[1.0, 1.00]),
    )
    assert (found.loss.value, found.loss.step) == (pytest.approx(0.1), 2)
    assert (found.first_gradients.value, found.first_gradients.where) == (pytest.approx(0.01, rel=1e-4), "model.v")
    assert (found.weights.value, found.weights.where) == (pytest.approx(0.01, rel=1e-4), "model.v")
    assert found.num_left_out == 0


def test_a_gradient_that_is_only_rounding_counts_little_and_its_weights_are_told_apart(two: tuple[Made, Made]) -> None:
    """The bias before a batch norm: another gradient, so another full step of Adam, and another running mean."""
    a, b = two
    found = compare(
        a.losses(1.0).gradients(1, w=[1.0], b=[1e-8]).buffers(mean=[0.51]).weights(w=[1.0], b=[0.01]),
        b.losses(1.0).gradients(1, w=[1.0], b=[-1e-8]).buffers(mean=[0.50]).weights(w=[1.0], b=[-0.01]),
    )
    assert found.first_gradients.value == pytest.approx(2e-6)  # 2e-8 over 1 % of the model's largest
    assert (found.weights.value, found.num_left_out, found.buffers.value) == (0.0, 1, 0.0)
    assert (found.left_out.value, found.left_out.where) == (pytest.approx(2.0), "model.b")


def test_a_buffer_that_differs_more_than_what_it_may_follow_counts(two: tuple[Made, Made]) -> None:
    a, b = two
    found = compare(
        a.losses(1.0).gradients(1, w=[1.0]).buffers(mean=[0.6]).weights(w=[1.0]),
        b.losses(1.0).gradients(1, w=[1.0]).buffers(mean=[0.5]).weights(w=[1.0]),
    )
    assert (found.buffers.value, found.buffers.where) == (pytest.approx(0.2, rel=1e-4), "model.mean")
    assert found.weights.value == 0.0


def test_what_the_optimizer_keeps_is_compared_without_what_is_only_rounding(two: tuple[Made, Made]) -> None:
    a, b = two
    found = compare(
        a.losses(1.0).gradients(1, w=[1.0], b=[1e-8]).optimizers(w=[1.1], b=[1e-8]).weights(w=[1.0], b=[0.01]),
        b.losses(1.0).gradients(1, w=[1.0], b=[-1e-8]).optimizers(w=[1.0], b=[-1e-8]).weights(w=[1.0], b=[0.01]),
    )
    assert (found.optimizers.value, found.optimizers.where) == (pytest.approx(0.1, rel=1e-4), "momentum of model.w")


def test_an_element_that_gets_its_first_gradient_later_is_judged_by_that_one(two: tuple[Made, Made]) -> None:
    """A row of an embedding that the first batch does not use: exact zeros are not amplified by any optimizer."""
    a, b = two
    found = compare(
        a.losses(1.0, 1.0).gradients(1, w=[1.0, 0.0]).gradients(2, w=[1.0, 1.0]).weights(w=[1.0, 0.9]),
        b.losses(1.0, 1.0).gradients(1, w=[1.0, 0.0]).gradients(2, w=[1.0, 1.0]).weights(w=[1.0, 1.0]),
    )
    assert found.num_left_out == 0
    assert found.weights.value == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("ours", "theirs", "value"),
    [
        ([float("nan")], [float("nan")], 0.0),
        ([float("inf")], [float("inf")], 0.0),
        ([float("nan")], [1.0], float("inf")),
        ([1.0], [float("inf")], float("inf")),
        ([0.0], [0.0], 0.0),
        ([1.0, 1.0], [1.0], float("inf")),
    ],
)
def test_what_is_not_finite_or_has_another_shape_is_no_small_difference(
    ours: list[float], theirs: list[float], value: float, two: tuple[Made, Made]
) -> None:
    a, b = two
    found = compare(
        a.losses(1.0).gradients(1, w=ours).weights(w=[1.0]), b.losses(1.0).gradients(1, w=theirs).weights(w=[1.0])
    )
    assert found.first_gradients.value == value


def test_what_only_one_side_has_is_a_difference(two: tuple[Made, Made]) -> None:
    a, b = two
    found = compare(
        a.losses(1.0).gradients(1, w=[1.0]).weights(w=[1.0]),
        b.losses(1.0, 0.5).gradients(1, w=[1.0], v=[1.0]).gradients(2, w=[1.0]).weights(w=[1.0], v=[1.0]),
    )
    assert (found.loss.value, found.loss.step) == (float("inf"), 2)
    assert (found.first_gradients.value, found.first_gradients.where) == (float("inf"), "model.v")
    assert (found.gradients.value, found.gradients.step) == (float("inf"), 1)
    assert (found.weights.value, found.weights.where) == (float("inf"), "model.v")


# --------------------------------------------------------------------------------------------------------- the capture


def test_a_capture_is_read_back_whatever_the_types(tmp_path: Path) -> None:
    model = nn.Module()
    model.low = nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    model.whole = nn.Parameter(torch.ones(2, 3, dtype=torch.float64).T)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("wave", torch.tensor([1 + 2j]))
    model.again = model.whole
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    writer = Writer(tmp_path / "captured", 0)

    def itself(_: str, tensor: Tensor | None) -> Tensor | None:
        return tensor

    writer.gradients(1, [("model.low", model.low)], itself)
    writer.gradients(1, [("model.whole", model.whole)], itself)  # another optimizer, in the same step
    writer.loss(1, 0.25)
    writer.gradients(2, [("model.low", model.low)], itself)
    writer.loss(2, float("nan"))
    writer.weights({"model": model}, itself)
    Writer(tmp_path / "nothing", 1).loss(1, 0.25)  # only worker 0 writes

    capture = CaptureReader(tmp_path / "captured")
    assert capture.losses[1] == 0.25
    assert np.isnan(capture.losses[2])
    assert sorted(capture.gradients) == [1, 2]
    found = compare(capture, CaptureReader(tmp_path / "captured"))
    assert (found.num_steps, found.loss.value, found.gradients.value, found.weights.value) == (2, 0.0, 0.0, 0.0)
    assert not (tmp_path / "nothing").exists()
