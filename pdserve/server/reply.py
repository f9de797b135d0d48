"""The client's side of one request: what it has been sent, and whether it is still there.

Owns the ASGI `send` and, once the body is read, `receive`. Knows nothing of engines.

While a stream has no data yet, comments may keep it alive: the first one commits to 200, so from then on an error is an error event, but the answer
is still free to come from anywhere.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from starlette.types import Receive, Send

from pdserve.errors import PdserveError

Headers = Sequence[tuple[bytes, bytes]]
STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
KEEP_ALIVE = b": keep-alive\n\n"
PIECE_BYTES = 16 << 10
"""most that is given to the connection at once; it takes no more while too much is unread"""
LAST_WORD_S = 5.0
"""how long a client that reads slowly may take for the event that says its stream failed"""


class ClientGone(Exception):
    """The client closed its connection. Never leaves the server."""


class Stopped(Exception):
    """This router is told to stop and its patience with running requests is over. Never leaves the server."""


class Departures:
    """Whom to tell when one connection is gone: cheaper than a task that waits for it, for each request."""

    SCOPE_KEY = "pdserve.departures"
    """where a connection's requests find it in their ASGI scope"""

    def __init__(self) -> None:
        self.callbacks: set[Callable[[], None]] = set()
        self.is_over = False

    def tell(self) -> None:
        """The connection is gone."""
        self.is_over = True
        for callback in list(self.callbacks):
            callback()


class Reply:
    """One response.

    Args:
        request_id: what `x-request-id` tells the client.
        departures: called when the connection is gone; None if only `receive` tells it.
    """

    def __init__(self, receive: Receive, send: Send, request_id: str, departures: "Departures | None" = None) -> None:
        self._receive = receive
        self._departures = departures
        self._send = send
        self._id_header = (b"x-request-id", request_id.encode())
        self.extra_headers: list[tuple[bytes, bytes]] = []
        """sent with whatever the response becomes"""
        self.debug_header: tuple[bytes, bytes] | None = None
        self.is_started = False
        """a status was sent, so the outcome can no longer change it"""
        self.has_data = False
        """something of the answer was sent, so no other answer can take its place"""
        self.is_ended = False
        self._pause_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def presence(self, on_left: Callable[[], None] = lambda: None, limit_s: float | None = None) -> "Presence":
        """Return a scope that lasts as long as the client is there, `limit_s` seconds at most; `on_left` is called when it is seen to have left."""
        return Presence(self, self._receive, self._departures, on_left, limit_s)

    def keep_alive(self, pause_s: float) -> None:
        """From now on send a comment every `pause_s` seconds, until there is data or the client's presence ends. Idempotent; 0 sends none."""
        if pause_s > 0 and self._timer is None and not self.has_data:
            self._pause_s = pause_s
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._begin_comment)

    def end_keep_alive(self) -> None:
        """Begin no further comment. Idempotent."""
        self._pause_s = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete response."""
        await self._begin_data()
        await self._start(status, headers)
        await self._body(body, is_last=True)

    async def events(self, events: bytes) -> None:
        """Send events as they are; the first ones commit to 200. Waits while the client reads slower than the engine writes."""
        if not self.has_data:
            await self._begin_data()
        if not self.is_started:
            await self._start(200, STREAM_HEADERS)
        await self._body(events, is_last=False)

    async def end_events(self, last: bytes) -> None:
        """Send the last events."""
        await self._begin_data()
        if not self.is_started:
            await self._start(200, STREAM_HEADERS)
        await self._body(last, is_last=True)

    async def fail_events(self, error_event: bytes) -> None:
        """End a started stream with an error event, unless the client does not take it in time."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self.end_events(error_event)
        except TimeoutError:
            self.is_ended = True

    def _begin_comment(self) -> None:
        self._comment = asyncio.create_task(self._send_comment())

    async def _send_comment(self) -> None:
        if self.has_data:
            return
        if not self.is_started:
            await self._start(200, STREAM_HEADERS)
        await self._body(KEEP_ALIVE, is_last=False)
        self._timer = None
        self.keep_alive(self._pause_s)

    async def _begin_data(self) -> None:
        """Let a comment that is being sent out first: a response is one sequence of bytes."""
        self.has_data = True
        self.end_keep_alive()
        if self._comment is not None and not self._comment.done():
            await asyncio.wait((self._comment,))

    async def _start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        sent = [*headers, self._id_header, *self.extra_headers]
        if self.debug_header is not None:
            sent.append(self.debug_header)
        await self._send({"type": "http.response.start", "status": status, "headers": sent})

    async def _body(self, body: bytes, *, is_last: bool) -> None:
        # Set first: the server reports a finished response as a disconnect, which must not look like a client that left.
        self.is_ended = is_last
        start = 0
        while len(body) - start > PIECE_BYTES:
            await self._send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})
            start += PIECE_BYTES
        await self._send({"type": "http.response.body", "body": body[start:], "more_body": not is_last})


class Presence:
    """Runs its block as long as the client is there, and time is left: like `asyncio.timeout`, with the client's departure as a second end.

    Leaving the block raises `ClientGone` if the client left, `Stopped` if `stop` was called, `TimeoutError` if the time is over, whichever came
    first. Any other way out passes unchanged.
    """

    def __init__(
        self, reply: Reply, receive: Receive, departures: "Departures | None", on_left: Callable[[], None], limit_s: float | None
    ) -> None:
        self._reply = reply
        self._receive = receive
        self._departures = departures
        self._on_left = on_left
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._cancelling = 0
        self._cause: type[ClientGone] | type[Stopped] | type[TimeoutError] | None = None

    async def __aenter__(self) -> "Presence":
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        if self._limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._end, TimeoutError)
        if self._departures is None:
            self._watch = asyncio.create_task(self._until_gone())
        elif self._departures.is_over:
            self._end(ClientGone)
        else:
            self._departures.callbacks.add(self._gone)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        task, watch = self._task, self._watch
        self._task = self._watch = None
        assert task is not None
        if watch is not None:
            watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._departures is not None:
            self._departures.callbacks.discard(self._gone)
        self._reply.end_keep_alive()
        if self._cause is None or task.uncancel() > self._cancelling:
            return
        if isinstance(error, asyncio.CancelledError | PdserveError | TimeoutError):
            raise self._cause from error

    def stop(self) -> None:
        """End the block as if the client had left, but raise `Stopped`."""
        self._end(Stopped)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        if not self._reply.is_ended:
            self._end(ClientGone)

    def _end(self, cause: type[ClientGone] | type[Stopped] | type[TimeoutError]) -> None:
        if self._task is not None and self._cause is None:
            self._cause = cause
            if cause is ClientGone:
                self._on_left()
            self._task.cancel()
