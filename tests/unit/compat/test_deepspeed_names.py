"""The names of DeepSpeed's package: what a program imports is found here, or refused with the way here."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.compat.deepspeed as deepspeed
from paceline.compat.deepspeed.arguments import config_in_arguments
from paceline.compat.deepspeed.module_names import answer_imports, stop_answering
from paceline.compat.deepspeed.refusals import REFUSED, SUBMODULES, refusal
from paceline.errors import PlanError


@pytest.fixture(autouse=True)
def answered() -> Iterator[None]:
    answer_imports()
    yield
    stop_answering()
    for name in [one for one in sys.modules if one == "deepspeed" or one.startswith("deepspeed.")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", sorted(SUBMODULES))
def test_a_module_of_deepspeed_is_one_of_this_package(name: str) -> None:
    module = importlib.import_module(f"deepspeed.{name}")
    assert module.__name__ == f"paceline.compat.deepspeed.{SUBMODULES[name]}"
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__
    assert importlib.import_module(module.__name__) is module


@pytest.mark.parametrize("name", deepspeed.__all__)
def test_a_name_of_the_package_is_there(name: str) -> None:
    assert getattr(deepspeed, name) is not None


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_says_what_to_do(name: str) -> None:
    if "." not in name:
        with pytest.raises(AttributeError, match=rf"deepspeed\.{name} is not here: "):
            getattr(deepspeed, name)
    assert len(refusal(name)) > len(f"deepspeed.{name} is not here: ")


def test_a_refused_module_may_be_imported_and_not_used() -> None:
    module = importlib.import_module("deepspeed.moe.utils")
    with pytest.raises(PlanError, match=r"deepspeed\.moe\.utils\.is_moe_param is not here: experts are spread"):
        module.is_moe_param()
    with pytest.raises(PlanError, match=r"deepspeed\.moe\.layer\.MoE\.forward is not here"):
        _ = importlib.import_module("deepspeed.moe.layer").MoE.forward


def test_an_unknown_module_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"deepspeed\.nothing is not here\. What is here is in docs/"):
        importlib.import_module("deepspeed.nothing")


def test_deepspeed_itself_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    with pytest.raises(ImportError, match="is imported already"):
        answer_imports()


def test_the_arguments_of_a_program_name_its_configuration() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    found = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (found.deepspeed, found.deepspeed_config) == (True, "ds.json")
    assert config_in_arguments(["--steps", "3", "--deepspeed_config", "ds.json"]) == "ds.json"
    assert config_in_arguments(["--deepspeed_config=ds.json"]) == "ds.json"
    assert config_in_arguments(["--deepspeed_config"]) is None
    assert config_in_arguments(["ds.json"]) is None


def test_the_page_that_refusals_name_is_there() -> None:
    assert (Path(__file__).parents[3] / "docs/how-to/bring-your-deepspeed-program.md").is_file()
