"""With `load_failure: fail`, decode never answers from a prompt that it had to compute itself: 503 before the first data, or the moved KV."""

import asyncio

import pytest
from router_rig import CHAT, COMPLETIONS, Rig, rig, until

from pdserve.testing.fake_worker import Script
from pdserve.types import CloseReason

BAD = [reason for reason in CloseReason if reason not in (CloseReason.LANDED, CloseReason.RELEASED, CloseReason.NOTHING_TO_MOVE)]


async def ask(r: Rig, path: str, *, stream: bool) -> tuple[int, str]:
    async with r.client.post(
        r.url + path,
        json={"model": "fake", "stream": stream, **({"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"})},
    ) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("outcome", BAD)
async def test_kv_that_does_not_arrive_is_a_503(outcome: CloseReason) -> None:
    """Whatever ended the transfer: one attempt, one status, both legs aborted, the reason in the receipt."""
    async with rig(decodes=2, load_failure="fail") as r:
        for worker in r.decodes:
            worker.script = Script(outcome=outcome)
        status, error = await r.post()
        assert (status, error["error"]["code"]) == (503, "kv_load_failed")
        assert sum(len(worker.legs) for worker in r.decodes) == 1
        (receipt,) = await r.receipts(1)
        assert (receipt.status, receipt.outcome, receipt.reason) == (503, "failed", f"transfer_{outcome.value}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_data_passes_before_the_record_is_seen(path: str, stream: bool) -> None:
    """Decode's recomputed tokens wait at the router for as long as its agent does not say how the transfer ended."""
    async with rig(load_failure="fail") as r:
        decode = r.decodes[0]
        decode.script = Script(outcome=CloseReason.EXPIRED)
        decode.is_agent_silent = True
        asking = asyncio.create_task(ask(r, path, stream=stream))
        await until(lambda: bool(decode.records))
        await asyncio.sleep(0.3)
        assert not asking.done()
        decode.is_agent_silent = False
        status, text = await asking
        assert status == 503
        assert "Hel" not in text


async def test_a_failed_load_ends_both_legs_before_decode_has_computed() -> None:
    """The record is looked for from the start, so that a prompt is not computed for nothing."""
    async with rig(load_failure="fail") as r:
        r.prefills[0].script = Script(head_delay_s=60)
        r.decodes[0].script = Script(outcome=CloseReason.PEER_LOST, tokens=["a", "b"], token_delay_s=60)
        status, _ = await r.post()
        assert status == 503
        await until(lambda: {leg.ended for leg in r.legs} == {"disconnected"})
        await until(lambda: sorted(r.aborts) == sorted(leg.request_id for leg in r.legs))


@pytest.mark.parametrize("outcome", [CloseReason.LANDED, CloseReason.NOTHING_TO_MOVE])
@pytest.mark.parametrize("stream", [False, True])
async def test_kv_that_is_there_is_answered_from(outcome: CloseReason, stream: bool) -> None:
    """Moved, or in decode's own cache already: an ordinary answer."""
    async with rig(load_failure="fail") as r:
        r.decodes[0].script = Script(outcome=outcome)
        status, text = await ask(r, CHAT, stream=stream)
        assert status == 200
        assert "Hel" in text
        (receipt,) = await r.receipts(1)
        assert receipt.outcome == "finished"


async def test_local_requests_are_not_concerned() -> None:
    """A request that is served by decode alone has no transfer to wait for."""
    async with rig(load_failure="fail", disaggregation="never") as r:
        assert (await r.post())[0] == 200
        assert not r.prefills[0].legs


async def test_by_default_decode_computes_what_did_not_arrive() -> None:
    """The client gets its answer, and the receipt says that it was computed locally."""
    async with rig() as r:
        r.decodes[0].script = Script(outcome=CloseReason.EXPIRED)
        assert (await r.post())[0] == 200
        (receipt,) = await r.receipts(1)
        assert (receipt.path, receipt.reason) == ("local", "transfer_expired")
