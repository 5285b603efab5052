"""What holds for every test: it leaves nothing behind, it works in a folder of its own, it ends in time.

A test may take `timeout` seconds (pyproject.toml); `@pytest.mark.timeout(n)` gives one its own limit.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import re
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import imported
import lasting
import leaks
import quick
import warm

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = itertools.count()
ORDER = ("fault", "docs", "world", "unit")  # folders, from those of the longest tests to those of the shortest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="try some of the sizes and seeds (tests/support/quick.py)")
    parser.addoption("--further", action="store_true", help="only the further cases, which `make test` leaves out")


def pytest_configure(config: pytest.Config) -> None:
    quick.turn_on(bool(config.getoption("quick")))
    # A green run stays green: the same examples each time, and no time limit of its own on a shared machine.
    hypothesis.settings.register_profile(
        "paceline", derandomize=True, deadline=None, database=None, max_examples=quick.examples(100)
    )
    hypothesis.settings.load_profile("paceline")
    os.environ[leaks.MARK] = uuid.uuid4().hex
    # Threads of OpenMP that wait for each other spin, unless told not to before torch is loaded. On a busy machine they
    # take the core from the one that they wait for: a process with two threads has been seen to take 25 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if importlib.util.find_spec("torchvision") is not None:  # of `make test-long`; transformers imports it, too
        importlib.import_module("cpu_torchvision")
    imported.collect_seldom()
    # What this process has left for its collector is not collected in one that it forks: a process group of gloo waits
    # at its end for its threads, which a forked process does not have, and would wait for ever.
    os.register_at_fork(after_in_child=gc.freeze)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a script: children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick` a file whose tests are all thorough is not even imported: some import what takes seconds."""
    is_thorough = (
        collection_path.suffix == ".py" and "\npytestmark = pytest.mark.thorough" in collection_path.read_text()
    )
    return True if is_thorough and config.getoption("--quick") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the further cases, or all others; with `--quick` also the thorough tests. Put files of long tests
    first, so that no process is left with one of them when the others have nothing to do."""
    wanted: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        is_left_out = config.getoption("--quick") and item.get_closest_marker("thorough") is not None
        is_wanted = (item.get_closest_marker("further") is not None) == config.getoption("--further")
        wanted[is_wanted and not is_left_out].append(item)
    config.hook.pytest_deselected(items=wanted[False])
    items[:] = wanted[True]
    places = {folder: place for place, folder in enumerate(ORDER)}
    items.sort(key=lambda item: next((places[part] for part in item.path.parts[::-1] if part in places), 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of each folder of tests, for the table in CONTRIBUTING.md; fixtures count where they are made."""
    seconds: dict[str, float] = {}
    tests: dict[str, int] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.partition("::")[0].rpartition("/")[0] or "."
                seconds[folder] = seconds.get(folder, 0.0) + report.duration
                tests[folder] = tests.get(folder, 0) + (report.when == "call")
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder")
        for folder in sorted(seconds):
            terminalreporter.write_line(f"{seconds[folder]:8.1f} s  {tests[folder]:5d} tests  {folder}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    for mark in item.iter_markers("needs"):
        missing = [program for program in mark.args if shutil.which(program, path=path) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: tests/system_packages.sh installs it, as root")


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing() -> Iterator[None]:
    """Also what lives as long as the session (a pool of workers, say) has to end with it."""
    before = leaks.take()
    yield
    _refuse(leaks.left_behind(before), "The session")


@pytest.fixture(scope="session", autouse=True)
def _lasting_folders() -> Iterator[None]:
    """What was kept for other tests goes with the session."""
    yield
    lasting.remove_all()


@pytest.fixture(scope="session", autouse=True)
def _programs_source(_session_leaves_nothing: None) -> Iterator[None]:
    """What programs are forked from ends with the session."""
    yield
    warm.close()


@pytest.fixture(autouse=True)
def _own_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The test leaves nothing behind. Runs land in a folder of its own, and nothing of the user's home is read or
    written. One fixture for all of that: of thousands of tests most take less time than a fixture."""
    imported.spare_the_collector()
    before = leaks.take()
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(FOLDERS)}"  # pytest's own looks through all that there are
    path.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("HOME", str(path))
        yield path
    _refuse(leaks.left_behind(before), "The test")


@pytest.fixture
def tmp_path(_own_folder: Path) -> Path:
    """The folder of the test's own."""
    return _own_folder


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


def _refuse(found: list[str], who: str) -> None:
    if found:
        pytest.fail(f"{who} left behind:\n  " + "\n  ".join(found), pytrace=False)
