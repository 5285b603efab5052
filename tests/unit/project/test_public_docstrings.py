"""Every public name is explained where `help()` finds it: its errors, and an example that runs."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import paceline
from docstring_examples import example

NEEDS_A_WORKER = ("StepBatch",)
METHODS = [name for name, _ in inspect.getmembers(paceline.Worker, inspect.isfunction) if not name.startswith("_")]
EVERYTHING = [*paceline.__all__, *(f"Worker.{name}" for name in METHODS)]


def named(name: str) -> object:
    thing: object = paceline
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", EVERYTHING)
def test_docstring_says_which_errors_are_raised(name: str) -> None:
    text = inspect.getdoc(named(name)) or ""
    assert re.search(r"\braise[sd]?\b", text, re.IGNORECASE), f"paceline.{name} does not say what it raises"


@pytest.mark.parametrize("name", EVERYTHING)
def test_docstring_has_an_example_of_that_name(name: str) -> None:
    code = example(named(name))
    assert code, f"paceline.{name} has no block below `Example::`"
    compile(code, name, "exec")
    word = name.rpartition(".")[2]
    uses = {"StepBatch": "batches", "PacelineError": "PacelineError", "Worker": "worker"}.get(word, word)
    assert re.search(rf"\b{uses}\b", code), f"the example of paceline.{name} does not use it"


@pytest.mark.parametrize("name", [name for name in paceline.__all__ if name not in NEEDS_A_WORKER])
def test_example_runs(name: str) -> None:
    exec(example(named(name)), {"paceline": paceline, "torch": torch})


def test_public_attributes_of_workers_are_explained() -> None:
    properties = [name for name, _ in inspect.getmembers(paceline.Worker, inspect.isdatadescriptor)]
    public = [name for name in properties if not name.startswith("_")]
    assert public
    assert all(inspect.getdoc(getattr(paceline.Worker, name)) for name in public)


def test_reader_finds_the_block_below_the_word() -> None:
    class Documented:
        """One line.

        Example::

            x = [
                1,

            ]

        More.
        """

    class Plain:
        """One line, with Example: x."""

    assert example(Documented) == "x = [\n    1,\n\n]"
    assert example(Plain) == ""
