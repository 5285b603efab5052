"""What is sent to Slurm, as text."""

from __future__ import annotations

from typing import Any

import pytest

from engine_submissions import asked
from paceline.errors import PlanError
from paceline.launch.engines.catalog import read_engine, refusals
from paceline.launch.engines.slurm import Slurm
from paceline.launch.engines.submission import Submission

FIXED = """\
#!/bin/bash
# All hosts of the run. Warned of the time limit by SIGUSR1, the run saves and ends with 75.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --time=4:00:00
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --mem=200G
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/runs/big/engine/host_%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --exclusive

module load cuda

export PACELINE_ENGINE=slurm
srun \\
    --kill-on-bad-exit=0 \\
    --no-kill \\
    --cpus-per-task=16 \\
    /venv/bin/python -m paceline run /home/me/train.py \\
    --hosts 4 \\
    --workers 32 \\
    --head auto \\
    --run-dir /home/me/runs/big \\
    --token-file /home/me/runs/big/engine/token \\
    --save-every 200 \\
    --plan 'replicas=32+batch(size=1024)' \\
    -- \\
    --lr 0.1
status=$?
# 75: saved and left; 76: hosts were lost. Both go on with the next start.
if [ $status -eq 75 -o $status -eq 76 ] \\
    && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] \\
    && [ ! -e /home/me/runs/big/engine/stopped ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


def script(engine: Slurm, submission: Submission) -> str:
    return engine.render(submission)[1].text


def test_a_fixed_run_is_one_allocation_with_a_step_of_paceline_on_each_host() -> None:
    engine = Slurm(
        partition="gpu",
        time="4:00:00",
        cpus=16,
        gpus=8,
        memory="200G",
        options=("--exclusive",),
        setup="module load cuda",
    )
    assert script(engine, asked()) == FIXED


def test_an_elastic_run_is_an_array_of_hosts_that_begins_with_the_least() -> None:
    text = script(Slurm(), asked(least_hosts=2, plan="replicas=16-32+batch(size=1024)"))
    assert "#SBATCH --array=0-3\n#SBATCH --nodes=1\n" in text
    assert "--hosts 2 \\\n    --workers 16 \\\n" in text
    assert '[ ! -e /home/me/runs/big/engine/leave_"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" ]' in text
    assert "host_%A_%a.log" in text


def test_the_token_is_not_in_what_is_sent() -> None:
    before, job = Slurm().render(asked())
    assert "umask 077" in before.text
    assert "secrets.token_hex" in before.text
    assert "token_hex" not in job.text


def test_paths_with_odd_letters_stay_one_word() -> None:
    text = script(Slurm(), asked(run_dir='/home/me/a b/$x`y"z'))
    assert "--run-dir '/home/me/a b/$x`y\"z'" in text
    assert "[ ! -e '/home/me/a b/$x`y\"z/engine/stopped' ]" in text


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"launcher": "inline", "hosts": 1, "workers": 1}, "launcher='inline'"),
        ({"fresh": True}, "fresh=True would start over each time that Slurm starts a host again"),
        ({"slots": 4}, "slots=4"),
        ({"capture_dir": "x"}, "capture_dir"),
        ({"grace_s": 60.0}, "Slurm would warn the run 60 s before the time limit, and its workers may take 60 s"),
        ({"head": "auto"}, "head='auto' says where the hosts meet"),
    ],
)
def test_what_slurm_cannot_do_is_refused_by_a_rule(job: dict[str, Any], says: str) -> None:
    found = [str(one) for one in refusals(Slurm(), asked(**job), detach=False)]
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slurm(nodes=3)", "Slurm has no field 'nodes'"),
        ("slrum", "Did you mean 'Slurm'?"),
        ("slurm(cpus=0)", r"Slurm.cpus is 0; it must be at least 1"),
        ("slurm(options=exclusive)", "'exclusive'; each must be an option of sbatch"),
        ("slurm(cpus=many)", "cpus"),
    ],
)
def test_settings_that_are_none_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_engine(text)


def test_settings_are_read_from_text_a_table_and_single_values() -> None:
    engine = Slurm(partition="gpu", cpus=4)
    assert read_engine("slurm(partition=gpu,cpus=4)") == engine
    assert read_engine({"kind": "slurm", "partition": "gpu", "cpus": 4}) == engine
    assert read_engine("slurm", settings=["partition=gpu", "cpus=4"]) == engine
    assert read_engine(engine) == engine
    with pytest.raises(PlanError, match="give their number"):
        read_engine("slurm", hosts="a,b")
