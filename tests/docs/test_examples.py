"""The examples run as a newcomer would run them, and do what they say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
COMMAND = [sys.executable, "-m", "paceline"]


def run(*command: str | Path) -> str:
    """What a command says that ends well. It finds its imports done: README's first commands start as users do."""
    code, output = programs.run(*command)
    assert code == 0, output
    return output


def last_accuracy(output: str) -> float:
    """Of the evaluation after the last epoch, as the closing table says it."""
    return float(re.findall(r"held out +loss [\d.]+  accuracy ([\d.]+) \(step 184\)", output)[-1])


def test_digits_are_learned_and_one_worker_or_three_of_a_job_file_give_the_same_loss(tmp_path: Path) -> None:
    words = {"1": [EXAMPLES / "digits.py", "--workers", "1"], "3": [EXAMPLES / "digits.toml", "--max-steps", "69"]}
    outputs = [run(*COMMAND, "run", *words[n], "--threads", "1", "--run-dir", tmp_path / n) for n in words]

    assert last_accuracy(outputs[0]) > 0.96
    found = [re.findall(r"held out: loss ([\d.]+)  accuracy ([\d.]+)  \(360 samples in ", output) for output in outputs]
    assert [len(one) for one in found] == [8, 3]
    for alone, together in zip(*(one[:2] for one in found), strict=True):  # after the first epochs
        assert [float(value) for value in together] == pytest.approx([float(value) for value in alone], rel=6e-3)
    rows = [[json.loads(row) for row in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("1", "3")]
    one, three = [[row["loss"] for row in run_rows] for run_rows in rows]
    assert (len(one), len(three)) == (184, 69)
    assert three[:50] == pytest.approx(one[:50], rel=1e-3)
    assert json.loads((tmp_path / "3" / "run.json").read_text())["state"] == "finished"
    assert (tmp_path / "3" / "attempt_1" / "worker_2" / "stdout.log").exists()  # three workers, as the file says


def test_gpt_as_a_plain_program_for_a_few_steps(tmp_path: Path) -> None:
    script = tmp_path / "gpt.py"
    text = (EXAMPLES / "gpt.py").read_text()
    for long, short in {"CONTEXT = 1600, 8, 128": "CONTEXT = 12, 8, 32", "length=400": "length=40"}.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    script.write_text(text)

    output = run(sys.executable, script)

    found = re.search(r"held-out loss ([\d.]+)", output)
    assert found and 2 < float(found[1]) < 5.55  # better than knowing nothing: log(256)
    # The sample comes in one piece: no line of the console's is in the middle of it.
    assert re.search(r"It writes:\n\nclass Worker:\n    def ", output)
    assert re.search(r"^step 1 of 12  loss [\d.]+  lr [\d.e-]+$", output, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["gpt.py", "digits.py"])
def test_an_example_is_read_in_two_minutes(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 120
