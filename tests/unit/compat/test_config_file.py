"""`paceline plan --from FILE` finds out of which framework a configuration is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.compat.config_file import convert_config_file

LAUNCH = {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"}


@pytest.mark.parametrize("name", ["default_config.yaml", "launch.yml", "launch.json"])
def test_a_file_of_accelerate_launch_is_known_by_its_name_or_its_keys(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(LAUNCH))  # JSON is YAML
    found = convert_config_file(path)
    assert "precision=bf16" in found.plan and found.job["workers"] == "4"
    assert convert_config_file(path, workers=2).job["workers"] == "2"


def test_every_other_file_is_one_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 1}}))
    assert main(["plan", "--from", str(path), "--workers", "2"]) == 0
    assert "shard=2+zero=1" in capsys.readouterr().out
    path.write_text("{")
    assert main(["plan", "--from", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
