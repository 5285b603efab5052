"""The guard in conftest.py: each kind of leak fails the test that made it, and a clean test passes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

LEAKING = """
import os, subprocess, sys, tempfile, threading, uuid
from pathlib import Path

ended = threading.Event()
FILE = Path("/dev/shm") / f"leak-{uuid.uuid4().hex}"
FOLDER = Path(tempfile.gettempdir()) / "paceline-run-0"


def test_clean():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def test_process():
    subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_orphan():
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", f"import subprocess, sys; {sleeper}"], check=True)


def test_thread():
    threading.Thread(target=ended.wait, name="stray").start()


def test_thread_is_gone():
    ended.set()


def test_shared_memory():
    FILE.write_bytes(b"x")


def test_shared_memory_is_gone():
    FILE.unlink()


def test_folder():
    FOLDER.mkdir()


def test_folder_is_gone():
    FOLDER.rmdir()


def test_environment():
    os.environ["LEFT"] = "1"


def test_environment_is_put_back():
    assert "LEFT" not in os.environ
"""


@pytest.mark.timeout(90)
@pytest.mark.thorough
def test_every_kind_of_leak_fails_the_test_that_made_it(
    pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(root / "tests" / "conftest.py", pytester.path)
    helpers = ("cpu_torchvision", "imported", "lasting", "leaks", "quick", "warm", "warm_source")
    for name in helpers:
        shutil.copy(root / "tests" / "support" / f"{name}.py", pytester.path)
    source = (pytester.path / "leaks.py").read_text()
    alone = source.replace(" or _others_are_here()", "")  # this session is somebody else
    assert alone != source
    pytester.path.joinpath("leaks.py").write_text(alone.replace("grace_s: float = 20.0", "grace_s: float = 0.2"))
    pytester.makepyfile(test_leaking=LEAKING)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    monkeypatch.setenv("TMPDIR", str(pytester.path))

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")

    outcomes = result.parseoutcomes()
    assert outcomes == {"passed": 11, "errors": 6}
    result.stdout.fnmatch_lines_random(
        [
            "ERROR test_leaking.py::test_process*",
            "ERROR test_leaking.py::test_orphan*",
            "ERROR test_leaking.py::test_thread *",
            "ERROR test_leaking.py::test_shared_memory *",
            "ERROR test_leaking.py::test_folder *",
            "ERROR test_leaking.py::test_environment *",
        ]
    )
    said = ["*process * -c input()", "*thread stray", "*shared memory /dev/shm/leak-*", "*folder */paceline-run-*"]
    result.stdout.fnmatch_lines_random(said)
