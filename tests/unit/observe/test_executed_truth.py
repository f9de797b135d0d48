"""Configured, eligible and executed in a receipt: executed is what the records prove, never what was meant."""

from dataclasses import replace

import pytest
from receipt_facts import TRANSFER_ID, receive_record, send_record

from pdserve.config import Config
from pdserve.routing.line import PoolLimits
from pdserve.routing.pool import Pool
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Policy
from pdserve.server.draft import Draft
from pdserve.server.features import configured
from pdserve.testing.clock import ManualClock
from pdserve.types import CloseReason, FleetSnapshot, Receipt, Role, ServePath, Ticket, TransferRecord, WorkerSnapshot, WorkerState

CONFIGURED = configured(Config())
MOVED = ("disaggregation", "layer_wise_push", "transport")
"""what needs two legs"""
WORKERS = (
    WorkerSnapshot("p0", "i0", Role.PREFILL, WorkerState.READY, "http://p0", "m", 100, 1, 1000),
    WorkerSnapshot("d0", "i0", Role.DECODE, WorkerState.READY, "http://d0", "m", 100, 1, 1000),
)


def draft(*, local: PathReason | None = None, workers: tuple[WorkerSnapshot, ...] = WORKERS, outcome: str = "finished") -> Draft:
    """Return the facts of a request that had a pair, and a ticket if it was to be disaggregated."""
    pool = Pool(ManualClock(), PoolLimits(32, 1.0), Policy())
    pool.update(FleetSnapshot(1, workers))
    lease = pool.enter(Demand("m", 40, local)).lease
    assert lease is not None
    facts = Draft("r0", None, "/v1/completions", 10.0, CONFIGURED)
    facts.local_reason = local
    facts.leased(lease)
    if lease.prefill is not None:
        facts.ticket = Ticket(TRANSFER_ID, 1, "p0", "i0", "d0", "i0", 60.0)
    facts.end(12.0, 200, outcome)
    return facts


def way(receipt: Receipt) -> tuple[ServePath, str, str | None]:
    """Return path, reason and whether disaggregation was executed."""
    return (receipt.path, receipt.reason, receipt.executed["disaggregation"])


def test_a_load_that_landed_is_executed_disaggregation() -> None:
    """Both records are in the receipt, and the features they prove."""
    send = send_record(tokens_reused=8, bytes_before_forward_end=3072)
    receipt = draft().receipt(send, receive_record(tokens_reused=4, transport="shm"))
    assert way(receipt) == (ServePath.DISAGGREGATED, "default", "yes")
    assert receipt.configured == {
        "disaggregation": "auto",
        "layer_wise_push": "on",
        "prefix_reuse": "on",
        "transport": "tcp",
        "spec_decode": "off",
        "digest": "parcel",
    }
    assert receipt.eligible == {**dict.fromkeys(MOVED, "yes"), "prefix_reuse": "yes", "spec_decode": None}
    assert receipt.executed == {
        "disaggregation": "yes",
        "layer_wise_push": "yes: 3072 of 4096 bytes before the forward pass ended",
        "prefix_reuse": "yes: prefill 8 tokens, decode 4 tokens",
        "transport": "shm",
        "spec_decode": None,
    }
    assert (receipt.send, receipt.transfer_id) == (send, TRANSFER_ID)


@pytest.mark.parametrize("outcome", [outcome for outcome in CloseReason if outcome not in (CloseReason.LANDED, CloseReason.RELEASED)])
def test_a_load_that_failed_is_a_local_request(outcome: CloseReason) -> None:
    """It was configured and eligible, and decode computed the prompt itself: the receipt says so and why."""
    receipt = draft().receipt(send_record(CloseReason.PEER_CLOSED), receive_record(outcome))
    assert way(receipt) == (ServePath.LOCAL, f"transfer_{outcome.value}", f"no: {outcome.value}")
    assert receipt.eligible["disaggregation"] == "yes"


def test_a_load_that_landed_without_a_token_is_a_local_request() -> None:
    """Nothing moved, however good its end."""
    path, reason, executed = way(draft().receipt(send_record(), receive_record(tokens_moved=0)))
    assert (path, reason) == (ServePath.LOCAL, "transfer_nothing_to_move")
    assert executed is not None and executed.startswith("no: ")


@pytest.mark.parametrize("send", [None, send_record()])
def test_a_load_whose_record_never_came_is_unproven(send: TransferRecord | None) -> None:
    """Neither yes nor no; the producer's word alone does not count."""
    receipt = draft().receipt(send, None)
    assert way(receipt) == (ServePath.DISAGGREGATED, "transfer_unproven", None)
    assert (receipt.executed["transport"], receipt.executed["prefix_reuse"]) == (None, None)
    assert (receipt.executed["layer_wise_push"] is None) == (send is None)


def test_what_the_producer_did_is_told_only_by_its_record() -> None:
    """Without it the push is not claimed."""
    receipt = draft().receipt(None, receive_record())
    assert way(receipt) == (ServePath.DISAGGREGATED, "default", "yes")
    assert (receipt.executed["layer_wise_push"], receipt.executed["prefix_reuse"], receipt.executed["transport"]) == (None, None, None)


