"""What a program's text tells of how it becomes distributed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.plan import CommandPlan, Plan
from paceline.plan.program_check import check_program
from paceline.plan.program_text import ProgramText


def program(folder: Path, text: str, **beside: str) -> Path:
    for name, other in beside.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(other)
    (folder / "train.py").write_text(text)
    return folder / "train.py"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nfrom paceline import run\nrun(train)\n",
        "import torch, accelerate\n",
        "import torch, some_library\n",
        "import torch\nfrom torch.distributed import init_process_group as begin\nbegin()\n",
        "import torch\nfrom torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2,))\n",
        "import torch, importlib\nimportlib.import_module(name)\n",
        "import torch\nexec(text)\n",
        "print('no torch, so what it is for is not known')\n",
        "def broken(:\n",
        "import torch\nfrom helper import start\n",
    ],
)
def test_what_may_become_distributed_is_started(text: str, tmp_path: Path) -> None:
    script = program(
        tmp_path, text, helper="import deeper\n", deeper="import torch.distributed as dist\ndist.init_process_group()\n"
    )
    assert not ProgramText.of(script).is_never_distributed
    check_program(script, CommandPlan(), run_as=None)


def test_what_never_becomes_distributed_is_refused(tmp_path: Path) -> None:
    text = "import torch\nimport numpy as np\nfrom models.net import Net\nfrom .models import net\nimport json\n"
    script = program(tmp_path, text, models__net="import torch.nn as nn\n", models____init__="")
    assert ProgramText.of(script).is_never_distributed
    with pytest.raises(PlanError, match=r"train.py trains in one process"):
        check_program(script, CommandPlan(), run_as=None)
    check_program(script, CommandPlan(), run_as="horovod")


def test_a_program_of_rpc_is_refused_with_or_without_groups(tmp_path: Path) -> None:
    for more in ("", "dist.init_process_group()\n"):
        text = f"import torch.distributed as dist\nimport torch.distributed.rpc as rpc\n{more}rpc.init_rpc('worker')\n"
        with pytest.raises(PlanError, match=r"train.py calls torch.distributed.rpc"):
            check_program(program(tmp_path, text), CommandPlan(), run_as=None)


def test_a_program_with_groups_of_its_own_has_a_fixed_number_of_replicas(tmp_path: Path) -> None:
    script = program(tmp_path, "import torch.distributed as dist\ndist.init_process_group()\n")
    for plan in ("replicas=2-4", "tensor=2"):
        with pytest.raises(PlanError):
            check_program(script, CommandPlan(whole=Plan.parse(plan)), run_as=None)
    check_program(script, CommandPlan(whole=Plan.parse("replicas=2")), run_as=None)
    both = program(tmp_path, "import paceline\nimport torch.distributed as dist\ndist.init_process_group()\n")
    check_program(both, CommandPlan(whole=Plan.parse("replicas=2-4")), run_as=None)


def test_an_option_for_the_local_rank_is_found_as_it_is_spelled(tmp_path: Path) -> None:
    for word in ("--local_rank", "--local-rank"):
        script = program(tmp_path, f"import argparse\nparser.add_argument(\n    '{word}', type=int)\n")
        assert ProgramText.of(script).local_rank_option == word
    assert ProgramText.of(program(tmp_path, "local_rank = 0\n")).local_rank_option is None


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("import paceline\npaceline.run(print)\n", True),
        ("import paceline as pl\nif True:\n    pl.run(print)\n", True),
        ("from paceline import run as go\ngo(print)\n", True),
        ("from paceline.compat.accelerate import Accelerator\nAccelerator().run(1)\n", False),
        ("import subprocess\nsubprocess.run(['ls'])\n", False),
    ],
)
def test_a_script_that_gives_a_function_to_a_run_is_known(text: str, calls: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert ProgramText.of(script).calls_run == calls
