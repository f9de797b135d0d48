"""Writes to a client once per turn of the event loop: head, first data and last data of a short answer are one system call instead of three.

Only small pieces are held, and none longer than the turn, so neither latency nor the bound on unread bytes moves. Knows no HTTP.
"""

import asyncio
from typing import Any

MOST_HELD_BYTES = 4096
"""held before they are written at once"""


class CoalescedTransport:
    """Stands in for a connection's transport; what is not defined here is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write in this turn of the loop."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > MOST_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held now."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def get_write_buffer_size(self) -> int:
        """Return the bytes that are written and not sent yet."""
        return self._held_bytes + self._transport.get_write_buffer_size()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._held_bytes = 0
        self._transport.abort()
