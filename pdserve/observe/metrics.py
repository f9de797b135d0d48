"""Every Prometheus series about requests and workers, once, behind typed methods. Those about clients at the door are in `access`.

What happened to a request is read from its receipt alone (`observe`); what is now (depth, in-flight) is read from its owner at scrape time
(`watch_*`), so no gauge is ever counted up and down. Labels are bounded: no request id, no client's word.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from pdserve.types import CloseReason, Receipt, Role, TransferRecord, WorkerSnapshot, WorkerState

CANARY_ROUTE = "canary"
"""route of the controller's own requests: counted, but kept out of clients' latencies"""
QUEUE = "prefill"
"""label of the one queue: it stands in front of the prefill pool"""

TIME_TO_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""the three above are vLLM's, so that quantiles of router and engine line up"""
QUEUE_WAIT_BUCKETS_S = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
ABORT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0)
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)


class Metrics:
    """The router's series in one registry. What every request moves is looked up by its labels once per set of them, not once per request.

    Args:
        registry: where they are registered; one `Metrics` per registry.
        version: value of `pdserve_build_info`.
    """

    def __init__(self, registry: CollectorRegistry, version: str) -> None:
        self.registry = registry
        self._request = cache(
            Counter(
                "pdserve_requests",
                "Client requests by how they were served.",
                ("route", "path", "reason", "code", "outcome"),
                registry=registry,
            ).labels
        )
        self._duration = _histograms(
            registry, "pdserve_request_duration_seconds", "From request read to last byte.", "route", REQUEST_BUCKETS_S
        )
        self._first_token = _histograms(
            registry, "pdserve_time_to_first_token_seconds", "From request read to first data.", "path", TIME_TO_FIRST_TOKEN_BUCKETS_S
        )
        self._inter_token = _histograms(
            registry, "pdserve_inter_token_latency_seconds", "Gaps between data of one stream.", "path", INTER_TOKEN_BUCKETS_S
        )
        self._queue_wait = _histograms(
            registry, "pdserve_queue_wait_seconds", "From admission to a leased pair.", "pool", QUEUE_WAIT_BUCKETS_S
        )(QUEUE)
        self._queue_requests = Gauge("pdserve_queue_depth_requests", "Requests that wait for a pair.", ("pool",), registry=registry)
        self._queue_tokens = Gauge("pdserve_queue_depth_tokens", "Estimated prompt tokens that wait.", ("pool",), registry=registry)
        self._queue_limit = Gauge("pdserve_queue_limit_tokens", "Estimated prompt tokens that may wait.", ("pool",), registry=registry)
        self._in_flight = Gauge("pdserve_in_flight_requests", "Live leases.", ("role",), registry=registry)
        self._reserved = Gauge("pdserve_kv_reserved_tokens", "KV tokens reserved for live leases.", ("role",), registry=registry)
        self._reuse = Counter(
            "pdserve_expected_reuse_tokens", "Prompt tokens that a picked worker was expected to hold.", ("role",), registry=registry
        )
        self._breakers = Gauge(
            "pdserve_breakers", "Pairings of workers whose transport failed since their last success.", ("state",), registry=registry
        )
        self._breakers_opened = Counter("pdserve_breakers_opened", "Times that a breaker opened.", registry=registry)
        self._verdicts = Gauge(
            "pdserve_disaggregation_verdict", "Models by what their measured rates say.", ("verdict",), registry=registry
        )
        self._connections = Gauge("pdserve_client_connections", "Open connections of clients.", registry=registry)
        self._connections_limit = Gauge("pdserve_client_connections_limit", "Connections of clients that are accepted.", registry=registry)
        self._retrying = Gauge("pdserve_retries_in_use", "Requests in a second or third attempt.", registry=registry)
        self._retries_denied = Counter(
            "pdserve_retries_denied",
            "Failed attempts that no other followed for want of budget or attempts.",
            ("reason",),
            registry=registry,
        )
        self._workers = Gauge("pdserve_workers", "Workers by role and state.", ("role", "state"), registry=registry)
        self._retries = Counter("pdserve_retries", "Attempts after the first, by what failed.", ("reason",), registry=registry)
        self._shed = Counter("pdserve_shed", "Requests refused for want of room.", ("reason",), registry=registry)
        self._ends = _Ends(registry)
        self._transfer = cache(Counter("pdserve_kv_transfers", "Ended transfers, by side.", ("side", "outcome"), registry=registry).labels)
        self._transfer_bytes = Counter("pdserve_kv_transfer_bytes", "KV bytes that landed.", registry=registry)
        self._transfer_tokens = Counter("pdserve_kv_transfer_tokens", "Prompt tokens whose KV landed.", registry=registry)
        self._transfer_s = Histogram(
            "pdserve_kv_transfer_seconds", "First parcel to last, of landed transfers.", registry=registry, buckets=TRANSFER_BUCKETS_S
        )
        self._records_missing = Counter(
            "pdserve_kv_records_missing", "Transfer records of finished requests that never came.", registry=registry
        )
        Info("pdserve_build", "Build of this router.", registry=registry).info({"version": version})

    def watch_queue(
        self, depth_requests: Callable[[], float], depth_tokens: Callable[[], float], limit_tokens: Callable[[], float]
    ) -> None:
        """Read the queue's depth and bound from its owner at each scrape."""
        self._queue_requests.labels(QUEUE).set_function(depth_requests)
        self._queue_tokens.labels(QUEUE).set_function(depth_tokens)
        self._queue_limit.labels(QUEUE).set_function(limit_tokens)

    def watch_role(self, role: Role, leases: Callable[[], float], reserved_tokens: Callable[[], float]) -> None:
        """Read a role's live leases and the KV tokens reserved for them from their owner at each scrape."""
        self._in_flight.labels(role.value).set_function(leases)
        self._reserved.labels(role.value).set_function(reserved_tokens)

    def watch_breakers(self, counts: Mapping[str, Callable[[], float]]) -> None:
        """Read how many breakers are in each state at each scrape."""
        for state, count in counts.items():
            self._breakers.labels(state).set_function(count)

    def watch_verdicts(self, counts: Mapping[str, Callable[[], float]]) -> None:
        """Read for how many models each verdict holds at each scrape."""
        for verdict, count in counts.items():
            self._verdicts.labels(verdict).set_function(count)

    def watch_retries(self, in_use: Callable[[], float]) -> None:
        """Read at each scrape how many requests are in a later attempt."""
        self._retrying.set_function(in_use)

    def watch_connections(self, open_now: Callable[[], float], limit: int) -> None:
        """Read at each scrape how many clients are connected."""
        self._connections.set_function(open_now)
        self._connections_limit.set(limit)

    def set_workers(self, workers: Iterable[WorkerSnapshot]) -> None:
        """Replace the worker counts; every role and state is shown, zero included."""
        tally = Tally((worker.role, worker.state) for worker in workers)
        for role in Role:
            for state in WorkerState:
                self._workers.labels(role.value, state.value).set(tally[role, state])

    def record_retry(self, reason: str) -> None:
        """One attempt failed and another follows; `reason` is a `RetryReason`."""
        self._retries.labels(reason).inc()

    def record_denied_retry(self, reason: str) -> None:
        """An attempt failed and none follows though it might: ``budget`` or ``attempts``."""
        self._retries_denied.labels(reason).inc()

    def record_breaker_opened(self) -> None:
        """A pairing of workers is not used for a while."""
        self._breakers_opened.inc()

    def record_reuse(self, prefill_tokens: int, decode_tokens: int) -> None:
        """One lease was granted; so many of its prompt's tokens the two workers were expected to hold."""
        if prefill_tokens:
            self._reuse.labels(Role.PREFILL.value).inc(prefill_tokens)
        if decode_tokens:
            self._reuse.labels(Role.DECODE.value).inc(decode_tokens)

    def record_abort(self, outcome: str) -> None:
        """One abort call ended: ``done`` or ``failed``."""
        self._ends.calls.labels(outcome).inc()

    def observe(self, receipt: Receipt) -> None:
        """Count one finished request."""
        path = receipt.path.value
        self._request(receipt.route, path, receipt.reason, str(receipt.status), receipt.outcome).inc()
        if receipt.outcome == "shed":
            self._shed.labels(receipt.reason).inc()
        if receipt.route != CANARY_ROUTE:
            self._observe_latency(receipt, path)
        self._ends.observe(receipt)
        if receipt.transfer_id is not None:
            for record in (receipt.send, receipt.receive):
                self._observe_transfer(record, is_due=receipt.outcome == "finished")

    def _observe_latency(self, receipt: Receipt, path: str) -> None:
        self._duration(receipt.route).observe(receipt.duration_s)
        if receipt.attempts:
            self._queue_wait.observe(receipt.queue_wait_s)
        if receipt.ttft_s is not None:
            self._first_token(path).observe(receipt.ttft_s)
        if receipt.inter_token_s:
            gap = self._inter_token(path)
            for gap_s in receipt.inter_token_s:
                gap.observe(gap_s)

    def _observe_transfer(self, record: TransferRecord | None, *, is_due: bool) -> None:
        if record is None:
            # A request that ended early may never have reached the engine, so it owes no record.
            self._records_missing.inc(is_due)
            return
        self._transfer(record.side.value, record.outcome.value).inc()
        if record.outcome is CloseReason.LANDED:
            self._transfer_bytes.inc(record.bytes_moved)
            self._transfer_tokens.inc(record.tokens_moved)
            self._transfer_s.observe(record.transfer_s)


