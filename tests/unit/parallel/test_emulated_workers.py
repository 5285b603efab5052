"""Workers emulated by threads: what is left of them when they have done their work."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate

LIBC = ctypes.CDLL(None)
END_US = 100_000  # that each thread takes to end


def test_the_threads_are_gone_when_it_returns_so_that_a_fork_copies_no_lock_of_theirs() -> None:
    key = ctypes.c_uint()
    # The C library's own `usleep` in the place of what a library does at a thread's end.
    assert LIBC.pthread_key_create(ctypes.byref(key), ctypes.cast(LIBC.usleep, ctypes.c_void_p)) == 0

    def work(group: EmulatedGroup) -> int:
        LIBC.pthread_setspecific(key, ctypes.c_void_p(END_US))
        return threading.get_native_id()

    try:
        tasks = emulate(3, work)
        assert len(set(tasks)) == 3
        assert not [task for task in tasks if Path(f"/proc/self/task/{task}").exists()]
    finally:
        LIBC.pthread_key_delete(key)
