"""What is on record after a request: chosen and executed are two things, and only the agents' records say which was which."""

import asyncio
import time

import pytest
from router_rig import CHAT, Rig, filled, rig, until

from pdserve.server.records import FIRST_PAUSE_S, LONGEST_PAUSE_S
from pdserve.testing.fake_worker import KV_BYTES_PER_TOKEN, Fault, Phase, Script
from pdserve.types import CloseReason, ServePath

FAILED_TRANSFERS = [outcome for outcome in CloseReason if outcome not in (CloseReason.LANDED, CloseReason.RELEASED)]


async def test_a_landed_transfer_is_proof_of_disaggregation() -> None:
    """Both records are joined to the router's facts; metrics tell the same story."""
    async with rig() as r:
        await r.stream(stream_options={"include_usage": True})
        (receipt,) = await r.receipts(1)
        assert (receipt.path, receipt.reason, receipt.outcome, receipt.status) == ("disaggregated", "default", "finished", 200)
        assert (receipt.prefill_worker, receipt.decode_worker) == ("prefill-0", "decode-0")
        assert receipt.send is not None
        assert receipt.receive is not None
        assert receipt.send.transfer_id == receipt.receive.transfer_id == receipt.transfer_id
        assert receipt.executed["disaggregation"] == "yes"
        assert (receipt.eligible["disaggregation"], receipt.configured["disaggregation"]) == ("yes", "auto")
        assert receipt.executed["transport"] == receipt.configured["transport"] == "tcp"
        assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (9, 4, 0)
        assert receipt.ttft_s is not None
        assert 0 < receipt.ttft_s <= receipt.duration_s
        assert receipt.inter_token_s == ()
        metrics = await r.metrics()
        labels = 'code="200",outcome="finished",path="disaggregated",reason="default",route="/v1/chat/completions"'
        assert metrics[f"pdserve_requests_total{{{labels}}}"] == 1
        assert metrics["pdserve_kv_transfer_bytes_total"] == 9 * KV_BYTES_PER_TOKEN
        assert metrics["pdserve_kv_transfer_tokens_total"] == 9
        assert metrics['pdserve_kv_transfers_total{outcome="landed",side="receive"}'] == 1
        assert metrics['pdserve_kv_transfers_total{outcome="released",side="send"}'] == 1
        assert metrics['pdserve_time_to_first_token_seconds_count{path="disaggregated"}'] == 1


@pytest.mark.parametrize("outcome", FAILED_TRANSFERS)
async def test_a_transfer_that_failed_makes_the_path_local_with_its_reason(outcome: CloseReason) -> None:
    """Decode recomputed the prompt and the client got a right answer: that was the local path, whatever had been chosen."""
    async with rig() as r:
        r.decodes[0].script = Script(outcome=outcome)
        status, _ = await r.stream()
        (receipt,) = await r.receipts(1)
        assert status == 200
        assert (receipt.path, receipt.reason) == (ServePath.LOCAL, f"transfer_{outcome.value}")
        assert receipt.executed["disaggregation"] == f"no: {outcome.value}"


async def test_a_record_that_never_comes_proves_nothing() -> None:
    """The client's answer does not wait for it; the receipt says that nothing was shown, and the gap is counted."""
    async with rig() as r:
        r.decodes[0].is_agent_silent = True
        assert (await r.stream())[0] == 200
        (receipt,) = await r.receipts(1, timeout_s=15)
        assert (receipt.path, receipt.reason) == (ServePath.DISAGGREGATED, "transfer_unproven")
        assert receipt.executed["disaggregation"] is None and receipt.executed["transport"] is None
        assert receipt.send is not None and str(receipt.executed["layer_wise_push"]).startswith("yes: ")
        assert (await r.metrics())["pdserve_kv_records_missing_total"] == 1


async def test_a_record_that_comes_late_is_waited_for() -> None:
    """An agent that answers only after a while still completes the receipt."""
    async with rig() as r:
        r.decodes[0].is_agent_silent = True
        await r.stream()
        await asyncio.sleep(0.3)
        assert (await r.admin("receipts"))["receipts"] == []
        r.decodes[0].is_agent_silent = False
        (receipt,) = await r.receipts(1)
        assert receipt.executed["disaggregation"] == "yes"


async def test_many_requests_share_few_fetches() -> None:
    """A hundred receipts take a few calls per agent, not one each, and no call is made when nothing is wanted."""
    async with rig() as r:
        await r.put_fleet(max_running=200)
        begin_s = time.monotonic()
        for _ in range(100):
            await r.stream()
        await r.receipts(100)
        calls = [worker.record_calls for worker in r.workers]
        assert all(1 <= count <= 1 + (time.monotonic() - begin_s) / FIRST_PAUSE_S for count in calls)
        await asyncio.sleep(2 * LONGEST_PAUSE_S)
        assert [worker.record_calls for worker in r.workers] == calls


