"""What a client gets when nothing goes wrong: the engine's own words, the right usage, and one end."""

import asyncio

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, rig

from pdserve.testing import wire
from pdserve.testing.fake_worker import Script
from pdserve.types import TransferSide

PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@PATHS
async def test_stream_is_the_engines_own_with_one_done(path: str) -> None:
    """Every event decode sent arrives byte for byte, but for the usage nobody asked for; `[DONE]` comes once, last."""
    async with rig() as r:
        status, body = await r.stream(path)
        (decode,) = r.decodes[0].legs
        expected = wire.events(
            decode.request_id, is_chat=path == CHAT, tokens=("Hel", "lo", " wor", "ld"), finish_reason="stop", counts=None
        )
        assert status == 200
        assert body == b"".join(expected) + wire.DONE


@PATHS
async def test_both_legs_are_of_one_ticket(path: str) -> None:
    """Prefill sends and decode receives under the same transfer id and attempt, each naming the other's worker and incarnation."""
    async with rig() as r:
        await r.stream(path)
        (prefill,), (decode,) = r.prefills[0].legs, r.decodes[0].legs
        assert (prefill.side, decode.side) == (TransferSide.SEND, TransferSide.RECEIVE)
        sent, received = prefill.body["kv_transfer_params"], decode.body["kv_transfer_params"]
        assert (sent["transfer_id"], sent["attempt"]) == (received["transfer_id"], received["attempt"])
        assert (sent["worker"], sent["incarnation"]) == ("decode-0", "decode-0-1")
        assert (received["worker"], received["incarnation"]) == ("prefill-0", "prefill-0-1")
        assert prefill.request_id == decode.request_id
        assert 0 < sent["timeout_s"] <= 120


@PATHS
async def test_usage_reports_the_cache_hits_of_prefill(path: str) -> None:
    """Decode thinks all of the prompt was cached; the client is told what prefill had cached."""
    async with rig() as r:
        r.prefills[0].script = Script(cached_tokens=4)
        status, body = await r.stream(path, stream_options={"include_usage": True})
        events = [event for event in body.split(b"\n\n") if event]
        usage = orjson.loads(events[-2].removeprefix(b"data: "))
        assert status == 200
        assert usage["choices"] == []
        assert usage["usage"] == wire.usage(9, 4, 4)
        assert events[-1] == b"data: [DONE]"
        _, whole = await r.post(path)
        assert whole["usage"] == wire.usage(9, 4, 4)


async def test_usage_without_details_passes_as_it_is() -> None:
    """Engines started without prompt token details have nothing to correct."""
    async with rig() as r:
        r.prefills[0].script = r.decodes[0].script = Script(cached_tokens=None)
        _, whole = await r.post()
        assert whole["usage"] == wire.usage(9, 4, None)


async def test_continuous_usage_is_not_switched_on_by_the_router() -> None:
    """The router asks decode for usage; a client that did not must not get it on every event either."""
    async with rig() as r:
        await r.stream(stream_options={"continuous_usage_stats": True})
        assert r.decodes[0].legs[0].body["stream_options"] == {"include_usage": True}
        await r.stream(stream_options={"continuous_usage_stats": True, "include_usage": True})
        assert r.decodes[0].legs[1].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("cut_bytes", [1, 2, 3, 7, 64, 1000])
async def test_stream_survives_any_cut(cut_bytes: int) -> None:
    """However the network cuts decode's stream, also inside a character, the client's bytes are the same."""
    tokens = ("日本", "🙂", "é", '"usage"', '{"error":1}', "\\n")
    async with rig() as r:
        r.decodes[0].script = Script(tokens=tokens, cut_bytes=cut_bytes)
        _, body = await r.stream()
        leg = r.decodes[0].legs[0]
        assert body == b"".join(wire.events(leg.request_id, is_chat=True, tokens=tokens, finish_reason="stop", counts=None)) + wire.DONE


