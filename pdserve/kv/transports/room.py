"""Whether this machine has room for an arena, asked before it is made: memory that is promised and not there ends processes later, at random."""

import psutil

from pdserve.errors import TransferError


def require_room(num_bytes: int) -> None:
    """Compare with what is free now.

    Raises:
        TransferError: reason ``overflow``, with both numbers.
    """
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise TransferError("overflow", f"receive slots of {num_bytes} bytes, {available} are free; set kv.arena_bytes to less")