async def test_a_restarted_workers_records_are_read_from_their_start() -> None:
    """A new incarnation has a new list of records: the old one's cursor would skip its first."""
    async with rig() as r:
        for _ in range(3):
            await r.stream()
        await r.receipts(3)
        worker = r.decodes[0]
        worker.records.clear()
        worker.incarnation = "decode-0-2"
        await r.put_fleet()
        await r.stream()
        receipts = await r.receipts(4)
        assert receipts[0].executed["disaggregation"] == "yes"
        assert receipts[0].receive is not None
        assert receipts[0].receive.incarnation == "decode-0-2"


async def test_a_failed_attempts_transfer_is_not_the_receipts() -> None:
    """The receipt carries the transfer that served the request, not the one that was given up."""
    async with rig(prefills=2) as r:
        for worker in r.prefills:
            worker.scripts.append(Script(fault=Fault.RESET))
        r.prefills[1].scripts.clear()
        await r.stream()
        (receipt,) = await r.receipts(1)
        assert receipt.send is not None
        assert (receipt.attempts, receipt.send.attempt, receipt.send.worker) == (2, 2, "prefill-1")
        assert receipt.transfer_id == receipt.send.transfer_id


async def test_inter_token_gaps_are_measured_between_arrivals() -> None:
    """Gaps are as long as decode made them."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=tuple("abcde"), token_delay_s=0.03)
        await r.stream()
        await r.receipts(1)
        metrics = await r.metrics()
        count = metrics['pdserve_inter_token_latency_seconds_count{path="disaggregated"}']
        total_s = metrics['pdserve_inter_token_latency_seconds_sum{path="disaggregated"}']
        assert count >= 4
        assert total_s >= 4 * 0.03
        assert metrics['pdserve_inter_token_latency_seconds_bucket{le="0.025",path="disaggregated"}'] <= count - 4


async def test_gauges_follow_what_is_under_way() -> None:
    """In-flight by role and queue depth are read from the pool: they rise with requests and are zero at rest."""
    async with rig() as r:
        await r.put_fleet(max_running=2)
        r.decodes[0].script = Script(fault=Fault.HANG, phase=Phase.AFTER_HEAD)
        tasks = _posts(r, 5)
        await until(lambda: _in_flight(r, decode=2))
        metrics = await r.metrics()
        assert metrics['pdserve_queue_depth_requests{pool="prefill"}'] == 3
        assert metrics['pdserve_queue_depth_tokens{pool="prefill"}'] > 0
        for task in tasks:
            task.cancel()
        await r.at_rest()
        assert await _in_flight(r, decode=0)
        assert (await r.metrics())['pdserve_queue_depth_tokens{pool="prefill"}'] == 0


async def test_debug_header_names_the_pair() -> None:
    """With `debug_headers` each answer says who served it; without, nothing does."""
    async with rig(debug_headers=True) as r:
        async with r.client.post(r.url + CHAT, json={"model": "fake", "messages": [{"role": "user", "content": "x"}]}) as answer:
            facts = answer.headers["x-pdserve-receipt"]
        (receipt,) = await r.receipts(1)
        assert receipt.transfer_id is not None
        assert all(word in facts for word in (receipt.request_id, receipt.transfer_id, "prefill-0", "decode-0", "disaggregated"))


def _posts(r: Rig, count: int) -> list[asyncio.Task[tuple[int, bytes]]]:
    return [asyncio.create_task(r.stream()) for _ in range(count)]


async def _in_flight(r: Rig, decode: int) -> bool:
    return (await r.metrics())['pdserve_in_flight_requests{role="decode"}'] == decode


async def test_receipts_are_found_by_what_they_say() -> None:
    """Newest first, of one outcome, path or reason; the limit counts what matches."""
    async with rig() as r:
        for count, body in enumerate(({}, {"n": 2}, {"model": "nope"}), 1):
            await r.stream(**body)
            await r.receipts(count)

        async def found(query: str) -> list[str]:
            return [receipt["reason"] for receipt in (await r.admin(f"receipts?{query}"))["receipts"]]

        assert await found("") == ["rejected", "n_above_one", "default"]
        assert await found("outcome=finished") == ["n_above_one", "default"]
        assert await found("outcome=finished&limit=1") == ["n_above_one"]
        assert await found("path=disaggregated") == await found("reason=default") == ["default"]
        assert await found("outcome=nonsense") == await found("limit=0") == []


@pytest.mark.parametrize("limit", ["-1", "1025", "x"])
async def test_a_bad_limit_of_receipts_is_named(limit: str) -> None:
    """400 in the shape of all errors."""
    async with rig() as r, r.client.get(f"{r.admin_url}/admin/v1/receipts?limit={limit}") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "limit"


async def test_one_receipt_is_found_by_each_of_its_ids() -> None:
    """The router's, the client's, the transfer's; another id is 404."""
    async with rig() as r:
        async with r.client.post(r.url + CHAT, json=filled(CHAT, {}), headers={"x-request-id": "mine-1"}) as answer:
            assert answer.status == 200
        (receipt,) = await r.receipts(1)
        assert receipt.client_request_id == "mine-1" and receipt.transfer_id is not None
        for known_as in (receipt.request_id, "mine-1", receipt.transfer_id):
            assert (await r.admin(f"receipts/{known_as}"))["request_id"] == receipt.request_id
        async with r.client.get(f"{r.admin_url}/admin/v1/receipts/nobody") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