@pytest.mark.parametrize(
    ("send", "receive", "reuse"),
    [
        (send_record(), receive_record(), "no: nothing cached"),
        (None, receive_record(tokens_reused=4), "yes: decode 4 tokens"),
        (send_record(tokens_reused=8), None, "yes: prefill 8 tokens"),
        (send_record(), None, None),
        (None, None, None),
    ],
)
def test_reuse_is_denied_only_by_both_sides(send: TransferRecord | None, receive: TransferRecord | None, reuse: str | None) -> None:
    """One record that tells of a hit is enough to say yes; to say no takes both."""
    assert draft().receipt(send, receive).executed["prefix_reuse"] == reuse


@pytest.mark.parametrize(
    ("changes", "push"),
    [
        ({}, "no: 0 of 4096 bytes before the forward pass ended"),
        ({"bytes_moved": 0, "outcome": CloseReason.PEER_LOST}, "no: peer_lost"),
    ],
)
def test_a_push_that_began_after_the_forward_pass_was_none(changes: dict[str, object], push: str) -> None:
    """Also one that moved nothing, whose end says why."""
    assert draft().receipt(replace(send_record(), **changes), receive_record()).executed["layer_wise_push"] == push


@pytest.mark.parametrize(("cached_tokens", "reuse"), [(8, "yes: cached 8 tokens"), (0, "no: nothing cached"), (None, None)])
def test_a_local_request_reuses_what_its_engine_says(cached_tokens: int | None, reuse: str | None) -> None:
    """An engine that does not tell leaves it open."""
    facts = draft(local=PathReason.N_ABOVE_ONE)
    facts.usage = {} if cached_tokens is None else {"cached_tokens": cached_tokens}
    assert facts.receipt(None, None).executed["prefix_reuse"] == reuse


@pytest.mark.parametrize(
    ("local", "reuse"),
    [(None, "yes"), (PathReason.PROMPT_LOGPROBS, "no: prompt_logprobs"), (PathReason.N_ABOVE_ONE, None)],
)
def test_eligibility_for_the_prefix_cache_is_told_where_it_is_known(local: PathReason | None, reuse: str | None) -> None:
    """An earlier reason hides whether the prompt's logprobs were asked for as well."""
    assert draft(local=local).receipt(None, None).eligible["prefix_reuse"] == reuse


@pytest.mark.parametrize(
    ("arguments", "cache", "speculates"),
    [
        ((), "on", "off"),
        (("--no-enable-prefix-caching",), "off", "off"),
        (("--no_enable_prefix_caching", "--enable-prefix-caching"), "on", "off"),
        (("--speculative-config", "{}"), "on", "on"),
        (("--speculative_config={}",), "on", "on"),
        (("-sc", "{}"), "on", "on"),
        (("--spec-method", "ngram"), "on", "on"),
        (("--config", "file.yaml"), "on", None),
    ],
)
def test_what_engines_are_set_to_is_read_from_their_arguments(arguments: tuple[str, ...], cache: str, speculates: str | None) -> None:
    """As vLLM 0.32 spells them; a file of options may hold anything that the command line does not settle."""
    told = configured(Config.model_validate({"engine": {"extra_args": arguments}}))
    assert (told["prefix_reuse"], told["spec_decode"]) == (cache, speculates)


def test_a_request_that_cannot_be_disaggregated_was_not_eligible() -> None:
    """The three values differ: set, not qualified, not done."""
    receipt = draft(local=PathReason.N_ABOVE_ONE).receipt(None, None)
    assert way(receipt) == (ServePath.LOCAL, "n_above_one", "no: n_above_one")
    assert {receipt.eligible[feature] for feature in MOVED} == {receipt.executed[feature] for feature in MOVED} == {"no: n_above_one"}
    assert receipt.transfer_id is None and receipt.prefill_worker is None


def test_a_request_that_found_no_prefill_worker_was_eligible() -> None:
    """The fleet stood against it, not the request."""
    receipt = draft(workers=WORKERS[1:]).receipt(None, None)
    assert way(receipt) == (ServePath.LOCAL, "no_ready_prefill", "no: no_ready_prefill")
    assert receipt.eligible["disaggregation"] == "yes"


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "upstream_error"])
def test_a_request_that_did_not_finish_keeps_the_path_it_was_on(outcome: str) -> None:
    """Its transfer ended because it did, which is no reason to call it local."""
    receipt = draft(outcome=outcome).receipt(None, receive_record(CloseReason.ABORTED))
    assert way(receipt) == (ServePath.DISAGGREGATED, "default", "no: aborted")


def test_a_request_that_was_turned_away_claims_nothing() -> None:
    """Without a path nothing was eligible, nothing executed."""
    facts = Draft("r0", None, "/v1/completions", 10.0, CONFIGURED)
    facts.end(10.5, 400, "client_error")
    receipt = facts.receipt(None, None)
    assert (receipt.path, receipt.reason, receipt.eligible) == (ServePath.NONE, "rejected", {})
    assert set(receipt.executed.values()) == {"no: never started"}
