"""Facts of a request, and the receipt they become: what was chosen is not yet what was executed."""

import pytest

from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Pick
from pdserve.routing.slots import Lease, Slot
from pdserve.server.draft import Draft
from pdserve.types import CloseReason, Role, ServePath, Ticket, TransferRecord, TransferSide, WorkerSnapshot, WorkerState

TICKET = Ticket("a" * 32, 1, "p0", "1", "d0", "1", 60)


def slot(worker_id: str, role: Role) -> Slot:
    return Slot(WorkerSnapshot(worker_id, "1", role, WorkerState.READY, "http://x", "m", 4096, 16, 1))


def draft(path: ServePath = ServePath.DISAGGREGATED, reason: PathReason = PathReason.DEFAULT) -> Draft:
    """Return a leased request that began at 10 s."""
    made = Draft("r", "c", "/v1/completions", 10.0, {"transport": "tcp"})
    prefill = slot("p0", Role.PREFILL) if path is ServePath.DISAGGREGATED else None
    made.leased(Lease(Demand("m", 1), Pick(path, reason, prefill, slot("d0", Role.DECODE))))
    made.ticket = TICKET if prefill else None
    return made


def record(side: TransferSide, outcome: CloseReason, tokens_moved: int = 9) -> TransferRecord:
    return TransferRecord("a" * 32, 1, side, "w", "1", outcome, tokens_moved=tokens_moved, tokens_reused=2, bytes_moved=900)


def test_times_are_measured_from_the_body_to_the_client() -> None:
    """TTFT to the first data, gaps between arrivals, duration to the end; a second end changes nothing."""
    made = draft()
    made.stream = True
    assert made.data(10.5)
    assert not made.data(10.7)
    assert not made.data(11.0)
    made.end(11.25, 200, "finished")
    made.end(99.0, 500, "failed")
    receipt = made.receipt(None, None)
    assert receipt.ttft_s == pytest.approx(0.5)
    assert receipt.inter_token_s == pytest.approx((0.2, 0.3))
    assert (receipt.duration_s, receipt.status, receipt.outcome) == (1.25, 200, "finished")


def test_an_answer_in_one_piece_has_no_first_token_time() -> None:
    """Its first token was never seen."""
    made = draft()
    made.data(10.5)
    made.end(11.0, 200, "finished")
    assert made.receipt(None, None).ttft_s is None


@pytest.mark.parametrize(
    ("outcome", "receive", "path", "reason", "executed"),
    [
        ("finished", (CloseReason.LANDED, 9), ServePath.DISAGGREGATED, "default", "yes"),
        ("finished", (CloseReason.LANDED, 0), ServePath.LOCAL, "transfer_nothing_to_move", "no: landed"),
        ("finished", (CloseReason.NOTHING_TO_MOVE, 0), ServePath.LOCAL, "transfer_nothing_to_move", "no: nothing_to_move"),
        ("finished", (CloseReason.PROMPT_MISMATCH, 0), ServePath.LOCAL, "transfer_prompt_mismatch", "no: prompt_mismatch"),
        ("finished", (CloseReason.EXPIRED, 5), ServePath.LOCAL, "transfer_expired", "no: expired"),
        ("finished", None, ServePath.DISAGGREGATED, "transfer_unproven", None),
        ("cancelled", (CloseReason.ABORTED, 0), ServePath.DISAGGREGATED, "default", "no: aborted"),
        ("failed", None, ServePath.DISAGGREGATED, "default", None),
    ],
)
def test_the_path_is_what_the_receiving_side_proves(
    outcome: str, receive: tuple[CloseReason, int] | None, path: ServePath, reason: str, executed: str | None
) -> None:
    """A finished request was disaggregated only if KV landed; one that did not finish keeps what was chosen."""
    made = draft()
    made.end(11.0, 200, outcome)
    receipt = made.receipt(None, None if receive is None else record(TransferSide.RECEIVE, *receive))
    assert (receipt.path, receipt.reason, receipt.executed["disaggregation"]) == (path, reason, executed)


def test_a_local_request_says_why() -> None:
    """Configured, eligible and executed are three different things."""
    made = draft(ServePath.LOCAL, PathReason.MEDIA)
    made.local_reason = PathReason.MEDIA
    made.end(11.0, 200, "finished")
    receipt = made.receipt(None, None)
    assert receipt.configured == {"transport": "tcp"}
    assert (receipt.eligible["disaggregation"], receipt.executed["disaggregation"]) == ("no: media", "no: media")
    assert (receipt.prefill_worker, receipt.decode_worker, receipt.transfer_id) == (None, "d0", None)


def test_a_request_that_was_refused_has_no_path() -> None:
    """Nothing was eligible, nothing was executed."""
    made = Draft("r", None, "/v1/completions", 10.0, {})
    made.end(10.0, 400, "client_error")
    receipt = made.receipt(None, None)
    assert (receipt.path, receipt.reason, receipt.attempts) == (ServePath.NONE, "rejected", 0)
    assert receipt.eligible == {}
    assert set(receipt.executed.values()) == {"no: never started"}


def test_usage_becomes_counts() -> None:
    """As the client was told them; an engine that tells less leaves gaps."""
    made = draft()
    made.usage = {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 3}
    receipt = made.receipt(None, None)
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (9, 4, 3)
    made.usage = {"prompt_tokens": 9, "prompt_tokens_details": None}
    assert made.receipt(None, None).cached_tokens is None
