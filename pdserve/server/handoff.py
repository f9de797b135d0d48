"""The life of one request, top to bottom.

    serve       deadline and client's presence around everything; whatever ends it becomes one outcome for the client and one receipt
    _attempts   lease a pair, try, and try elsewhere while nothing has reached the client and the retry budget lasts
    _attempt    mint the ticket and write both legs' bodies; `exchange` sends them and brings back decode's answer

The client's status is decided by decode's first data, not by its head: an engine says 200 as soon as it has taken a request. Before that data a
failure is retried or becomes a status, after it an error event; never nothing. Which workers is the pool's to say, what the bodies hold `legs`'.
"""

import asyncio
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from os import urandom

from pdserve.clock import Clock
from pdserve.errors import NoReadyWorker, PdserveError, PoolSaturated, RequestError, UpstreamError, WorkerLost
from pdserve.observe.metrics import Metrics
from pdserve.routing.budget import RetryBudget, RetryClaim
from pdserve.routing.reasons import PathReason, retry_reason
from pdserve.routing.select import Demand
from pdserve.routing.slots import Lease
from pdserve.server.admission import Admission
from pdserve.server.api.dialect import Dialect
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.request import ClientRequest, Route
from pdserve.server.demand import Demands
from pdserve.server.draft import Draft
from pdserve.server.errors import HttpError, is_retryable, to_http
from pdserve.server.exchange import Attempt, Exchange
from pdserve.server.legs import decode_body, prefill_body
from pdserve.server.records import Records
from pdserve.server.reply import ClientGone, Presence, Reply, Stopped
from pdserve.server.resume import Resumption, resume_hindrance
from pdserve.types import Role, ServePath, Ticket

