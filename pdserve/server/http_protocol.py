"""uvicorn's HTTP protocol with what it leaves open: limits on a request's header, on the time it takes to become whole, and on unread answers.

    a connection, or a request's first byte ──header_timeout_s──► header whole ──body_timeout_s──► body whole
    64 KiB of an answer wait ──slow_client_timeout_s──► the client reads on, or its connection is dropped

Requests that come while an earlier one is answered have their time begin when it is their turn. Knows no path and no application.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdserve.server.coalesced import MOST_HELD_BYTES, CoalescedTransport
from pdserve.server.errors import error_body
from pdserve.server.reply import Departures

UNREAD_BYTES = (48 << 10) - MOST_HELD_BYTES
"""of an answer, beyond which its writer waits; with one more piece of it (`reply.PIECE_BYTES`) this makes 64 KiB"""
RESUME_BYTES = 16 << 10
LINGER_S = 2.0
"""how long a refused client may go on sending"""
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Settings of the same names."""

    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    slow_client_timeout_s: float = 60.0
    max_headers: int = 100
    max_header_bytes: int = 32 << 10


class GuardedProtocol(HttpToolsProtocol):
    """One client's connection. Set `limits` before it is made."""

    limits = ConnectionLimits()
    on_room: Callable[[], None] = staticmethod(lambda: None)
    """told when the connection is gone, or idle"""
    on_slow: Callable[[], None] = staticmethod(lambda: None)
    """told when the connection is dropped because its client does not read"""
    _timer: asyncio.TimerHandle | None = None
    _slow_timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _is_in_body = False
    _head_bytes = 0
    _messages = 0
    _is_refused = False
    _answering: RequestResponseCycle | None = None
    """what the request was found behind whose bytes arrive now"""

    @property
    def is_idle(self) -> bool:
        """Say whether its last request is answered and no other has begun."""
        return self.cycle is not None and self.cycle.response_complete and not self.pipeline and self._timer is None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._departures = Departures()
        super().connection_made(CoalescedTransport(transport, self.loop))  # type: ignore[arg-type]
        transport.set_write_buffer_limits(high=UNREAD_BYTES, low=RESUME_BYTES)
        self._arm(self.limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        messages = self._messages
        super().data_received(data)
        if self._is_in_head:
            if messages == self._messages:
                # All of it belongs to a header that has not ended, of which the parser may have told nothing yet.
                self._head_bytes += len(data)
                self._check_head()
        elif self.is_idle and not self.transport.is_closing():
            # Bytes that begin no request have stopped the clock of idle connections.
            self._arm(self.limits.header_timeout_s)

    def on_message_begin(self) -> None:
        self._messages += 1
        self._answering = self.cycle if self.cycle is not None and not self.cycle.response_complete else None
        super().on_message_begin()
        self.scope[Departures.SCOPE_KEY] = self._departures  # type: ignore[literal-required]
        self._is_in_head, self._is_in_body, self._head_bytes = True, False, 0
        if self._timer is None:
            self._arm(self.limits.header_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head they are trailers, which nobody here reads and nobody has bounded.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = max(self._head_bytes, len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
        if self._is_refused or not self._check_head():
            return
        super().on_headers_complete()
        self._is_in_head, self._is_in_body = False, True
        self._arm(self.limits.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._disarm()
        self._is_in_body = False
        super().on_message_complete()
        if not self.pipeline:
            # A large body pauses reading, and a client that leaves would not be seen.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_close()
        self.on_room()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_slow_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_slow_timer()
        self._watch_close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_slow_timer()
        super().connection_lost(exc)
        self._departures.tell()
        self.on_room()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1", "invalid_http")

    def _check_head(self) -> bool:
        """Refuse a header beyond its limits; returns whether it is within."""
        limits = self.limits
        if self._head_bytes <= limits.max_header_bytes and len(self.headers) <= limits.max_headers:
            return True
        message = f"the header is larger than {limits.max_header_bytes} bytes, or has more than {limits.max_headers} fields"
        self._refuse(431, message, "header_too_large")
        return False

    def _arm(self, limit_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(limit_s, self._overdue)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        self._timer = None
        if self._answering is not None and not self._answering.response_complete:
            self._arm(self.limits.body_timeout_s if self._is_in_body else self.limits.header_timeout_s)
        elif self._is_in_head or (self._is_in_body and not self.cycle.response_started):
            self._refuse(408, "the request was not whole in time", "request_timeout")
        else:
            # Nothing was asked, or it is answered already.
            self.transport.close()
            self._watch_close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer in place of the application, unless an answer is under way, and close."""
        self._is_refused = True
        self._disarm()
        is_free = self._answering is None or self._answering.response_complete
        has_begun = self._is_in_body and self.cycle.response_started
        if self._is_in_body:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not is_free or has_begun or self.transport.is_closing():
            self.transport.close()
            self._watch_close()
            return
        body = error_body(status, message, None, code)
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        # A client that still sends would be answered with a reset, which takes the answer with it: hear it out for a while.
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _watch_close(self) -> None:
        """A closed connection lasts until its client has read what was written; see that this ends."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._start_slow_timer()

    def _start_slow_timer(self) -> None:
        if self._slow_timer is None:
            self._slow_timer = self.loop.call_later(self.limits.slow_client_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._slow_timer = None
        self.on_slow()
        self.transport.abort()

    def _stop_slow_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
