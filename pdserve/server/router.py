"""One router: the parts of this room, put together, and what its two applications ask of them.

Owns the order of starting and stopping. Knows neither HTTP paths nor the process it runs in.
"""

import asyncio
import re
from collections.abc import Iterable
from functools import partial
from os import urandom

import structlog
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from pdserve import __version__
from pdserve.clock import Clock
from pdserve.config import Config, RouterConfig
from pdserve.errors import NoReadyWorker, PdserveError, RateLimited, WorkerLost
from pdserve.observe.access import AccessMetrics
from pdserve.observe.metrics import CANARY_ROUTE, Metrics
from pdserve.observe.receipts import ReceiptBook, ReceiptLog
from pdserve.ports import AgentRecords, EngineClient
from pdserve.routing.breakers import BreakerState
from pdserve.routing.budget import RetryBudget
from pdserve.routing.line import PoolLimits
from pdserve.routing.pool import Pool
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Policy
from pdserve.routing.verdict import Verdict
from pdserve.server.aborts import Aborts
from pdserve.server.admission import Admission
from pdserve.server.api.dialect import Dialect
from pdserve.server.api.dialects import parse
from pdserve.server.api.endpoints import dialect_of
from pdserve.server.api.questions import Question
from pdserve.server.api.request import Limits, Route
from pdserve.server.auth import Auth
from pdserve.server.body import read_body
from pdserve.server.canary import TIMEOUT_S, canary_request, discard, stay
from pdserve.server.caps import Caps
from pdserve.server.demand import Demands
from pdserve.server.descriptors import Allowance
from pdserve.server.draft import Draft
from pdserve.server.edge import Edge
from pdserve.server.errors import to_http
from pdserve.server.exchange import Exchange, LegSettings
from pdserve.server.features import configured
from pdserve.server.gate import key_of
from pdserve.server.handoff import Handoff, HandoffSettings, Pair, send_error
from pdserve.server.keys import KeyRing
from pdserve.server.questions import Questions
from pdserve.server.rate_limit import RateLimits
from pdserve.server.records import Records
from pdserve.server.reply import ClientGone, Departures, Reply, Stopped
from pdserve.server.resume import resumable_routes
from pdserve.server.salts import TenantSalts
from pdserve.types import FleetSnapshot, Receipt, Role

SESSION_HEADER = b"x-session-id"
"""names a conversation, so that its turns meet the same workers"""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,128}\Z")


