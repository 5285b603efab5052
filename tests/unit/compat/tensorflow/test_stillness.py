"""When a program stands still."""

from __future__ import annotations

import os
import signal

from paceline.compat.tensorflow.stillness import Stillness
from paceline.compat.tensorflow.task_look import catches_signal


def test_a_program_stands_still_after_a_while_without_work_and_words() -> None:
    still = Stillness(60.0)
    assert still.take(100.0, cores=1.0, written=1) == 0.0
    assert still.take(130.0, cores=0.0, written=1) == 0.0
    assert still.take(160.0, cores=0.01, written=1) == 60.0
    assert still.take(170.0, cores=0.01, written=1) == 70.0


def test_work_and_words_begin_the_time_anew() -> None:
    still = Stillness(60.0)
    still.take(100.0, cores=0.0, written=1)
    assert still.take(150.0, cores=0.5, written=1) == 0.0
    assert still.take(200.0, cores=0.0, written=2) == 0.0
    assert still.take(259.0, cores=0.0, written=2) == 0.0
    assert still.take(261.0, cores=0.0, written=2) == 61.0


def test_a_process_is_asked_for_its_stack_only_where_it_has_a_handler() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert catches_signal(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert not catches_signal(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not catches_signal(1 << 22, signal.SIGUSR1)
