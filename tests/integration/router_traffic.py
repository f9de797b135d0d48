"""Runs a real router over fake workers, under traffic of every kind that a dashboard shows. A program, for `test_dashboards.py`.

Prints the router's port once its first round is served; stops on SIGTERM.
"""

import asyncio
import sys
from contextlib import suppress

import aiohttp
import msgspec

from pdserve.clock import MonotonicClock
from pdserve.config import Config, RouterConfig
from pdserve.observe import log
from pdserve.server.serve import serve
from pdserve.testing import wire
from pdserve.testing.fake_worker import FakeKv, FakeWorker, Fault, Phase, Script
from pdserve.types import CloseReason, FleetSnapshot, Role

SECRET = "test"
CHAT = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
BURST_REQUESTS = 64
"""more than run at once and wait: two leases and the 32 that always fit in the queue"""
PAUSE_S = 0.1


class Traffic:
    """Sends rounds of requests, each kind once, to a router over one prefill and two decode workers."""

    def __init__(self, url: str, prefill: FakeWorker, decodes: tuple[FakeWorker, FakeWorker]) -> None:
        self._url = url
        self._prefill = prefill
        self._decodes = decodes

    async def serve_one_of_each_kind(self, client: aiohttp.ClientSession) -> None:
        """Return when each has ended, one after the other but for the burst."""
        await self._ask(client, CHAT)
        await self._ask(client, {**CHAT, "stream": False})
        await self._ask(client, {**CHAT, "n": 2})
        await self._ask(client, {**CHAT, "model": "unknown"})
        self._prefill.scripts.append(Script(status=500))
        await self._ask(client, CHAT)
        await self._ask_of_decode(client, Script(outcome=CloseReason.PEER_LOST))
        await self._ask_of_decode(client, Script(fault=Fault.RESET, phase=Phase.AFTER_TOKENS))
        await asyncio.gather(*(self._ask(client, CHAT) for _ in range(BURST_REQUESTS)))

    async def _ask_of_decode(self, client: aiohttp.ClientSession, script: Script) -> None:
        for decode in self._decodes:
            decode.scripts.append(script)
        await self._ask(client, CHAT)
        for decode in self._decodes:
            decode.scripts.clear()

    async def _ask(self, client: aiohttp.ClientSession, body: dict[str, object]) -> None:
        async with client.post(f"{self._url}/v1/chat/completions", json=body) as response:
            await response.read()


async def main() -> None:
    """Serve and send until cancelled."""
    log.configure("router", None)
    bound: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
    kv = FakeKv()
    slow = Script(token_delay_s=0.01)
    async with (
        FakeWorker("prefill-0", kv, SECRET, slow) as prefill,
        FakeWorker("decode-0", kv, SECRET, slow) as decode,
        FakeWorker("decode-1", kv, SECRET, slow) as other,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        config = Config(router=RouterConfig(port=0, max_queued_requests=1))
        router = asyncio.create_task(
            serve(config, SECRET, clock=MonotonicClock(), on_bound=lambda public, admin: bound.set_result((public, admin)))
        )
        port, admin_port = await bound
        workers = (
            prefill.snapshot(Role.PREFILL, max_running=2),
            *(worker.snapshot(Role.DECODE, max_running=2) for worker in (decode, other)),
        )
        fleet = msgspec.json.encode(FleetSnapshot(1, workers))
        headers = {"x-pdserve-secret": SECRET, "content-type": "application/json"}
        async with client.put(f"http://127.0.0.1:{admin_port}/admin/v1/fleet", data=fleet, headers=headers) as response:
            response.raise_for_status()
        traffic = Traffic(f"http://127.0.0.1:{port}", prefill, (decode, other))
        await traffic.serve_one_of_each_kind(client)
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        with suppress(aiohttp.ClientError):
            while not router.done():
                await traffic.serve_one_of_each_kind(client)
                await asyncio.sleep(PAUSE_S)
        await router


if __name__ == "__main__":
    asyncio.run(main())
