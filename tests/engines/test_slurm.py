"""`paceline run --on slurm` on a real cluster: controller and nodes, each on a host of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridged_hosts import bridged_hosts, end_host
from engine_runs import losses, one_machine, submitted, until, write_program
from examined_clusters import doctor_command, require_cluster
from network_hosts import NamespaceHost
from paceline.monitor.records.run_record import RunRecord
from pool_folders import PACELINE, PoolFolder
from slurm_cluster import Cluster, needs_slurm, slurm_cluster

PREEMPTING = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclasses.dataclass
class Site:
    """A cluster of three nodes."""

    cluster: Cluster
    login: NamespaceHost
    nodes: dict[str, NamespaceHost]

    @property
    def env(self) -> dict[str, str]:
        return self.cluster.environment


@contextlib.contextmanager
def made(folder: Path, *, subnet: str, more: str = "") -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        login, *nodes = stack.enter_context(bridged_hosts(folder, ["login", "n1", "n2", "n3"], subnet=subnet))
        cluster = stack.enter_context(slurm_cluster(folder, nodes, login=login, more=more))
        yield Site(cluster, login, {node.name: node for node in nodes})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with made(tmp_path_factory.mktemp("slurm"), subnet="10.96.0") as cluster:
        yield cluster


@needs_slurm
def test_a_fixed_run_gets_one_allocation_and_has_the_losses_of_one_machine(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path, sleep_s=0.0)
    options = ["--on", "slurm", "--hosts", "2", "--workers", "4"]
    plan = ("--plan", "batch(size=24,micro=4)")
    with submitted(site.login, program, *options, *plan, run_dir=tmp_path / "r", env=site.env) as run:
        assert run.wait() == 0, run.output
    assert "submitted to Slurm as job" in run.output
    assert run.output.count("finished at step 20") == 1, "one console for all hosts"
    assert losses(tmp_path / "r") == pytest.approx(one_machine(program, tmp_path / "one", *plan), rel=1e-6)


@needs_slurm
def test_an_allocation_is_examined_with_the_reading_of_a_script(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    words = ["train.py", "--on", "slurm", "--hosts", "3", "--workers", "3", "--plan", "batch(size=24,micro=4)"]
    done = doctor_command(tmp_path, *words, prefix=site.login.prefix, env=site.env)
    require_cluster(done, program, hosts=["n1", "n2", "n3"], each=1)
    assert "samples/s is what each worker's steps will take, as predicted for replicas=3" in done.stdout


@needs_slurm
def test_a_script_that_fails_is_shown_and_not_requeued(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    (tmp_path / "fail").touch()
    options = ["--on", "slurm", "--hosts", "2", "--workers", "2"]
    with submitted(site.login, program, *options, run_dir=tmp_path / "r", env=site.env) as run:
        assert run.wait() == 1, run.output
    assert run.output.count("in train\n") == 1, "one traceback, of one host's console"
    assert not site.cluster.ask("squeue", "--noheader").strip()


@needs_slurm
def test_what_slurm_refuses_is_said_in_its_words(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    options = ["--on", "slurm(partition=nowhere)", "--hosts", "2"]
    with submitted(site.login, program, *options, run_dir=tmp_path / "r", env=site.env) as run:
        assert run.wait() == 2
    assert "Slurm does not take the job: sbatch: error: invalid partition specified: nowhere" in run.output


@needs_slurm
def test_a_job_that_waits_is_said_to_and_can_be_stopped(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    options = ["--on", "slurm", "--hosts", "9"]
    with submitted(site.login, program, *options, run_dir=tmp_path / "r", env=site.env) as run:
        until(lambda: "is pending (" in run.output, "the reason is shown")
        assert "is pending (" in run.command("status").stdout
        assert "is pending (" in run.command("logs").stdout
        assert run.command("stop").returncode == 0
        assert run.wait(60) != 0
    assert "cancelled" in run.output


@needs_slurm
def test_the_rendered_script_is_one_that_slurm_takes(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    options = ["--on", "slurm(time=1:00:00,cpus=1)", "--hosts", "2", "--workers", "2", "--dry-run"]
    for plan in ("replicas=2", "replicas=1-2"):
        with submitted(site.login, program, *options, "--plan", plan, run_dir=tmp_path / plan, env=site.env) as run:
            assert run.wait() == 0
        before, script = run.output.split("--- job script, for sbatch\n")
        (tmp_path / "job.sh").write_text(script)
        subprocess.run(["sh", "-c", before.partition("\n")[2]], check=True)
        said = site.cluster.ask("sbatch", "--test-only", str(tmp_path / "job.sh"))
        assert "to start at" in said, said
        assert (tmp_path / plan / "engine" / "token").stat().st_mode & 0o077 == 0


@needs_slurm
def test_the_time_limit_has_the_run_saved_and_requeued(site: Site, tmp_path: Path) -> None:
    """Slurm's notice, as at the limit, to the steps of the job."""
    program = write_program(tmp_path, samples=4800, sleep_s=0.03)
    options = ["--on", "slurm", "--hosts", "2", "--workers", "2"]
    with submitted(site.login, program, *options, run_dir=tmp_path / "r", env=site.env) as run:
        run.until_step(5)
        job = run.output.partition("as job ")[2].partition(";")[0]
        site.cluster.ask("scancel", "--signal=USR1", job)
        until(lambda: len(run.record.get("attempts", [])) == 2, "it begins again", limit_s=200)
        assert run.wait(200) == 0, run.output
    first, second = run.record["attempts"]
    assert (first["exit_code"], second["exit_code"]) == (75, 0)
    alone = one_machine(write_program(tmp_path / "alone", samples=4800, sleep_s=0.0), tmp_path / "one")
    assert losses(tmp_path / "r") == pytest.approx(alone, rel=1e-5)


