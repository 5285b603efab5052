"""An elastic run over two hosts: one of them is lost, cut off or told to go, and the other one goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fault.elastic_runs import LIMIT_S, PROGRAM, Run, assert_unharmed, reached, undisturbed
from network import Host, cut, mend, needs_network, two_hosts
from programs import child_environment

PORT = 29517
STEPS = 60
SILENCE_S = 3.0

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.81.0") as made:
        yield made


class Pair:
    """The same command on both hosts, each with a disk of its own."""

    def __init__(self, folder: Path, hosts: list[Host], **options: Any) -> None:
        self.folder = folder
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text("0123456789abcdef0123456789abcdef")
        self.processes: list[subprocess.Popen[str]] = []
        for host in hosts:
            (folder / host.name).mkdir()
            job = {
                "run_dir": str(folder / host.name / "run"),
                "hosts": 2,
                "head": f"{hosts[0].address}:{PORT}",
                "token_file": str(token),
                "max_steps": STEPS,
                "silence_s": SILENCE_S,
                **options.get("job", {}),
            }
            environment = child_environment() | {
                "FAULT_DIR": str(folder),
                "OPTIONS": json.dumps({"pause_s": 0.1, **options, "job": job}),
            }
            with open(folder / host.name / "output", "w", encoding="utf-8") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*host.prefix, sys.executable, str(PROGRAM)],
                        env=environment,
                        cwd=folder / host.name,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        self.run_dir = folder / hosts[0].name / "run"
        self._names = [host.name for host in hosts]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def reached(self, step: int) -> None:
        """Return when the run has committed a step."""
        reached(self.run_dir, step, self.processes[0])

    def outputs(self) -> str:
        return "\n".join((self.folder / name / "output").read_text() for name in self._names)

    def end(self) -> Run:
        code = self.processes[0].wait(LIMIT_S)
        run = Run(self.run_dir.parent, code, self.outputs())
        (self.run_dir.parent / "weights.json").write_text((self.folder / "weights.json").read_text())
        return run

    def ledger_steps(self, name: str) -> list[int]:
        """What the workers of a host have committed, by their own books."""
        ledgers = (self.folder / name / "run" / "attempt_1").glob("worker_*/ledger.jsonl")
        lines = [json.loads(line) for ledger in ledgers for line in ledger.read_text().splitlines()]
        return [line["step"] for line in lines if "step" in line]


def like() -> Run:
    return undisturbed(json.dumps({"job": {"max_steps": STEPS}}))


@needs_network
def test_a_host_that_is_lost_costs_no_step(hosts: list[Host], tmp_path: Path) -> None:
    with Pair(tmp_path, hosts) as pair:
        pair.reached(5)
        pair.processes[1].kill()  # its supervisor; the kernel ends the workers with it
        run = pair.end()
    assert_unharmed(run, like())
    assert run.workers() == [0, 1]
    assert "host west" in run.output
    assert sum(event["steps_lost"] for event in run.events("Regrouped")) == 0


@needs_network
def test_a_cut_link_leaves_one_side_that_goes_on_and_one_that_commits_nothing_and_ends(
    hosts: list[Host], tmp_path: Path
) -> None:
    with Pair(tmp_path, hosts) as pair:
        pair.reached(5)
        cut(hosts[1])
        run = pair.end()
        mend(hosts[1])
        assert pair.processes[1].wait(LIMIT_S) == 1  # the other side has lost the head, and says so
    assert_unharmed(run, like())
    assert run.workers() == [0, 1]
    (regrouped, *_) = run.events("Regrouped")
    # No split brain: what the cut-off workers have committed, the others have, too; and nothing after that.
    assert max(pair.ledger_steps("west")) <= regrouped["step"]
    assert "the head" in pair.outputs() and "was lost" in pair.outputs()


@needs_network
def test_sigterm_on_one_host_has_everybody_save_and_leave_and_the_next_start_goes_on(
    hosts: list[Host], tmp_path: Path
) -> None:
    with Pair(tmp_path, hosts) as pair:
        pair.reached(5)
        pair.processes[1].send_signal(signal.SIGTERM)
        codes = [process.wait(LIMIT_S) for process in pair.processes]
    assert codes == [75, 75], pair.outputs()
    steps = [json.loads(line)["step"] for line in (pair.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (pair.run_dir / "checkpoints" / f"step_{steps[-1]:08}").is_dir()
