"""A router that may open few files: clients beyond what fits are told so or wait to be let in, and nobody's connection is reset."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
from router_rig import CHAT, SECRET, filled, until

from pdserve.testing.fake_worker import FakeKv, FakeWorker, Script, fleet
from pdserve.types import Role

FILES = 128
STREAMS = 200
PROGRAM = """
import asyncio, json, os, pathlib, sys
import uvloop
from pdserve.clock import MonotonicClock
from pdserve.config import Config
from pdserve.observe.log import configure
from pdserve.server.serve import serve

configure("router", pathlib.Path(os.devnull))

def bound(*ports):
    print(json.dumps(ports), flush=True)

config = Config.model_validate({"router": {"port": 0, **json.loads(sys.argv[3])}})
run = uvloop.run if sys.argv[1] == "uvloop" else asyncio.run
run(serve(config, sys.argv[2], clock=MonotonicClock(), on_bound=bound))
"""


@dataclass
class Small:
    """A router in a process with few files, and its fake workers."""

    url: str
    pid: int
    decode: FakeWorker

    def files(self) -> int:
        """Return how many files the router has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@asynccontextmanager
async def small_router(loop: str, settings: str = "{}") -> AsyncIterator[Small]:
    """Run a router under `FILES`, soft limit at half of it, with two workers that take a while."""
    command = f'ulimit -Sn {FILES // 2} && ulimit -Hn {FILES} && exec "$@"'
    arguments = ["bash", "-c", command, "-", sys.executable, "-c", PROGRAM, loop, SECRET, settings]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)  # noqa: ASYNC220
    try:
        async with AsyncExitStack() as stack:
            kv = FakeKv()
            prefill, decode = [await stack.enter_async_context(FakeWorker(name, kv, SECRET)) for name in ("prefill-0", "decode-0")]
            decode.script = Script(tokens=("a", "b", "c", "d"), token_delay_s=0.05)
            assert process.stdout is not None
            port, admin_port = msgspec.json.decode(await asyncio.to_thread(process.stdout.readline))
            client = await stack.enter_async_context(aiohttp.ClientSession(headers={"x-pdserve-secret": SECRET}))
            workers = fleet(1, prefill.snapshot(Role.PREFILL, max_running=64), decode.snapshot(Role.DECODE, max_running=64))
            async with client.put(f"http://127.0.0.1:{admin_port}/admin/v1/fleet", data=msgspec.json.encode(workers)) as answer:
                assert answer.status == 200
            yield Small(f"http://127.0.0.1:{port}", process.pid, decode)
    finally:
        process.terminate()
        assert process.wait(30) == 0
        if process.stdout is not None:
            process.stdout.close()


async def stream(client: aiohttp.ClientSession, small: Small) -> tuple[int, bool]:
    """Return an answer's status, and whether it was whole or said when to come back. Raises `aiohttp.ClientError` on a reset."""
    async with client.post(small.url + CHAT, json=filled(CHAT, {"stream": True})) as answer:
        body = await answer.read()
        return answer.status, body.endswith(b"[DONE]\n\n") if answer.status == 200 else "Retry-After" in answer.headers


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_many_more_streams_than_files_are_served_or_told_to_come_back(loop: str) -> None:
    """Two hundred at once under 128 files: 200, 429 or 503, never a reset; afterwards everything works and nothing stays open."""
    async with small_router(loop) as small:
        at_rest = small.files()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            answers = await asyncio.gather(*(stream(client, small) for _ in range(STREAMS)))
            assert all(is_whole for _, is_whole in answers)
            statuses = Counter(status for status, _ in answers)
            assert set(statuses) <= {200, 429, 503}
            assert statuses[200] >= 16
            assert [status for status, _ in [await stream(client, small) for _ in range(3)]] == [200] * 3
        await until(lambda: small.files() <= at_rest + 2, "files stay open", timeout_s=15)


async def test_clients_that_keep_idle_connections_do_not_lock_others_out() -> None:
    """As many idle ones as there is room for: a newcomer takes the place of one of them."""
    async with small_router("uvloop") as small, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as holder:
        await asyncio.gather(*(stream(holder, small) for _ in range(STREAMS)))
        async with aiohttp.ClientSession() as newcomer, asyncio.timeout(10):
            assert (await stream(newcomer, small))[0] == 200


async def test_a_setting_bounds_connections_below_what_files_allow() -> None:
    """Sixteen at once, half of which run; the others wait to be let in and are served or told."""
    async with (
        small_router("uvloop", '{"max_connections": 16}') as small,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        answers = [asyncio.create_task(stream(client, small)) for _ in range(60)]
        most = 0
        while not all(task.done() for task in answers):
            most = max(most, sum(leg.ended is None for leg in small.decode.legs))
            await asyncio.sleep(0.005)
        assert all(is_whole for _, is_whole in await asyncio.gather(*answers))
        assert 0 < most <= 8
