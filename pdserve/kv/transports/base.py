"""The port that every transport implements: where slots live, and where a producer's gather writes.

Two capabilities decide how the driver treats a transport, instead of its type:

    carries_inline   pages follow the notice on the control link          tcp
                     pages are in the slot before the notice is sent      memory, shm, cuda_ipc, nixl
    peer_writes      the peer holds the slot's memory mapped and may write it until its process is gone
                     (so slots of a dead peer stay quarantined until then)    shm, cuda_ipc, nixl
"""

from typing import Protocol

from pdserve.kv.pages import Bytes


class Arena(Protocol):
    """This rank's receive slots."""

    @property
    def descriptor(self) -> str:
        """How a peer reaches the slots; travels in the handshake. Empty where nothing is needed."""
        ...

    def slot(self, number: int) -> Bytes:
        """Return one slot's bytes, uint8 [slot_bytes]."""
        ...

    def close(self) -> None:
        """Release the memory; peers that still map it keep it alive for themselves only."""
        ...


class Mover(Protocol):
    """A producer's way into one peer's slots."""

    def target(self, slot: int, num_bytes: int) -> Bytes:
        """Return where to gather a parcel: the peer's slot itself, or a buffer that is sent next. Valid until the next call."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """One fabric."""

    @property
    def name(self) -> str: ...

    @property
    def carries_inline(self) -> bool: ...

    @property
    def peer_writes(self) -> bool: ...

    def open_arena(self, num_slots: int, slot_bytes: int) -> Arena:
        """Make this rank's slots. Raises `TransferError` where memory is short."""
        ...

    def connect(self, descriptor: str, slot_bytes: int) -> Mover:
        """Prepare to fill a peer's slots. Raises `TransferError` where the peer's memory cannot be reached."""
        ...
