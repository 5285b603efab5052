"""`paceline run --on kubernetes` on a real control plane, with nodes that run pods as processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridged_hosts import end_host
from engine_runs import Submitted, losses, one_machine, until, write_program
from examined_clusters import doctor_command, require_cluster
from kube_cluster import needs_kubernetes
from kube_site import Site, kube_site

pytest.importorskip("kubernetes", reason="needs the client: make test-engines installs it")
FIXED = ("--plan", "batch(size=24,micro=4)")
ELASTIC = ("--plan", "replicas=1-3+batch(size=24,micro=4)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with kube_site(tmp_path_factory.mktemp("kubernetes"), subnet="10.99.0") as cluster:
        yield cluster


@needs_kubernetes
def test_a_run_has_the_losses_of_one_machine_and_its_logs_are_shown(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path, sleep_s=0.0)
    with site.run(program, "--hosts", "2", "--workers", "4", *FIXED) as run:
        assert run.wait() == 0, run.output
        assert "finished with exit code 0" in run.command("status").stdout
        assert json.loads(run.command("status", "--json").stdout)["state"] == "finished"
        assert "goodput" in run.command("report").stdout  # by a pod that reads the volume
        assert (run.run_dir / "report.html").read_text().endswith("</html>\n")
        assert not [name for name in _all_pods(site) if "reader" in name]
    assert run.output.count("finished at step 20") == 1
    assert losses(run.files) == pytest.approx(one_machine(program, tmp_path / "one", *FIXED), rel=1e-6)


@needs_kubernetes
def test_pods_are_examined_and_the_file_comes_from_their_volume(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    words = (*site.options(program), "--hosts", "2", "--workers", "2")
    env = {"KUBECONFIG": str(site.cluster.admin)}
    done = doctor_command(tmp_path, *words, prefix=site.control.prefix, env=env)
    require_cluster(done, program, hosts=2, each=1)
    until(lambda: not [name for name in _all_pods(site) if "reader" in name], "the pod that read it is gone")


@needs_kubernetes
def test_the_token_is_in_no_command_line(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path, samples=24_000)
    with site.run(program, "--hosts", "1", "--workers", "1", *FIXED) as run:
        run.until_step(3)
        name = run.output.partition("default/")[2].partition(";")[0]
        code = f"print(base64.b64decode(core.read_namespaced_secret({name!r}, 'default').data['token']).decode())"
        token = site.cluster.ask(f"import base64\n{code}").strip()
        assert len(token) == 64
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not [line for line in lines if token.encode() in line]
        assert run.command("stop").returncode == 0
        assert run.wait(60) == 75
        assert "stopped" in run.output
    assert run.record["state"] == "stopped"


@needs_kubernetes
def test_a_script_that_fails_is_not_started_again(site: Site, tmp_path: Path) -> None:
    """The control plane here is older than podFailurePolicy; the run's own record and the limit bound it."""
    program = write_program(tmp_path)
    (tmp_path / "fail").touch()
    with site.run(program, "--hosts", "1", "--workers", "1", "--set", "engine.most_restarts=0", *FIXED) as run:
        assert run.wait() == 1, run.output
    assert "RuntimeError: as asked" in run.output
    assert run.output.count("in train\n") == 1


@needs_kubernetes
def test_what_the_cluster_refuses_is_said_and_nothing_is_left(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    with site.run(program, "--hosts", "2", "--workers", "2", user=True) as run:
        assert run.wait() == 2
    assert 'User "some-user" cannot' in run.output, run.output
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"count/jobs.batch": "1"}}}
    site.cluster.ask(f"core.create_namespaced_resource_quota('default', {quota!r})")
    try:
        until(
            lambda: "used" in site.cluster.ask("print(core.list_namespaced_resource_quota('default').items[0].status)"),
            "the quota counts",
        )
        with site.run(program, "--hosts", "2", "--workers", "2") as run:
            assert run.wait() == 2
        assert "exceeded quota: few" in run.output, run.output
    finally:
        site.cluster.ask("core.delete_namespaced_resource_quota('few', 'default')")
    until(lambda: "few" not in site.cluster.ask("print(core.list_namespaced_resource_quota('default').items)"), "gone")
    mark = re.search(r"train-[0-9a-f]{8}", site.cluster.ask("print(batch.list_namespaced_job('default').items)"))
    left = site.cluster.ask("for secret in core.list_namespaced_secret('default').items: print(secret.metadata.name)")
    assert mark is None or mark[0] in left


