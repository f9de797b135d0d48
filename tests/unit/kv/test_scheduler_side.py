"""What the engine core's half tells the ranks, request by request and step by step, driven with the few fields of vLLM's objects that it reads."""

from dataclasses import replace

import pytest
from scheduler_objects import TABLE, Blocks, BlockState, CachedRequests, NewRequest, Output, Request, Step

from pdserve.kv.actions import ReceiveOrder, SendOrder
from pdserve.kv.identity import prompt_digest
from pdserve.kv.metadata import Decline, RankReports, SendProgress, StepMetadata
from pdserve.kv.scheduler_side import SchedulerSide
from pdserve.kv.settings import KvSettings
from pdserve.kv.ticket import TransferKey
from pdserve.types import CloseReason, Ticket, TransferRecord, TransferSide

SEND, RECEIVE = TransferSide.SEND, TransferSide.RECEIVE
KEY = TransferKey("0123456789abcdef0123456789abcdef", 1)
TICKET = Ticket(KEY.transfer_id, 1, "prefill-0", "pa", "decode-0", "da", 30.0)


def scheduler(num_ranks: int = 1, digest: str = "parcel") -> SchedulerSide:
    return SchedulerSide(KvSettings(worker_id="worker", incarnation="inc", digest=digest), num_ranks)


def leg(side: TransferSide, *, tokens: int = 40, request_id: str = "r1") -> Request:
    return Request(request_id, TICKET.params(side), tokens)


def step(computed: int, tokens: int, *, is_new: bool = True, preempted: bool = False) -> Step:
    """One engine step that computes tokens of request r1."""
    return Step(
        {"r1": tokens},
        [NewRequest("r1", computed)] if is_new else [],
        CachedRequests() if is_new else CachedRequests(["r1"], [computed]),
        {"r1"} if preempted else None,
        BlockState({"r1": TABLE}),
    )


def told(side: SchedulerSide, output: Step | None = None) -> StepMetadata:
    return side.build_metadata(output or Step())  # type: ignore[arg-type]


def is_silent(metadata: StepMetadata) -> bool:
    """Whether the ranks are told nothing about transfers."""
    return metadata == StepMetadata(num_scheduled_tokens=metadata.num_scheduled_tokens)


# ---- tickets -------------------------------------------------------------------------------------------------------------------------


def test_request_without_a_ticket_is_none_of_our_business() -> None:
    """It loads nothing, keeps no blocks and reaches no rank."""
    side, request = scheduler(), Request()
    side.on_new_request(request)
    assert side.num_matched_tokens(request, 0) == (0, False)
    side.allocated(request, Blocks(), 0)
    assert side.request_finished(request) == (False, None)
    assert is_silent(told(side))
    assert side.num_open == 0


@pytest.mark.parametrize(("field_name", "value"), [("transfer_id", ""), ("role", "both"), ("attempt", 0), ("timeout_s", "soon")])
def test_malformed_ticket_is_refused_and_counted(field_name: str, value: object) -> None:
    """The request computes its own KV; the engine is not disturbed."""
    side = scheduler()
    request = Request(kv_transfer_params=TICKET.params(RECEIVE) | {field_name: value})
    side.on_new_request(request)
    assert side.refused == {f"bad_{field_name}": 1}
    assert side.num_matched_tokens(request, 0) == (0, False)
    assert (side.request_finished(request), side.num_open) == ((False, None), 0)


def test_ticket_in_use_is_refused_until_its_request_is_over() -> None:
    """Two children of one body carry the same ticket: the first has it, the second computes for itself."""
    side = scheduler()
    first, second = leg(RECEIVE), leg(RECEIVE, request_id="r2")
    side.on_new_request(first)
    side.on_new_request(second)
    assert side.refused == {"ticket_in_use": 1}
    assert side.num_matched_tokens(second, 0) == (0, False)
    assert side.request_finished(second) == (False, None)
    assert side.num_matched_tokens(first, 0) == (40, True)
    side.request_finished(first)
    side.on_new_request(leg(RECEIVE, request_id="r3"))
    assert side.refused == {"ticket_in_use": 1}


