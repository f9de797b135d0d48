"""Every series of the router: its name, its labels, and what one receipt does to it."""

from collections.abc import Iterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from receipt_facts import receipt, receive_record, send_record

from pdserve.observe.metrics import CANARY_ROUTE, Metrics
from pdserve.testing.fleet import FakeFleet, specs
from pdserve.types import CloseReason, FleetSnapshot, LegAbort, Receipt, Role, ServePath, TransferRecord, WorkerState

FAMILIES: dict[str, tuple[str, set[str]]] = {
    "pdserve_queue_depth_requests": ("gauge", {"pool"}),
    "pdserve_queue_depth_tokens": ("gauge", {"pool"}),
    "pdserve_queue_wait_seconds": ("histogram", {"pool"}),
    "pdserve_queue_limit_tokens": ("gauge", {"pool"}),
    "pdserve_in_flight_requests": ("gauge", {"role"}),
    "pdserve_kv_reserved_tokens": ("gauge", {"role"}),
    "pdserve_expected_reuse_tokens_total": ("counter", {"role"}),
    "pdserve_breakers": ("gauge", {"state"}),
    "pdserve_breakers_opened_total": ("counter", set()),
    "pdserve_disaggregation_verdict": ("gauge", {"verdict"}),
    "pdserve_client_connections": ("gauge", set()),
    "pdserve_client_connections_limit": ("gauge", set()),
    "pdserve_retries_in_use": ("gauge", set()),
    "pdserve_retries_denied_total": ("counter", {"reason"}),
    "pdserve_time_to_first_token_seconds": ("histogram", {"path"}),
    "pdserve_inter_token_latency_seconds": ("histogram", {"path"}),
    "pdserve_request_duration_seconds": ("histogram", {"route"}),
    "pdserve_requests_total": ("counter", {"route", "path", "reason", "code", "outcome"}),
    "pdserve_kv_transfer_bytes_total": ("counter", set()),
    "pdserve_kv_transfer_tokens_total": ("counter", set()),
    "pdserve_kv_transfer_seconds": ("histogram", set()),
    "pdserve_kv_transfers_total": ("counter", {"side", "outcome"}),
    "pdserve_kv_records_missing_total": ("counter", set()),
    "pdserve_retries_total": ("counter", {"reason"}),
    "pdserve_shed_total": ("counter", {"reason"}),
    "pdserve_aborts_total": ("counter", {"outcome"}),
    "pdserve_resumed_streams_total": ("counter", {"outcome"}),
    "pdserve_abort_seconds": ("histogram", {"until"}),
    "pdserve_aborts_unconfirmed_total": ("counter", {"until"}),
    "pdserve_workers": ("gauge", {"role", "state"}),
    "pdserve_build_info": ("gauge", {"version"}),
}
LATENCIES = (
    ("pdserve_queue_wait_seconds", {"pool": "prefill"}),
    ("pdserve_time_to_first_token_seconds", {"path": "disaggregated"}),
    ("pdserve_inter_token_latency_seconds", {"path": "disaggregated"}),
    ("pdserve_request_duration_seconds", {"route": "/v1/chat/completions"}),
)


class Scrape:
    """Metrics in a registry of their own, read as Prometheus reads them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, "1.2.3")

    def samples(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        """Yield family, type, labels and value of all but the ``_created`` series."""
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    yield sample.name, family.type, sample.labels, sample.value

    def value(self, name: str, labels: dict[str, str] | None = None) -> float:
        """Return one series' value, 0 if it does not exist yet."""
        found = [value for sample, _, its, value in self.samples() if sample == name and its == (labels or {})]
        assert len(found) <= 1
        return found[0] if found else 0.0

    def timed(self, name: str, labels: dict[str, str] | None = None) -> tuple[float, float]:
        """Return a histogram's count and sum."""
        return (self.value(f"{name}_count", labels), self.value(f"{name}_sum", labels))


@pytest.fixture
def scrape() -> Scrape:
    """Metrics that nothing has touched."""
    return Scrape()


def use_everything(scrape: Scrape) -> None:
    """Touch every series."""
    metrics = scrape.metrics
    metrics.watch_queue(lambda: 3, lambda: 99, lambda: 1000)
    for role in Role:
        metrics.watch_role(role, lambda: 1, lambda: 64)
    metrics.watch_breakers({"open": lambda: 1})
    metrics.watch_verdicts({"cold": lambda: 1})
    metrics.watch_connections(lambda: 5, 100)
    metrics.watch_retries(lambda: 1)
    metrics.set_workers(())
    metrics.record_retry("prefill_connect")
    metrics.record_denied_retry("budget")
    metrics.record_breaker_opened()
    metrics.record_reuse(512, 128)
    metrics.record_abort("done")
    metrics.observe(receipt(resumed_at=(3, 17)))
    metrics.observe(receipt(aborts=(LegAbort("p0", "r0-1", 0.25, 0.5), LegAbort("d0", "r0-1", None, None))))
    metrics.observe(receipt(outcome="shed", status=429, reason="queue_full_tokens", path=ServePath.NONE, transfer_id=None, attempts=0))


