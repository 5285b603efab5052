"""Keras on another back end, an old one and a missing one are refused at the import, with the way."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
from torch import nn

from paceline.errors import PlanError
from paceline.worker.state import foreign_models


def fake_keras(version: str, backend: str) -> types.ModuleType:
    found = types.ModuleType("keras")
    found.__dict__.update(__version__=version, backend=types.SimpleNamespace(backend=lambda: backend))
    return found


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (fake_keras("3.15.1", "tensorflow"), "Keras computes with tensorflow here.*KERAS_BACKEND=torch before keras"),
        (fake_keras("3.15.1", "jax"), "Keras computes with jax here"),
        (fake_keras("2.15.0", "torch"), r"keras 2.15.0 .*Use Keras 3: pip install 'keras>=3.15,<4'"),
        (None, "Keras cannot be imported.*pip install 'keras>=3.15,<4'"),
    ],
)
def test_import_is_refused(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None, said: str) -> None:
    monkeypatch.setitem(sys.modules, "keras", module)  # None: as if it were not there
    for name in [name for name in sys.modules if name.startswith("paceline.compat.keras")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PlanError, match=said):
        importlib.import_module("paceline.compat.keras")


def test_preparing_finds_the_package_of_a_frameworks_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class FrameworkModel(nn.Linear):
        pass

    settled: list[nn.Module] = []
    framework, package = types.ModuleType("fake_framework"), types.ModuleType("fake_package")
    framework.__dict__["Layer"], package.__dict__["bind"] = FrameworkModel, settled.append
    monkeypatch.setitem(sys.modules, "fake_package", package)
    monkeypatch.setattr(foreign_models, "FOREIGN", {"fake_framework": ("Layer", "fake_package", "bind")})
    model = FrameworkModel(2, 2)
    foreign_models.settle_foreign_model(model)
    assert settled == []  # a framework that nobody has imported has no models
    monkeypatch.setitem(sys.modules, "fake_framework", framework)
    foreign_models.settle_foreign_model(nn.Linear(2, 2))
    assert settled == []
    foreign_models.settle_foreign_model(model)
    assert settled == [model]
