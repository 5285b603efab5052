"""`paceline migrate --check`: which uses of frameworks a program's text has, and what becomes of each."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.compat.migrate.check import CallFinding, MigrationReport, check_program_calls
from paceline.compat.migrate.tables import FrameworkTable, framework_tables

TORCH = """\
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed.rpc as rpc

def main(rank):
    dist.init_process_group("gloo")
    model = DDP(net())
    fully_shard(model)
    dist.recv(t)
    dist.recv(t, src=1)
    rpc.init_rpc("w")
    op = dist.ReduceOp.SUM

mp.spawn(main, nprocs=2)
"""
ACCELERATE = """\
from accelerate import Accelerator

class Job:
    def __init__(self):
        self.accelerator = Accelerator()
        self.model = self.accelerator.prepare(net())

    def run(self):
        if self.accelerator.is_main_process:
            print(self.accelerator.num_processes)
        self.accelerator.unscale_gradients()
"""
HOROVOD = """\
import horovod.torch as hvd

hvd.init()
hvd.allreduce(x, op=hvd.Average)
hvd.run(train)
hvd.no_such_call()
"""
DEEPSPEED = """\
import deepspeed

engine, _, loader, _ = deepspeed.initialize(model=net(), config="ds.json")
loss = engine(batch)
engine.backward(loss)
engine.step()
deepspeed.init_inference(model)
"""
KERAS = "import keras\nmodel = keras.Sequential()\nmodel.fit(x, y)\nkeras.distribution.set_distribution(d)\n"
TENSORFLOW = """\
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
tpu = tf.distribute.TPUStrategy(r)
"""


def check(folder: Path, text: str, **beside: str) -> MigrationReport:
    (folder / "train.py").write_text(text)
    for name, other in beside.items():
        (folder / f"{name}.py").write_text(other)
    return check_program_calls(folder / "train.py")


def verdicts(report: MigrationReport) -> dict[str, str]:
    return {f"{one.call}:{one.line}": one.verdict for one in report.findings}


def of_call(report: MigrationReport, call: str) -> CallFinding:
    (found,) = [one for one in report.findings if one.call == call]
    return found


def test_torchs_own_calls_work_but_those_that_cannot(tmp_path: Path) -> None:
    report = check(tmp_path, TORCH)
    assert verdicts(report) == {
        "dist.init_process_group:8": "works",
        "DDP:9": "works",
        "fully_shard:10": "works",
        "dist.recv:11": "refused",
        "dist.recv:12": "works",
        "rpc.init_rpc:13": "refused",
        "mp.spawn:16": "works",
    }
    assert report.num_refused == 2
    assert report.starts == (f"paceline run {tmp_path / 'train.py'} --workers N",)
    assert of_call(report, "DDP").name == "torch.nn.parallel.DistributedDataParallel"


def test_methods_are_known_by_what_was_called(tmp_path: Path) -> None:
    report = check(tmp_path, ACCELERATE)
    found = {one.call: one.verdict for one in report.findings}
    assert found["Accelerator"] == found["self.accelerator.prepare"] == "works"
    assert found["self.accelerator.num_processes"] == "counterpart"
    assert found["self.accelerator.unscale_gradients"] == "refused"
    assert "self.accelerator.is_main_process" not in found  # it works, and is no call
    assert report.changes == (
        ("from accelerate import Accelerator", "from paceline.compat.accelerate import Accelerator"),
    )


def test_a_changed_program_has_nothing_more_to_change(tmp_path: Path) -> None:
    report = check(tmp_path, ACCELERATE.replace("from accelerate", "from paceline.compat.accelerate"))
    assert {one.verdict for one in report.findings} == {"works", "counterpart", "refused"}
    assert not report.changes


def test_each_framework_has_its_way_to_start(tmp_path: Path) -> None:
    horovod = check(tmp_path, HOROVOD)
    assert {one.call: one.verdict for one in horovod.findings} == {
        "hvd.init": "works",
        "hvd.allreduce": "works",
        "hvd.run": "refused",
        "hvd.no_such_call": "refused",
    }
    assert horovod.starts[0].startswith("paceline run --as horovod ")
    deepspeed = check(tmp_path, DEEPSPEED)
    assert {one.call: one.verdict for one in deepspeed.findings} == {
        "deepspeed.initialize": "works",
        "engine": "works",
        "engine.backward": "works",
        "engine.step": "works",
        "deepspeed.init_inference": "refused",
    }
    keras = check(tmp_path, KERAS)
    assert {one.call: one.verdict for one in keras.findings} == {
        "model.fit": "counterpart",
        "keras.distribution.set_distribution": "refused",
    }
    tensorflow = check(tmp_path, TENSORFLOW)
    assert [one.verdict for one in tensorflow.findings] == ["works", "refused"]
    assert tensorflow.starts[0].startswith("paceline run --for tensorflow ")


def test_modules_beside_the_script_are_read_one_level_deep(tmp_path: Path) -> None:
    one = "import torch.distributed as dist\nimport below\n\ndef average(x):\n    dist.all_reduce(x)\n"
    report = check(
        tmp_path, "from beside import average\n", beside=one, below="import torch\ntorch.distributed.barrier()\n"
    )
    assert [(Path(each.file).name, each.call) for each in report.findings] == [("beside.py", "dist.all_reduce")]


def test_the_command_prints_a_table_or_json_and_tells_of_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCH)
    assert main(["migrate", "--check", str(script)]) == 1
    text = capsys.readouterr().out
    assert "5 work, 2 are refused" in text
    assert "start with" in text
    assert main(["migrate", "--check", str(script), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["num_refused"] == 2
    script.write_text("import torch\nprint(torch.ones(1))\n")
    assert main(["migrate", "--check", str(script)]) == 0
    assert "it trains in one process" in capsys.readouterr().out
    script.write_text("def work(:\n")
    assert main(["migrate", "--check", str(script)]) == 2
    assert "is no Python program" in capsys.readouterr().err
    assert main(["migrate", str(script)]) == 2
    assert "changes no program" in capsys.readouterr().err


@pytest.mark.parametrize("table", framework_tables(), ids=lambda table: table.name)
def test_what_works_is_there(table: FrameworkTable) -> None:
    """Each name that a table says works exists in the module that has it here; methods count with their class."""
    if importlib.util.find_spec(table.here) is None:
        pytest.skip(f"{table.here} is not installed")
    if table.name == "Keras":
        pytest.importorskip("keras", reason="Keras is not installed here; make test-compat installs it")
    for name in table.works:
        path = f"{table.here}.{name}" if table.module else name
        assert resolved(path) is not None, f"{table.name}: {name} works, and there is no {path}"


def resolved(path: str) -> object | None:
    """What a full name stands for."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            found = member(found, name)
        return found
    return None


def member(thing: object, name: str) -> object | None:
    """An attribute, also of a class's objects or its subclasses, as far as their source tells."""
    if not isinstance(thing, type) or hasattr(thing, name):
        return getattr(thing, name, None)
    classes = [thing, *thing.__subclasses__()]
    sources = [inspect.getsource(one) for one in classes]
    return True if any(hasattr(one, name) for one in classes) or any(f"self.{name}" in one for one in sources) else None
