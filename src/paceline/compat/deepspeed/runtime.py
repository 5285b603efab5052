"""`deepspeed.runtime`: the modules of it that programs reach by their names."""

from __future__ import annotations

from paceline.compat.deepspeed import data as dataloader
from paceline.compat.deepspeed import engine, utils, zero
from paceline.compat.deepspeed import pipeline as pipe
from paceline.compat.deepspeed import schedules as lr_schedules

__all__ = ["dataloader", "engine", "lr_schedules", "pipe", "utils", "zero"]
