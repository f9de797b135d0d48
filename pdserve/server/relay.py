"""Carries decode's answer to the client: verbatim, but for the usage it reports, errors, and the end of the stream.

Raises instead of answering when decode failed; whether the client already has a status is the caller's to look at. Knows no worker but the one that
answers, and nothing of retries; what an answer's bytes mean is its dialect's to say.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from pdserve.clock import Clock
from pdserve.errors import UpstreamError, WorkerLost
from pdserve.ports import UpstreamResponse
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.request import ClientRequest, Route
from pdserve.server.draft import Draft
from pdserve.server.frames import EventTooLong, Frame, FrameKind, FrameSplitter, data_event, event_name
from pdserve.server.records import Records
from pdserve.server.reply import Reply
from pdserve.server.resume import Resumption

PREFILL_USAGE_S = 1.0
"""longest wait, at the end of an answer, for what prefill says about its cache"""
TAIL_S = 1.0
"""longest wait for the end of an HTTP body whose last event has come"""

PrefillTask = asyncio.Task[Mapping[str, int]]
"""the running prefill leg; its result is what prefill says of the prompt, see `Dialect.counts`"""


class Relay:
    """One attempt's way back.

    Args:
        worker_id: the decode worker, for errors.
        prefill: the other leg, None on the local path.
        landing: ends well when the prompt's KV has arrived; nothing reaches the client before. None where decode may recompute.
        resumption: notes what the client gets, if the stream may be taken up again.
    """

    def __init__(
        self,
        request: ClientRequest,
        reply: Reply,
        draft: Draft,
        clock: Clock,
        records: Records,
        worker_id: str,
        prefill: PrefillTask | None,
        landing: asyncio.Task[None] | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        self._request = request
        self._dialect = DIALECTS[request.route]
        self._reply = reply
        self._draft = draft
        self._clock = clock
        self._records = records
        self._worker_id = worker_id
        self._prefill = prefill
        self._landing = landing
        self._resumption = resumption
        self._splitter = FrameSplitter(self._dialect)
        self._held: list[bytes] = []
        """events that say nothing yet, until there is data: an attempt that fails before leaves no trace of itself"""
        self._has_data = False
        self._has_usage = False

    async def stream(self, answer: UpstreamResponse) -> None:
        """Forward events as they come, until the stream's own end, or to an end like it if all was said before the stream broke.

        Raises:
            UpstreamError: the engine sent an error event.
            WorkerLost: the stream broke, or ended without a finish and its last event.
        """
        try:
            await self._stream(answer)
        except (UpstreamError, WorkerLost):
            if self._resumption is None:
                raise
            if self._prefill is not None and self._prefill.done():
                self._resumption.prefilled(await _told_by(self._prefill))
            if not self._splitter.has_finish:
                raise
            await self._end_resumed(self._resumption)

    async def _end_resumed(self, resumption: Resumption) -> None:
        """Say what the engine would have said after the end of its answer."""
        events = [self._dialect.stream_end]
        if not self._has_usage:
            usage = resumption.usage()
            self._draft.usage = self._dialect.counts(usage)
            if self._request.include_usage:
                events.insert(0, resumption.usage_event(usage))
        await self._end(events, has_data=False)

    async def _stream(self, answer: UpstreamResponse) -> None:
        if not answer.content_type.startswith("text/event-stream"):
            raise self._lost(f"a stream of type {answer.content_type}")
        chunks = answer.chunks()
        async for chunk in chunks:
            try:
                frames = self._splitter.feed(chunk)
            except EventTooLong as error:
                raise self._lost(str(error)) from error
            if await self._forward(frames):
                if not answer.is_whole:
                    await _read_out(chunks)
                return
        raise self._lost("the stream ended without its last event")

    async def whole(self, answer: UpstreamResponse) -> None:
        """Forward a complete answer.

        Raises:
            WorkerLost: the body broke, is not JSON, or says that the engine dropped the request.
        """
        body = await answer.read()
        try:
            payload = orjson.loads(body)
            is_aborted, usage = self._dialect.is_aborted(payload), payload.get("usage")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise self._lost("an answer that is no completion") from error
        if is_aborted:
            raise self._lost("the engine aborted the request")
        await self._note_data()
        if await self._mend(payload):
            body = orjson.dumps(payload)
        self._draft.usage = self._dialect.counts(usage) if isinstance(usage, dict) else {}
        self._draft.end(self._clock.now_s(), 200, "finished")
        await self._reply.whole(200, ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())), body)

    async def _forward(self, frames: Sequence[Frame]) -> bool:
        """Send what these events mean to the client; return True after the last one."""
        events: list[bytes] = []
        has_data = False
        for frame in frames:
            match frame.kind:
                case FrameKind.DATA:
                    events.append(frame.raw)
                    has_data = True
                case FrameKind.PREAMBLE if not events and not self._has_data:
                    self._held.append(frame.raw)
                case FrameKind.PREAMBLE:
                    events.append(frame.raw)
                case FrameKind.OTHER:
                    if events or self._reply.has_data:
                        events.append(frame.raw)
                case FrameKind.USAGE:
                    if self._prefill is not None and not self._prefill.done():
                        # What prefill says of its cache has to be waited for: nothing else waits with it.
                        await self._send(events, has_data=has_data)
                        events, has_data = [], False
                    events += await self._usage_event(frame)
                case FrameKind.DONE:
                    await self._end([*events, frame.raw], has_data=has_data)
                    return True
                case FrameKind.ERROR | FrameKind.ABORTED:
                    await self._send(events, has_data=has_data)
                    raise self._engine_error(frame.payload)
        await self._send(events, has_data=has_data)
        return False

    async def _send(self, events: Sequence[bytes], *, has_data: bool) -> None:
        if not events:
            return
        if has_data or not self._has_data:
            await self._note_data()
        await self._reply.events(self._outgoing(events))

    async def _end(self, events: Sequence[bytes], *, has_data: bool) -> None:
        if not self._splitter.has_finish:
            raise self._lost("the stream ended without a finish")
        if has_data or not self._has_data:
            await self._note_data()
        self._draft.end(self._clock.now_s(), 200, "finished")
        await self._reply.end_events(self._outgoing(events))

    def _outgoing(self, events: Sequence[bytes]) -> bytes:
        """Return events as the client gets them, after those that were held."""
        held, self._held = self._held, []
        outgoing = events[0] if len(events) == 1 and not held else b"".join((*held, *events))
        return outgoing if self._resumption is None else self._resumption.take(outgoing)

    async def _note_data(self) -> None:
        """Date data, before it goes to the client. Raises `LoadFailed` if it may not go."""
        self._has_data = True
        if self._landing is not None and self._draft.ticket is not None and not self._landing.done():
            self._records.hurry(self._draft.ticket)
            await asyncio.shield(self._landing)
        is_first = self._draft.data(self._clock.now_s())
        if is_first and self._draft.ticket is not None:
            self._records.landed(self._draft.ticket)

    async def _usage_event(self, frame: Frame) -> list[bytes]:
        """Note the usage; return its event if the client gets one."""
        assert frame.payload is not None
        self._has_usage = True
        answer = self._dialect.answer(frame.payload)
        is_changed = await self._mend(answer)
        usage = answer.get("usage")
        self._draft.usage = self._dialect.counts(usage) if isinstance(usage, dict) else {}
        if not self._request.include_usage:
            return []
        return [data_event(frame.payload, event_name(frame.raw)) if is_changed else frame.raw]

    async def _mend(self, answer: dict[str, Any]) -> bool:
        """Have an answer say what is true of the whole request, and nothing of how it was made. Returns whether it changed."""
        usage, is_changed = answer.get("usage"), False
        if self._prefill is not None and isinstance(usage, dict) and "cached_tokens" in self._dialect.counts(usage):
            told = await _told_by(self._prefill)
            is_changed = self._dialect.mend(usage, told if self._resumption is None else self._resumption.prefilled(told))
        if self._resumption is not None and isinstance(usage, dict):
            is_changed = self._resumption.mend(usage) or is_changed
        if answer.get("kv_transfer_params") is not None:
            answer["kv_transfer_params"], is_changed = None, True
        return is_changed

    def _engine_error(self, payload: dict[str, Any] | None) -> UpstreamError | WorkerLost:
        if payload is None:
            return self._lost("the engine aborted the request")
        error = payload["error"]
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return UpstreamError(self._worker_id, status, orjson.dumps({"error": error}))

    def _lost(self, detail: str) -> WorkerLost:
        return WorkerLost(self._worker_id, "body", detail)


async def _read_out(chunks: AsyncIterator[bytes]) -> None:
    """Read to the end of the body, or the connection to the engine could not be used again."""
    with suppress(TimeoutError, WorkerLost):
        async with asyncio.timeout(TAIL_S):
            async for _ in chunks:
                pass


async def _told_by(prefill: PrefillTask) -> Mapping[str, int]:
    """Return what prefill says of its prompt, if it says so in time."""
    if not prefill.done():
        await asyncio.wait((prefill,), timeout=PREFILL_USAGE_S)
    return prefill.result() if prefill.done() and not prefill.cancelled() else {}


def prompt_counts_of(route: Route, worker_id: str, content: bytes) -> Mapping[str, int]:
    """Return what a prefill leg's answer says of its prompt, see `Dialect.counts`.

    Raises:
        UpstreamError: 500, it says that the leg failed.
    """
    try:
        return DIALECTS[route].prompt_counts(content)
    except ValueError as error:
        raise UpstreamError(worker_id, 500, b"") from error
