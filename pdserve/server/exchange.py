"""Both legs of one attempt, in one scope: the first failure ends both, and what is left on an engine then is aborted there.

    run         send the legs at once, or decode's alone on the local path
    _prefill    its answer is of no use but for what it says about its own cache
    _decode     its answer is the client's

Knows nothing of retries; raises what `handoff` retries or tells the client.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import orjson

from pdserve.clock import Clock
from pdserve.errors import LoadFailed, UpstreamError, WorkerLost
from pdserve.ports import EngineClient
from pdserve.routing.reasons import transfer_reason
from pdserve.routing.slots import Lease
from pdserve.server.aborts import Aborts
from pdserve.server.admission import Admission
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.request import ClientRequest
from pdserve.server.draft import Draft
from pdserve.server.errors import is_retryable
from pdserve.server.records import Records
from pdserve.server.relay import PrefillTask, Relay, prompt_counts_of
from pdserve.server.reply import Reply
from pdserve.server.resume import Resumption
from pdserve.types import CloseReason, Ticket, WorkerSnapshot

ERROR_BODY_BYTES = 64 << 10
"""of an engine's error answer, kept for the client"""
DECODE_VERDICT_S = 0.1
"""when prefill refuses a request, decode is about to as well, and names the limits the client sent instead of a prefill leg's"""
LATE_PREFILL_S = 0.1
"""how long an answered request waits for its prefill leg to end by itself; one that decode did not need is aborted then"""


@dataclass(frozen=True, slots=True)
class LegSettings:
    """Settings of the same names, seconds."""

    first_byte_timeout_s: float
    idle_timeout_s: float
    debug_headers: bool
    keepalive_s: float
    may_recompute: bool
    """whether decode may compute a prompt whose KV did not arrive; if not, such a request fails"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a request: what is asked, who answers, and whom to tell."""

    request: ClientRequest
    reply: Reply
    draft: Draft
    lease: Lease
    leg_id: str
    """what both engines call this attempt"""
    ticket: Ticket | None
    """None on the local path, and so is the next"""
    prefill_body: bytes | None
    decode_body: bytes
    resumption: Resumption | None = None
    """of a stream that may be taken up again if this attempt breaks"""