MAX_ATTEMPTS = 3
SHORTEST_TRANSFER_S = 1.0
"""least time on a ticket, however little the request has left"""
CLIENT_GONE_STATUS = 499
_SHED_REASONS = {
    "requests": PathReason.QUEUE_FULL_REQUESTS,
    "tokens": PathReason.QUEUE_FULL_TOKENS,
    "deadline": PathReason.DEADLINE_UNMEETABLE,
    "connections": PathReason.TOO_MANY_CONNECTIONS,
}
"""by `PoolSaturated.reason`"""


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """Settings of the same names, seconds."""

    request_timeout_s: float
    transfer_timeout_s: float
    resume: Collection[Route]
    """whose streams are taken up again when their decode worker is lost"""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers that a canary names."""

    prefill_worker: str
    decode_worker: str


class Handoff:
    """Serves requests; one per router."""

    def __init__(
        self,
        settings: HandoffSettings,
        clock: Clock,
        admission: Admission,
        exchange: Exchange,
        records: Records,
        demands: Demands,
        retries: RetryBudget,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._admission = admission
        self._exchange = exchange
        self._records = records
        self._demands = demands
        self._retries = retries
        self._metrics = metrics
        self._running: set[Presence] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def running(self) -> int:
        """Requests between admission and their last byte."""
        return len(self._running)

    async def idle(self) -> None:
        """Wait until no request runs."""
        await self._is_idle.wait()

    def stop_all(self) -> None:
        """End every running request: with a status if it has none yet, else with an error event."""
        for presence in self._running:
            presence.stop()

    async def serve(self, request: ClientRequest, reply: Reply, draft: Draft, pair: Pair | None = None) -> None:
        """Serve one request to its end. Cancellation ends both legs and counts as a client that left."""
        draft.model, draft.stream, draft.local_reason = request.model, request.stream, request.local_reason
        draft.reason = PathReason.LEFT_QUEUE
        presence = reply.presence(lambda: self._note_left(draft), self._settings.request_timeout_s)
        self._running.add(presence)
        self._is_idle.clear()
        try:
            async with presence:
                await self._attempts(request, reply, draft, pair)
            self._demands.learn(request, draft.usage)
        except (ClientGone, asyncio.CancelledError) as error:
            draft.end(self._clock.now_s(), CLIENT_GONE_STATUS, "cancelled")
            if isinstance(error, asyncio.CancelledError):
                raise
        except (PdserveError, TimeoutError, Stopped) as error:
            await self._fail(error, request, reply, draft)
        finally:
            draft.end(self._clock.now_s(), 500, "failed")
            self._records.settle(draft)
            self._running.discard(presence)
            if not self._running:
                self._is_idle.set()

    def _note_left(self, draft: Draft) -> None:
        draft.aborts.left_s = self._clock.now_s()

    async def _fail(self, error: Exception, request: ClientRequest, reply: Reply, draft: Draft) -> None:
        """Give the client its one error."""
        match error:
            case RequestError():
                draft.reason = PathReason.REJECTED
            case PoolSaturated():
                draft.reason = _SHED_REASONS[error.reason]
            case NoReadyWorker():
                draft.reason = PathReason.NO_READY_WORKER
            case TimeoutError() if draft.path is ServePath.NONE:
                draft.reason = PathReason.EXPIRED_IN_QUEUE
            case Stopped() if draft.path is ServePath.NONE:
                draft.reason = PathReason.DRAINING
        http = to_http(error)
        draft.end(self._clock.now_s(), 200 if reply.is_started else http.status, http.outcome)
        await send_error(http, DIALECTS[request.route], reply)

    async def _attempts(self, request: ClientRequest, reply: Reply, draft: Draft, pair: Pair | None) -> None:
        demand = self._demands.of(request, draft)
        resumption = self._resumption(request, draft)
        failed: WorkerLost | UpstreamError | None = None
        with self._retries.claim() as claim:
            while True:
                waiting_since_s = self._clock.now_s()
                try:
                    async with self._hold(demand, pair, again=failed is not None) as lease:
                        draft.queue_wait_s += self._clock.now_s() - waiting_since_s
                        draft.leased(lease)
                        self._metrics.record_reuse(*lease.reuse_tokens)
                        attempt = self._attempt(request if resumption is None else resumption.request, reply, draft, lease, resumption)
                        try:
                            await self._exchange.run(attempt)
                        except WorkerLost as error:
                            self._admission.lost(lease, error)
                            raise
                        return self._admission.answered(lease, draft.lease_to_first_data_s)
                except NoReadyWorker as nobody:
                    # The client hears what went wrong, not that there is nobody else to try.
                    raise failed or nobody from nobody
                except (WorkerLost, UpstreamError) as error:
                    is_lost = reply.has_data and (resumption is None or not resumption.is_possible)
                    if is_lost or pair is not None or not is_retryable(error) or not self._may_retry(claim, draft):
                        raise
                    failed = error
                demand = replace(demand, avoid=demand.avoid | self._note_failure(failed, attempt))
                if reply.has_data and resumption is not None:
                    resumption.resume()
                    draft.resumed_at.append(resumption.output_tokens)
                    demand = replace(demand, prompt_tokens=resumption.prompt_tokens)

    def _resumption(self, request: ClientRequest, draft: Draft) -> Resumption | None:
        if not self._settings.resume:
            return None
        draft.resume_hindrance = resume_hindrance(request, self._settings.resume)
        return Resumption(request) if draft.resume_hindrance is None else None

    def _may_retry(self, claim: RetryClaim, draft: Draft) -> bool:
        """Say whether one more attempt is within the limits; one that is not is counted."""
        if draft.attempts < MAX_ATTEMPTS and claim.try_take(self.running):
            return True
        self._metrics.record_denied_retry("attempts" if draft.attempts >= MAX_ATTEMPTS else "budget")
        return False

    def _attempt(self, request: ClientRequest, reply: Reply, draft: Draft, lease: Lease, resumption: Resumption | None) -> Attempt:
        ticket = draft.ticket = self._mint(lease, draft)
        leg_id = f"{draft.request_id}-{draft.attempts}"
        return Attempt(
            request=request,
            reply=reply,
            draft=draft,
            lease=lease,
            leg_id=leg_id,
            ticket=ticket,
            prefill_body=None if ticket is None else prefill_body(request, ticket, leg_id),
            decode_body=decode_body(request, ticket, leg_id),
            resumption=resumption,
        )

    def _hold(self, demand: Demand, pair: Pair | None, *, again: bool) -> AbstractAsyncContextManager[Lease]:
        if pair is not None:
            return self._admission.pinned(demand, pair.prefill_worker, pair.decode_worker)
        return self._admission.pair(demand, again=again)

    def _mint(self, lease: Lease, draft: Draft) -> Ticket | None:
        if lease.prefill is None:
            return None
        left_s = draft.started_s + self._settings.request_timeout_s - self._clock.now_s()
        return Ticket(
            transfer_id=urandom(16).hex(),
            attempt=draft.attempts,
            prefill_worker=lease.prefill.worker_id,
            prefill_incarnation=lease.prefill.incarnation,
            decode_worker=lease.decode.worker_id,
            decode_incarnation=lease.decode.incarnation,
            timeout_s=max(SHORTEST_TRANSFER_S, min(self._settings.transfer_timeout_s, left_s)),
        )

    def _note_failure(self, error: WorkerLost | UpstreamError, attempt: Attempt) -> frozenset[str]:
        """Count the retry and return the workers to avoid in it."""
        prefill = attempt.lease.prefill
        role = Role.PREFILL if prefill is not None and error.worker_id == prefill.worker_id else Role.DECODE
        phase = error.phase if isinstance(error, WorkerLost) else "status"
        self._metrics.record_retry(retry_reason(role, phase))
        if attempt.ticket is not None:
            self._records.forget(attempt.ticket)
        suspects = {error.worker_id}
        if phase in ("first_byte", "idle") and prefill is not None:
            # Decode is silent while it waits for KV, so the silence may be prefill's.
            suspects.add(prefill.worker_id)
        return frozenset(suspects)


async def send_error(http: HttpError, dialect: Dialect, reply: Reply) -> None:
    """Send an error the way the client can still take it: as a status, or as an event that ends its stream."""
    if reply.is_ended:
        return
    if reply.is_started:
        await reply.fail_events(dialect.error_event(http.status, http.body) + dialect.stream_end)
    else:
        http = replace(http, body=dialect.error_body(http.status, http.body))
        await reply.whole(http.status, http.headers, http.body)