def test_closing_ends_what_a_finished_prefill_keeps_and_nothing_else() -> None:
    """Its consumer may never come: the ranks are told to close, as often as one likes. A running request is the engine's to abort."""
    side, request = scheduler(), leg(SEND)
    side.on_new_request(request)
    side.allocated(request, Blocks(TABLE), 0)
    told(side, step(0, 40))
    side.close(["r1", "unknown"])
    assert is_silent(told(side))
    assert side.request_finished(request) == (True, None)
    side.close(["r1"])
    assert told(side).cancelled_sends == [(KEY, CloseReason.ABORTED)]
    assert side.num_open == 1


def test_engine_ids_are_labels_only() -> None:
    """Ids that are prefixes of each other, or of another alphabet, never cross: the key is the ticket's."""
    side = scheduler()
    ids = ["a", "a-1", "cmpl-a-1-0-8f2c", "ä/\n", "a" * 5000]
    for number, request_id in enumerate(ids):
        ticket = Ticket(f"{number:032x}", 1, "prefill-0", "pa", "decode-0", "da", 30.0)
        request = Request(request_id, ticket.params(RECEIVE))
        side.on_new_request(request)
        side.allocated(request, Blocks(), 40)
    side.request_finished(Request("a"))
    metadata = told(side)
    assert [(order.key.transfer_id, order.request_id) for order in metadata.receives] == [(f"{n:032x}", i) for n, i in enumerate(ids)]
    assert metadata.cancelled_receives == [(TransferKey(f"{0:032x}", 1), CloseReason.ABORTED)]


# ---- decode --------------------------------------------------------------------------------------------------------------------------


def test_ticket_brings_what_is_missing_once() -> None:
    """A positive count until blocks are given; never again after that, whoever asks: that would load again or stop the engine."""
    side, request = scheduler(), leg(RECEIVE)
    side.on_new_request(request)
    assert side.num_matched_tokens(request, 8) == (32, True)
    assert side.num_matched_tokens(request, 8) == (32, True)
    side.allocated(request, Blocks(), 32)
    assert side.num_matched_tokens(request, 8) == (0, False)
    (order,) = told(side).receives
    assert order == ReceiveOrder(KEY, "r1", "prefill-0", "pa", prompt_digest(request), 40, 8, TABLE, 30.0, proof=False)
    side.allocated(request, Blocks(), 0)
    side.on_output(Output(finished_recving={"r1"}))
    for computed in (0, 39, 40):
        assert side.num_matched_tokens(request, computed) == (0, False)
    assert is_silent(told(side))
    assert side.request_finished(request) == (False, None)
    assert side.num_open == 0


@pytest.mark.parametrize(
    ("asked", "digest", "wanted"), [(False, "parcel", False), (True, "parcel", True), (False, "full", True), (True, "full", True)]
)
def test_proof_is_made_for_a_ticket_or_a_worker_that_asks(asked: bool, digest: str, wanted: bool) -> None:
    """On both sides."""
    ticket = replace(TICKET, proof=asked)
    sending, receiving = scheduler(digest=digest), scheduler(digest=digest)
    for side, which, external in ((sending, SEND, 0), (receiving, RECEIVE, 40)):
        request = Request(kv_transfer_params=ticket.params(which))
        side.on_new_request(request)
        side.allocated(request, Blocks(), external)
    assert [told(sending).sends[0].proof, told(receiving).receives[0].proof] == [wanted, wanted]


def test_one_token_prompt_is_loaded_once() -> None:
    """vLLM looks a one-token prompt up again after it has landed."""
    side, request = scheduler(), leg(RECEIVE, tokens=1)
    side.on_new_request(request)
    assert side.num_matched_tokens(request, 0) == (1, True)
    side.allocated(request, Blocks(((4,), (2,))), 1)
    assert len(told(side).receives) == 1
    side.on_output(Output(finished_recving={"r1"}))
    assert side.num_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("computed", [40, 41])
