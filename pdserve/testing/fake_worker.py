"""A worker without an engine: speaks vLLM's wire form and the agent's routes over a real socket, and does what its script says.

    FakeKv            what several workers share: legs of one ticket meet there, as KV does between engines
    Script            how one leg is answered: status, delays, tokens, cuts, and where it goes wrong
    FakeWorker        the server; records every leg it got, how each ended, and every abort

A decode leg with a ticket holds its first byte until the prefill leg of the same ticket has answered. Both then leave a transfer record, which the
agent route serves. Used by the router's tests and its benchmark; knows nothing of the router.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
import orjson
from aiohttp import web

from pdserve.ports import AbortReport
from pdserve.testing import wire
from pdserve.testing.forms import FORMS, Form
from pdserve.types import CloseReason, FleetSnapshot, Role, TransferRecord, TransferSide, WorkerSnapshot, WorkerState

KV_BYTES_PER_TOKEN = 1024
FOREVER_S = 3600.0
LARGEST_BODY_BYTES = 256 << 20

Transferred = Callable[[], Awaitable[None]]
"""does a leg's part of the transfer: marks the KV as sent, or waits for it"""


class Phase(StrEnum):
    """Where in an answer a fault strikes."""

    BEFORE_HEAD = "before_head"
    AFTER_HEAD = "after_head"
    AFTER_TOKENS = "after_tokens"
    """after `Script.fault_after` tokens"""


class Fault(StrEnum):
    """What goes wrong there."""

    RESET = "reset"
    """the connection is dropped"""
    HANG = "hang"
    """nothing more comes"""
    END = "end"
    """the body ends cleanly, without a finish and without the stream's last event"""
    ERROR = "error"
    """an error event, then the stream's end"""


@dataclass(frozen=True, slots=True)
class Script:
    """How one leg is answered."""

    status: int = 200
    """other than 200: `body`, or an error object, and nothing else"""
    body: bytes | None = None
    """sent instead of a stream or an answer, exactly"""
    tokens: Sequence[str] = ("Hel", "lo", " wor", "ld")
    finish_reason: str | None = "stop"
    prompt_tokens: int = 9
    cached_tokens: int | None = 0
    """what `usage` says of the prompt's cache hits; None leaves the details out"""
    head_delay_s: float = 0.0
    token_delay_s: float = 0.0
    """before each token but the first"""
    cut_bytes: int | None = None
    """write the body in pieces of this size; None writes it event by event"""
    fault: Fault | None = None
    phase: Phase = Phase.BEFORE_HEAD
    fault_after: int = 1
    outcome: CloseReason = CloseReason.LANDED
    """how the transfer ends on this side; a decode leg waits for its prefill leg only if it is to land"""


@dataclass(slots=True)
class Leg:
    """One request a worker got."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    ended: str | None = None
    """``answered``, ``faulted`` or ``disconnected``; None while it runs"""

    @property
    def request_id(self) -> str:
        """What the engine calls it; for responses that is in the body."""
        return str(self.body.get("request_id") or self.headers.get("X-Request-Id", ""))

    @property
    def side(self) -> TransferSide | None:
        """Which end of a transfer it is, None on the local path."""
        params = self.body.get("kv_transfer_params")
        return None if params is None else TransferSide(params["role"])


class FakeKv:
    """Where the legs of one ticket meet."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], asyncio.Event] = {}

    def sent(self, params: Mapping[str, Any]) -> asyncio.Event:
        """Return the event that the prefill leg of this ticket sets."""
        return self._sent.setdefault((params["transfer_id"], params["attempt"]), asyncio.Event())


