"""The failure report shows the error that began it, first and once, and believes in memory only where it must."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import WorkerError
from paceline.host_memory import memory_limit_bytes, oom_kills, oom_kills_here, oom_likely
from paceline.monitor.records.failure import Failure, explain, headline, root_cause
from paceline.runs.own_frames import error_text

GiB = 1 << 30
OURS = Path(paceline.__file__).parent


FRAMES = 'Traceback (most recent call last):\n  File "train.py", line {}, in f\nValueError: {}\n'


def failed(worker: int, message: str = "bad", *, time: float = 1.0, echo: bool = False, **fields: Any) -> Failure:
    error = {
        "kind": "SyncError" if echo else "ValueError",
        "message": message,
        "traceback": FRAMES.format(worker, message),
        "worker": worker, "host": "a", "pid": 100 + worker, "step": 812, "time": time, "usage": False, "echo": echo,
    }  # fmt: skip
    return Failure(worker=worker, host="a", pid=100 + worker, exit_code=1, error={**error, **fields})


def killed(worker: int, number: int = signal.SIGTERM, **fields: Any) -> Failure:
    return Failure(worker=worker, host="a", pid=100 + worker, signal=number, **fields)


def test_the_first_own_error_is_the_root_before_echoes_and_before_those_we_ended() -> None:
    failures = [
        killed(0, sent_by_us=True, time=0.0),
        failed(1, echo=True, time=0.5),
        failed(3, "late", time=3.0),
        failed(2, "early", time=2.0),
    ]
    assert root_cause(failures).worker == 2
    assert root_cause(failures[:2]).worker == 1
    assert root_cause([failed(1, echo=True), killed(4, signal.SIGKILL)]).worker == 4
    with pytest.raises(ValueError, match="no failure"):
        root_cause([])


def test_the_traceback_comes_first_and_once_and_the_others_are_one_line() -> None:
    text = explain([failed(0, echo=True), failed(1, echo=True), failed(2), killed(3, sent_by_us=True)])
    assert text.split("\n") == [
        "worker 2 (host a, pid 102) failed after step 812: ValueError: bad",
        "Traceback (most recent call last):",
        '  File "train.py", line 2, in f',
        "ValueError: bad",
        "workers 0, 1, 3 stopped because of it",
    ]


def test_equal_errors_of_several_workers_are_one() -> None:
    text = explain([failed(worker, time=worker) for worker in range(4)])
    assert text.startswith(
        "workers 0-3 (host a) all failed with the same error after step 812: ValueError: bad\nTraceback"
    )
    assert text.count("Traceback") == 1 and "stopped because of it" not in text


def test_another_error_of_its_own_is_named_in_a_line() -> None:
    text = explain([failed(0, "one", time=1.0), failed(1, "two", time=2.0)])
    assert text.endswith("worker 1 (host a, pid 101) failed after step 812: ValueError: two (independently)")


def test_frames_of_ours_above_the_user_s_are_left_out() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        f'  File "{OURS}/worker/main.py", line 1, in work\n    run()\n    ^^^^^\n'
        '  File "<frozen runpy>", line 88, in _run_code\n'
        '  File "/home/me/train.py", line 7, in train\n    step(batch)\n'
        f'  File "{OURS}/worker/stepper.py", line 2, in __call__\n    loss()\n'
        '  File "/home/me/train.py", line 3, in loss\n    raise ValueError("bad")\n'
        "ValueError: bad\nsecond line\n"
    )
    text = explain([failed(0, traceback=trace)])
    assert "worker/main.py" not in text and "runpy" not in text and "^^^^^" not in text
    assert "worker/loop/stepper.py" not in text
    assert 'train.py", line 7, in train\n    step(batch)\n  ... 1 frame in paceline\n  File "/home/me/train.py"' in text
    assert text.endswith('    raise ValueError("bad")\nValueError: bad\nsecond line')


def test_runs_of_frames_of_torch_and_paceline_below_the_user_s_are_one_line() -> None:
    torch = "/venv/lib/python3.11/site-packages/torch/nn/modules"
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 7, in train\n    step(batch)\n'
        f'  File "{OURS}/worker/stepper.py", line 2, in __call__\n    loss()\n    ^^^^^^\n'
        f'  File "{torch}/module.py", line 2, in _call_impl\n    forward()\n'
        '  File "/home/me/model.py", line 3, in forward\n    self.fc(x)\n'
        f'  File "{torch}/module.py", line 2, in _call_impl\n    forward()\n'
        f'  File "{torch}/linear.py", line 2, in forward\n    F.linear()\n'
        "RuntimeError: shapes cannot be multiplied\n"
    )
    assert explain([failed(0, traceback=trace)]).split("\n")[1:] == [
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 7, in train',
        "    step(batch)",
        "  ... 2 frames in paceline, torch",
        '  File "/home/me/model.py", line 3, in forward',
        "    self.fc(x)",
        "  ... 2 frames in torch",
        "RuntimeError: shapes cannot be multiplied",
    ]


def test_frames_of_errors_in_a_group_are_those_of_the_user_in_each(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "from paceline.units import workers_text\n"
        "def failed():\n"
        "    try:\n"
        "        workers_text(None)\n"  # fails in a frame of ours
        "    except TypeError as error:\n"
        "        return error\n"
        "raise ExceptionGroup('two', [failed(), ValueError('bad')])\n"
    )
    text = explain(
        [failed(0, traceback=subprocess.run([sys.executable, program], capture_output=True, text=True).stderr)]
    )
    shown = text.split("\n")[1:]
    assert [line for line in shown if str(OURS) in line] == []
    assert shown[0] == "  + Exception Group Traceback (most recent call last):"
    assert [line for line in shown if "frame in paceline" in line or "frames in paceline" in line] != []
    assert "    | ValueError: bad" in shown and shown[-1] == "    +------------------------------------"


def test_a_program_on_the_command_line_has_frames_of_its_own() -> None:
    program = "from paceline.units import workers_text\ndef train():\n    workers_text(None)\ntrain()\n"
    trace = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr
    shown = explain([failed(0, traceback=trace)]).split("\n")
    frames = [line for line in shown if line.startswith(("  File ", "  ... "))]  # from Python 3.13 on with their code
    assert frames[:2] == ['  File "<string>", line 4, in <module>', '  File "<string>", line 3, in train']
    assert re.fullmatch(r"  \.\.\. \d frames? in paceline", "\n".join(frames[2:]))


def test_the_step_of_a_failure_is_the_furthest_that_is_known_of() -> None:
    assert (
        headline(failed(0, step=0))
        == "worker 0 (host a, pid 100) failed before the end of the first step: ValueError: bad"
    )
    known = dataclasses.replace(failed(0, step=0), step=20)
    assert headline(known) == "worker 0 (host a, pid 100) failed after step 20: ValueError: bad"


def test_what_is_left_out_of_a_traceback_is_in_a_file_that_is_named() -> None:
    ours = f'  File "{OURS}/worker/stepper.py", line 2, in __call__\n    loss()\n'
    own = '  File "/home/me/train.py", line 7, in train\n    step(batch)\n'
    for frames, is_named in ((ours + own, True), (own, False)):
        trace = f"Traceback (most recent call last):\n{frames}ValueError: bad\n"
        lines = explain([failed(0, traceback=trace, log="runs/a/attempt_1/worker_0/stderr.log")]).split("\n")
        assert (lines[-1] == "(all frames: runs/a/attempt_1/worker_0/stderr.log)") == is_named


def test_an_uncaught_error_of_a_run_is_printed_with_the_scripts_frames_and_the_workers_as_they_were() -> None:
    said = (
        "worker 1 failed after step 3: ValueError: bad\nTraceback (most recent call last):\n"
        '  File "/home/me/train.py", line 7, in train\n    step(batch)\n  ... 1 frame in paceline\nValueError: bad'
    )
    made: dict[str, Any] = {"WorkerError": WorkerError}
    exec(compile(f"def run():\n raise WorkerError({said!r}, worker=1)", f"{OURS}/runs/run.py", "exec"), made)
    exec(compile("def main():\n run()", "/home/me/script.py", "exec"), made)
    exec(compile("def _run_code():\n main()", "<frozen runpy>", "exec"), made)
    with pytest.raises(WorkerError) as raised:
        made["_run_code"]()
    error = raised.value.with_traceback(raised.tb.tb_next)  # without the frame of this test
    assert error_text(error).split("\n") == [
        "Traceback (most recent call last):",
        '  File "/home/me/script.py", line 2, in main',
        "  ... 1 frame in paceline",
        *f"paceline.errors.WorkerError: {said}".split("\n"),
    ]


def test_an_error_in_a_loader_process_has_the_user_s_type_message_and_frames() -> None:
    inner = (
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 1, in _worker_loop\n'
        f'  File "{OURS}/worker/reading.py", line 1, in __getitem__\n    fetch()\n'
        '  File "/home/me/train.py", line 7, in __getitem__\n    return self.rows[index]\n'
        "           ~~~~~~~~~^^^^^^^\n"
        "KeyError: 'colour: red'\n"
    )
    message = f"Caught KeyError in DataLoader worker process 1.\nOriginal {inner}"
    other = message.replace("process 1", "process 0")
    text = explain([
        failed(worker, said, kind="KeyError", traceback=f'{FRAMES.format(3, "x")}KeyError: {said}')
        for worker, said in enumerate([message, other])
    ])  # fmt: skip
    assert text.split("\n") == [
        "workers 0, 1 (host a) all failed with the same error after step 812: KeyError: 'colour: red' "
        "(in loader process 1)",
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 7, in __getitem__',
        "    return self.rows[index]",
        "           ~~~~~~~~~^^^^^^^",
        "KeyError: 'colour: red'",
    ]


def test_a_usage_error_is_its_sentence_alone_uncut_with_the_user_s_line() -> None:
    trace = (
        f'Traceback (most recent call last):\n  File "{OURS}/worker/main.py", line 1, in work\n    run()\n'
        '  File "/home/me/train.py", line 7, in train\n    Plan(wire=3)\n'
        f'  File "{OURS}/plan/plan.py", line 9, in __post_init__\n    raise PlanError("no")\n'
        "paceline.errors.PlanError: no\n"
    )
    sentence = "no " * 200 + "end."
    text = explain([failed(0, sentence, traceback=trace, usage=True), failed(1, echo=True), killed(2, sent_by_us=True)])
    assert text == f"paceline: {sentence} (/home/me/train.py, line 7)"


def test_an_error_that_says_all_has_no_traceback_and_is_one_for_workers_that_differ_in_their_files() -> None:
    text = explain([
        failed(worker, f"/r/attempt_1/worker_{worker}/ledger.jsonl is not written. {'Why. ' * 60}", says_all=True)
        for worker in (0, 1)
    ])  # fmt: skip
    assert text.startswith(
        "workers 0, 1 (host a) all failed with the same error after step 812: ValueError: /r/attempt_1/"
    )
    assert text.endswith("Why. Why.") and "Traceback" not in text and "..." not in text


def test_a_real_chain_of_errors_keeps_all_its_parts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error\n")
    trace = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30, check=False).stderr
    assert explain([failed(0, traceback=trace)]).split("\n", 1)[1] == trace.rstrip("\n")
    inner = trace.replace('  File "', f'  File "{OURS}/worker/main.py", line 1, in work\n    run()\n  File "')
    assert explain([failed(0, traceback=inner)]).split("\n", 1)[1] == trace.rstrip("\n")


def test_a_traceback_of_ours_alone_stays_as_it_is() -> None:
    trace = f'Traceback (most recent call last):\n  File "{OURS}/worker/main.py", line 1, in work\nKeyError: 1'
    assert explain([failed(0, traceback=trace)]).endswith(trace)


def test_a_killed_worker_is_said_to_be_killed_with_its_peak_memory() -> None:
    failure = killed(1, signal.SIGKILL, step=7, peak_memory_bytes=int(3.1 * GiB), memory_limit_bytes=24 * GiB)
    line = "worker 1 (host a, pid 101) was killed by signal 9 (SIGKILL) after step 7; peak memory 3.10 GiB of 24.0 GiB"
    assert explain([failure]) == line
    likely = killed(
        1, signal.SIGKILL, step=7, peak_memory_bytes=int(3.1 * GiB), memory_limit_bytes=24 * GiB, oom_likely=True
    )
    first, hint = explain([likely]).split("\n")
    assert first == f"{line}: probably out of memory"
    assert "Batch(micro=...)" in hint


def test_an_exit_without_an_error_is_said_as_such() -> None:
    failure = Failure(worker=0, host="a", pid=100, exit_code=3, step=5)
    assert "ended with exit code 3 after step 5, without an error of its own; see its stderr.log" in headline(failure)


def test_workers_killed_alike_are_one_line() -> None:
    text = explain([killed(worker, signal.SIGSEGV, step=2) for worker in range(3)])
    assert text == "workers 0-2 (host a) were all killed by signal 11 (SIGSEGV) after step 2"


def test_a_long_message_of_many_lines_is_short_in_the_headline_and_whole_in_the_traceback() -> None:
    message = "first line\n" + "x" * 500
    text = explain([failed(0, message)])
    assert len(text.split("\n")[0]) < 300 and "first line xxx" in text.split("\n")[0]
    assert "x" * 500 in text


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("number", "peak", "before", "after", "expected"),
    [
        (9, 1, 0, 1, True),  # the kernel says so
        (9, 23 * GiB, None, None, True),
        (9, 23 * GiB, 0, 0, True),
        (9, 3 * GiB, 0, 0, False),
        (9, None, None, None, False),
        (15, 23 * GiB, 0, 1, False),
        (None, 23 * GiB, 0, 1, False),
    ],
)
def test_out_of_memory_is_likely_only_with_a_sign_of_it(
    number: int | None, peak: int | None, before: int | None, after: int | None, expected: bool
) -> None:
    found = oom_likely(
        signal=number,
        peak_memory_bytes=peak,
        memory_limit_bytes=24 * GiB,
        oom_kills_before=before,
        oom_kills_after=after,
    )
    assert found is expected


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_control_groups_v2_are_read_up_to_the_top(tmp_path: Path) -> None:
    system = write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal:  {64 * GiB // 1024} kB\nMemFree: 1 kB\n",
            "proc/vmstat": "nr_free 7\noom_kill 2\n",
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": f"{24 * GiB}\n",
            "sys/fs/cgroup/job/memory.events": "low 0\noom_kill 3\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
        },
    )
    assert memory_limit_bytes(system) == 24 * GiB
    assert oom_kills(system) == 5
    assert oom_kills_here(system) == 3, "of the nearest group that counts; others' kills on the machine are not ours"


def test_control_groups_v1_are_read_also_where_the_own_place_is_not_mounted(tmp_path: Path) -> None:
    system = write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal:  {64 * GiB // 1024} kB\n",
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GiB}\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        },
    )
    assert memory_limit_bytes(system) == 8 * GiB
    assert oom_kills(system) == oom_kills_here(system) == 4


def test_no_limit_means_the_machine_s_memory_and_no_files_mean_not_known(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) is None and oom_kills(tmp_path) is None
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1024 kB\n",
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert memory_limit_bytes(tmp_path) == 1 << 20