class Router:
    """Serves client requests and answers the controller.

    Args:
        engines: carries legs to engines.
        agent: carries calls to agents.
        registry: where the metrics go.
        secret: of the deployment; salts are derived from it.
        ring: the keys in force, None to serve whoever comes.
        allowance: what fits under the process's limit on open files; None for no limit.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        engines: EngineClient,
        agent: AgentRecords,
        registry: CollectorRegistry,
        secret: str,
        ring: KeyRing | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        settings = config.router
        self._settings = settings
        self._clock = clock
        self._configured = configured(config)
        self._is_stopping = False
        self._log = structlog.get_logger().bind()
        self.metrics = Metrics(registry, __version__)
        self.receipts = ReceiptBook((self.metrics.observe, ReceiptLog().observe))
        self.pool = Pool(clock, _limits(settings, allowance), _policy(settings))
        self.access = AccessMetrics(registry)
        self.auth = Auth(None, self.access.record_refused)
        self._retries = RetryBudget()
        self._limits = RateLimits(clock)
        demands = Demands(settings.request_timeout_s, may_set_priority=settings.client_priority)
        salts = TenantSalts(secret) if has_salts(settings) else None
        self._edge = Edge(_caps(config), self._limits, salts, demands.tokens)
        self._admission = Admission(self.pool, self.metrics.record_breaker_opened)
        self._records = Records(agent, self.receipts, clock)
        self._aborts = Aborts(agent, clock, self.metrics)
        self._questions = Questions(self.pool, engines, settings.first_byte_timeout_s)
        exchange = Exchange(
            LegSettings(
                first_byte_timeout_s=settings.first_byte_timeout_s,
                idle_timeout_s=settings.idle_timeout_s,
                debug_headers=settings.debug_headers,
                keepalive_s=settings.keepalive_s,
                may_recompute=settings.load_failure == "recompute",
            ),
            clock,
            engines,
            self._admission,
            self._records,
            self._aborts,
        )
        self._handoff = Handoff(
            HandoffSettings(settings.request_timeout_s, config.kv.transfer_timeout_s, _resumable(config)),
            clock,
            self._admission,
            exchange,
            self._records,
            demands,
            self._retries,
            self.metrics,
        )
        self._watch()
        if ring is not None:
            self.take_keys(ring)

    def _watch(self) -> None:
        """Have the metrics read what is now from its owners."""
        pool, metrics = self.pool, self.metrics
        metrics.watch_queue(lambda: pool.queued_requests, lambda: pool.queued_tokens, lambda: pool.max_queued_tokens)
        for role in Role:
            metrics.watch_role(role, partial(pool.in_flight, role), partial(pool.reserved_tokens, role))
        metrics.watch_breakers({state.value: partial(pool.breakers.count, state) for state in BreakerState})
        metrics.watch_verdicts({verdict.value: partial(_count_verdicts, pool, verdict) for verdict in Verdict})
        metrics.watch_retries(lambda: self._retries.in_use)
        metrics.set_workers(())

    @property
    def running(self) -> int:
        """Requests that are being served or wait."""
        return self._handoff.running

    @property
    def pending_receipts(self) -> int:
        """Transfers whose records are still awaited."""
        return self._records.pending

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def update_fleet(self, fleet: FleetSnapshot) -> None:
        """Take over a new view of the fleet; stale versions are ignored."""
        self._admission.update(fleet)
        self.metrics.set_workers(self.pool.workers)

    def take_keys(self, ring: KeyRing) -> None:
        """Have these keys in force from now on, in place of those before."""
        self.auth.ring = ring
        self._limits.keep(key.name for key in ring.keys)
        self.access.record_keys(len(ring.keys))

    async def answer(self, endpoint: Route | Question, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one client request, whatever it is worth. The process's edge: an unforeseen error becomes a 500 and a log line."""
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        request_id = urandom(16).hex()
        client_id = next((v.decode() for name, v in headers if name == b"x-request-id" and _REQUEST_ID.match(v)), None)
        path, dialect = endpoint.path if isinstance(endpoint, Question) else endpoint.value, dialect_of(endpoint)
        draft = Draft(request_id, client_id, path, self._clock.now_s(), self._configured)
        draft.session = next((v.decode("latin-1") for name, v in headers if name == SESSION_HEADER), "")
        key = key_of(scope)
        draft.tenant = "" if key is None else key.name
        meter = self._edge.meter(key, dialect)
        reply = Reply(receive, send, client_id or request_id, scope.get(Departures.SCOPE_KEY))
        try:
            self._edge.enter(meter)
            if self._is_stopping:
                raise Stopped
            raw = await read_body(headers, receive, self._settings.max_body_bytes)
            draft.started_s = self._clock.now_s()
            reply.extra_headers = self._edge.headers(meter)
            if isinstance(endpoint, Question):
                await self._ask(endpoint, raw, reply, draft)
            else:
                request = self._edge.admit(parse(endpoint, raw, self.body_limits()), raw, draft.tenant, meter)
                reply.extra_headers = self._edge.headers(meter)
                await self._handoff.serve(request, reply, draft)
        except ClientGone:
            return
        except Exception as error:
            if not isinstance(error, PdserveError | Stopped):
                self._log.exception("request failed", request_id=request_id)
            reply.extra_headers = self._edge.headers(meter)
            await self._refuse(error, dialect, reply, draft)
        finally:
            self._edge.settle(meter, draft)

    async def _ask(self, question: Question, raw: bytes, reply: Reply, draft: Draft) -> None:
        """Have a worker answer a question. Raises what `_refuse` tells the client, `ClientGone`."""
        body, draft.model = question.parse(raw, self.body_limits())
        self._edge.check(raw, body)
        draft.reason = PathReason.QUESTION
        async with reply.presence():
            content = await self._questions.ask(question, raw, draft.model, draft.request_id)
            draft.end(self._clock.now_s(), 200, "finished")
            self._records.settle(draft)
            await reply.whole(200, ((b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())), content)

    async def _refuse(self, error: Exception, dialect: Dialect, reply: Reply, draft: Draft) -> None:
        """Give the client its one error, and the request its receipt if it was not served at all."""
        http = to_http(error)
        if not draft.outcome:
            if isinstance(error, RateLimited):
                draft.reason = PathReason(f"rate_limited_{error.kind}")
            draft.end(self._clock.now_s(), http.status, http.outcome)
            self._records.settle(draft)
        await send_error(http, dialect, reply)

    async def canary(self, prefill_worker: str, decode_worker: str) -> Receipt:
        """Serve one real token through this pair, warming or ready, and return its receipt: with its records, or at once if it failed.

        Raises:
            NoReadyWorker: the decode worker is unknown.
            WorkerLost: nothing came within `canary.TIMEOUT_S`.
        """
        workers = {worker.worker_id: worker for worker in self.pool.workers}
        decode = workers.get(decode_worker)
        if decode is None:
            raise NoReadyWorker(Role.DECODE.value)
        draft = Draft(urandom(16).hex(), None, CANARY_ROUTE, self._clock.now_s(), self._configured)
        draft.receipt_made = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._handoff.serve(
                    canary_request(decode), Reply(stay, discard, draft.request_id), draft, Pair(prefill_worker, decode_worker)
                )
        except TimeoutError as error:
            raise WorkerLost(decode_worker, "idle", "canary") from error
        if draft.outcome != "finished":
            return draft.receipt(None, None)
        return await draft.receipt_made

    async def drain(self, patience_s: float) -> None:
        """Refuse new requests, let running ones finish for `patience_s`, then end them; returns when nothing of theirs is left."""
        self._is_stopping = True
        try:
            async with asyncio.timeout(patience_s):
                await self._handoff.idle()
        except TimeoutError:
            self._log.warning("requests ended by shutdown", running=self.running)
            self._handoff.stop_all()
            await self._handoff.idle()
        await self._aborts.drained()
        await self._records.close()

    def body_limits(self) -> Limits:
        """Return what bounds bodies now. Raises `NoReadyWorker` while nothing is served."""
        models = self.pool.models
        if not models:
            raise NoReadyWorker(Role.DECODE.value)
        return Limits(models, self._settings.max_n)


