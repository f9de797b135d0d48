"""The legs' way to engines: connections kept and reused, one silent retry where reuse went wrong, every failure a `WorkerLost` with its phase.

Limits: connecting has its own, the first byte and silence are bounded per exchange by the caller, total time by the caller's cancel scope, and no
worker shares a limit with another. An engine that closes a kept connection just when a request is written has not read it: if not a byte came back,
the request is sent once more on a fresh connection. Knows nothing of bodies or tickets.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from urllib.parse import urlsplit

from pdserve.errors import WorkerLost
from pdserve.ports import UpstreamResponse
from pdserve.server.engine_connection import ConnectionLost, EngineConnection

SECRET_HEADER = "x-pdserve-secret"
KEEP_ALIVE_S = 2.5
"""kept connections are used again within this time only; engines close theirs after 5 s"""


class EngineClient:
    """Implements `ports.EngineClient`. Make it inside the event loop; `close` it there.

    Args:
        secret: sent with every request.
        connect_timeout_s: longest time for a connection to be there.
        max_kept: most idle connections to all engines together, None for any number.
    """

    def __init__(self, secret: str, connect_timeout_s: float, max_kept: int | None = None) -> None:
        self._secret = secret
        self._connect_timeout_s = connect_timeout_s
        self._max_kept = max_kept
        self._idle: defaultdict[str, list[EngineConnection]] = defaultdict(list)
        self._kept = 0
        self._busy: set[EngineConnection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def post(
        self,
        worker_id: str,
        url: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        idle_timeout_s: float | None = None,
        first_byte_timeout_s: float | None = None,
    ) -> "_Exchange":
        """See `ports.EngineClient.post`."""
        return _Exchange(self, worker_id, url, (self._head(url, path, body, headers), body), (idle_timeout_s, first_byte_timeout_s))

    @property
    def busy(self) -> int:
        """Connections with an exchange on them."""
        return len(self._busy)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of answers that came and are not read yet."""
        return sum(connection.buffered_bytes for connection in self._busy)

    async def close(self) -> None:
        """Drop all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in (*self._busy, *(c for kept in self._idle.values() for c in kept)):
            connection.close()
        self._idle.clear()
        self._kept = 0

    async def connection(self, worker_id: str, url: str, *, fresh: bool) -> EngineConnection:
        """Return an idle connection, a kept one unless it must be `fresh`. Raises `WorkerLost` (phase ``connect``)."""
        kept = self._idle[url]
        oldest_s = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while kept and not fresh:
            connection = kept.pop()
            self._kept -= 1
            if connection.is_idle and connection.idle_since_s > oldest_s:
                self._busy.add(connection)
                return connection
            connection.close()
        connection = await self._connect(worker_id, url)
        self._busy.add(connection)
        return connection

    def give_back(self, url: str, connection: EngineConnection) -> None:
        """Keep a connection whose exchange ended whole, drop any other."""
        self._busy.discard(connection)
        has_place = self._max_kept is None or self._kept < self._max_kept
        if connection.can_be_reused and connection.is_idle and has_place:
            self._idle[url].append(connection)
            self._kept += 1
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._sweep)
        else:
            connection.close()

    async def _connect(self, worker_id: str, url: str) -> EngineConnection:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(EngineConnection, host, port)
        except (OSError, TimeoutError) as error:
            raise WorkerLost(worker_id, "connect", f"{type(error).__name__}: {error}") from error
        return connection

    def _sweep(self) -> None:
        """Close what was kept for too long."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - KEEP_ALIVE_S
        for url, kept in list(self._idle.items()):
            for connection in kept:
                if connection.idle_since_s <= oldest_s:
                    connection.close()
            self._idle[url] = [connection for connection in kept if connection.is_idle]
            self._kept -= len(kept) - len(self._idle[url])
            if not self._idle[url]:
                del self._idle[url]
        self._sweeper = loop.call_later(KEEP_ALIVE_S, self._sweep) if self._idle else None

    def _head(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return (
            f"POST {path} HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n{SECRET_HEADER}: {self._secret}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        ).encode("latin-1")


class _Exchange:
    """The scope of one exchange: leaving it before the answer's end drops the connection, which aborts the request on the engine."""

    __slots__ = ("_client", "_connection", "_limits_s", "_parts", "_url", "_worker_id")

    def __init__(
        self, client: EngineClient, worker_id: str, url: str, parts: tuple[bytes, bytes], limits_s: tuple[float | None, float | None]
    ) -> None:
        self._client = client
        self._worker_id = worker_id
        self._url = url
        self._parts = parts
        self._limits_s = limits_s
        self._connection: EngineConnection | None = None

    async def __aenter__(self) -> UpstreamResponse:
        try:
            connection = await self._send(fresh=False)
        except ConnectionLost as error:
            raise _lost(self._worker_id, error) from error
        return _Answer(self._worker_id, connection)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    async def _send(self, *, fresh: bool) -> EngineConnection:
        """Send the request and wait for the head of its answer."""
        connection = self._connection = await self._client.connection(self._worker_id, self._url, fresh=fresh)
        was_used = connection.exchanges > 0
        connection.send(self._parts, *self._limits_s)
        try:
            await connection.head()
        except ConnectionLost as error:
            self._give_back()
            if was_used and error.is_untouched and error.phase == "head":
                return await self._send(fresh=True)
            raise
        except BaseException:
            self._give_back()
            raise
        return connection

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.give_back(self._url, connection)


class _Answer:
    """Implements `ports.UpstreamResponse`."""

    __slots__ = ("_connection", "_worker_id", "content_type", "status")

    def __init__(self, worker_id: str, connection: EngineConnection) -> None:
        self._worker_id = worker_id
        self._connection = connection
        self.status = connection.status
        self.content_type = connection.content_type

    @property
    def is_whole(self) -> bool:
        return self._connection.has_ended

    async def read(self) -> bytes:
        chunks = [chunk async for chunk in self.chunks()]
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def chunks(self) -> AsyncIterator[bytes]:
        return _Chunks(self._worker_id, self._connection)


class _Chunks:
    """Iterates a body. A class, because an async generator left in the middle lives on until the loop collects it."""

    __slots__ = ("_connection", "_worker_id")

    def __init__(self, worker_id: str, connection: EngineConnection) -> None:
        self._worker_id = worker_id
        self._connection = connection

    def __aiter__(self) -> "_Chunks":
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._connection.chunk()
        except ConnectionLost as error:
            raise _lost(self._worker_id, error) from error
        if not chunk:
            raise StopAsyncIteration
        return chunk


def _lost(worker_id: str, error: ConnectionLost) -> WorkerLost:
    return WorkerLost(worker_id, error.phase, error.detail)
