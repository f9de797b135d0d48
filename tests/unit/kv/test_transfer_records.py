"""Records of ranks become the worker's, once all have reported; readers follow with a cursor."""

from dataclasses import replace

import pytest

from pdserve.kv.records import MAX_PARTIAL, MAX_RECORDS, RecordLog, join_ranks
from pdserve.types import CloseReason, RunDigest, TransferRecord, TransferSide

RECORD = TransferRecord(
    transfer_id="t",
    attempt=1,
    side=TransferSide.RECEIVE,
    worker="decode-0",
    incarnation="x",
    outcome=CloseReason.LANDED,
    request_id="r",
    prompt_tokens=100,
    tokens_moved=100,
    tokens_reused=32,
    bytes_moved=1000,
    parcels=3,
    layers_sealed=4,
    layers_expected=4,
    acks=2,
    acks_expected=2,
    passes=1,
    bytes_before_forward_end=700,
    wait_s=0.5,
    transfer_s=1.0,
    dropped={"stale_pass": 1},
    digests=(RunDigest(0, "a", 0, 0, "d0"),),
)
OTHER = replace(
    RECORD,
    tokens_moved=68,
    tokens_reused=16,
    bytes_moved=500,
    parcels=2,
    layers_sealed=3,
    acks=1,
    passes=2,
    bytes_before_forward_end=100,
    wait_s=0.7,
    transfer_s=0.2,
    dropped={"stale_pass": 2, "late": 1},
    digests=(RunDigest(1, "a", 1, 0, "d1"),),
)


def test_ranks_join_to_sums_and_worst_cases() -> None:
    """Bytes, parcels and acks add up; tokens and layers are what all ranks have; times are the longest."""
    assert join_ranks([RECORD, OTHER]) == replace(
        RECORD,
        tokens_moved=68,
        tokens_reused=16,
        bytes_moved=1500,
        parcels=5,
        layers_sealed=3,
        acks=3,
        acks_expected=4,
        passes=2,
        bytes_before_forward_end=800,
        wait_s=0.7,
        transfer_s=1.0,
        dropped={"stale_pass": 3, "late": 1},
        digests=(*RECORD.digests, *OTHER.digests),
    )


@pytest.mark.parametrize("bad", [reason for reason in CloseReason if reason not in (CloseReason.LANDED, CloseReason.RELEASED)])
def test_one_rank_that_failed_fails_the_worker(bad: CloseReason) -> None:
    """Whichever rank it is."""
    failed = replace(RECORD, outcome=bad)
    assert join_ranks([RECORD, failed]).outcome is bad
    assert join_ranks([failed, RECORD]).outcome is bad


def test_record_appears_when_every_rank_has_reported() -> None:
    """Attempts, sides and transfers are kept apart."""
    log = RecordLog(num_ranks=2)
    parts = [RECORD, replace(RECORD, attempt=2), replace(RECORD, side=TransferSide.SEND), replace(RECORD, transfer_id="u")]
    for part in parts:
        log.add_rank(part)
    assert log.after(0) == (0, [])
    for part in reversed(parts):
        log.add_rank(part)
    cursor, records = log.after(0)
    assert cursor == 4
    assert [(r.transfer_id, r.attempt, r.side) for r in records] == [(p.transfer_id, p.attempt, p.side) for p in reversed(parts)]


def test_cursor_gives_each_record_once() -> None:
    """A reader that asks again with what it was told gets only what is new."""
    log = RecordLog(num_ranks=1)
    log.add_rank(RECORD)
    cursor, first = log.after(0)
    log.add(OTHER)
    cursor_after, second = log.after(cursor)
    assert (list(first), list(second)) == ([RECORD], [OTHER])
    assert log.after(cursor_after) == (2, [])


@pytest.mark.parametrize("cursor", [-5, 0, 10**9])
def test_cursor_from_elsewhere_does_no_harm(cursor: int) -> None:
    """Older than anything gives all that is kept, newer than anything gives nothing."""
    log = RecordLog(num_ranks=1)
    log.add(RECORD)
    assert len(log.after(cursor)[1]) == (0 if cursor > 0 else 1)


def test_slow_reader_loses_the_oldest_and_can_tell() -> None:
    """The ring is bounded; the cursor jumps by more than what came."""
    log = RecordLog(num_ranks=1)
    for number in range(MAX_RECORDS + 10):
        log.add(replace(RECORD, request_id=str(number)))
    cursor, records = log.after(0)
    assert (cursor, len(records), records[0].request_id) == (MAX_RECORDS + 10, MAX_RECORDS, "10")


def test_ranks_that_never_report_cost_bounded_memory() -> None:
    """The oldest half record makes room for the newest."""
    log = RecordLog(num_ranks=2)
    for number in range(MAX_PARTIAL + 1):
        log.add_rank(replace(RECORD, transfer_id=str(number)))
    log.add_rank(replace(RECORD, transfer_id="0"))
    log.add_rank(replace(RECORD, transfer_id=str(MAX_PARTIAL)))
    assert [record.transfer_id for record in log.after(0)[1]] == [str(MAX_PARTIAL)]