class _Ends:
    """Series about legs that did not end by themselves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter("pdserve_aborts", "Abort calls to agents.", ("outcome",), registry=registry)
        self._resumes = Counter("pdserve_resumed_streams", "Times that a stream went on elsewhere.", ("outcome",), registry=registry)
        self._abort = _histograms(
            registry, "pdserve_abort_seconds", "From a client's departure to what an agent confirmed.", "until", ABORT_BUCKETS_S
        )
        self._unconfirmed = Counter("pdserve_aborts_unconfirmed", "Aborts that no agent confirmed.", ("until",), registry=registry)

    def observe(self, receipt: Receipt) -> None:
        if receipt.resumed_at:
            self._resumes.labels(receipt.outcome).inc(len(receipt.resumed_at))
        for abort in receipt.aborts:
            self._observe("acknowledged", abort.acknowledged_s)
            self._observe("blocks_free", abort.blocks_free_s)

    def _observe(self, until: str, duration_s: float | None) -> None:
        if duration_s is None:
            self._unconfirmed.labels(until).inc()
        else:
            self._abort(until).observe(duration_s)


def _histograms(registry: CollectorRegistry, name: str, text: str, label: str, buckets_s: tuple[float, ...]) -> Callable[[str], Histogram]:
    """Register a series with one label; returns the way from its value to the histogram."""
    return cache(Histogram(name, text, (label,), registry=registry, buckets=buckets_s).labels)