class FakeWorker:
    """One server on a port of its own; use it as a context.

    Args:
        kv: shared by the workers of one fleet.
        secret: demanded on every path.
    """

    def __init__(self, worker_id: str, kv: FakeKv, secret: str, script: Script | None = None) -> None:
        self.worker_id = worker_id
        self.incarnation = f"{worker_id}-1"
        self.script = script or Script()
        """answers every leg for which `scripts` holds none"""
        self.scripts: deque[Script] = deque()
        """answer the next legs, in order"""
        self.legs: list[Leg] = []
        self.paths: set[str] = set()
        """all that were ever asked for"""
        self.aborts: list[str] = []
        """request ids, in the order the agent was told; one that it said is held is told again"""
        self.aborted_s: dict[str, float] = {}
        """when the agent first answered that a request is aborted, on the event loop's clock"""
        self.abort_calls = 0
        self.abort_delay_s = 0.0
        """an engine step, before the agent answers"""
        self.held: set[str] = set()
        """requests whose blocks the agent says are kept"""
        self.records: list[TransferRecord] = []
        self.record_calls = 0
        self._clients: set[object] = set()
        self.is_agent_silent = False
        """the agent answers 503 to everything"""
        self.port = 0
        self._kv = kv
        self._secret = secret
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=LARGEST_BODY_BYTES, middlewares=[self._gate])
        for path in FORMS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/pdserve/v1/records", self._get_records)
        app.router.add_post("/pdserve/v1/abort", self._post_abort)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the port and drop every connection; a later `__aenter__` opens the same port again. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Connections over which legs came."""
        return len(self._clients)

    def snapshot(
        self, role: Role, state: WorkerState = WorkerState.READY, max_running: int = 16, max_model_len: int = 4096
    ) -> WorkerSnapshot:
        """Return what the controller would say of it."""
        return WorkerSnapshot(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=role,
            state=state,
            url=self.url,
            model=wire.MODEL,
            max_model_len=max_model_len,
            max_running=max_running,
            kv_capacity_tokens=100_000,
            block_tokens=16,
        )

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("x-pdserve-secret") != self._secret:
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.paths.add(request.path)
        if self.is_agent_silent and request.path.startswith("/pdserve/"):
            return web.Response(status=503)
        response: web.StreamResponse = await handler(request)
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        script = self.scripts.popleft() if self.scripts else self.script
        leg = Leg(request.path, request.headers, orjson.loads(await request.read()))
        self.legs.append(leg)
        assert request.transport is not None
        self._clients.add(request.transport.get_extra_info("peername"))
        answer = _Answer(request, leg, script)
        try:
            response = await answer.send(partial(self._transferred, leg, script))
        except (asyncio.CancelledError, ConnectionResetError) as error:
            leg.ended = "disconnected"
            self._record(leg, script, CloseReason.ABORTED)
            raise asyncio.CancelledError from error
        except _Faulted:
            leg.ended = "faulted"
            self._record(leg, script, CloseReason.ABORTED)
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError from None
        leg.ended = "answered" if answer.is_whole else "faulted"
        return response

    async def _transferred(self, leg: Leg, script: Script) -> None:
        params = leg.body.get("kv_transfer_params")
        if params is None:
            return
        sent = self._kv.sent(params)
        if leg.side is TransferSide.SEND:
            sent.set()
            self._record(leg, script, CloseReason.RELEASED)
        else:
            if script.outcome is CloseReason.LANDED:
                await sent.wait()
            self._record(leg, script, script.outcome)

    def _record(self, leg: Leg, script: Script, outcome: CloseReason) -> None:
        params = leg.body.get("kv_transfer_params")
        if params is None or any(r.transfer_id == params["transfer_id"] for r in self.records):
            return
        moved = script.prompt_tokens if outcome in (CloseReason.LANDED, CloseReason.RELEASED) else 0
        self.records.append(
            TransferRecord(
                transfer_id=params["transfer_id"],
                attempt=params["attempt"],
                side=TransferSide(params["role"]),
                worker=self.worker_id,
                incarnation=self.incarnation,
                outcome=outcome,
                request_id=leg.request_id,
                prompt_tokens=script.prompt_tokens,
                tokens_moved=moved,
                bytes_moved=moved * KV_BYTES_PER_TOKEN,
                bytes_before_forward_end=moved * KV_BYTES_PER_TOKEN // 2,
                transfer_s=0.001,
                transport="tcp",
            )
        )

    async def _get_records(self, request: web.Request) -> web.Response:
        self.record_calls += 1
        after = int(request.query["after"])
        answer = {"next": len(self.records), "records": self.records[after:]}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _post_abort(self, request: web.Request) -> web.Response:
        ids: list[str] = orjson.loads(await request.read())["request_ids"]
        self.abort_calls += 1
        self.aborts.extend(ids)
        await asyncio.sleep(self.abort_delay_s)
        now_s = asyncio.get_running_loop().time()
        for request_id in ids:
            self.aborted_s.setdefault(request_id, now_s)
        held = tuple(request_id for request_id in ids if request_id in self.held)
        report = AbortReport(len(ids), blocks_free_before=0, blocks_free_after=0, elapsed_s=self.abort_delay_s, held=held)
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")


class _Faulted(Exception):
    """The script says that the connection drops here."""


@dataclass(slots=True)
class _Answer:
    """Sends one scripted answer."""

    request: web.Request
    leg: Leg
    script: Script
    is_whole: bool = True
    _tokens: list[str] = field(default_factory=list)
    _given: int = 0
    """tokens of the answer that came with the prompt"""

    async def send(self, transferred: Transferred) -> web.StreamResponse:
        script, body = self.script, self.leg.body
        await asyncio.sleep(script.head_delay_s)
        if script.status != 200:
            content = script.body or orjson.dumps(self._form.error(script.status, f"scripted {script.status}"))
            return web.Response(body=content, status=script.status, content_type="application/json")
        await self._strike(Phase.BEFORE_HEAD)
        self._given = wire.given_tokens(body, script.prompt_tokens)
        limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
        limit = next((limit for limit in limits if limit), len(script.tokens))
        self._tokens = list(script.tokens[self._given : self._given + limit])
        return await (self._stream(transferred) if body.get("stream") else self._whole(transferred))

    @property
    def _form(self) -> Form:
        return FORMS[self.leg.path]

    @property
    def _finish_reason(self) -> str | None:
        return self.script.finish_reason if self._given + len(self._tokens) == len(self.script.tokens) else "length"

    def _counts(self) -> dict[str, Any]:
        is_receiving = self.leg.side is TransferSide.RECEIVE
        cached = self.script.cached_tokens
        if is_receiving and cached is not None:
            cached = self.script.prompt_tokens + self._given
        return self._form.usage(self.script.prompt_tokens + self._given, len(self._tokens), cached)

    async def _whole(self, transferred: Transferred) -> web.StreamResponse:
        await transferred()
        for _ in self._tokens[1:]:
            await asyncio.sleep(self.script.token_delay_s)
        answer = self._form.whole(
            self.leg.request_id, text="".join(self._tokens), finish_reason=self._finish_reason or "", counts=self._counts()
        )
        content = self.script.body or orjson.dumps(answer)
        if self.script.fault is None:
            return web.Response(body=content, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(content))})
        await response.prepare(self.request)
        await self._strike(Phase.AFTER_HEAD)
        await response.write(content[: len(content) // 2])
        await self._strike(Phase.AFTER_TOKENS)
        raise _Faulted

    async def _stream(self, transferred: Transferred) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self.request)
        if await self._strike(Phase.AFTER_HEAD, response):
            return response
        form, leg_id = self._form, self.leg.request_id
        for event in form.preamble(leg_id):
            await self._write(response, event)
        await transferred()
        if self.script.body is not None:
            await self._write(response, self.script.body)
            return response
        has_usage = form.END != wire.DONE or (self.leg.body.get("stream_options") or {}).get("include_usage")
        counts = self._counts() if has_usage else {}
        events = form.events(leg_id, tokens=self._tokens, finish_reason=self._finish_reason, counts=counts)
        if self.leg.body.get("return_token_ids"):
            events = wire.with_token_ids(events, range(self.script.prompt_tokens), self._given)
        for index, event in enumerate(events):
            if index == self.script.fault_after and await self._strike(Phase.AFTER_TOKENS, response):
                return response
            if index:
                await asyncio.sleep(self.script.token_delay_s)
            await self._write(response, event)
        await self._write(response, form.END)
        return response

    async def _write(self, response: web.StreamResponse, content: bytes) -> None:
        size = self.script.cut_bytes or max(1, len(content))
        for start in range(0, len(content), size):
            await response.write(content[start : start + size])
            if self.script.cut_bytes is not None:
                await asyncio.sleep(0)

    async def _strike(self, phase: Phase, response: web.StreamResponse | None = None) -> bool:
        """Let the scripted fault happen if this is its phase; returns True when the body ends here."""
        if self.script.fault is None or self.script.phase is not phase:
            return False
        if self.script.fault is Fault.HANG:
            await asyncio.sleep(FOREVER_S)
        if self.script.fault is Fault.RESET or response is None:
            raise _Faulted
        if self.script.fault is Fault.ERROR:
            await response.write(self._form.error_event(500, "scripted error") + self._form.END)
        self.is_whole = False
        return True


def fleet(version: int, *workers: WorkerSnapshot) -> FleetSnapshot:
    """Return a fleet of these workers."""
    return FleetSnapshot(version, workers)
