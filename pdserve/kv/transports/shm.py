"""Slots in memory that the producer maps: one copy out of its blocks into the consumer's slot, on the same host.

The memory is an anonymous file (`memfd_create`), reached by the peer through ``/proc/<pid>/fd/<number>``: it has no name that could be left
behind, ends with the last process that maps it, and does not count against the size of ``/dev/shm``. A cookie in its first page proves to a
producer that it has mapped what the consumer meant, also where process ids of two containers happen to collide.

The segment: one page with the cookie, then the slots, each on a page boundary.
"""

import mmap
import os
from pathlib import Path

import msgspec
import numpy as np

from pdserve.errors import TransferError
from pdserve.kv.pages import Bytes
from pdserve.kv.transports.room import require_room

COOKIE_BYTES = 16


class ShmDescriptor(msgspec.Struct, frozen=True):
    """How a producer finds a consumer's segment; travels in the handshake, under the link's key."""

    boot_id: str
    pid: int
    fd: int
    num_slots: int
    slot_bytes: int
    cookie: bytes


def boot_id() -> str:
    """Return this machine's identity since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _segment_bytes(num_slots: int, slot_bytes: int) -> int:
    return mmap.PAGESIZE + num_slots * _stride(slot_bytes)


def _map(fd: int, size: int) -> Bytes:
    """Map all of a segment now, so that the first transfer does not pay for it."""
    return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)


def _slot(segment: Bytes, number: int, slot_bytes: int) -> Bytes:
    start = mmap.PAGESIZE + number * _stride(slot_bytes)
    view: Bytes = segment[start : start + slot_bytes]
    return view


class ShmArena:
    """The consumer's slots."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        size = _segment_bytes(num_slots, slot_bytes)
        require_room(size)
        self._fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, 0, size)
            self._segment = _map(self._fd, size)
        except OSError as error:
            os.close(self._fd)
            raise TransferError("overflow", f"no memory for {size} bytes of receive slots: {error.strerror}") from error
        cookie = os.urandom(COOKIE_BYTES)
        self._segment[:COOKIE_BYTES] = np.frombuffer(cookie, dtype=np.uint8)
        self._descriptor = ShmDescriptor(boot_id(), os.getpid(), self._fd, num_slots, slot_bytes, cookie)

    @property
    def descriptor(self) -> str:
        return msgspec.json.encode(self._descriptor).decode()

    def slot(self, number: int) -> Bytes:
        return _slot(self._segment, number, self._slot_bytes)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShmMover:
    """A producer's mapping of one consumer's slots."""

    def __init__(self, descriptor: ShmDescriptor) -> None:
        self._descriptor = descriptor
        size = _segment_bytes(descriptor.num_slots, descriptor.slot_bytes)
        try:
            fd = os.open(f"/proc/{descriptor.pid}/fd/{descriptor.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError("unreachable", f"peer's slots cannot be mapped ({error.strerror}); use transport tcp") from error
        try:
            if os.fstat(fd).st_size != size:
                raise TransferError("unreachable", "peer's slots are not at the place that it names; use transport tcp")
            self._segment = _map(fd, size)
        finally:
            os.close(fd)
        if self._segment[:COOKIE_BYTES].tobytes() != descriptor.cookie:
            raise TransferError("unreachable", "peer's slots are not at the place that it names; use transport tcp")

    def target(self, slot: int, num_bytes: int) -> Bytes:
        if not 0 <= slot < self._descriptor.num_slots or num_bytes > self._descriptor.slot_bytes:
            raise TransferError("bad_frame", f"slot {slot} with {num_bytes} bytes; the peer has {self._descriptor.num_slots}")
        return _slot(self._segment, slot, self._descriptor.slot_bytes)[:num_bytes]

    def close(self) -> None:
        self._segment = np.empty(0, dtype=np.uint8)


class ShmTransport:
    name = "shm"
    carries_inline = False
    peer_writes = True

    def open_arena(self, num_slots: int, slot_bytes: int) -> ShmArena:
        return ShmArena(num_slots, slot_bytes)

    def connect(self, descriptor: str, slot_bytes: int) -> ShmMover:
        try:
            place = msgspec.json.decode(descriptor, type=ShmDescriptor)
        except msgspec.DecodeError as error:
            raise TransferError("unreachable", "peer offers no shared memory; use the same transport on both") from error
        if place.boot_id != boot_id():
            raise TransferError("unreachable", "peer is on another machine; use transport tcp")
        return ShmMover(place)
