"""Slots in the memory of this process, for ranks that live in one: what tests run the real rank on, with faults where they want them.

Behaves as `shm` does towards the driver: a producer's gather writes the consumer's slot, and may go on writing while it lives.
"""

from typing import Protocol

import numpy as np

from pdserve.errors import TransferError
from pdserve.kv.pages import Bytes
from pdserve.kv.transports.room import require_room


class Faults(Protocol):
    """What may go wrong with a slot's bytes."""

    def before_post(self) -> None:
        """A producer is about to fill a slot. Raises `TransferError` to fail the post."""
        ...

    def before_read(self, slot: Bytes) -> None:
        """A consumer is about to read a slot; may change its bytes."""
        ...


class MemoryArena:
    """One rank's slots."""

    def __init__(self, num_slots: int, slot_bytes: int, descriptor: str, faults: Faults | None) -> None:
        require_room(num_slots * slot_bytes)
        self.slots = np.zeros((num_slots, slot_bytes), dtype=np.uint8)
        self.descriptor = descriptor
        self._faults = faults

    def slot(self, number: int) -> Bytes:
        view: Bytes = self.slots[number]
        if self._faults is not None:
            self._faults.before_read(view)
        return view

    def close(self) -> None:
        """Nothing to release: a producer that still holds the memory keeps it for itself only."""


class MemoryMover:
    """A producer's way into one rank's slots."""

    def __init__(self, arena: MemoryArena, faults: Faults | None) -> None:
        self._arena = arena
        self._faults = faults

    def target(self, slot: int, num_bytes: int) -> Bytes:
        if self._faults is not None:
            self._faults.before_post()
        num_slots, slot_bytes = self._arena.slots.shape
        if not 0 <= slot < num_slots or num_bytes > slot_bytes:
            raise TransferError("bad_frame", f"slot {slot} with {num_bytes} bytes; the peer has {num_slots}")
        view: Bytes = self._arena.slots[slot, :num_bytes]
        return view

    def close(self) -> None: ...


class MemoryTransport:
    """All arenas of one test; give the same object to every rank.

    Args:
        faults: what goes wrong, None for nothing.
    """

    name = "memory"
    carries_inline = False
    peer_writes = True

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults
        self._arenas: dict[str, MemoryArena] = {}

    def open_arena(self, num_slots: int, slot_bytes: int) -> MemoryArena:
        arena = MemoryArena(num_slots, slot_bytes, f"arena-{len(self._arenas)}", self._faults)
        self._arenas[arena.descriptor] = arena
        return arena

    def connect(self, descriptor: str, slot_bytes: int) -> MemoryMover:
        arena = self._arenas.get(descriptor)
        if arena is None:
            raise TransferError("unreachable", f"no rank of this process has {descriptor!r}")
        return MemoryMover(arena, self._faults)