@needs_slurm
@pytest.mark.timeout(400)
def test_nodes_are_lost_and_requeued_hosts_join_and_the_run_grows_and_shrinks(tmp_path: Path) -> None:
    program = write_program(tmp_path, samples=24_000, sleep_s=0.03)
    options = ["--on", "slurm(cpus=2)", "--hosts", "2", "--workers", "2"]
    plan = ("--plan", "replicas=1-3+batch(size=24,micro=4)")
    with (
        made(tmp_path, subnet="10.97.0") as site,
        submitted(site.login, program, *options, *plan, run_dir=tmp_path / "r", env=site.env) as run,
    ):
        run.until_step(5)
        until(lambda: _at_work(run.command("status").stdout) == 2, "both hosts are at work")
        lost = str(run.record["host"])
        step = run.step()
        end_host(site.nodes[lost])  # the coordinator's
        run.until_step(step + 5)
        assert run.record["host"] != lost
        site.cluster.start_node(site.nodes[lost])
        until(lambda: _at_work(run.command("status").stdout) == 2, "Slurm has requeued the lost host")
        grown = run.command("resize", "3")
        assert grown.returncode == 0, grown.stderr
        assert "asked Slurm for 1 more host (job" in grown.stdout
        until(lambda: _at_work(run.command("status").stdout) == 3, "the new host is at work")
        shrunk = run.command("resize", "1")
        assert shrunk.returncode == 0, shrunk.stderr + shrunk.stdout
        # The coordinator's host stays, also where it has no worker.
        kept = 3 - int(shrunk.stdout.partition("gave ")[2].split()[0])
        assert kept in (1, 2), shrunk.stdout
        until(lambda: len(site.cluster.ask("squeue", "--noheader").splitlines()) == kept, "the nodes are free")
        run.until_step(run.step() + 5)
        stopped = run.command("stop")
        assert stopped.returncode == 0, stopped.stderr
        assert run.wait(60) == 75, run.output
        assert not site.cluster.ask("squeue", "--noheader").strip()
        audit = run.command("audit")
        assert audit.returncode == 0, audit.stdout
    assert [attempt["attempt"] for attempt in run.record["attempts"]] == [1], "the others did not start again"
    assert "steps lost 0" in run.output or "0 steps lost" in run.output
    alone = one_machine(
        write_program(tmp_path / "alone", samples=24_000, sleep_s=0.0),
        tmp_path / "one",
        *("--plan", "batch(size=24,micro=4)", "--max-steps", str(run.step())),
    )
    assert losses(tmp_path / "r") == pytest.approx(alone, rel=1e-4)