async def test_one_megabyte_event_passes() -> None:
    """An event far larger than any read arrives whole."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=("x" * (1 << 20), "y"))
        _, body = await r.stream()
        assert body.count(b"x") >= 1 << 20
        assert body.endswith(wire.DONE)


async def test_each_event_is_forwarded_before_the_next_one_exists() -> None:
    """The client has the first token while decode still sleeps before the second."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=("a", "b"), token_delay_s=0.5)
        async with r.client.post(r.url + COMPLETIONS, json={"model": wire.MODEL, "prompt": "x", "stream": True}) as answer:
            first = await answer.content.readany()
            assert b'"a"' in first
            assert b'"b"' not in first
            assert b'"b"' in await answer.read()


async def test_stream_headers_keep_proxies_from_buffering() -> None:
    """Event streams are marked as such, uncached and unbuffered."""
    async with (
        rig() as r,
        r.client.post(r.url + CHAT, json={"model": wire.MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}) as a,
    ):
        assert a.headers["content-type"].startswith("text/event-stream")
        assert a.headers["cache-control"] == "no-cache"
        assert a.headers["x-accel-buffering"] == "no"
        await a.read()


async def test_a_finished_request_aborts_nothing() -> None:
    """A normal end sends no abort to either engine."""
    async with rig() as r:
        await r.stream()
        await r.post()
        await r.receipts(2)
        assert r.aborts == []


async def test_connections_to_engines_are_reused() -> None:
    """Twenty requests in a row use one connection per engine."""
    async with rig() as r:
        for _ in range(20):
            await r.stream()
        assert {leg.headers["Host"] for leg in r.decodes[0].legs} == {r.decodes[0].url.removeprefix("http://")}
        assert r.decodes[0].connections == 1
        assert r.prefills[0].connections == 1


async def test_simultaneous_requests_are_spread_evenly() -> None:
    """Pick and reserve is one step: 32 requests at once over 4 idle prefill workers are 8 each."""
    async with rig(prefills=4) as r:
        for worker in r.prefills:
            worker.script = Script(head_delay_s=0.3)
        r.decodes[0].script = Script()
        await r.put_fleet(max_running=64)
        await asyncio.gather(*(r.stream() for _ in range(32)))
        assert [len(worker.legs) for worker in r.prefills] == [8, 8, 8, 8]


async def test_local_path_asks_no_prefill_worker() -> None:
    """`n` above one goes to decode alone, without a ticket, and the receipt says why."""
    async with rig() as r:
        status, _ = await r.post(n=2)
        (receipt,) = await r.receipts(1)
        assert status == 200
        assert r.prefills[0].legs == []
        assert r.decodes[0].legs[0].side is None
        assert (receipt.path, receipt.reason) == ("local", "n_above_one")
        assert receipt.executed["disaggregation"] == "no: n_above_one"


async def test_without_a_prefill_worker_decode_serves_alone_and_says_so() -> None:
    """The fallback is counted with its reason."""
    async with rig(prefills=0) as r:
        status, body = await r.stream()
        (receipt,) = await r.receipts(1)
        assert status == 200
        assert body.endswith(wire.DONE)
        assert (receipt.path, receipt.reason) == ("local", "no_ready_prefill")
        async with r.client.get(r.url + "/readyz") as answer:
            assert answer.status == 503
            assert (await answer.json())["reasons"] == ["no ready prefill worker"]


async def test_waiting_requests_are_served_in_order() -> None:
    """With one lease, requests that came while it was taken are served first come, first served."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=("a",), head_delay_s=0.05)
        await r.put_fleet(max_running=1)
        tasks = []
        for index in range(5):
            tasks.append(asyncio.create_task(r.stream(user=f"user-{index}")))
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)
        assert [leg.body["user"] for leg in r.decodes[0].legs] == [f"user-{index}" for index in range(5)]
        await r.receipts(5)
        assert (await r.metrics())['pdserve_queue_wait_seconds_count{pool="prefill"}'] == 5
