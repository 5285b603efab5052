"""Runs with a `remote_dir` in a real S3 server: new machines, faults, kills, a store that is away."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load

from object_servers import CREDENTIALS, faulty_proxy, s3_server
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.storage.object_store import ObjectStore
from programs import PACELINE, checkpoints, command, reference_losses, run, write_program
from remote_runs import complete_steps

BATCH = "batch(size=12,micro=3)"
LARGE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def train(worker):
    model = worker.prepare(nn.Linear(1000, 4000))  # with its optimizer's state three parts of 16 MiB
    optim = worker.prepare(torch.optim.AdamW(model.parameters()))
    step = worker.stepper(model, optim, nn.functional.mse_loss)
    for batch in worker.batches(TensorDataset(torch.ones(8, 1000), torch.ones(8, 4000))):
        step(batch)


if __name__ == "__main__":
    paceline.run(train, plan="batch(size=4)")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)


def remote_of(address: str) -> RemoteCheckpoints:
    return RemoteCheckpoints(ObjectStore(address))


def losses_of(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def test_a_new_machine_goes_on_with_another_number_of_workers_through_a_store_that_fails_at_random(
    tmp_path: Path, server: str
) -> None:
    train, address = write_program(tmp_path), "s3://bucket/runs/moved"
    with faulty_proxy(server, seed=5) as proxy:
        proxy.rate = 0.1
        words = ("--plan", f"shard=2+{BATCH}", "--workers", "2", "--max-steps", "4")
        shaky = {"AWS_ENDPOINT_URL": proxy.url}
        code, output = run(
            *PACELINE, "run", train, *words, "--run-dir", "first", "--remote-dir", address, environment=shaky
        )
        assert code == 0 and "step 4  checkpoint uploaded to s3://bucket/runs/moved/step_00000004" in output, output
        assert complete_steps(remote_of(address)) == [4] and (proxy.num_faults or proxy.rate)
        code, output = run(
            *PACELINE, "run", train, "--plan", BATCH, "--workers", "1", "--run-dir", "second", "--remote-dir", address,
            environment=shaky,
        )  # fmt: skip
    assert code == 0 and "downloading s3://bucket/runs/moved/step_00000004" in output, output
    assert complete_steps(remote_of(address)) == checkpoints(tmp_path / "second") == [4, 8]
    found = losses_of(tmp_path / "first") | losses_of(tmp_path / "second")
    assert sorted(losses_of(tmp_path / "second")) == [5, 6, 7, 8]
    assert [found[step] for step in range(1, 9)] == pytest.approx(reference_losses(), rel=1e-4)
    for path in tmp_path.rglob("*"):  # nothing of the credentials is in any record
        if path.is_file():
            assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path


def test_a_kill_during_an_upload_costs_no_part_that_is_there(tmp_path: Path, server: str) -> None:
    train, address = write_program(tmp_path, text=LARGE), "s3://bucket/runs/killed"
    words = (*PACELINE, "run", train, "--run-dir", "large", "--remote-dir", address)
    with faulty_proxy(server) as proxy:
        environment = {"AWS_ENDPOINT_URL": proxy.url}
        proxy.most_part_bytes, proxy.num_large = 1 << 20, 1
        with command(*words, environment=environment) as program:
            assert proxy.held.wait(60)
            until = time.monotonic() + 60
            while proxy.body_bytes < 13 << 20 and time.monotonic() < until:  # one part is there, whichever
                time.sleep(0.02)
            os.kill(program.process.pid, signal.SIGKILL)
            program.process.wait()
            assert program.left(limit_s=20.0) == []
        assert complete_steps(remote_of(address)) == []
        proxy.let_go.set()
        before, uploads = proxy.body_bytes, proxy.count("POST", "?uploads")
        code, output = run(*words, "--no-save-at-end", environment=environment)
        assert code == 0, output
        (size,) = [one.num_bytes for one in remote_of(address).look()]
        assert size > 40 << 20 and (proxy.body_bytes - before) < size - (13 << 20), output
        assert proxy.count("POST", "?uploads") == uploads == 1  # the upload that was begun is the one that ended
    assert complete_steps(remote_of(address)) == checkpoints(tmp_path / "large")
    assert [path.name for path in (tmp_path / "large" / "uploads").glob("step_*")] == []


def test_a_store_that_goes_away_costs_the_run_nothing_and_gets_all_at_the_next_start(
    tmp_path: Path, server: str
) -> None:
    train, address = write_program(tmp_path), "s3://bucket/runs/away"
    with faulty_proxy(server) as proxy:
        words = (*PACELINE, "run", train, "--run-dir", "away", "--remote-dir", address, "--remote-wait-s", "1")
        with command(*words, environment={"AWS_ENDPOINT_URL": proxy.url}) as program:
            until = time.monotonic() + 60
            while not (tmp_path / "away" / "attempt_1").exists() and time.monotonic() < until:
                time.sleep(0.01)
            proxy.is_away = True  # it was there when the run began
            code, output = program.end()
            assert code == 0 and "not in s3://bucket/runs/away" in output, output
            assert program.left(limit_s=10.0) == []
    assert checkpoints(tmp_path / "away") == [4, 8] and complete_steps(remote_of(address)) == []
    code, output = run(*PACELINE, "run", train, "--run-dir", "away", "--remote-dir", address)
    assert code == 0 and complete_steps(remote_of(address)) == [4, 8], output


@pytest.mark.further  # tests/unit/checkpoint/test_export_remote.py has the command's part
def test_weights_are_exported_to_a_store_and_from_one(tmp_path: Path) -> None:
    train, address = write_program(tmp_path), "s3://bucket/runs/exported"
    text = train.read_text().replace(
        '    return {"step"', '    worker.save_model("s3://bucket/saved/model.safetensors")\n    return {"step"'
    )
    train.write_text(text)
    code, output = run(*PACELINE, "run", train, "--run-dir", "run", "--remote-dir", address)
    assert code == 0, output
    store = ObjectStore("s3://bucket")
    saved = load(store.read("saved/model.safetensors"))
    for words in (
        (address, "s3://bucket/exported/model.safetensors"),
        ("run", "s3://bucket/exported/folder"),
        (f"{address}/step_00000008", "model.safetensors"),
    ):
        code, output = run(*PACELINE, "export", *words)
        assert code == 0 and "model.safetensors" in output, output
    found = [store.read("exported/model.safetensors"), store.read("exported/folder/model.safetensors")]
    for data in (*found, (tmp_path / "model.safetensors").read_bytes()):
        assert {name: value.tolist() for name, value in load(data).items()} == {
            name: value.tolist() for name, value in saved.items()
        }
    store.write("exported/folder/model-00001-of-00002.safetensors", b"")
    code, output = run(*PACELINE, "export", "run", "s3://bucket/exported/folder")
    assert code == 1 and "has other weights already" in output, output
    code, output = run(*PACELINE, "export", "s3://bucket/nothing", "none.safetensors")
    assert code == 1 and "neither a checkpoint nor a run" in output, output


def test_a_store_that_cannot_be_used_is_found_before_anything_starts(tmp_path: Path) -> None:
    train = write_program(tmp_path)
    code, output = run(*PACELINE, "run", train, "--run-dir", "none", "--remote-dir", "s3://no-such-bucket/a")
    assert code == 2 and "make the bucket first" in output and not (tmp_path / "none").exists(), output


def test_a_scripts_own_remote_dir_is_asked_for_at_the_command(tmp_path: Path) -> None:
    train = write_program(tmp_path)
    train.write_text(train.read_text().replace("save_every=4", "save_every=4, remote_dir='s3://bucket/runs/own'"))
    code, output = run(*PACELINE, "run", train, "--run-dir", "own")
    assert code == 2 and "--remote-dir s3://bucket/runs/own" in output, output
    code, output = run(PACELINE[0], train)
    assert code == 0 and complete_steps(remote_of("s3://bucket/runs/own")) == [4, 8], output
