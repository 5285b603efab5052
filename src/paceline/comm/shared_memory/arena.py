"""Shared memory for the collectives of one host's workers: counters and tensor slots, like the buffers of NCCL's SHM
transport.

An arena is one file without a name (memfd). Member 0 makes it, and the others open it through /proc. The kernel frees
it when the last member has closed it, however the processes end. Its first pages are the *control*: a line of counters
per member, which only this member writes, and which the others read or wait on (futex). Behind it lie *segments*: one
slot per member, at offsets that follow from the order of reservation. So all members must reserve the same segments.

Each group makes an arena of its own, and no memory is reused between groups. So a stopped member of an older group that
continues writes into memory that no member reads any more.

On x86-64, stores become visible in the order in which they were made. Other processors do not guarantee it, and Python
has no fences: `why_unsupported` reports that.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import resource
import secrets
import select
import sys
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = [
    "ARRIVED",
    "DONE",
    "MAILBOX_COUNTERS",
    "NUM_FINGERPRINTS",
    "SENT",
    "TAKEN",
    "Arena",
    "Segment",
    "why_unsupported",
]

# The counters of a member's line. SENT and TAKEN are two each: one for the next member, and one for the previous one.
ARRIVED, DONE, PID, LEFT, SENT, TAKEN = 0, 1, 2, 3, 4, 6
CONTROL_LINE = 8  # counters of 8 bytes: one cache line, so members do not invalidate each other's
NUM_FINGERPRINTS = 256  # a circular buffer: which collectives a member has entered last
MAILBOX_COUNTERS = 16  # bytes of each tensor in a member's mailboxes

NAME = "paceline"
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1  # of x86-64; without the private flag, as the word is shared by processes
WAKE_ALL = 2**31 - 1
NOT_OURS = "not this group's memory: its workers see different processes under the same process ids"
PUNCH_HOLE_MODE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def why_unsupported() -> str | None:
    """Return why this machine cannot use an arena; None if it can."""
    if sys.platform != "linux":
        return f"memory is shared on Linux only, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"memory is shared on x86-64 only, which keeps stores in order; this is {platform.machine()}"
    if sys.maxsize < 2**32:
        return "memory is shared by 64-bit interpreters only"
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return "the limit on the size of files (ulimit -f) holds for shared memory, too"
    return None


class Segment:
    """One tensor per member, all of the same length and type; entry `index` is this process's own.

    The memory is valid as long as the tensor that `Arena.reserve` returned, or a view of it. So keep one of them while
    you use `slots`.
    """

    def __init__(self, slots: list[Tensor], *, page: int) -> None:
        self.slots = slots
        self.dtype = slots[0].dtype
        self.page = page  # where it begins in the file: the same for all members


class Arena:
    """This process's view of the shared file."""

    def __init__(self, fd: int, *, index: int, size: int) -> None:
        self.index, self.size = index, size
        self._fd, self._pid = fd, os.getpid()
        # Bytes of the file that are reserved so far.
        self._end = _pages(8 * ((1 + size) * CONTROL_LINE + size * (NUM_FINGERPRINTS + MAILBOX_COUNTERS)))
        self._grow()
        self._address = _map(fd, 0, self._end)
        block = _block(self._address, self._end)
        weakref.finalize(block, _unmap, self._address, self._end).atexit = False  # pyrefly: ignore[missing-attribute]
        self.control = memoryview(block).cast("B").cast("Q")
        self._futex = _libc().syscall
        self._segments: dict[int, Segment] = {}  # by the address of one's own slot
        self._peers: dict[int, int] = {}  # pidfd -> index
        self._poll = select.poll()
        self._ended: set[int] = set()

    @classmethod
    def create(cls, *, size: int) -> Arena:
        """Make one for `size` members, as member 0. Raises OSError if the system refuses."""
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Two members may grow the file at once; the one with the smaller size must not shrink it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            arena = cls(fd, index=0, size=size)
            arena._publish_pid()
        except OSError:
            os.close(fd)
            raise
        arena.control[0] = secrets.randbits(62) | 1
        return arena

    @classmethod
    def open(cls, address: tuple[int, int, int], *, index: int, size: int) -> Arena:
        """Open the arena at `address` (see the property) as member `index`. Raises OSError if it cannot be opened."""
        pid, number, nonce = address
        path = f"/proc/{pid}/fd/{number}"
        found = os.readlink(path)
        if not found.startswith(f"/memfd:{NAME}"):
            raise OSError(errno.ENOENT, NOT_OURS, path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            arena = cls(fd, index=index, size=size)
            if arena.control[0] != nonce:
                raise OSError(errno.ENOENT, NOT_OURS, path)
            arena._publish_pid()
        except OSError:
            os.close(fd)
            raise
        return arena

    @property
    def address(self) -> tuple[int, int, int]:
        """Where the other members find it: process, descriptor, and a random number that identifies it."""
        return self._pid, self._fd, self.control[0]

    def counter(self, index: int, name: int) -> int:
        """Return the position in `control` of one of a member's counters."""
        return (1 + index) * CONTROL_LINE + name

    def fingerprint(self, index: int, sequence: int) -> int:
        """Return the position in `control` of the fingerprint of one of a member's collectives."""
        return (1 + self.size) * CONTROL_LINE + index * NUM_FINGERPRINTS + sequence % NUM_FINGERPRINTS

    def mailbox_counter(self, index: int, number: int) -> int:
        """Return the position in `control` of the length of a tensor in one of a member's mailboxes."""
        return (1 + self.size) * CONTROL_LINE + self.size * NUM_FINGERPRINTS + index * MAILBOX_COUNTERS + number

    def announce(self, name: int, value: int) -> None:
        """Publish a counter of this member, after everything it has written before, and wake all that wait on it."""
        word = self.counter(self.index, name)
        self.control[word] = value
        self._futex(SYS_FUTEX, self._address + 8 * word, FUTEX_WAKE, WAKE_ALL, None, None, 0)

    def wait_for_change(self, word: int, seen: int, limit_s: float) -> None:
        """Return when the counter at `word` differs from `seen`, or after `limit_s`; it may return early."""
        limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
        # A futex compares 32 bits: the low half of the counter, which little-endian processors store first.
        self._futex(SYS_FUTEX, self._address + 8 * word, FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit), None, 0)

    def reserve(self, numel: int, dtype: torch.dtype, *, is_lasting: bool = False) -> Tensor:
        """Return this member's slot of a new segment, filled with zeros. Raises MemoryError.

        All members must reserve the same segments. The memory is allocated at once, and freed when the tensor is
        dropped. With `is_lasting`, other members may still read it then, so it is freed when all have closed the arena.
        """
        slot_bytes = _pages(max(numel, 1) * dtype.itemsize)
        start = self._end
        own_start = start + self.index * slot_bytes
        try:
            # Otherwise the kernel would give out page after page, and kill a process when none is left.
            if self.size * slot_bytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
                raise OSError(errno.ENOMEM, "the host has less memory than all its workers need")
            self._end += self.size * slot_bytes
            self._grow()
            os.posix_fallocate(self._fd, own_start, slot_bytes)
            address = _map(self._fd, start, self.size * slot_bytes)
        except OSError as error:
            raise MemoryError(
                f"cannot allocate {slot_bytes:,} bytes of shared memory for tensors of this worker: "
                f"{error.strerror}. Use fewer workers on this host, or a smaller model"
            ) from None
        starts = [address + index * slot_bytes for index in range(self.size)]
        slots = [_tensor(_block(at, slot_bytes), numel, dtype) for at in starts]
        key = starts[self.index]
        self._segments[key] = Segment(slots, page=start // mmap.PAGESIZE)
        own = _block(key, slot_bytes)
        mapped = (address, self.size * slot_bytes)
        reserved = None if is_lasting else (own_start, slot_bytes)
        weakref.finalize(own, self._release, key, mapped, reserved).atexit = False  # pyrefly: ignore[missing-attribute]
        return _tensor(own, numel, dtype)

    def segment(self, tensor: Tensor) -> Segment | None:
        """Return the segment that contains `tensor`; None if it is not in this arena."""
        return self._segments.get(tensor.untyped_storage().data_ptr())

    def watch_members(self) -> None:
        """Start to watch the other members' processes; call it after all have opened the arena."""
        for index in range(self.size):
            try:
                watch = os.pidfd_open(self.control[self.counter(index, PID)])
            except ProcessLookupError:
                self._ended.add(index)
                continue
            self._peers[watch] = index
            self._poll.register(watch, select.POLLIN)

    def ended_members(self) -> Iterator[tuple[int, str]]:
        """Yield the members that will not announce anything any more, each with the reason."""
        self._ended.update(self._peers[watch] for watch, _ in self._poll.poll(0))
        for index in range(self.size):
            if self.control[self.counter(index, LEFT)]:
                yield index, "has left the group"
            elif index in self._ended:
                yield index, "has ended"

    def close(self) -> None:
        """Leave the group and close the file; tensors in it stay valid until they are dropped."""
        if self._fd < 0:
            return
        if self._pid == os.getpid() and self.control[self.counter(self.index, PID)] == self._pid:
            self.announce(LEFT, 1)
            for name in (ARRIVED, DONE):  # wakes waiting members, which then see that this one has left
                self.announce(name, self.control[self.counter(self.index, name)])
        for fd in (*self._peers, self._fd):
            os.close(fd)
        self._peers.clear()
        self._poll = select.poll()
        self._fd = -1

    def _publish_pid(self) -> None:
        os.close(os.pidfd_open(self._pid))  # OSError where the system does not let this process watch others
        self.control[self.counter(self.index, PID)] = self._pid

    def _grow(self) -> None:
        try:
            os.ftruncate(self._fd, self._end)
        except PermissionError:  # another member has grown the file further, and it is sealed against shrinking
            if os.fstat(self._fd).st_size < self._end:
                raise

    def _release(self, key: int, mapped: tuple[int, int], reserved: tuple[int, int] | None) -> None:
        """Unmap a segment whose tensor was dropped, and free this member's slot."""
        del self._segments[key]
        _unmap(*mapped)
        is_owner = self._pid == os.getpid()  # a process that the user's code forked only drops its copy
        if reserved is not None and self._fd >= 0 and is_owner:
            _libc().fallocate(self._fd, PUNCH_HOLE_MODE, *reserved)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    word, pointer = ctypes.c_uint32, ctypes.c_void_p
    libc.syscall.argtypes = [ctypes.c_long, pointer, ctypes.c_int, word, pointer, pointer, word]
    return libc


def _map(fd: int, start: int, num_bytes: int) -> int:
    """Map a part of the file and return its address; raises OSError."""
    address = _libc().mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, start)
    if address in (None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def _unmap(address: int, num_bytes: int) -> None:
    _libc().munmap(address, num_bytes)


def _block(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * num_bytes).from_address(address)


def _tensor(block: ctypes.Array[ctypes.c_ubyte], numel: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a tensor that is made during evaluation must serve training as well
        return torch.frombuffer(block, dtype=dtype, count=numel)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
