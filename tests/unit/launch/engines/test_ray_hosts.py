"""A job on Ray, as far as no cluster is needed: settings, what is sent, and the process that an actor starts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from engine_submissions import asked
from paceline.errors import PlanError
from paceline.launch.engines.catalog import read_engine, refusals
from paceline.launch.engines.ray import Ray
from paceline.launch.engines.ray_host import HostProcess

HOST = """\
#!{python}
import sys
print("args", *sys.argv[1:], flush=True)
for line in sys.stdin:
    print("got", line.strip(), flush=True)
    if line.strip() == "many":
        print("\\n".join(map(str, range(3000))), flush=True)
    if line.strip() == "end":
        sys.exit(7)
print("input ended", flush=True)
sys.exit(75)
"""


@pytest.fixture
def host(tmp_path: Path) -> HostProcess:
    program = tmp_path / "python"
    program.write_text(HOST.format(python=sys.executable))
    program.chmod(0o755)
    return HostProcess(str(program))


def told(host: HostProcess, lines: int) -> tuple[list[str], int | None]:
    """What it answers, until that many lines have come, or its end."""
    found, code, deadline = list[str](), None, time.monotonic() + 30
    while code is None and (len(found) < lines or lines < 0):
        new, code = host.poll()
        found += new
        if time.monotonic() > deadline:
            raise TimeoutError(found)
    return found, code


def test_lines_travel_both_ways_and_the_exit_status_comes_last(host: HostProcess) -> None:
    host.send("hello")
    assert told(host, 2) == (["args -m paceline host", "got hello"], None)
    host.send("many")
    host.send("end")
    found, code = told(host, -1)
    assert found == ["got many", *map(str, range(3000)), "got end"]
    assert code == 7


def test_the_end_of_its_input_has_it_leave(host: HostProcess) -> None:
    host.end()
    assert told(host, -1) == (["args -m paceline host", "input ended"], 75)
    host.end()


def test_a_command_runs_beside_it(host: HostProcess, tmp_path: Path) -> None:
    code, output, errors = host.run([sys.executable, "-c", "print(1); import sys; sys.exit(3)"], str(tmp_path))
    assert (code, output, errors) == (3, b"1\n", "")
    host.end()


def test_settings_are_in_rays_words() -> None:
    engine = read_engine("ray(cpus=4,gpus=2,resources=a100=1,strategy=STRICT_SPREAD)")
    assert isinstance(engine, Ray)
    assert engine.bundle == {"CPU": 4.0, "GPU": 2.0, "a100": 1.0}
    with pytest.raises(PlanError, match="must be more than 0"):
        Ray(cpus=0)
    with pytest.raises(PlanError, match="must be a resource with its amount"):
        Ray(resources=("a100",))
    with pytest.raises(PlanError, match="strategy"):
        read_engine("ray(strategy=RANDOM)")


def test_what_is_sent_can_be_read() -> None:
    group, told = Ray(cpus=8).render(asked())
    assert group.text == "placement_group([{'CPU': 8.0}] * 4, strategy='SPREAD')"
    assert "run /home/me/train.py --hosts 4 --workers 32 --run-dir /home/me/runs/big" in told.text
    assert "--head" not in told.text


def test_more_workers_than_gpus_are_refused() -> None:
    found = [str(one) for one in refusals(Ray(gpus=4), asked(device="cuda"), detach=False)]
    assert "A host has 8 workers and 4 GPUs. Use ray(gpus=8)" in found[0]
    assert next(str(one) for one in refusals(Ray(), asked(), detach=True)).startswith("With Ray the run ends with")