def has_salts(settings: RouterConfig) -> bool:
    """Return whether each tenant's prefix cache has a salt of its own."""
    return settings.tenant_cache_salt == "always" or (settings.tenant_cache_salt == "auto" and settings.keys_file is not None)


def _caps(config: Config) -> Caps:
    limits = config.limits
    return Caps(
        max_output_tokens=limits.max_output_tokens,
        max_json_depth=limits.max_json_depth,
        max_messages=limits.max_messages,
        max_tools=limits.max_tools,
        max_stop_strings=limits.max_stop_strings,
        allow_remote_media=config.router.allow_remote_media,
    )


def _limits(settings: RouterConfig, allowance: Allowance | None) -> PoolLimits:
    return PoolLimits(
        max_queued_requests=settings.max_queued_requests,
        ttft_objective_s=settings.ttft_objective_s,
        max_leases=None if allowance is None else allowance.leases,
        max_waiting=None if allowance is None else allowance.waiting,
    )


def _policy(settings: RouterConfig) -> Policy:
    return Policy(settings.disaggregation, settings.local_below_tokens, settings.local_prefix_share)


def _resumable(config: Config) -> frozenset[Route]:
    has_reasoning_parser = any(argument.startswith("--reasoning-parser") for argument in config.engine.extra_args)
    return resumable_routes(has_reasoning_parser=has_reasoning_parser) if config.router.resume else frozenset()


def _count_verdicts(pool: Pool, verdict: Verdict) -> int:
    return sum(known is verdict for known in pool.verdicts().values())
