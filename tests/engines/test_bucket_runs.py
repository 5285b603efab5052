"""Whole runs on the stores' servers: checkpoints, kill -9, other numbers of workers, exports, data and models there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load
from transformers.utils import logging

import paceline
from bucket_servers import STORES, BucketServer, bucket_server
from object_servers import faulty_proxy
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
STREAMED = """\
import json

import torch
from torch import nn

import paceline


def rows(address):
    with paceline.open_file(address, block_bytes=100) as file:
        for line in file:
            number = float(json.loads(line)["n"])
            yield torch.tensor([number]), torch.tensor([number % 3])


def train(worker):
    torch.manual_seed(1)
    model = worker.prepare(nn.Linear(1, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=1e-4))
    step = worker.stepper(model, optim, nn.functional.mse_loss)
    for batch in worker.batches(paceline.ShardedStream.of_files("ADDRESS/*.jsonl", rows)):
        worker.report(loss=step(batch))


if __name__ == "__main__":
    paceline.run(train, plan="batch(size=10,micro=2)", save_every=2)
"""


@pytest.fixture(scope="module", params=STORES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with bucket_server(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def remote_of(address: str) -> RemoteCheckpoints:
    return RemoteCheckpoints(ObjectStore(address))


def losses_of(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def test_a_new_machine_goes_on_with_another_number_of_workers_through_a_store_that_fails_at_random(
    server: BucketServer, tmp_path: Path
) -> None:
    train, address = write_program(tmp_path), server.address("runs/moved")
    with faulty_proxy(server.url, seed=5) as proxy:
        proxy.rate = 0.1
        shaky = dict(server.environment(proxy.url))
        words = ("--plan", f"shard=2+{BATCH}", "--workers", "2", "--max-steps", "4")
        code, output = run(
            *PACELINE, "run", train, *words, "--run-dir", "first", "--remote-dir", address, environment=shaky
        )
        assert code == 0 and f"step 4  checkpoint uploaded to {address}/step_00000004" in output, output
        assert complete_steps(remote_of(address)) == [4]
        words = ("--plan", BATCH, "--workers", "1", "--keep", "1")
        code, output = run(
            *PACELINE, "run", train, *words, "--run-dir", "second", "--remote-dir", address, environment=shaky
        )
    assert code == 0 and f"downloading {address}/step_00000004" in output, output
    assert complete_steps(remote_of(address)) == checkpoints(tmp_path / "second") == [8]  # the newest one stays
    found = losses_of(tmp_path / "first") | losses_of(tmp_path / "second")
    assert sorted(losses_of(tmp_path / "second")) == [5, 6, 7, 8]
    assert [found[step] for step in range(1, 9)] == pytest.approx(reference_losses(), rel=1e-4)
    secret = [value for value in server.environment().values() if "AccountKey" in value or "secret" in value]
    for path in tmp_path.rglob("*"):  # nothing of the credentials is in any record
        if path.is_file():
            assert not any(value.encode() in path.read_bytes() for value in secret), path


def test_a_kill_during_an_upload_costs_no_part_that_is_there(server: BucketServer, tmp_path: Path) -> None:
    train, address = write_program(tmp_path, text=LARGE), server.address("runs/killed")
    words = (*PACELINE, "run", train, "--run-dir", "large", "--remote-dir", address)
    with faulty_proxy(server.url) as proxy:
        environment = dict(server.environment(proxy.url))
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
        before = proxy.body_bytes
        code, output = run(*words, "--no-save-at-end", environment=environment)
        assert code == 0, output
        (size,) = [one.num_bytes for one in remote_of(address).look()]
        assert size > 40 << 20 and (proxy.body_bytes - before) < size - (13 << 20), output
    assert complete_steps(remote_of(address)) == checkpoints(tmp_path / "large")
    assert [path.name for path in (tmp_path / "large" / "uploads").glob("step_*")] == []


def test_weights_are_exported_to_a_store_and_from_one(server: BucketServer, tmp_path: Path) -> None:
    train, address = write_program(tmp_path), server.address("runs/exported")
    saved = server.address("saved/model.safetensors")
    text = train.read_text().replace('    return {"step"', f'    worker.save_model("{saved}")\n    return {{"step"')
    train.write_text(text)
    code, output = run(*PACELINE, "run", train, "--run-dir", "run", "--remote-dir", address)
    assert code == 0, output
    code, output = run(*PACELINE, "export", address, server.address("exported/folder"))
    assert code == 0 and "model.safetensors" in output, output
    store = ObjectStore(server.address("saved"))
    folder = ObjectStore(server.address("exported/folder"))
    assert {name: value.tolist() for name, value in load(folder.read("model.safetensors")).items()} == {
        name: value.tolist() for name, value in load(store.read("model.safetensors")).items()
    }
    folder.write("model-00001-of-00002.safetensors", b"")
    code, output = run(*PACELINE, "export", "run", server.address("exported/folder"))
    assert code == 1 and "has other weights already" in output, output
    code, output = run(*PACELINE, "checkpoints", address)
    assert code == 0 and f"{address}/step_00000008" in output, output


def test_a_run_streams_its_data_from_a_store_and_goes_on_with_other_workers(
    server: BucketServer, tmp_path: Path
) -> None:
    store = ObjectStore(server.address("data"))
    for file, length in enumerate((23, 17, 0, 30, 10)):
        lines = [json.dumps({"n": file * 10 + number}) + "\n" for number in range(length)]
        store.write(f"{file}.jsonl", "".join(lines).encode())
    train = write_program(tmp_path, text=STREAMED.replace("ADDRESS", server.address("data")))
    code, output = run(*PACELINE, "run", train, "--workers", "1", "--run-dir", "alone")
    assert code == 0, output
    with faulty_proxy(server.url, seed=3) as proxy:
        proxy.rate = 0.1
        shaky = dict(server.environment(proxy.url))
        for words in (("--workers", "2", "--max-steps", "4"), ("--workers", "3")):
            code, output = run(*PACELINE, "run", train, *words, "--run-dir", "moved", environment=shaky)
            assert code == 0, output
        assert proxy.num_faults
    alone, moved = losses_of(tmp_path / "alone"), losses_of(tmp_path / "moved")
    assert sorted(moved) == sorted(alone) == list(range(1, 9))
    assert [moved[step] for step in sorted(moved)] == pytest.approx([alone[step] for step in sorted(alone)], rel=1e-5)


def test_a_model_comes_from_a_folder_there(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.disable_progress_bar()  # which would leave a thread behind
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32
    )
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    store = ObjectStore(server.address("models/tiny"))
    for path in (tmp_path / "base").iterdir():
        store.write(path.name, path.read_bytes())
    model = paceline.from_pretrained(server.address("models/tiny"))
    found, expected = dict(model.named_parameters()), dict(base.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].detach().cpu(), expected[name].detach()) for name in found)


def test_a_store_that_cannot_be_used_is_found_before_anything_starts(server: BucketServer, tmp_path: Path) -> None:
    train = write_program(tmp_path)
    absent = f"{server.store}://no-such-bucket/a"
    code, output = run(*PACELINE, "run", train, "--run-dir", "none", "--remote-dir", absent)
    assert code == 2 and "make the bucket first" in output and not (tmp_path / "none").exists(), output