def test_every_series_has_its_name_type_and_labels(scrape: Scrape) -> None:
    """Dashboards and alerts depend on these; nothing else is exported."""
    use_everything(scrape)
    seen: dict[str, tuple[str, set[str]]] = {}
    for name, kind, labels, _ in scrape.samples():
        base = name
        if kind == "histogram":
            base = name.rsplit("_", 1)[0]
        seen[base] = (kind, set(labels) - {"le"})
    assert seen == FAMILIES


def test_one_receipt_moves_every_series_of_a_request_once(scrape: Scrape) -> None:
    """Counts, sums and labels come from the receipt and its two records alone."""
    scrape.metrics.observe(receipt())
    request = {"route": "/v1/chat/completions", "path": "disaggregated", "reason": "default", "code": "200", "outcome": "finished"}
    assert scrape.value("pdserve_requests_total", request) == 1
    assert [scrape.timed(name, labels) for name, labels in LATENCIES] == [(1, 0.25), (1, 0.5), (2, 0.5), (1, 2.0)]
    assert scrape.value("pdserve_kv_transfers_total", {"side": "send", "outcome": "released"}) == 1
    assert scrape.value("pdserve_kv_transfers_total", {"side": "receive", "outcome": "landed"}) == 1
    assert scrape.value("pdserve_kv_transfer_bytes_total") == 4096
    assert scrape.value("pdserve_kv_transfer_tokens_total") == 40
    assert scrape.timed("pdserve_kv_transfer_seconds") == (1, 0.02)
    assert scrape.value("pdserve_kv_records_missing_total") == 0
    assert not any(value for name, _, _, value in scrape.samples() if name in ("pdserve_shed_total", "pdserve_retries_total"))


def test_aborts_are_timed_where_an_agent_confirmed_them(scrape: Scrape) -> None:
    """One whose agent never answered, or whose blocks were never said to be free, is counted instead of timed."""
    scrape.metrics.observe(receipt(aborts=(LegAbort("p0", "r0-1", 0.25, 0.5), LegAbort("d0", "r0-1", 0.5, None))))
    scrape.metrics.observe(receipt(aborts=(LegAbort("d0", "r1-1", None, None),)))
    assert scrape.timed("pdserve_abort_seconds", {"until": "acknowledged"}) == (2, 0.75)
    assert scrape.timed("pdserve_abort_seconds", {"until": "blocks_free"}) == (1, 0.5)
    assert scrape.value("pdserve_aborts_unconfirmed_total", {"until": "acknowledged"}) == 1
    assert scrape.value("pdserve_aborts_unconfirmed_total", {"until": "blocks_free"}) == 2


def test_a_canary_counts_but_times_no_client(scrape: Scrape) -> None:
    """It is in the request and transfer counts, and in no latency of clients."""
    scrape.metrics.observe(receipt(route=CANARY_ROUTE, reason="pinned"))
    canary = {"route": "canary", "path": "disaggregated", "reason": "pinned", "code": "200", "outcome": "finished"}
    assert scrape.value("pdserve_requests_total", canary) == 1
    assert scrape.value("pdserve_kv_transfer_tokens_total") == 40
    assert [scrape.timed(name, labels) for name, labels in LATENCIES] == [(0, 0)] * 4
    assert scrape.timed("pdserve_request_duration_seconds", {"route": "canary"}) == (0, 0)


def test_a_shed_request_is_counted_with_its_reason_and_waited_for_nothing(scrape: Scrape) -> None:
    """It never had a pair, so it is no sample of the queue's wait."""
    shed = receipt(
        outcome="shed",
        status=429,
        reason="queue_full_requests",
        path=ServePath.NONE,
        attempts=0,
        transfer_id=None,
        ttft_s=None,
        inter_token_s=(),
        send=None,
        receive=None,
    )
    scrape.metrics.observe(shed)
    assert scrape.value("pdserve_shed_total", {"reason": "queue_full_requests"}) == 1
    assert [scrape.timed(name, labels)[0] for name, labels in LATENCIES] == [0, 0, 0, 1]
    assert scrape.value("pdserve_kv_records_missing_total") == 0


@pytest.mark.parametrize("outcome", [outcome for outcome in CloseReason if outcome is not CloseReason.LANDED])
def test_a_load_that_failed_moves_no_bytes(scrape: Scrape, outcome: CloseReason) -> None:
    """What crossed before it failed was thrown away: it shows as an outcome, not as traffic."""
    scrape.metrics.observe(receipt(receive=receive_record(outcome)))
    assert scrape.value("pdserve_kv_transfers_total", {"side": "receive", "outcome": outcome.value}) == 1
    assert scrape.value("pdserve_kv_transfer_bytes_total") == 0
    assert scrape.value("pdserve_kv_transfer_tokens_total") == 0
    assert scrape.timed("pdserve_kv_transfer_seconds") == (0, 0)


