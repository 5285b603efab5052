"""The folder of a model of peft: its adapters alone, whole or not at all, here or in object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.storage.exports import written_to
from paceline.worker.state.adapter_weights import adapter_names, has_adapters, write_adapters

pytestmark = pytest.mark.thorough  # peft takes seconds to import
peft: Any = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def adapted() -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["first"], modules_to_save=["last"], init_lora_weights=False)
    model = peft.get_peft_model(Net(), config)
    model.add_adapter("other", peft.LoraConfig(r=1, target_modules=["first"], init_lora_weights=False))
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    held = model.state_dict()
    return {name: held[name] for name in adapter_names(model, list(held))}


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


EXPECTED = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


def test_only_models_of_peft_have_adapters_and_their_names_are_those_of_adapters() -> None:
    model = adapted()
    assert has_adapters(model) and not has_adapters(Net())
    names = weights_of(model)
    assert len(names) == 2 + 2 + 2, "two matrices of each adapter, and the saved module's weight and bias"
    assert not [name for name in names if "base_layer" in name or "original_module" in name]


def test_each_adapter_has_its_folder_and_peft_reads_both(tmp_path: Path) -> None:
    model = adapted()
    write_adapters(model, weights_of(model), tmp_path / "out")
    assert files(tmp_path / "out") == sorted([*EXPECTED, *(f"other/{name}" for name in EXPECTED[1:])])
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(Net(), str(tmp_path / "out"))
    loaded.load_adapter(str(tmp_path / "out" / "other"), adapter_name="other")
    x = torch.ones(3, 4)
    for name in ("default", "other"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        torch.testing.assert_close(loaded(x), model(x))


def test_what_peft_cannot_write_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    write_adapters(model, weights_of(model), tmp_path / "out")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path / "out")}

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no such kind")

    monkeypatch.setattr("peft.peft_model.safe_save_file", fails)
    with pytest.raises(CheckpointError, match="peft cannot write the adapters: ValueError: no such kind"):
        write_adapters(model, weights_of(model), tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path / "out")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_within_a_folder_are_sent_to_object_storage_too(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    model = adapted()
    with written_to(Path(f"file://{tmp_path}/far/tuned")) as local:
        write_adapters(model, weights_of(model), local)
    assert files(tmp_path / "far" / "tuned") == sorted([*EXPECTED, *(f"other/{name}" for name in EXPECTED[1:])])
