"""Packed rows through a Llama of transformers: the losses of its sequences by themselves, under each layout."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forked import World
from paceline.data.packed_sequences import PackedSequences
from paceline.plan import Batch, Layout, Plan
from tuned_models import base

IGNORED = -100
DRAWS = torch.Generator().manual_seed(5)
TEXTS = [torch.randint(1, 32, (int(size),), generator=DRAWS) for size in torch.randint(2, 16, (40,), generator=DRAWS)]
ROWS = PackedSequences([{"input_ids": one, "completion_mask": torch.arange(len(one)) > 1} for one in TEXTS], 16)
BATCH = Batch(size=8, micro=2)


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the tokens that count, and their number."""
    targets = labels[:, 1:]
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def of_rows(model: Any, micro: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=micro["input_ids"], position_ids=micro["position_ids"]).logits
    return token_losses(logits, micro["labels"])


def of_sequences(model: Any, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same for each sequence of each row by itself, without positions or masks."""
    parts: list[tuple[Tensor, Tensor]] = []
    for tokens, positions, labels in zip(rows["input_ids"], rows["position_ids"], rows["labels"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for begin, end in itertools.pairwise(starts):
            logits = model(input_ids=tokens[None, begin:end], use_cache=False).logits
            parts.append(token_losses(logits, labels[None, begin:end]))
    return sum(one for one, _ in parts), sum(count for _, count in parts)  # pyright: ignore[reportReturnType]


def trained(worker: Any, forward: Any = of_rows, checkpointing: dict[str, bool] | None = None) -> list[float]:
    given = base()
    if checkpointing is not None:
        given.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    model = worker.prepare(given)
    step = worker.stepper(model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01)), forward=forward)
    return [step(batch).item() for batch in worker.batches(ROWS, epochs=2)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Each sequence by itself, in one process."""
    return World(tmp_path_factory.mktemp("one")).one_process(
        functools.partial(trained, forward=of_sequences), Plan(batch=BATCH)
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2),
        Layout(stages=2),
        Layout(context=2),
        pytest.param(Layout(shard=2), marks=pytest.mark.further),
        pytest.param(Layout(), marks=pytest.mark.further),
    ],
    ids=str,
)
def test_rows_have_the_losses_of_their_sequences(layout: Layout, world: World, expected: list[float]) -> None:
    assert len(ROWS) > 16, "the last batch is not full"
    for found in world(trained, layout.workers_each, Plan(layout=layout, batch=BATCH)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "reentrant"),
    [
        (Layout(stages=2), False),
        (Layout(stages=2), True),
        pytest.param(Layout(stages=2, schedule="zero-bubble"), False, marks=pytest.mark.further),
        pytest.param(Layout(shard=2), True, marks=pytest.mark.further),
        pytest.param(Layout(tensor=2), True, marks=pytest.mark.further),
        pytest.param(Layout(context=2), False, marks=pytest.mark.further),
    ],
    ids=str,
)
def test_the_same_with_gradient_checkpointing_of_transformers(
    layout: Layout, reentrant: bool, world: World, expected: list[float]
) -> None:
    function = functools.partial(trained, checkpointing={"use_reentrant": reentrant})
    for found in world(function, layout.workers_each, Plan(layout=layout, batch=BATCH)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