def test_nothing_to_move_is_declined_and_recorded(computed: int) -> None:
    """(0, False), never (0, True); the producer hears it once, and a record says why nothing moved."""
    side, request = scheduler(num_ranks=2), leg(RECEIVE)
    side.on_new_request(request)
    assert side.num_matched_tokens(request, computed) == (0, False)
    side.allocated(request, Blocks(), 0)
    side.allocated(request, Blocks(), 0)
    metadata = told(side)
    assert metadata.declines == [Decline(KEY, "prefill-0", "pa", CloseReason.NOTHING_TO_MOVE)]
    assert metadata.receives == []
    _, (record,) = side.records.after(0)
    assert (record.outcome, record.tokens_reused, record.request_id) == (CloseReason.NOTHING_TO_MOVE, 40, "r1")
    assert side.request_finished(request) == (False, None)
    assert (is_silent(told(side)), side.num_open) == (True, 0)


def test_declined_ticket_brings_nothing_after_preemption() -> None:
    """The request lost its cached blocks, but the producer was told no: to wait for it now would be to wait for ever."""
    side, request = scheduler(), leg(RECEIVE)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 0)
    assert len(told(side).declines) == 1
    assert side.num_matched_tokens(request, 0) == (0, False)
    side.allocated(request, Blocks(), 0)
    assert is_silent(told(side))
    assert side.request_finished(request) == (False, None)
    assert (is_silent(told(side)), side.num_open, len(side.records.after(0)[1])) == (True, 0, 1)


def test_decode_aborted_before_it_has_blocks_declines() -> None:
    """The producer hears it, nothing is kept."""
    side, request = scheduler(), leg(RECEIVE)
    side.on_new_request(request)
    side.num_matched_tokens(request, 0)
    assert side.request_finished(request) == (False, None)
    assert told(side).declines == [Decline(KEY, "prefill-0", "pa", CloseReason.ABORTED)]
    assert side.num_open == 0
    assert side.records.after(0)[1][0].outcome is CloseReason.ABORTED


def test_decode_aborted_while_it_loads_cancels_and_waits_for_the_report() -> None:
    """vLLM keeps the blocks until then, and so does the ticket."""
    side, request = scheduler(), leg(RECEIVE)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 40)
    told(side)
    assert side.request_finished(request) == (False, None)
    assert told(side).cancelled_receives == [(KEY, CloseReason.ABORTED)]
    assert side.num_open == 1
    side.on_output(Output(finished_recving={"r1"}))
    assert side.num_open == 0


def test_decode_that_ends_after_landing_tells_nobody() -> None:
    """Its transfer is over."""
    side, request = scheduler(), leg(RECEIVE)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 40)
    told(side)
    side.on_output(Output(finished_recving={"r1"}))
    assert side.request_finished(request) == (False, None)
    assert (is_silent(told(side)), side.num_open) == (True, 0)


# ---- prefill -------------------------------------------------------------------------------------------------------------------------


def test_prefill_loads_nothing_and_is_ordered_once() -> None:
    """Whatever the cache holds, with the prompt's own digest."""
    side, request = scheduler(digest="full"), leg(SEND)
    side.on_new_request(request)
    assert side.num_matched_tokens(request, 0) == (0, False)
    side.allocated(request, Blocks(), 0)
    side.allocated(request, Blocks(), 0)
    assert told(side, step(0, 16)).sends == [SendOrder(KEY, "r1", "decode-0", "da", prompt_digest(request), 40, 30.0, proof=True)]


def test_chunks_are_announced_with_their_table_and_the_last_one_seals() -> None:
    """The end is counted in prompt tokens, never beyond them; output tokens add nothing."""
    side, request = scheduler(), leg(SEND)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 0)
    chunks = [told(side, step(8, 16)), told(side, step(24, 10, is_new=False)), told(side, step(34, 9, is_new=False))]
    assert [metadata.progress for metadata in chunks] == [
        [SendProgress(KEY, 1, TABLE, 8, 24, is_last=False)],
        [SendProgress(KEY, 1, TABLE, 8, 34, is_last=False)],
        [SendProgress(KEY, 1, TABLE, 8, 40, is_last=True)],
    ]
    assert [metadata.num_scheduled_tokens for metadata in chunks] == [16, 10, 9]
    assert told(side, step(40, 1, is_new=False)).progress == []


def test_blocks_of_a_finished_prefill_stay_until_the_ranks_report() -> None:
    """A sealed transfer is not cancelled by the end of its request."""
    side, request = scheduler(), leg(SEND)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 0)
    told(side, step(0, 40))
    assert side.request_finished(request) == (True, None)
    assert (is_silent(told(side)), side.num_open) == (True, 1)
    side.on_output(Output(finished_sending={"r1"}))
    assert side.num_open == 0