@needs_kubernetes
def test_what_cannot_be_placed_is_said_with_the_reason(site: Site, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    with site.run(program, "--hosts", "1", "--workers", "1", "--set", "engine.cpus=64") as run:
        until(lambda: "Insufficient cpu" in run.output, "the reason is shown")
        assert "Insufficient cpu" in run.command("status").stdout
        assert run.command("stop").returncode == 0
        assert run.wait(60) != 0


@needs_kubernetes
@pytest.mark.timeout(500)
def test_pods_and_nodes_are_lost_and_replaced_and_the_run_grows_and_shrinks(tmp_path: Path) -> None:
    program = write_program(tmp_path / "work", samples=48_000, sleep_s=0.03)
    with (
        kube_site(tmp_path, subnet="10.100.0") as site,
        site.run(program, "--hosts", "2", "--workers", "2", *ELASTIC) as run,
    ):
        run.until_step(5)
        until(lambda: _at_work(run) == 2, "both hosts are at work")
        # A pod is evicted: it leaves, and another one takes its place.
        (evicted,) = [name for name in site.pods() if "-hosts-" in name]
        site.cluster.ask(f"core.delete_namespaced_pod({evicted!r}, 'default')")
        until(lambda: evicted not in site.pods() and len(site.pods()) == 2, "another pod takes its place")
        until(lambda: _at_work(run) == 2, "its host is at work")
        # The coordinator's pod is evicted: another host takes over, and the new pod joins it.
        head = str(run.record["host"])
        site.cluster.ask(f"core.delete_namespaced_pod({head!r}, 'default')")
        until(lambda: head not in site.pods() and len(site.pods()) == 2, "another pod takes its place")
        until(lambda: run.record["host"] != head and _at_work(run) == 2, "its host is at work")
        # The coordinator's node is lost.
        head = str(run.record["host"])
        node = site.pods()[head]
        step = run.step()
        end_host(site.nodes[node])
        run.until_step(step + 5)
        assert run.record["host"] != head
        until(lambda: head not in site.pods() and len(site.pods()) == 2, "the lost pod is replaced", limit_s=60)
        until(lambda: _at_work(run) == 2, "its host has joined", limit_s=60)
        site.cluster.start_node(site.nodes[node])
        # More hosts, and fewer.
        until(lambda: run.command("resize", "3").returncode == 0, "there is room for another host")
        until(lambda: _at_work(run) == 3, "the new host is at work")
        shrunk = run.command("resize", "1")
        assert shrunk.returncode == 0, shrunk.stderr
        until(lambda: len(site.pods()) == 1, "the pods are given back")
        step = run.step()
        run.until_step(step + 3)
        assert run.command("logs").stdout.count("\n") >= 0
        stopped = run.command("stop")
        assert stopped.returncode == 0, stopped.stderr
        assert run.wait(60) == 75, run.output
    assert [attempt["attempt"] for attempt in run.record["attempts"]] == [1], "the others did not start again"
    alone = one_machine(
        write_program(tmp_path / "alone", samples=48_000, sleep_s=0.0),
        tmp_path / "one",
        *("--plan", "batch(size=24,micro=4)", "--max-steps", str(run.step())),
    )
    assert losses(run.files) == pytest.approx(alone, rel=1e-4)


def _all_pods(site: Site) -> list[str]:
    return site.cluster.ask("for pod in core.list_namespaced_pod('default').items: print(pod.metadata.name)").split()


def _at_work(run: Submitted) -> int:
    """How many workers the run has, by its status in the coordinator's pod."""
    said = run.command("status", "--json")
    try:
        return sum(worker["state"] == "running" for worker in json.loads(said.stdout)["workers"])
    except (ValueError, KeyError):
        return 0
