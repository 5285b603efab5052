"""Names of Accelerate that are not here are refused by name, with the way that there is."""

from __future__ import annotations

import datetime
import importlib

import pytest

from paceline.compat.accelerate.blank_tracker import BlankTracker
from paceline.compat.accelerate.options import Handlers
from paceline.compat.accelerate.refused_names import WAYS, way_for
from paceline.compat.accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from paceline.errors import PlanError


@pytest.mark.parametrize("module", ["paceline.compat.accelerate", "paceline.compat.accelerate.utils"])
@pytest.mark.parametrize(
    ("name", "way"),
    [("FullyShardedDataParallelPlugin", "shard=4"), ("PartialState", "process_index"), ("no_such_name", "lists what")],
)
def test_an_import_of_another_name_says_the_way(module: str, name: str, way: str) -> None:
    with pytest.raises(ImportError, match=f"{name} of accelerate.* is not in Paceline.*{way}"):
        getattr(importlib.import_module(module), name)


def test_what_python_looks_for_itself_is_no_refused_name() -> None:
    assert not hasattr(importlib.import_module("paceline.compat.accelerate"), "__wrapped__")


def test_every_way_is_one_sentence_with_the_page() -> None:
    for name in WAYS:
        assert way_for(name).endswith("(docs/how-to/bring-your-accelerate-program.md)")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GradientAccumulationPlugin(sync_with_dataloader=False), "over the end of an epoch"),
        (lambda: GradientAccumulationPlugin(adjust_scheduler=False), "steps with the optimizer"),
        (lambda: DataLoaderConfiguration(use_seedable_sampler=True), "is not needed"),
        (
            lambda: DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16),
            r"--plan 'cast\(dtype=fp16\)'",
        ),
    ],
)
def test_options_that_are_not_there_say_the_way(make: object, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()  # pyright: ignore[reportCallIssue]


def test_handlers_are_kept_or_told_of_or_refused() -> None:
    handlers, told = Handlers(), list[str]()
    profile, autocast = ProfileKwargs(with_flops=True), AutocastKwargs(enabled=False)
    waits = InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=2))
    handlers.take([profile, autocast, waits, InitProcessGroupKwargs(), DistributedDataParallelKwargs()], told.append)
    assert (handlers.profile, handlers.autocast) == (profile, autocast)
    assert told == ["InitProcessGroupKwargs(timeout=...) is not used: paceline run --timeout-s 120"]
    with pytest.raises(PlanError, match=r"kwargs_handlers=\[int\(...\)\]\) is not in Paceline"):
        handlers.take([1], told.append)


def test_a_tracker_says_that_it_keeps_nothing() -> None:
    told = list[str]()
    tracker = BlankTracker("wandb", told.append)
    assert tracker.log({"images": []}, step=3) is None
    assert len(told) == 1 and told[0].startswith("get_tracker('wandb').log(...) keeps nothing")
    assert not hasattr(tracker, "__len__")