class Exchange:
    """Runs attempts; one per router."""

    def __init__(
        self,
        settings: LegSettings,
        clock: Clock,
        engines: EngineClient,
        admission: Admission,
        records: Records,
        aborts: Aborts,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._engines = engines
        self._admission = admission
        self._records = records
        self._aborts = aborts

    async def run(self, attempt: Attempt) -> None:
        """Send the legs and give the client decode's answer.

        Raises:
            WorkerLost: a worker did not answer, or not to the end.
            UpstreamError: a worker answered with an error.
            LoadFailed: the prompt's KV did not arrive and decode may not compute it.
        """
        lease = attempt.lease
        if self._settings.debug_headers:
            attempt.reply.debug_header = _debug_header(attempt.draft)
        if attempt.request.stream:
            attempt.reply.keep_alive(self._settings.keepalive_s)
        try:
            if lease.prefill is None or attempt.ticket is None or attempt.prefill_body is None:
                await self._decode(attempt, None)
            else:
                self._records.expect(attempt.ticket, lease.prefill, lease.decode, partial(self._admission.received, lease))
                await self._both_legs(attempt, lease.prefill, attempt.prefill_body)
        except BaseException as error:
            self._abort(lease.decode, attempt, error)
            if lease.prefill is not None:
                self._abort(lease.prefill, attempt, error)
            raise

    async def _both_legs(self, attempt: Attempt, prefill_worker: WorkerSnapshot, prefill_body: bytes) -> None:
        try:
            async with asyncio.TaskGroup() as legs:
                prefill = legs.create_task(self._prefill(attempt, prefill_worker, prefill_body))
                # Let prefill's request out first: decode can do nothing before prefill has.
                await asyncio.sleep(0)
                landing = None if self._settings.may_recompute else legs.create_task(self._landing(attempt))
                await self._decode(attempt, prefill, landing)
                if landing is not None:
                    landing.cancel()
                if not prefill.done():
                    await asyncio.wait((prefill,), timeout=LATE_PREFILL_S)
                if prefill.cancel():
                    self._aborts.send(prefill_worker.worker_id, prefill_worker.url, attempt.leg_id, attempt.draft.aborts)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _landing(self, attempt: Attempt) -> None:
        """Wait until decode has the prompt's KV. Raises `LoadFailed` if it will not get it."""
        assert attempt.ticket is not None
        outcome = (await self._records.received(attempt.ticket)).outcome
        if outcome not in (CloseReason.LANDED, CloseReason.NOTHING_TO_MOVE):
            attempt.draft.reason = transfer_reason(outcome)
            raise LoadFailed(attempt.lease.decode.worker_id, outcome.value)

    async def _prefill(self, attempt: Attempt, worker: WorkerSnapshot, body: bytes) -> Mapping[str, int]:
        """Run the prefill leg; returns what it says of the prompt. Once the client has data, a failure here is nobody's."""
        prompt_tokens: int | None = None
        try:
            path, headers = attempt.request.route.value, {"X-Request-Id": attempt.leg_id}
            async with self._engines.post(
                worker.worker_id, worker.url, path, body, headers, first_byte_timeout_s=self._settings.first_byte_timeout_s
            ) as answer:
                content = await answer.read()
            if answer.status != 200:
                raise UpstreamError(worker.worker_id, answer.status, content[:ERROR_BODY_BYTES])
            counts = prompt_counts_of(attempt.request.route, worker.worker_id, content)
            prompt_tokens = counts.get("prompt_tokens", 0)
            return counts
        except (UpstreamError, WorkerLost) as error:
            if isinstance(error, UpstreamError) and not is_retryable(error):
                await asyncio.sleep(DECODE_VERDICT_S)
            if attempt.draft.is_answering:
                return {}
            raise
        finally:
            self._admission.prefill_done(attempt.lease, prompt_tokens)

    async def _decode(self, attempt: Attempt, prefill: PrefillTask | None, landing: asyncio.Task[None] | None = None) -> None:
        """Run the decode leg and give its answer to the client."""
        worker, request = attempt.lease.decode, attempt.request
        headers = {"X-Request-Id": attempt.leg_id}
        # An answer in one piece is silent until it is there: only the request's own time bounds it.
        first_byte_timeout_s = self._settings.first_byte_timeout_s if request.stream else None
        idle_timeout_s = self._settings.idle_timeout_s if request.stream else None
        if request.stream and DIALECTS[request.route].has_preamble:
            # An engine says at once that it has the request; the silence until the prompt is computed comes after that.
            idle_timeout_s = max(self._settings.idle_timeout_s, self._settings.first_byte_timeout_s)
        async with self._engines.post(
            worker.worker_id,
            worker.url,
            request.route.value,
            attempt.decode_body,
            headers,
            idle_timeout_s=idle_timeout_s,
            first_byte_timeout_s=first_byte_timeout_s,
        ) as answer:
            if answer.status != 200:
                raise UpstreamError(worker.worker_id, answer.status, (await answer.read())[:ERROR_BODY_BYTES])
            relay = Relay(
                request,
                attempt.reply,
                attempt.draft,
                self._clock,
                self._records,
                worker.worker_id,
                prefill,
                landing,
                attempt.resumption,
            )
            if request.stream:
                await relay.stream(answer)
            else:
                await relay.whole(answer)

    def _abort(self, worker: WorkerSnapshot, attempt: Attempt, error: BaseException) -> None:
        never_connected = isinstance(error, WorkerLost) and error.worker_id == worker.worker_id and error.phase == "connect"
        if not never_connected:
            self._aborts.send(worker.worker_id, worker.url, attempt.leg_id, attempt.draft.aborts)


def _debug_header(draft: Draft) -> tuple[bytes, bytes]:
    facts = {
        "request_id": draft.request_id,
        "attempt": draft.attempts,
        "path": draft.path,
        "reason": draft.reason,
        "prefill_worker": draft.prefill_worker,
        "decode_worker": draft.decode_worker,
        "transfer_id": None if draft.ticket is None else draft.ticket.transfer_id,
    }
    return (b"x-pdserve-receipt", orjson.dumps(facts))
