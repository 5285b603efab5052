"""Workers find whether they were given the same samples, of every kind of array and however many there are."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np
import pytest
import torch

from paceline.compat.keras.data import InputRows, SampleSource, have_same_samples, sample_source, whole

VALUES = np.arange(1.0, 201.0)


def same(one: SampleSource, other: SampleSource) -> bool:
    return have_same_samples(one.fingerprint(), other.fingerprint())


@pytest.mark.parametrize("kind", ["bool", "uint8", "int64", "float16", "float32", "float64", "complex64"])
def test_arrays_of_every_kind_are_compared(kind: str) -> None:
    x = (VALUES % 3).astype(kind)
    other = x.copy()
    other[-1] = 0 if x[-1] else 1
    assert same(sample_source(x), sample_source(x.copy()))
    assert not same(sample_source(x), sample_source(other))
    assert not same(sample_source(x), sample_source(x[:-1]))
    assert not same(sample_source(x), sample_source(x, x))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 2**24 + 3])
def test_the_first_and_the_last_row_are_among_those_compared(length: int) -> None:
    def fingerprint(marked: int | None) -> tuple[float, ...]:
        rows = torch.zeros(length, dtype=torch.uint8)
        if marked is not None:
            rows[marked] = 1
        return SampleSource(samples=InputRows((rows, None, None)), collate=whole).fingerprint()

    assert fingerprint(None) == (length, 0.0)
    assert fingerprint(0) == fingerprint(-1) == (length, 1.0)


def test_sums_may_differ_by_how_a_host_rounds_and_lengths_may_not() -> None:
    assert have_same_samples((200.0, 0.1 + 0.2), (200.0, 0.3))
    assert not have_same_samples((200.0, 0.3), (200.0, 0.300001))
    assert not have_same_samples((2.0**33, 0.3), (2.0**33 + 1, 0.3))
    x = np.where(VALUES == 1.0, np.nan, VALUES)
    assert same(sample_source(x), sample_source(x))
