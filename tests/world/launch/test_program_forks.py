"""Programs that are started as forks do, say and end as those that Python starts, and are found by what they carry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import warm
from programs import GONE_S, Announcements, child_environment, command, run

PROGRAMS = {
    "place": "import os, sys\nprint(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ['GIVEN'])",
    "neighbour": "import beside\nprint(beside.__file__, beside.VALUE)",
    "streams": "import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint(repr(sys.stdin.read()))",
    "end": "import atexit, threading\n"
    "atexit.register(print, 'last')\nthreading.Thread(target=print, args=(1,)).start()",
    "status": "import sys\nsys.exit(3)",
    "text": "raise SystemExit('said')",
    "error": "def work():\n    raise ValueError('no')\n\n\nwork()",
    "cause": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('no') from error",
    "syntax": "def work(:\n    pass",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
}
CARRIES = """\
import os
import paceline

def look(worker):
    name = "PACELINE_FAMILY"
    return f"{name}={os.environ[name]}".encode() in open("/proc/self/environ", "rb").read().split(b"\\0")

if __name__ == "__main__":
    print("found", paceline.run(look, workers=1, run_dir="run"))
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_says_and_ends_as_with_python(name: str, tmp_path: Path) -> None:
    program = tmp_path / "programs" / "program.py"
    program.parent.mkdir()
    program.write_text(PROGRAMS[name] + "\n")
    program.with_name("beside.py").write_text("VALUE = 7\n")
    words = [sys.executable, str(program), "a", "--b"]
    environment = child_environment() | {"GIVEN": "here"}
    assert warm.can_start(words, environment)
    forked = warm.run(words, env=environment, stderr=subprocess.PIPE, timeout=60)
    asked = {"env": environment, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    like = subprocess.run(words, **asked, check=False)
    assert (forked.returncode, forked.stdout, forked.stderr) == (like.returncode, like.stdout, like.stderr)


def test_a_program_is_found_by_its_mark_and_killed_with_its_group(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(
        "import os, subprocess, sys\nchild = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1], 'w').write(f'[{os.getpid()}, {child.pid}]\\n')\nchild.wait()\n"
    )
    with closing(Announcements(tmp_path / "pipe")) as pipe, command(sys.executable, program, pipe.path) as started:
        (pids,) = started.told(pipe, 1)
        assert isinstance(started.process, warm.Process) and started.process.pid == pids[0]
        deadline, marked = time.monotonic() + GONE_S, set[int]()
        while not marked >= set(pids) and time.monotonic() < deadline:  # an exec hides the environment for a moment
            marked = {int(line.partition(":")[0]) for line in started.left()}
        assert marked >= set(pids)
        assert started.process.poll() is None
        started.signal(signal.SIGKILL)
        assert started.end() == (-signal.SIGKILL, "")
        assert started.left(limit_s=10) == []


def test_workers_carry_the_mark_of_their_family(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(CARRIES)
    code, output = run(sys.executable, tmp_path / "look.py")
    assert code == 0, output
    assert "found True" in output


def test_what_is_read_when_python_or_torch_is_loaded_needs_a_start_anew() -> None:
    program = [sys.executable, "program.py"]
    assert warm.can_start(program, os.environ | {"ANY": "thing", "PYTHONPATH": "elsewhere"})
    assert not warm.can_start(program, os.environ | {"OMP_NUM_THREADS": "7"})
    assert not warm.can_start([sys.executable, "-c", "pass"], os.environ)
    assert not warm.can_start(["mpirun", sys.executable, "program.py"], os.environ)
