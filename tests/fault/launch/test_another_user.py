"""Another user of the host, with a user id of its own, tries all that a run opens, from its start to its end.

It connects to each socket and sends junk, pickles and false requests. It tries to open each file, each memory and each
process of the run. Nothing of it is executed, the losses are those of an undisturbed run, and the run ends well.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from network_hosts import free_port
from programs import PACELINE, Announcements, Program, command, losses, reference_losses, the_run, write_program
from strangers import AnotherUser, Opened, another_user, needs_root, opened_by

ELASTIC = "replicas=2-2+batch(size=12,micro=3)"
SERVERS = "replicas=2+parameterserver(staleness=1)+batch(size=12,micro=3)"
GREETING = f"connected: {b'PACELIN2'.hex()}[0-9a-f]{{64}}(00){{0,32}}"  # a challenge, and zeros for a wrong answer
KNOCKS = 1000  # at each socket, while the workers regroup


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, as /home/user often is; pytest's own ones are closed to them."""
    made = Path(tempfile.mkdtemp(prefix="open-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def attacked_once(programs: Sequence[Program], user: AnotherUser, folder: Path) -> Opened:
    """Attack all that the programs have open now, and return it."""
    now = Opened()
    for program in programs:
        now.update(opened_by(program.mark))
    user.attack(now, folders=(folder / "runs",))
    return now


def attacked(programs: Sequence[Program], user: AnotherUser, folder: Path) -> Opened:
    """Attack until the programs end; what they had open."""
    seen = Opened()
    while any(program.process.poll() is None for program in programs):
        seen.update(attacked_once(programs, user, folder))
    return seen


def assert_harmless(user: AnotherUser, seen: Opened, folder: Path) -> None:
    assert user.files == {}, "another user could open these"
    assert user.answers == {}, "these sockets answered another user"
    assert seen.tcp == set(), "on one host nothing listens at a port"
    assert not (folder / "executed").exists()


@needs_root
def test_another_user_cannot_harm_a_run_while_it_regroups(folder: Path, tmp_path: Path) -> None:
    """A worker is killed, and another user knocks at every socket while the others regroup."""
    train = write_program(folder)
    with closing(Announcements(tmp_path / "pipe")) as pipe, another_user(folder) as user:
        words = ("run", train, "--workers", "2", "--plan", ELASTIC)
        with command(*PACELINE, *words, "--tell", pipe.path, "--tell-at", "4", cwd=folder) as program:
            told = program.told(pipe, 2)
            os.kill(next(one["pid"] for one in told if one["rank"] == 1), signal.SIGKILL)
            user.attack(opened_by(program.mark), times=KNOCKS)
            seen = attacked([program], user, folder)
            code, output = program.end()
    assert code == 0, output
    assert_harmless(user, seen, folder)
    assert user.num_connected > 0, "the sockets without a file were reached, and refused it"
    assert losses(the_run(folder)) == pytest.approx(list(reference_losses()), rel=1e-5)


@needs_root
def test_another_user_cannot_harm_parameter_servers(folder: Path, tmp_path: Path) -> None:
    train = write_program(folder)
    with closing(Announcements(tmp_path / "pipe")) as pipe, another_user(folder) as user:
        words = ("run", train, "--workers", "2", "--plan", SERVERS, "--epochs", "6")
        with command(*PACELINE, *words, "--tell", pipe.path, cwd=folder) as program:
            (one,) = program.told(pipe, 1)
            os.kill(one["pid"], signal.SIGSTOP)  # the other waits for it: servers are there as long as the attack takes
            seen = opened_by(program.mark)
            user.attack(seen, folders=(folder / "runs",))
            os.kill(one["pid"], signal.SIGCONT)
            code, output = program.end()
    assert code == 0, f"{code}\n{output}"
    assert_harmless(user, seen, folder)
    assert any(name.startswith("/") for name in seen.unix), "the servers' sockets were tried"


@needs_root
def test_another_user_cannot_harm_workers_that_an_engine_has_started(folder: Path) -> None:
    train = write_program(folder)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        user = stack.enter_context(another_user(folder))
        programs = [
            stack.enter_context(
                command(sys.executable, train, cwd=folder, environment=world | {"RANK": rank, "LOCAL_RANK": rank})
            )
            for rank in "01"
        ]
        seen = attacked(programs, user, folder)
        ends = [program.end() for program in programs]
    assert [code for code, _ in ends] == [0, 0], ends
    assert_harmless(user, seen, folder)
    assert losses(the_run(folder)) == pytest.approx(list(reference_losses()), rel=1e-5)


@needs_root
def test_another_user_cannot_harm_split_models_a_notebook_or_a_run_that_waits_for_hosts(folder: Path) -> None:
    """Five runs at once: fully sharded, tensor parallel, in stages, of a function that was pickled, and with a port for
    later hosts."""
    train, port, token = write_program(folder), free_port(), folder / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef0123456789abcdef")
    cell = f"import runpy; one = runpy.run_path({str(train)!r}); one['paceline'].run(one['train'], workers=2, "
    cell += "plan='replicas=2+batch(size=12,micro=3)', run_dir='runs/notebook')"
    words: dict[str, list[str]] = {
        name: [*PACELINE, "run", str(train), "--workers", "2", "--run-dir", f"runs/{name}", "--plan"]
        for name in ("shard", "tensor", "stages", "head")
    }
    batch = "+batch(size=12,micro=3)"
    for name in ("shard", "tensor", "stages"):
        words[name].append(f"{name}=2{batch}")
    words["head"] += [ELASTIC, "--hosts", "1", "--head", f"127.0.0.1:{port}", "--token-file", str(token)]
    os.mkfifo(gate := folder / "gate")
    words["head"] += ["--tell", str(gate), "--tell-at", "2"]  # its workers wait there until somebody reads
    words["notebook"] = [sys.executable, "-c", cell]
    with contextlib.ExitStack() as stack:
        user = stack.enter_context(another_user(folder))
        programs = {name: stack.enter_context(command(*one, cwd=folder)) for name, one in words.items()}
        seen = Opened()
        while port not in {place[1] for place in seen.tcp} and programs["head"].process.poll() is None:
            seen.update(attacked_once(list(programs.values()), user, folder))
        stack.callback(os.close, os.open(gate, os.O_RDWR))
        seen.update(attacked(list(programs.values()), user, folder))
        ends = {name: program.end() for name, program in programs.items()}
    assert {name: code for name, (code, _) in ends.items()} == dict.fromkeys(words, 0), ends
    ports = {place[1] for place in seen.tcp}
    assert port in ports and len(ports) <= 2, "nothing listens but the head, where hosts come and where snapshots come"
    assert user.files == {} and not (folder / "executed").exists()
    said = {answer for answers in user.answers.values() for answer in answers}
    assert [one for one in said if not re.fullmatch(GREETING, one)] == [], (
        "the head's ports ask for the token, and say no more"
    )
    for name in words.keys() - {"stages", "tensor"}:  # where dropout is drawn for each unit, or each part
        assert losses(folder / "runs" / name) == pytest.approx(list(reference_losses()), rel=1e-5), name
