"""Memory that the workers of one host share: a line of numbers and a slot for tensors from each of them.

An arena is one file without a name (memfd): index 0 makes it, the others open it through /proc, and the kernel frees it
when the last of them has let go, however they end. Its first pages are the *control*: for each member, a line of
numbers that only this member writes and the others read or sleep on. Behind it lie *segments*, each a slot per member,
at places that follow from the order in which they were reserved: all members reserve the same ones.

Nothing is ever reused between groups: each group makes an arena of its own, so a member of an older one that was
stopped and goes on writes into memory that nobody reads any more.

Stores become visible in the order in which they were made on x86-64. Other processors promise less, and Python has no
fences: there `why_unsupported` says so.
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
    "MARKS",
    "SENT",
    "TAKEN",
    "Arena",
    "Segment",
    "why_unsupported",
]

# The numbers of a member's line. SENT and TAKEN are two each: for what goes to the next member, and to the one before.
ARRIVED, DONE, PID, LEFT, SENT, TAKEN = 0, 1, 2, 3, 4, 6
CONTROL_LINE = 8  # numbers of 8 bytes: one cache line, so that members do not disturb each other's
MARKS = 256  # what a member's last collectives were: a ring of as many numbers
MAILBOX_COUNTERS = 16  # what lies in a member's mailboxes

NAME = "paceline"
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1  # of x86-64; without the private flag, as the word is shared by processes
WAKE_ALL = 2**31 - 1
NOT_OURS = "not this group's memory: its workers see different processes under the same numbers"
PUNCH_HOLE_MODE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def why_unsupported() -> str | None:
    """Return why this machine cannot share memory as an arena does; None where it can."""
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
    """One tensor of each member, all of a length and type; entry `index` is this process's own.

    The memory is there as long as the tensor that `Arena.reserve` returned, or a view of
    it: whoever uses `slots` keeps one.
    """

    def __init__(self, slots: list[Tensor], *, place: int) -> None:
        self.slots = slots
        self.dtype = slots[0].dtype
        self.place = place  # in the file, in pages: the same for all members


class Arena:
    """This process's view of the shared file."""

    def __init__(self, fd: int, *, index: int, size: int) -> None:
        self.index, self.size = index, size
        self._fd, self._pid = fd, os.getpid()
        self._end = _pages(8 * ((1 + size) * CONTROL_LINE + size * (MARKS + MAILBOX_COUNTERS)))  # of what is reserved
        self._grow()
        self._address = _map(fd, 0, self._end)
        block = _block(self._address, self._end)
        weakref.finalize(block, _unmap, self._address, self._end).atexit = False
        self.control = memoryview(block).cast("B").cast("Q")
        self._futex = _libc().syscall
        self._segments: dict[int, Segment] = {}  # by the address of one's own slot
        self._peers: dict[int, int] = {}  # pidfd -> index
        self._poll = select.poll()
        self._ended: set[int] = set()

    @classmethod
    def create(cls, *, size: int) -> Arena:
        """Make one for `size` members, as member 0. Raises OSError where the system does not let us."""
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Of two members that grow it the one that wants less may come last.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            arena = cls(fd, index=0, size=size)
            arena._sign()
        except OSError:
            os.close(fd)
            raise
        arena.control[0] = secrets.randbits(62) | 1
        return arena

    @classmethod
    def open(cls, address: tuple[int, int, int], *, index: int, size: int) -> Arena:
        """Open the one at `address` (see the property) as member `index`. Raises OSError where it cannot be had."""
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
            arena._sign()
        except OSError:
            os.close(fd)
            raise
        return arena

    @property
    def address(self) -> tuple[int, int, int]:
        """Where the other members find it: process, descriptor, and a number by which they know it."""
        return self._pid, self._fd, self.control[0]

    def word(self, index: int, name: int) -> int:
        """The place in `control` of a number of a member's line."""
        return (1 + index) * CONTROL_LINE + name

    def mark(self, index: int, sequence: int) -> int:
        """The place in `control` of what a member says about one of its collectives."""
        return (1 + self.size) * CONTROL_LINE + index * MARKS + sequence % MARKS

    def note(self, index: int, number: int) -> int:
        """The place in `control` of what a member says about a place in its mailboxes."""
        return (1 + self.size) * CONTROL_LINE + self.size * MARKS + index * MAILBOX_COUNTERS + number

    def announce(self, name: int, value: int) -> None:
        """Store a number in one's own line, behind all that was written before, and wake who sleeps on it."""
        word = self.word(self.index, name)
        self.control[word] = value
        self._futex(SYS_FUTEX, self._address + 8 * word, FUTEX_WAKE, WAKE_ALL, None, None, 0)

    def sleep(self, word: int, seen: int, limit_s: float) -> None:
        """Return when the number at `word` is not `seen` any more, or may not be, or after `limit_s`."""
        limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
        # The low half of the number, on a processor that stores it first.
        self._futex(SYS_FUTEX, self._address + 8 * word, FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit), None, 0)

    def reserve(self, numel: int, dtype: torch.dtype, *, is_lasting: bool = False) -> Tensor:
        """Return one's own slot of a new segment, zeros; all members must reserve the same. Raises MemoryError.

        The memory is taken at once, and given back when the tensor is dropped; of a lasting one, which others may still
        read then, when all members have let go.
        """
        slot_bytes = _pages(max(numel, 1) * dtype.itemsize)
        start = self._end
        own_start = start + self.index * slot_bytes
        try:
            # The kernel would give page after page, and end somebody's process when there are no more.
            if self.size * slot_bytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
                raise OSError(errno.ENOMEM, "the host has less memory than all its workers need")
            self._end += self.size * slot_bytes
            self._grow()
            os.posix_fallocate(self._fd, own_start, slot_bytes)
            address = _map(self._fd, start, self.size * slot_bytes)
        except OSError as error:
            raise MemoryError(
                f"{slot_bytes:,} bytes of shared memory for tensors of this worker are not to be had: "
                f"{error.strerror}. Use fewer workers on this host, or a smaller model"
            ) from None
        starts = [address + index * slot_bytes for index in range(self.size)]
        slots = [_tensor(_block(at, slot_bytes), numel, dtype) for at in starts]
        key = starts[self.index]
        self._segments[key] = Segment(slots, place=start // mmap.PAGESIZE)
        own = _block(key, slot_bytes)
        mapped = (address, self.size * slot_bytes)
        reserved = None if is_lasting else (own_start, slot_bytes)
        weakref.finalize(own, self._release, key, mapped, reserved).atexit = False
        return _tensor(own, numel, dtype)

    def segment(self, tensor: Tensor) -> Segment | None:
        """The segment that `tensor` lies in; None where it lies elsewhere."""
        return self._segments.get(tensor.untyped_storage().data_ptr())

    def meet(self) -> None:
        """Begin to watch the other members; call it once all have opened the arena."""
        for index in range(self.size):
            try:
                watch = os.pidfd_open(self.control[self.word(index, PID)])
            except ProcessLookupError:
                self._ended.add(index)
                continue
            self._peers[watch] = index
            self._poll.register(watch, select.POLLIN)

    def gone(self) -> Iterator[tuple[int, str]]:
        """Yield the members that will not announce anything any more, and what became of them."""
        self._ended.update(self._peers[watch] for watch, _ in self._poll.poll(0))
        for index in range(self.size):
            if self.control[self.word(index, LEFT)]:
                yield index, "has left the group"
            elif index in self._ended:
                yield index, "has ended"

    def close(self) -> None:
        """Leave, and let go of the file; tensors that lie in it live on until they are dropped."""
        if self._fd < 0:
            return
        if self._pid == os.getpid() and self.control[self.word(self.index, PID)] == self._pid:
            self.announce(LEFT, 1)
            for name in (ARRIVED, DONE):  # those who sleep look again
                self.announce(name, self.control[self.word(self.index, name)])
        for fd in (*self._peers, self._fd):
            os.close(fd)
        self._peers.clear()
        self._poll = select.poll()
        self._fd = -1

    def _sign(self) -> None:
        os.close(os.pidfd_open(self._pid))  # whoever may not watch itself may not watch others
        self.control[self.word(self.index, PID)] = self._pid

    def _grow(self) -> None:
        try:
            os.ftruncate(self._fd, self._end)
        except PermissionError:  # another member has grown it further, and it is sealed against shrinking
            if os.fstat(self._fd).st_size < self._end:
                raise

    def _release(self, key: int, mapped: tuple[int, int], reserved: tuple[int, int] | None) -> None:
        """Unmap a segment whose tensor has gone, and give one's own slot back to the system."""
        del self._segments[key]
        _unmap(*mapped)
        is_owner = self._pid == os.getpid()  # and not a process that the user's code forked, which drops its copy
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
    """Return the address at which this part of the file now lies; raises OSError."""
    address = _libc().mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, start)
    if address in (None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def _unmap(address: int, num_bytes: int) -> None:
    _libc().munmap(address, num_bytes)


def _block(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * num_bytes).from_address(address)


def _tensor(block: ctypes.Array[ctypes.c_ubyte], numel: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # what is made while somebody evaluates must serve training as well
        return torch.frombuffer(block, dtype=dtype, count=numel)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
