"""Pages over the control link's own TCP stream: works between any two hosts, always available.

The producer gathers into a buffer of its own and sends it after the notice; the consumer's reader fills the slot from the socket.
"""

import numpy as np

from pdserve.kv.pages import Bytes
from pdserve.kv.transports.room import require_room


class TcpArena:
    """Slots in private memory."""

    descriptor = ""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        require_room(num_slots * slot_bytes)
        self._slots = np.empty((num_slots, slot_bytes), dtype=np.uint8)
        self._slots[:] = 0  # the first transfer does not pay for the pages

    def slot(self, number: int) -> Bytes:
        view: Bytes = self._slots[number]
        return view

    def close(self) -> None:
        self._slots = np.empty((0, 0), dtype=np.uint8)


class TcpMover:
    """One staging buffer per link; the link sends it before it asks for the next target."""

    def __init__(self, slot_bytes: int) -> None:
        self._staging = np.empty(slot_bytes, dtype=np.uint8)

    def target(self, slot: int, num_bytes: int) -> Bytes:
        return self._staging[:num_bytes]

    def close(self) -> None:
        self._staging = np.empty(0, dtype=np.uint8)


class TcpTransport:
    name = "tcp"
    carries_inline = True
    peer_writes = False

    def open_arena(self, num_slots: int, slot_bytes: int) -> TcpArena:
        return TcpArena(num_slots, slot_bytes)

    def connect(self, descriptor: str, slot_bytes: int) -> TcpMover:
        return TcpMover(slot_bytes)
