"""Rates of a device and a disk: sizes are right, and nothing is left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from paceline.doctor import rates, storage
from paceline.doctor.findings import SLOW_DISK

CPU = torch.device("cpu")


def test_rates_are_operations_and_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_median_s", lambda run, device, seconds: 2.0)
    assert rates.matmul_rates(CPU, seconds=1.0) == {"fp32": 1024**3, "bf16": 1024**3, "fp16": 256**3}
    assert rates.memory_bandwidth(CPU, seconds=1.0) == 2 * (1 << 26) / 2
    assert rates.attention_rate(CPU, seconds=1.0) == 3.5 * 4 * 512 * 512 * 4 * 128 / 2 / 2
    assert rates.launch_s(CPU, seconds=1.0) == 0.02


def test_a_disk_has_rates_and_keeps_no_file(tmp_path: Path) -> None:
    written, read = storage.disk_rates(tmp_path, name="probe", seconds=0.01)
    assert written > 0
    assert read > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_keeps_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.disk_rates(tmp_path, name="probe", seconds=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_has_a_low_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rate is that of what has arrived there, and not in the kernel's memory."""
    monkeypatch.setattr(storage, "SYNCED", storage.PIECE)
    monkeypatch.setattr(os, "fdatasync", lambda _: time.sleep(0.1))
    written, _ = storage.disk_rates(tmp_path, name="probe", seconds=0.01)
    assert written < SLOW_DISK
