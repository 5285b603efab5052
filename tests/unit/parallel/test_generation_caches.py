"""Caches for generation are off while a model is trained, and on again in what is published."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from paceline.parallel.generation_caches import had_cache, is_of_transformers, turn_caches_off
from paceline.worker.state.published_models import config_text
from tuned_models import base


@pytest.mark.thorough
def test_what_is_published_has_the_cache_as_it_was() -> None:
    model: Any = base()
    assert is_of_transformers(nn.Sequential(model))
    assert turn_caches_off(nn.Sequential(model))
    assert model.config.use_cache is False
    assert json.loads(config_text(model) or "")["use_cache"] is True
    assert not turn_caches_off(model), "it was off"


def test_a_model_that_had_none_is_left_as_it_is() -> None:
    model: Any = base()
    model.config.use_cache = False
    assert not turn_caches_off(model)
    assert not had_cache(model)
    assert json.loads(config_text(model) or "")["use_cache"] is False
    assert not is_of_transformers(nn.Linear(1, 1))
