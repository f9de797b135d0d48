"""One HTTP/1.1 connection to an engine: one exchange at a time, bytes in, events out.

    IDLE ──send()──► HEAD ──head complete──► BODY ──message complete──► IDLE (may be used again) or CLOSED
                      └──────────────┴── lost, silent for too long, or not HTTP ──► CLOSED, with the reason

Owns a transport and httptools' parser. A thin layer on purpose: every client request is two exchanges, and a general HTTP client costs more than the
rest of the router together. Knows nothing of bodies, workers or retries.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

import httptools

MAX_BUFFERED_BYTES = 32 << 10
"""unread body held before the engine is made to wait"""
READ_BYTES = 32 << 10
"""most that one read adds to it"""
_READ_BUFFER = memoryview(bytearray(READ_BYTES))
"""one for all connections: the parser copies what it takes, before the next read of any of them"""
MAX_HEAD_BYTES = 64 << 10


class State(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    CLOSED = auto()


class ConnectionLost(Exception):
    """The exchange cannot go on.

    Args:
        phase: ``head``, ``body``, ``first_byte`` or ``idle``.
        detail: for the log.
        is_untouched: not a byte of an answer had come.
    """

    def __init__(self, phase: str, detail: str, *, is_untouched: bool) -> None:
        super().__init__(phase, detail)
        self.phase = phase
        self.detail = detail
        self.is_untouched = is_untouched


class EngineConnection(asyncio.BufferedProtocol):
    """See the module. All times come from the event loop."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.status = 0
        self.content_type = ""
        self.can_be_reused = False
        """the last exchange ended whole and the engine keeps the connection"""
        self.has_ended = False
        """the last exchange's answer came to its end"""
        self.exchanges = 0
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._chunks: deque[bytes] = deque()
        self.buffered_bytes = 0
        self._is_paused = False
        self._is_until_close = False
        self._is_untouched = True
        self._head_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._lost: ConnectionLost | None = None
        self._first_byte_timeout_s: float | None = None
        self._idle_timeout_s: float | None = None
        self._last_data_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, parts: Sequence[bytes], idle_timeout_s: float | None, first_byte_timeout_s: float | None = None) -> None:
        """Begin an exchange on an idle connection.

        Args:
            idle_timeout_s: bounds the engine's silence.
            first_byte_timeout_s: bounds the time to the first byte of its answer's body instead, if given.
        """
        assert self.state is State.IDLE
        assert self._transport is not None
        self.state = State.HEAD
        self.exchanges += 1
        self.can_be_reused = False
        self.has_ended = False
        self._is_untouched = True
        self._is_until_close = True
        self._head_bytes = 0
        self._chunks.clear()
        self.buffered_bytes = 0
        self.content_type = ""
        self._idle_timeout_s = idle_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s
        limit_s = idle_timeout_s if first_byte_timeout_s is None else first_byte_timeout_s
        if limit_s is not None:
            self._last_data_s = self._loop.time()
            self._timer = self._loop.call_later(limit_s, self._check_silence)
        self._transport.writelines(parts)

    async def head(self) -> None:
        """Wait until `status` and `content_type` are known. Raises `ConnectionLost`."""
        while self.state is State.HEAD:
            await self._wait()
        if self._lost is not None and self.state is State.CLOSED and self._lost.phase != "body":
            raise self._lost

    async def chunk(self) -> bytes:
        """Return what of the body has come since, waiting for at least a byte; empty at its end. Raises `ConnectionLost`."""
        while not self._chunks:
            if self.state is not State.BODY:
                if self._lost is not None:
                    raise self._lost
                return b""
            await self._wait()
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self.buffered_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_idle(self) -> bool:
        """Say whether a new exchange may begin."""
        return self.state is State.IDLE and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection now; idempotent."""
        self._fail("body", "closed by the router")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        self.state = State.IDLE

    def get_buffer(self, sizehint: int) -> memoryview:
        return _READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._received(_READ_BUFFER[:nbytes])

    def _received(self, data: memoryview) -> None:
        if self.state is State.IDLE or self._parser is None:
            self._fail("head", "bytes that nobody asked for")
            return
        self._is_untouched = False
        if self._timer is not None and self._first_byte_timeout_s is None:
            self._last_data_s = self._loop.time()
        if self.state is State.HEAD:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("body" if self.state is State.BODY else "head", f"not HTTP: {error}")
            return
        if self.state is State.HEAD and self._head_bytes > MAX_HEAD_BYTES:
            self._fail("head", "an endless head")
            return
        if self.state is not State.HEAD:
            self._wake()
        if self.buffered_bytes >= MAX_BUFFERED_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.state is State.BODY and self._is_until_close and exc is None:
            self._end(keep=False)
        self._fail(
            "body" if self.state is State.BODY else "head", "closed by the engine" if exc is None else f"{type(exc).__name__}: {exc}"
        )

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self.content_type = value.decode("latin-1")
        elif lowered in (b"content-length", b"transfer-encoding"):
            self._is_until_close = False

    def on_headers_complete(self) -> None:
        if self.state is not State.HEAD or self._parser is None:
            self._fail("head", "an answer that nobody asked for")
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self.state = State.BODY

    def on_body(self, body: bytes) -> None:
        if self.state is not State.BODY:
            return
        if self._first_byte_timeout_s is not None:
            self._end_first_byte_limit()
        self._chunks.append(body)
        self.buffered_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.state is State.BODY and self._parser is not None:
            self._end(keep=self._parser.should_keep_alive())

    def _end(self, *, keep: bool) -> None:
        self._stop_timer()
        self.can_be_reused = keep
        self.has_ended = True
        self.state = State.IDLE
        self.idle_since_s = self._loop.time()
        if not keep and self._transport is not None:
            self._transport.close()

    def _fail(self, phase: str, detail: str) -> None:
        """Close, and let whoever waits know why, once."""
        if self.state is State.CLOSED:
            return
        self._stop_timer()
        if self.state is not State.IDLE:
            self._lost = ConnectionLost(phase, detail, is_untouched=self._is_untouched)
        self.state = State.CLOSED
        self.can_be_reused = False
        if self._transport is not None:
            self._transport.abort()
        self._transport = self._parser = None
        self._wake()

    def _check_silence(self) -> None:
        """Fail if the engine was silent for too long, else look again when it could have been."""
        phase, limit_s = "first_byte", self._first_byte_timeout_s
        if limit_s is None:
            phase, limit_s = "idle", self._idle_timeout_s
        assert limit_s is not None
        # While reading is paused the silence is the client's.
        silent_s = 0.0 if self._is_paused else self._loop.time() - self._last_data_s
        if silent_s >= limit_s:
            self._fail(phase, f"silent for {limit_s:.0f} s")
        else:
            self._timer = self._loop.call_later(limit_s - silent_s, self._check_silence)

    def _end_first_byte_limit(self) -> None:
        """The answer has begun: from here on silence is what is bounded."""
        self._stop_timer()
        self._first_byte_timeout_s = None
        if self._idle_timeout_s is not None:
            self._last_data_s = self._loop.time()
            self._timer = self._loop.call_later(self._idle_timeout_s, self._check_silence)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
