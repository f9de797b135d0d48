"""Who sees a receipt, which are kept, and what is logged of one."""

from collections.abc import Mapping
from typing import Any

import pytest
from receipt_facts import receipt, receive_record
from structlog.testing import capture_logs

from pdserve.observe.receipts import KEPT, ReceiptBook, ReceiptLog
from pdserve.types import CloseReason, Receipt, ServePath

LOGGED_FIELDS = {
    *("event", "log_level", "request_id", "route", "status", "outcome", "path", "reason", "prefill_worker", "decode_worker", "transfer_id"),
    *("attempts", "queue_wait_s", "ttft_s", "duration_s", "prompt_tokens", "completion_tokens", "tokens_moved", "bytes_moved"),
}
LOCAL = {"path": ServePath.LOCAL, "reason": "media", "transfer_id": None, "send": None, "receive": None}


def ids(receipts: tuple[Receipt, ...]) -> list[str]:
    """Return their request ids."""
    return [each.request_id for each in receipts]


def test_the_ring_keeps_the_last_ones_newest_first() -> None:
    """An old receipt goes when a new one comes."""
    book = ReceiptBook(kept=3)
    for number in range(5):
        book.observe(receipt(request_id=f"r{number}"))
    assert ids(book.last(10)) == ["r4", "r3", "r2"]
    assert ids(book.last(2)) == ["r4", "r3"]
    assert book.last(0) == book.last(-1) == ()


def test_the_ring_is_bounded_unless_told_otherwise() -> None:
    """A busy router keeps no more than `KEPT`."""
    book = ReceiptBook()
    for _ in range(KEPT + 10):
        book.observe(receipt())
    assert len(book.last(10 * KEPT)) == KEPT


def test_observers_see_the_whole_receipt_in_order_and_the_ring_keeps_it_without_gaps() -> None:
    """The list of gaps, as long as the answer, is handed on and not stored; nothing else is lost."""
    seen: list[tuple[str, Receipt]] = []
    book = ReceiptBook((lambda r: seen.append(("first", r)), lambda r: seen.append(("second", r))))
    whole = receipt(inter_token_s=(0.1,) * 500)
    book.observe(whole)
    assert seen == [("first", whole), ("second", whole)]
    assert book.last(1) == (receipt(inter_token_s=()),)


def logged(**changes: object) -> Mapping[str, Any]:
    """Return the one line that a receipt makes."""
    with capture_logs() as lines:
        ReceiptLog().observe(receipt(**changes))
    (line,) = lines
    return line


def test_the_line_has_a_closed_list_of_fields_and_no_client_word() -> None:
    """Neither prompt nor answer nor the client's own id can be in it."""
    line = logged(client_request_id="please sum up my diary", model="m")
    assert set(line) == LOGGED_FIELDS
    assert "diary" not in repr(line)
    assert (line["tokens_moved"], line["bytes_moved"], line["ttft_s"], line["path"]) == (40, 4096, 0.5, "disaggregated")


def test_what_did_not_happen_is_none_not_zero() -> None:
    """A local request has no transfer, one that failed early no first token."""
    line = logged(**LOCAL, ttft_s=None)
    assert (line["tokens_moved"], line["bytes_moved"], line["ttft_s"], line["transfer_id"]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "info"),
        (LOCAL, "info"),
        ({"outcome": "client_error", "status": 400}, "info"),
        ({"outcome": "cancelled", "status": 499, "receive": None}, "info"),
        ({"outcome": "shed", "status": 429, "transfer_id": None, "send": None, "receive": None}, "info"),
        ({"outcome": "failed", "status": 502}, "warning"),
        ({"outcome": "upstream_error", "status": 500}, "warning"),
        ({"receive": None}, "warning"),
        ({"receive": receive_record(CloseReason.PROMPT_MISMATCH)}, "warning"),
        ({"receive": receive_record(CloseReason.PEER_LOST)}, "warning"),
    ],
)
def test_a_line_warns_when_the_fault_is_ours_or_the_path_was_not_as_chosen(changes: dict[str, object], level: str) -> None:
    """A right answer over a transfer that failed or was not proven warns too; a client's own fault does not."""
    assert logged(**changes)["log_level"] == level
