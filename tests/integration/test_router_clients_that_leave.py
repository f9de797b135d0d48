"""A client that leaves, in every phase of its request: both engines are told, nothing of it is left, and the next request is served at once.

The rig's teardown is part of each test: no lease, no waiting request, no task.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, Rig, filled, rig, until

from pdserve.testing.fake_worker import Fault, Phase, Script

STREAMS = pytest.mark.parametrize("stream", [False, True])


@asynccontextmanager
async def raw_request(r: Rig, path: str = CHAT, *, stream: bool, head: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """Send a request over a socket of its own; leaving the scope closes it without another word."""
    port = int(r.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = orjson.dumps(filled(path, {"stream": stream}))
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n".encode()
        + head
        + b"\r\n"
        + body
    )
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


async def assert_gone(r: Rig, legs: int) -> None:
    """Check that every leg was dropped and aborted by its id, and that the request is on record as cancelled."""
    await until(lambda: len(r.legs) == legs and all(leg.ended in ("disconnected", "answered") for leg in r.legs))
    await until(lambda: sorted(r.aborts) == sorted(leg.request_id for leg in r.legs))
    (receipt,) = await r.receipts(1)
    assert (receipt.outcome, receipt.status) == ("cancelled", 499)


@STREAMS
@pytest.mark.parametrize("phase", [Phase.BEFORE_HEAD, Phase.AFTER_HEAD, Phase.AFTER_TOKENS])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_leaving_while_an_engine_is_silent_ends_both_legs(role: str, phase: Phase, stream: bool) -> None:
    """In whatever phase either engine hangs, a client that leaves is noticed at once, also before its first byte."""
    async with rig() as r:
        (r.prefills if role == "prefill" else r.decodes)[0].script = Script(fault=Fault.HANG, phase=phase)
        async with raw_request(r, stream=stream):
            await until(lambda: len(r.legs) == 2)
            await asyncio.sleep(0.02)
        if role == "prefill" and phase is not Phase.BEFORE_HEAD and stream:
            return  # a prefill that hangs after its KV is out holds up nobody: the stream has ended by now
        await until(lambda: any(leg.ended == "disconnected" for leg in r.legs))
        await assert_gone(r, legs=2)
        r.prefills[0].script = r.decodes[0].script = Script()
        assert (await r.post())[0] == 200


@STREAMS
async def test_leaving_after_a_large_body_is_noticed_too(stream: bool) -> None:
    """Reading pauses while a large body comes in faster than it is taken; it goes on afterwards, or nobody would see the client go."""
    async with rig() as r:
        r.prefills[0].script = Script(fault=Fault.HANG)
        port = int(r.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = orjson.dumps(filled(CHAT, {"stream": stream, "messages": [{"role": "user", "content": "x" * 2_000_000}]}))
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        await writer.drain()
        await until(lambda: len(r.legs) == 2)
        writer.close()
        await assert_gone(r, legs=2)


@STREAMS
@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064])
async def test_leaving_at_any_moment_leaves_nothing(delay_s: float, stream: bool) -> None:
    """Fifty clients leave after a fixed time, wherever that catches them: connecting, waiting for heads, reading bodies, between events."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=tuple("abcdefgh"), token_delay_s=0.005, head_delay_s=0.005)
        r.prefills[0].script = Script(head_delay_s=0.01)

        async def leave() -> None:
            async with raw_request(r, stream=stream):
                await asyncio.sleep(delay_s)

        await asyncio.gather(*(leave() for _ in range(50)))
        await r.at_rest()
        await until(lambda: all(leg.ended is not None for leg in r.legs))
        assert {receipt["outcome"] for receipt in (await r.admin("receipts"))["receipts"]} <= {"cancelled", "finished"}
        assert (await r.post())[0] == 200


async def test_leaving_the_queue_ends_the_wait() -> None:
    """A client that leaves while it waits for a pair frees its place; no engine hears of it."""
    async with rig() as r:
        await r.put_fleet(max_running=1)
        r.decodes[0].script = Script(fault=Fault.HANG)
        async with raw_request(r, stream=True):
            await until(lambda: len(r.legs) == 2)
            async with raw_request(r, stream=True):
                await until(lambda: _queued(r))
            await until(lambda: _is_empty(r))
            assert len(r.legs) == 2
            (receipt,) = await r.receipts(1)
            assert (receipt.outcome, receipt.reason, receipt.path, receipt.attempts) == ("cancelled", "left_queue", "none", 0)


