"""Accepts clients as long as there is room for them: what would go past the limit on open files waits in the kernel's backlog, and is never reset.

At the limit a connection whose client has its answer and asks nothing is closed for the next one. Owns no connection and no socket; knows nothing of
HTTP but whether a connection is idle.
"""

import asyncio
import socket
from collections.abc import Callable, Collection

import structlog

from pdserve.server.http_protocol import GuardedProtocol

PAUSE_S = 0.1
"""before accepting again when the system itself has no room"""
AT_ONCE = 64
"""connections accepted before others get their turn"""


class Door:
    """The accepting side of one listening socket; make it inside the event loop.

    Args:
        listening: does not block.
        protocol: makes a connection's protocol.
        connections: those that are open, kept by the protocols.
        limit: most connections at once.
    """

    def __init__(
        self, listening: socket.socket, protocol: Callable[[], GuardedProtocol], connections: Collection[object], limit: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._protocol = protocol
        self._connections = connections
        self._limit = limit
        self._entering: set[asyncio.Task[object]] = set()
        self._is_open = False
        self._is_full = False
        self._log = structlog.get_logger().bind()

    def open(self) -> None:
        """Begin to accept."""
        self._is_open = True
        self._resume()

    async def close(self) -> None:
        """Accept no more; returns when those that were accepted are connections."""
        self._is_open = False
        self._loop.remove_reader(self._listening)
        await asyncio.gather(*self._entering, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if len(self._connections) + len(self._entering) >= self._limit:
                self._is_full = True
                self._loop.remove_reader(self._listening)
                self._close_an_idle_one()
                return
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # The system as a whole has no room left.
                self._log.warning("no connection accepted", error=str(error))
                self._loop.remove_reader(self._listening)
                self._loop.call_later(PAUSE_S, self._resume)
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._made, accepted))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    def _made(self) -> GuardedProtocol:
        protocol = self._protocol()
        protocol.on_room = self._has_room
        return protocol

    def _has_room(self) -> None:
        """A connection has closed, or is idle: go on if that is what was waited for."""
        if not self._is_full:
            return
        if len(self._connections) < self._limit:
            self._resume()
        else:
            self._close_an_idle_one()

    def _resume(self) -> None:
        self._is_full = False
        if self._is_open:
            self._loop.add_reader(self._listening, self._accept)

    def _close_an_idle_one(self) -> None:
        idle = next((c for c in self._connections if isinstance(c, GuardedProtocol) and c.is_idle and not c.transport.is_closing()), None)
        if idle is not None:
            idle.transport.close()