@pytest.mark.parametrize("chunk", [None, 16], ids=["before its first chunk", "after it"])
def test_prefill_aborted_while_it_computes_cancels_and_keeps_its_blocks(chunk: int | None) -> None:
    """Incomplete KV is never sealed, and gathers may still read the blocks."""
    side, request = scheduler(), leg(SEND)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 0)
    if chunk is not None:
        told(side, step(0, chunk))
    assert side.request_finished(request) == (True, None)
    assert told(side).cancelled_sends == [(KEY, CloseReason.ABORTED)]


def test_prefill_aborted_before_it_has_blocks_tells_decode() -> None:
    """There is nothing to keep; the cancel reaches the consumers whose offers are parked, and a record says how the ticket ended."""
    side, request = scheduler(num_ranks=4), leg(SEND)
    side.on_new_request(request)
    assert side.request_finished(request) == (False, None)
    assert told(side).cancelled_sends == [(KEY, CloseReason.ABORTED)]
    assert side.num_open == 0
    _, (record,) = side.records.after(0)
    assert (record.side, record.outcome, record.request_id) == (SEND, CloseReason.ABORTED, "r1")


@pytest.mark.parametrize("done", [16, 40], ids=["while it computes", "after its last chunk"])
def test_preempted_prefill_begins_a_new_pass(done: int) -> None:
    """The ranks hear the pass before its first chunk; cached tokens are those of the new pass, and it is sealed again."""
    side, request = scheduler(), leg(SEND)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 0)
    told(side, step(0, done))
    assert told(side, Step(preempted_req_ids={"r1", "stranger"})).preempted == [(KEY, 2)]
    resumed = told(side, step(8, 32, is_new=False))
    assert resumed.progress == [SendProgress(KEY, 2, TABLE, 8, 40, is_last=True)]
    assert resumed.sends == []


def test_preempted_twice_counts_on() -> None:
    """Each time its blocks are taken there is another pass, also within one step that schedules it again."""
    side, request = scheduler(), leg(SEND)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 0)
    told(side, step(0, 16))
    told(side, Step(preempted_req_ids={"r1"}))
    again = told(side, step(0, 16, is_new=False, preempted=True))
    assert (again.preempted, again.progress[0].pass_number) == ([(KEY, 3)], 3)


def test_preempted_prefill_that_ends_is_cancelled() -> None:
    """Its sealed KV is gone with its blocks."""
    side, request = scheduler(), leg(SEND)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 0)
    told(side, step(0, 40))
    told(side, Step(preempted_req_ids={"r1"}))
    assert side.request_finished(request) == (True, None)
    assert told(side).cancelled_sends == [(KEY, CloseReason.ABORTED)]


def test_preempted_decode_begins_no_pass() -> None:
    """Only what is sent has passes."""
    side, request = scheduler(), leg(RECEIVE)
    side.on_new_request(request)
    side.allocated(request, Blocks(), 40)
    told(side)
    side.on_output(Output(finished_recving={"r1"}))
    assert is_silent(told(side, Step(preempted_req_ids={"r1"})))


# ---- reports -------------------------------------------------------------------------------------------------------------------------


def test_records_of_all_ranks_become_one() -> None:
    """Through vLLM's own aggregation, in any order."""
    side = scheduler(num_ranks=2)
    record = TransferRecord(KEY.transfer_id, 1, SEND, "worker", "inc", CloseReason.RELEASED, bytes_moved=10)
    side.on_output(Output(kv_connector_worker_meta=RankReports([record]).aggregate(RankReports([]))))
    assert side.records.after(0)[1] == []
    side.on_output(Output(kv_connector_worker_meta=RankReports([record])))
    assert [joined.bytes_moved for joined in side.records.after(0)[1]] == [20]


def test_report_of_an_unknown_request_is_ignored() -> None:
    """A request may be gone by the time its ranks report."""
    side = scheduler()
    side.on_output(Output(finished_sending={"x"}, finished_recving={"y"}))
    assert side.num_open == 0