@needs_slurm
@pytest.mark.timeout(400)
def test_a_preempted_host_comes_back_and_the_others_go_on(tmp_path: Path) -> None:
    program = write_program(tmp_path, samples=24_000, sleep_s=0.03)
    options = ["--on", "slurm(cpus=2,partition=debug)", "--hosts", "3", "--workers", "3"]
    plan = ("--plan", "replicas=1-3+batch(size=24,micro=4)")
    with (
        made(tmp_path, subnet="10.98.0", more=PREEMPTING) as site,
        submitted(site.login, program, *options, *plan, run_dir=tmp_path / "r", env=site.env) as run,
    ):
        until(lambda: _at_work(run.command("status").stdout) == 3, "all hosts are at work")
        run.until_step(5)  # before the first step there is nothing to lose, and no other host takes over
        urgent = ["srun", "--partition=urgent", "--nodes=1", "--cpus-per-task=2", "--immediate=60", "sleep", "10"]
        assert "error" not in site.cluster.ask(*urgent)
        run.until_step(
            run.step() + 5
        )  # the others go on; Slurm starts a requeued job after two minutes at the earliest
        until(lambda: _at_work(run.command("status").stdout) == 3, "the preempted host is back", limit_s=200)
        assert run.command("stop").returncode == 0
    assert [attempt["attempt"] for attempt in run.record["attempts"]] == [1], "the others did not start again"


@needs_slurm
@pytest.mark.timeout(400)
def test_an_allocation_is_a_pool_and_the_loss_of_its_first_node_costs_that_node_only(tmp_path: Path) -> None:
    pool = PoolFolder(tmp_path)
    with made(tmp_path, subnet="10.99.0") as site:
        words = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--no-kill", "--kill-on-bad-exit=0"]
        command = [*site.cluster.srun(*words), *PACELINE, "pool", str(tmp_path / "pool")]
        with (tmp_path / "pool.out").open("a") as out:
            srun = subprocess.Popen(
                command, cwd=tmp_path, env=os.environ | site.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            pool.until(lambda: [*pool.nodes().values()] == ["here", "here"], what="both nodes here")
            pool.queue("run", "--steps", "5000", "--seconds", "0.4", replicas="1-4")
            pool.until(lambda: sorted(pool.workers_on("run").values()) == [2, 2], what="on both nodes")
            pool.until_later("run", 5)
            first = pool.facts()["host"]
            (other,) = pool.nodes().keys() - {first}
            end_host(site.nodes[first])  # the pool's process, and the host that leads the run
            pool.until(lambda: pool.facts()["host"] == other, what="the other node is the pool")
            pool.until(lambda: pool.shares("run") == {other: 2}, what="the run goes on there")
            pool.until_later("run", 5)
            number = site.cluster.ask("squeue", "--noheader", "--format=%i").split()[0]
            site.cluster.ask("scancel", "--signal=TERM", number)
            pool.until(lambda: pool.entry("run")["phase"] == "waiting", what="saved")
            srun.wait(60)
        finally:
            srun.kill()
            srun.wait()
    record = RunRecord.load(tmp_path / "runs" / "run")
    assert (record.attempt, record.exit_code) == (1, 75), "it did not start again"
    assert len(pool.losses("run")) == pool.entry("run")["step"], "no step twice, none left out"


def _at_work(status: str) -> int:
    """How many workers a status shows at work."""
    return sum(
        " running " in line for line in status.splitlines() if line.startswith("  ") and line.split()[0].isdecimal()
    )
