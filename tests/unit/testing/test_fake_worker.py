"""The fake engine keeps its word: it waits for KV as a decode engine must, and fails where its script says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from pdserve.testing import wire
from pdserve.testing.clock import ManualClock
from pdserve.testing.fake_worker import FakeKv, FakeWorker, Fault, Phase, Script
from pdserve.types import CloseReason, Role, Ticket, TransferSide

SECRET = "5ec7e7"
TICKET = Ticket("ab" * 16, 1, "p0", "p0-1", "d0", "d0-1", 60.0)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[FakeWorker, FakeWorker, aiohttp.ClientSession]]:
    kv = FakeKv()
    async with (
        FakeWorker("p0", kv, SECRET) as prefill,
        FakeWorker("d0", kv, SECRET) as decode,
        aiohttp.ClientSession(headers={"x-pdserve-secret": SECRET}) as client,
    ):
        yield prefill, decode, client


async def post(client: aiohttp.ClientSession, worker: FakeWorker, **body: Any) -> bytes:
    async with client.post(worker.url + "/v1/completions", json={"prompt": "x", **body}, headers={"X-Request-Id": "r"}) as answer:
        return await answer.read()


async def test_decode_holds_its_first_byte_until_prefill_has_answered() -> None:
    """The two legs of a ticket meet, and both leave a record of it."""
    async with pair() as (prefill, decode, client):
        received = asyncio.create_task(post(client, decode, stream=True, kv_transfer_params=TICKET.params(TransferSide.RECEIVE)))
        await asyncio.sleep(0.05)
        assert not received.done()
        await post(client, prefill, max_tokens=1, kv_transfer_params=TICKET.params(TransferSide.SEND))
        assert (await received).endswith(wire.DONE)
        assert [worker.records[0].outcome for worker in (prefill, decode)] == [CloseReason.RELEASED, CloseReason.LANDED]
        async with client.get(f"{decode.url}/pdserve/v1/records?after=0") as answer:
            records = await answer.json()
        assert records["next"] == 1
        assert records["records"][0]["transfer_id"] == TICKET.transfer_id


async def test_nobody_gets_in_without_the_secret() -> None:
    """On any path, as with a real worker."""
    async with pair() as (prefill, _, client), client.get(f"{prefill.url}/pdserve/v1/records", headers={"x-pdserve-secret": "x"}) as answer:
        assert answer.status == 401


async def test_the_output_limit_is_kept() -> None:
    """Fewer tokens than scripted end with `length`, all of them with the script's own reason."""
    async with pair() as (_, decode, client):
        short = orjson.loads(await post(client, decode, max_tokens=2))
        whole = orjson.loads(await post(client, decode))
        assert (short["choices"][0]["text"], short["choices"][0]["finish_reason"]) == ("Hello", "length")
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("Hello world", "stop")
        assert short["usage"]["completion_tokens"] == 2


async def test_usage_is_streamed_only_when_asked_for() -> None:
    """Like the engine it stands for."""
    async with pair() as (_, decode, client):
        assert b'"usage"' not in await post(client, decode, stream=True)
        assert b'"usage"' in await post(client, decode, stream=True, stream_options={"include_usage": True})


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reset_happens_in_its_phase(phase: Phase, stream: bool) -> None:
    """The client sees a broken exchange, the worker knows why."""
    async with pair() as (_, decode, client):
        decode.script = Script(fault=Fault.RESET, phase=phase)
        with pytest.raises(aiohttp.ClientError):
            await post(client, decode, stream=stream)
        assert decode.legs[0].ended == "faulted"


async def test_scripts_are_used_up_in_order() -> None:
    """One leg each, then the standing one again."""
    async with pair() as (_, decode, client):
        decode.scripts.extend([Script(status=500), Script(status=503)])
        statuses = []
        for _ in range(3):
            async with client.post(decode.url + "/v1/completions", json={"prompt": "x"}) as answer:
                statuses.append(answer.status)
        assert statuses == [500, 503, 200]


async def test_a_client_that_leaves_is_noticed() -> None:
    """And the transfer is on record as aborted."""
    async with pair() as (_, decode, client):
        decode.script = Script(fault=Fault.HANG)
        task = asyncio.create_task(post(client, decode, kv_transfer_params=TICKET.params(TransferSide.RECEIVE)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert decode.legs[0].ended == "disconnected"
        assert decode.records[0].outcome is CloseReason.ABORTED


async def test_a_stopped_worker_returns_on_its_port() -> None:
    """As a restarted engine may."""
    async with pair() as (_, decode, client):
        port = decode.port
        await decode.stop()
        with pytest.raises(aiohttp.ClientConnectorError):
            await post(client, decode)
        await decode.__aenter__()
        assert decode.port == port
        assert b"Hello world" in await post(client, decode)
        assert decode.snapshot(Role.DECODE).url.endswith(str(port))


def test_a_manual_clock_moves_only_when_told() -> None:
    """And never backwards."""
    clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(1.5)
    assert clock.now_s() == 6.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
