"""Numbers with units read well at every size, and never show a rounded-up "1000"."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.units import GiB, KiB, MiB, bytes_text, count_text, duration_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.00 KiB"),
        (8 * MiB, "8.00 MiB"),
        (1.949 * GiB, "1.95 GiB"),
        (1023.9 * MiB, "1.00 GiB"),
        (24 * GiB, "24.0 GiB"),
        (-3 * KiB, "-3.00 KiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_sizes_use_binary_units(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (7, "7"), (2.5, "2.50"), (950, "950"), (999.7, "1.00 k"), (12_345, "12.3 k"), (10_700_000, "10.7 M")],
)
def test_counts_use_decimal_units(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.5e-7, "0.35 us"),
        (350e-6, "350 us"),
        (999.9e-6, "1.00 ms"),
        (0.0125, "12.5 ms"),
        (1.849, "1.85 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (2 * 3600 + 4 * 60, "2 h 04 min"),
        (86400 - 1, "1 d 00 h"),
        (73 * 3600, "3 d 01 h"),
        (-0.5, "-500 ms"),
    ],
)
def test_durations_choose_their_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats(min_value=1e-7, max_value=1e8))
def test_no_duration_shows_sixty_seconds_or_a_thousand_of_a_unit(seconds: float) -> None:
    text = duration_text(seconds)
    assert not re.search(r"(?<![\d.])(1000|60 (s|min)|24 h)\b", text), text
