"""`paceline run --on ssh` with real OpenSSH servers, each on a host of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridged_hosts import bridged_hosts, end_host, processes_on
from engine_runs import login_command, losses, one_machine, submitted, until, write_program
from examined_clusters import doctor_command, require_cluster
from network_hosts import NamespaceHost
from ssh_servers import SshServers, needs_ssh, ssh_servers

ELASTIC = ("--plan", "replicas=1-3+batch(size=24,micro=4)")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with bridged_hosts(tmp_path_factory.mktemp("network"), ["login", "a", "b", "c"], subnet="10.95.0") as made:
        yield made


@pytest.fixture(scope="module")
def servers(hosts: list[NamespaceHost], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    with ssh_servers(tmp_path_factory.mktemp("ssh"), hosts[1:]) as made:
        yield made


def on_ssh(servers: SshServers, names: str) -> list[str]:
    return ["--on", "ssh", "--hosts", names, "--set", f"engine.options={','.join(servers.options)}"]


@needs_ssh
def test_a_run_over_named_hosts_has_the_losses_of_one_machine(
    hosts: list[NamespaceHost], servers: SshServers, tmp_path: Path
) -> None:
    program = write_program(tmp_path, sleep_s=0.0)
    plan = ("--plan", "batch(size=24,micro=4)")
    with submitted(
        hosts[0], program, *on_ssh(servers, "a,b:2"), "--workers", "3", *plan, run_dir=tmp_path / "r"
    ) as run:
        assert run.wait() == 0, run.output
        assert "finished at step 20" in run.output
    alone = one_machine(program, tmp_path / "alone", *plan)
    assert losses(tmp_path / "r") == pytest.approx(alone, rel=1e-6)
    workers = json.loads(run.command("status", "--json").stdout)["workers"]
    assert [worker["host"] for worker in workers] == ["a", "b", "b"]


@needs_ssh
def test_a_run_on_the_hosts_own_disks_is_read_after_its_end(
    hosts: list[NamespaceHost], servers: SshServers, tmp_path: Path
) -> None:
    program, run_dir = write_program(tmp_path, sleep_s=0.0), tmp_path / "r"
    options = (*on_ssh(servers, "a,b"), "--workers", "2", "--plan", "batch(size=24,micro=4)")
    with submitted(hosts[0], program, *options, run_dir=run_dir) as run:
        assert run.wait() == 0, run.output
    (tmp_path / "kept").write_bytes((run_dir / "engine.json").read_bytes())
    # Where it was submitted there is nothing of the run but this file.
    hide = f"mount -t tmpfs none {run_dir} && cp {tmp_path}/kept {run_dir}/engine.json"
    for words, expected in (("status", "finished with exit code 0"), ("report", "goodput")):
        told = f"{hide} && {sys.executable} -m paceline {words} {run_dir}"
        command = [*hosts[0].prefix, "unshare", "--mount", "sh", "-c", told]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert expected in done.stdout, done.stdout + done.stderr


@needs_ssh
def test_named_hosts_are_examined_though_they_share_no_disk_with_the_command(
    hosts: list[NamespaceHost], servers: SshServers, tmp_path: Path
) -> None:
    program = write_program(tmp_path)
    words = (*on_ssh(servers, "a,b:2"), "--workers", "3")
    done = doctor_command(tmp_path, *words, prefix=hosts[0].prefix, hides=True)
    require_cluster(done, program, hosts=["a", "b"], each=2)
    assert "of each worker's link within a host" in done.stdout, "b has two workers"


@needs_ssh
def test_a_script_may_say_the_engine_itself(hosts: list[NamespaceHost], servers: SshServers, tmp_path: Path) -> None:
    program = write_program(tmp_path, sleep_s=0.0)
    call = f"paceline.run(train, on=paceline.Ssh(options={servers.options!r}), hosts='a,b', workers=2, run_dir='r')"
    program.write_text(program.read_text().replace("paceline.run(train)", f"print('returned', {call})"))
    done = subprocess.run(
        [*hosts[0].prefix, sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished at step") == 1
    assert done.stdout.rstrip().endswith("returned None")
    shutil.rmtree(tmp_path / "r")
    (tmp_path / "fail").touch()
    failed = subprocess.run(
        [*hosts[0].prefix, sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert failed.returncode == 1
    assert "RuntimeError: as asked" in failed.stdout
    assert "returned" not in failed.stdout


@needs_ssh
def test_the_token_is_in_no_command_line_and_in_no_file(
    hosts: list[NamespaceHost], servers: SshServers, tmp_path: Path
) -> None:
    program, token = write_program(tmp_path, samples=2400), "0123456789abcdef" * 2
    options = [*on_ssh(servers, "a,b"), "--workers", "2"]
    with submitted(hosts[0], program, *options, run_dir=tmp_path / "r", env={"PACELINE_TOKEN": token}) as run:
        run.until_step(5)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for host in hosts for pid in processes_on(host)]
        assert any(b"paceline\0host" in line for line in lines)
        assert not [line for line in lines if token.encode() in line]
        files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
        assert not [path for path in files if token.encode() in path.read_bytes()]


@needs_ssh
def test_hosts_that_fail_are_named_and_the_others_are_ended(
    hosts: list[NamespaceHost], servers: SshServers, tmp_path: Path
) -> None:
    program = write_program(tmp_path)
    words = ["run", str(program), *on_ssh(servers, "a,nowhere,b"), "--workers", "3", "--run-dir", str(tmp_path / "r")]
    done = login_command(hosts[0], *words, folder=tmp_path)
    assert done.returncode == 2
    assert "1 of its 3 hosts failed" in done.stderr
    assert "nowhere: ssh: Could not resolve hostname" in done.stderr
    until(lambda: not _paceline_on(hosts[1:3]), "nothing is left on the other hosts", limit_s=30)


def _paceline_on(hosts: list[NamespaceHost]) -> list[int]:
    found = list[int]()
    for host in hosts:
        for pid in processes_on(host):
            try:
                if b"paceline" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                continue
    return found


@needs_ssh
def test_lost_hosts_come_back_also_the_coordinators_and_no_step_is_lost(tmp_path: Path) -> None:
    program = write_program(tmp_path, samples=9600, sleep_s=0.03)
    with (
        bridged_hosts(tmp_path, ["login", "a", "b", "c"], subnet="10.95.0") as (login, a, b, c),
        ssh_servers(tmp_path, [a, b, c]) as servers,
        submitted(login, program, *on_ssh(servers, "a,b,c"), "--workers", "3", *ELASTIC, run_dir=tmp_path / "r") as run,
    ):
        run.until_step(10)
        end_host(b)
        run.until_step(run.step() + 5)
        servers.start(b)
        until(lambda: "host b (10.95.0.3) has joined" in run.output, "host b joins again")
        until(lambda: "b  " in run.command("status").stdout, "b is shown")
        end_host(a)
        until(lambda: run.record.get("host") != "a", "another host leads")
        run.until_step(run.step() + 5)
        servers.start(a)
        until(lambda: "host a (10.95.0.2) has joined" in run.output, "host a joins again")
        asked = run.command("resize", "2")
        assert asked.returncode == 0, asked.stderr
        assert "it will have 2 replicas" in asked.stdout
        refused = run.command("resize", "4")
        assert refused.returncode == 2
        assert "SSH runs on the 3 hosts that were named" in refused.stderr
        assert run.wait(200) == 0, run.output
        audit = run.command("audit")
        assert audit.returncode == 0 and "clean" in audit.stdout, audit.stdout
    assert "steps lost 0" in run.output
    assert run.record["state"] == "finished"
    assert [attempt["attempt"] for attempt in run.record["attempts"]] == [1], "the others did not start again"
    alone = one_machine(write_program(tmp_path / "alone", samples=9600, sleep_s=0.0), tmp_path / "one", *ELASTIC)
    assert losses(tmp_path / "r") == pytest.approx(alone, rel=1e-5)


@needs_ssh
@pytest.mark.parametrize("how", ["stop", "driver killed", "ctrl-c"])
def test_when_its_command_ends_the_run_saves_and_leaves(
    hosts: list[NamespaceHost], servers: SshServers, tmp_path: Path, how: str
) -> None:
    program = write_program(tmp_path, samples=24_000)
    with submitted(hosts[0], program, *on_ssh(servers, "a,b"), "--workers", "2", run_dir=tmp_path / "r") as run:
        run.until_step(5)
        if how == "stop":
            assert run.command("stop").returncode == 0
            assert run.wait(60) == 75, run.output
        elif how == "ctrl-c":
            run.process.send_signal(signal.SIGINT)
            assert run.wait(60) == 75, run.output
            assert "Ctrl-C came: everything is saved" in run.output
        else:
            run.process.kill()
        until(lambda: not _paceline_on(hosts[1:3]), "nothing is left on the hosts", limit_s=60)
        assert run.record["state"] == "stopped"
        step = run.step()
    with submitted(hosts[0], program, *on_ssh(servers, "a,b"), "--workers", "2", run_dir=tmp_path / "r") as again:
        again.until_step(step + 2)
        said = f"continues at step {step + 1}", "resumed"  # what a host says comes a moment after its files
        until(lambda: any(words in again.output for words in said), "it says where it goes on", limit_s=30)
        assert min(losses(tmp_path / "r")) == 1
