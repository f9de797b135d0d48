"""A connection whose client does not read, below any socket. What goes over one is in the integration tests."""

import asyncio
from collections.abc import Callable

import pytest
import uvicorn
from uvicorn.server import ServerState

from pdserve.server.http_protocol import ConnectionLimits, GuardedProtocol

LIMIT_S = 0.02


class Transport(asyncio.Transport):
    """Holds what was written until the client reads it, also when it is closed."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        super().__init__()
        self.unread = 0
        self.is_aborted = False
        self._protocol = protocol
        self._is_closing = False

    def write(self, data: object) -> None:
        self.unread += len(bytes(data))  # type: ignore[call-overload]

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert high <= 64 << 10

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def write_eof(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True
        self._protocol.connection_lost(ConnectionAbortedError())


class Connection:
    """One protocol over such a transport."""

    def __init__(self) -> None:
        async def app(_scope: object, _receive: object, _send: object) -> None:
            await asyncio.sleep(0)

        self.slow = 0
        self.rooms = 0
        self.protocol = GuardedProtocol(uvicorn.Config(app, log_config=None, timeout_keep_alive=60), ServerState(), {})
        self.protocol.limits = ConnectionLimits(header_timeout_s=60, slow_client_timeout_s=LIMIT_S)
        self.protocol.on_slow = self.count_slow
        self.protocol.on_room = self.count_room
        self.transport = Transport(self.protocol)
        self.protocol.connection_made(self.transport)

    def count_slow(self) -> None:
        self.slow += 1

    def count_room(self) -> None:
        self.rooms += 1

    async def ends(self) -> bool:
        """Wait well beyond the limit; says whether the connection was dropped, which is told once."""
        await asyncio.sleep(5 * LIMIT_S)
        assert self.slow == self.transport.is_aborted
        return self.transport.is_aborted


CLOSES: dict[str, Callable[[GuardedProtocol], None]] = {
    "paused": lambda protocol: protocol.pause_writing(),
    "answered and closed": lambda protocol: (protocol.transport.close(), protocol.on_response_complete())[-1],
    "idle for too long": lambda protocol: protocol.timeout_keep_alive_handler(),
    "overdue": lambda protocol: protocol._overdue(),
}


@pytest.mark.parametrize("close", sorted(CLOSES))
@pytest.mark.parametrize("unread", [1, 40_000])
async def test_a_client_that_does_not_read_ends_at_its_limit(close: str, unread: int) -> None:
    """Also when little is left to read and nobody writes any more: a closed connection lasts until all of it is read."""
    connection = Connection()
    connection.transport.unread = unread
    CLOSES[close](connection.protocol)
    assert not connection.transport.is_aborted
    assert await connection.ends()
    assert connection.rooms >= 1


async def test_a_client_that_reads_in_time_is_left_alone() -> None:
    """Paused and resumed, again and again; or closed with nothing left."""
    connection = Connection()
    for _ in range(5):
        connection.protocol.pause_writing()
        await asyncio.sleep(LIMIT_S / 2)
        connection.protocol.resume_writing()
    assert not await connection.ends()
    connection.protocol.timeout_keep_alive_handler()
    assert not await connection.ends()
    connection.protocol.connection_lost(None)


async def test_a_connection_that_is_gone_is_not_dropped_again() -> None:
    """Its clocks end with it."""
    connection = Connection()
    connection.protocol.pause_writing()
    connection.protocol.connection_lost(None)
    assert not await connection.ends()