async def test_leaving_lets_the_next_in() -> None:
    """The lease of a client that left is granted to the head of the queue."""
    async with rig() as r:
        await r.put_fleet(max_running=1)
        r.decodes[0].scripts.append(Script(fault=Fault.HANG))
        async with raw_request(r, stream=True):
            await until(lambda: len(r.legs) == 2)
            waiting = asyncio.create_task(r.post())
            await until(lambda: _queued(r))
        assert (await waiting)[0] == 200


async def test_leaving_after_some_tokens_stops_decode() -> None:
    """The engine sees the connection close and its agent the abort, while it still had much to say."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=("x",) * 1000, token_delay_s=0.01)
        async with raw_request(r, COMPLETIONS, stream=True) as reader:
            while b'"x"' not in await reader.readline():
                pass
        await assert_gone(r, legs=2)


async def test_leaving_before_the_body_is_whole_is_no_request() -> None:
    """Half a body starts nothing and leaves nothing."""
    async with rig() as r:
        port = int(r.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        assert (await r.admin("receipts"))["receipts"] == []
        assert r.legs == []


async def test_a_client_that_reads_slowly_is_waited_for() -> None:
    """A stalled reader stalls its own stream only, and gets every event in the end."""
    async with rig() as r:
        big = "x" * 100_000
        r.decodes[0].script = Script(tokens=(big,) * 50)
        async with raw_request(r, COMPLETIONS, stream=True) as reader:
            await until(lambda: len(r.legs) == 2)
            for _ in range(5):
                assert (await r.post(n=2))[0] == 200
            received = 0
            while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                received += line.count(b"x")
        assert received >= 50 * len(big)


async def test_an_agent_that_does_not_answer_holds_up_nobody() -> None:
    """A failed abort is counted and tried again, up to a point; the client was gone anyway and the lease is back."""
    async with rig() as r:
        r.decodes[0].script = Script(fault=Fault.HANG)
        r.prefills[0].is_agent_silent = True
        async with raw_request(r, stream=True):
            await until(lambda: len(r.legs) == 2)
        await r.at_rest()
        await until(lambda: _aborts_failed(r, 3))


async def test_an_agent_that_answers_late_is_told_again() -> None:
    """An abort that did not get through once is sent again, and counts from the client's departure."""
    async with rig() as r:
        r.decodes[0].script = Script(fault=Fault.HANG)
        r.prefills[0].is_agent_silent = True
        async with raw_request(r, stream=True):
            await until(lambda: len(r.legs) == 2)
        await until(lambda: _aborts_failed(r))
        r.prefills[0].is_agent_silent = False
        (receipt,) = await r.receipts(1)
        assert all(abort.blocks_free_s is not None for abort in receipt.aborts)
        assert len(r.prefills[0].aborts) == 1


async def test_a_receipt_waits_for_blocks_that_are_held() -> None:
    """Acknowledged is not free: the agent is asked until nothing is kept, and both times are told."""
    async with rig() as r:
        r.decodes[0].script = Script(fault=Fault.HANG)
        async with raw_request(r, stream=True):
            await until(lambda: len(r.legs) == 2)
            (leg,) = r.decodes[0].legs
            r.decodes[0].held.add(leg.request_id)
        await until(lambda: r.decodes[0].abort_calls == 3)
        assert (await r.admin("receipts"))["receipts"] == []
        r.decodes[0].held.clear()
        (receipt,) = await r.receipts(1)
        decode = next(abort for abort in receipt.aborts if abort.worker == "decode-0")
        assert decode.acknowledged_s is not None and decode.blocks_free_s is not None
        assert decode.blocks_free_s > decode.acknowledged_s


async def _queued(r: Rig) -> bool:
    return bool((await r.admin("status"))["queue"]["requests"] == 1)


async def _is_empty(r: Rig) -> bool:
    return bool((await r.admin("status"))["queue"]["requests"] == 0)


async def _aborts_failed(r: Rig, calls: int = 1) -> bool:
    return (await r.metrics()).get('pdserve_aborts_total{outcome="failed"}', 0) >= calls