@pytest.mark.parametrize(
    ("transfer_id", "send", "receive", "missing"),
    [
        ("t", None, None, 2),
        ("t", send_record(), None, 1),
        ("t", None, receive_record(), 1),
        ("t", send_record(), receive_record(), 0),
        (None, None, None, 0),
    ],
)
def test_a_record_is_missing_only_where_there_was_a_transfer(
    scrape: Scrape, transfer_id: str | None, send: TransferRecord | None, receive: TransferRecord | None, missing: int
) -> None:
    """Each side that stays silent counts; a local request has no sides."""
    scrape.metrics.observe(receipt(transfer_id=transfer_id, send=send, receive=receive))
    assert scrape.value("pdserve_kv_records_missing_total") == missing


@pytest.mark.parametrize("outcome", ["cancelled", "failed", "upstream_error"])
def test_a_request_that_ended_early_owes_no_record(scrape: Scrape, outcome: str) -> None:
    """It may never have reached an engine; the record that did come still counts."""
    scrape.metrics.observe(receipt(outcome=outcome, receive=None, send=send_record(CloseReason.ABORTED)))
    assert scrape.value("pdserve_kv_records_missing_total") == 0
    assert scrape.value("pdserve_kv_transfers_total", {"side": "send", "outcome": "aborted"}) == 1


def varied(number: int) -> Receipt:
    """Return a receipt whose free words are all its own."""
    word = f"word{number}"
    return receipt(
        request_id=word,
        client_request_id=word,
        model=word,
        prefill_worker=word,
        decode_worker=word,
        transfer_id=word,
        prompt_tokens=number,
        send=send_record(transfer_id=word, worker=word, incarnation=word, request_id=word),
        receive=receive_record(transfer_id=word, worker=word, incarnation=word, request_id=word),
    )


def test_no_label_grows_with_traffic(scrape: Scrape) -> None:
    """A hundred requests of other clients, ids, models and workers make no series that the first did not."""
    scrape.metrics.observe(varied(0))
    series = [(name, labels) for name, _, labels, _ in scrape.samples()]
    for number in range(1, 100):
        scrape.metrics.observe(varied(number))
    assert [(name, labels) for name, _, labels, _ in scrape.samples()] == series
    assert not any("word" in value for _, labels in series for value in labels.values())


def test_depth_and_in_flight_are_read_at_the_scrape(scrape: Scrape) -> None:
    """The owner's present number is shown, not a copy."""
    depth: dict[str, int] = {"requests": 0, "tokens": 0, Role.PREFILL: 0, Role.DECODE: 0}
    scrape.metrics.watch_queue(lambda: depth["requests"], lambda: depth["tokens"], lambda: 70)
    for role in Role:
        scrape.metrics.watch_role(role, partial(depth.__getitem__, role), lambda: 64)
    for step in (5, 0):
        depth.update({"requests": step, "tokens": 10 * step, Role.PREFILL: 2 * step, Role.DECODE: 3 * step})
        assert scrape.value("pdserve_queue_depth_requests", {"pool": "prefill"}) == step
        assert scrape.value("pdserve_queue_depth_tokens", {"pool": "prefill"}) == 10 * step
        assert scrape.value("pdserve_in_flight_requests", {"role": "prefill"}) == 2 * step
        assert scrape.value("pdserve_in_flight_requests", {"role": "decode"}) == 3 * step
        assert scrape.value("pdserve_kv_reserved_tokens", {"role": "decode"}) == 64
        assert scrape.value("pdserve_queue_limit_tokens", {"pool": "prefill"}) == 70


async def test_workers_are_counted_anew_with_each_fleet(scrape: Scrape) -> None:
    """Every role and state has a series; one that emptied shows zero."""
    fleet = FakeFleet()
    for spec in specs(2, 1):
        await fleet.start(spec)
    snapshot: FleetSnapshot = await fleet.snapshot()
    scrape.metrics.set_workers(snapshot.workers)
    shown = {(labels["role"], labels["state"]): value for name, _, labels, value in scrape.samples() if name == "pdserve_workers"}
    assert {key: value for key, value in shown.items() if value} == {("prefill", "loading"): 2, ("decode", "loading"): 1}
    assert set(shown) == {(role.value, state.value) for role in Role for state in WorkerState}
    scrape.metrics.set_workers(snapshot.workers[:1])
    assert scrape.value("pdserve_workers", {"role": "decode", "state": "loading"}) == 0
    assert scrape.value("pdserve_workers", {"role": "prefill", "state": "loading"}) == 1


def test_retries_aborts_and_build_are_shown(scrape: Scrape) -> None:
    """What no receipt tells is counted where it happens."""
    scrape.metrics.record_retry("decode_head")
    scrape.metrics.record_retry("decode_head")
    scrape.metrics.record_abort("failed")
    assert scrape.value("pdserve_retries_total", {"reason": "decode_head"}) == 2
    assert scrape.value("pdserve_aborts_total", {"outcome": "failed"}) == 1
    assert scrape.value("pdserve_build_info", {"version": "1.2.3"}) == 1
