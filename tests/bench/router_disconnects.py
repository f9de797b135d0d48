"""A disconnect storm: how long until both engines have acknowledged the abort of every client that left, and what is left behind.

    python -m tests.bench.router_disconnects [--clients 1000] [--step-s 0 0.25]

The router runs in a process of its own, with two prefill and two decode fake workers in this one, whose agents answer an abort after one engine step.
All clients leave at once: while the prompt is computed, and while tokens come. Times are from the moment when a client's socket is closed to the
agent's answer, both on this process's clock. Ends with 1 if a leg was not aborted, or a lease, a receipt or a descriptor is left over.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec
import orjson
import uvloop

from pdserve.clock import MonotonicClock
from pdserve.config import Config
from pdserve.observe.log import configure
from pdserve.server.serve import serve
from pdserve.testing import wire
from pdserve.testing.fake_worker import FakeKv, FakeWorker, Fault, Script, fleet
from pdserve.types import Role
from tests.bench.router_overhead import free_ports

SECRET = "bench"
PATH = "/v1/completions"
PATIENCE_S = 20.0
RECEIPTS_KEPT = 1024
PHASES = {"prefill runs": Script(fault=Fault.HANG), "tokens come": Script()}
"""when the clients leave → what prefill does"""


@dataclass
class Storm:
    """One router, its workers, and who asks them."""

    port: int
    admin: str
    router: "subprocess.Popen[bytes]"
    workers: Sequence[FakeWorker]
    client: aiohttp.ClientSession
    kept: dict[str, int] = field(default_factory=dict)
    """phase → the router's open files after its first storm"""

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.router.pid}/fd").iterdir()))

    async def status(self) -> dict[str, object]:
        async with self.client.get(f"{self.admin}/admin/v1/status") as answer:
            return dict(await answer.json())

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not await condition():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"not at rest after {PATIENCE_S} s: {await self.status()}")
            await asyncio.sleep(0.02)

    async def run(self, clients: int, phase: str, step_s: float) -> bool:
        """Have so many clients leave at once; prints what it took and returns whether nothing is left."""
        for worker in self.workers:
            worker.legs.clear()
            worker.aborted_s.clear()
            worker.abort_calls = 0
            worker.abort_delay_s = step_s
            worker.script = PHASES[phase] if worker.worker_id.startswith("prefill") else Script(tokens=("x",) * 4000, token_delay_s=1.0)
        body = orjson.dumps({"model": wire.MODEL, "prompt": "Hello", "stream": True, "max_tokens": 4000})
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        open_now = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", self.port) for _ in range(clients)))
        for _, writer in open_now:
            writer.write(head + body)
        if phase == "tokens come":
            await asyncio.gather(*(reader.readuntil(b'"x"') for reader, _ in open_now))

        async def are_all_served() -> bool:
            return sum(len(worker.legs) for worker in self.workers) == 2 * clients

        await self.until(are_all_served)
        loop = asyncio.get_running_loop()
        left_s = loop.time()
        for _, writer in open_now:
            writer.close()
        closed_s = loop.time() - left_s

        async def are_all_aborted() -> bool:
            return all(leg.request_id in worker.aborted_s for worker in self.workers for leg in worker.legs)

        await self.until(are_all_aborted)
        took_ms = sorted((answered_s - left_s) * 1000 for worker in self.workers for answered_s in worker.aborted_s.values())
        told_ms, receipts = await self._receipts(clients)
        left_over = [name for name, number in (await self._left_over(phase)).items() if number]
        cuts = statistics.quantiles(took_ms, n=100)
        print(
            f"{phase:13} {clients:6,} clients  step {step_s:4.2f} s  closed in {closed_s * 1000:4.0f} ms  acknowledged p50 {cuts[49]:5.0f}"
            f"  p99 {cuts[98]:5.0f}  max {took_ms[-1]:5.0f} ms  receipts say p50 {told_ms[len(told_ms) // 2]:5.0f}  max {told_ms[-1]:5.0f} ms"
            f"  calls {sum(worker.abort_calls for worker in self.workers):3}  legs {len(took_ms):5,}  receipts {receipts:5,}"
            f"  left over: {', '.join(left_over) or 'nothing'}",
            flush=True,
        )
        return not left_over and len(took_ms) == 2 * clients

    async def _receipts(self, clients: int) -> tuple[list[float], int]:
        """Wait for every receipt; returns the times that they tell, sorted, and how many there are."""
        receipts: list[dict[str, object]] = []
        expected = min(clients, RECEIPTS_KEPT)

        async def are_there() -> bool:
            nonlocal receipts
            async with self.client.get(f"{self.admin}/admin/v1/receipts?limit={expected}") as answer:
                receipts = [r for r in (await answer.json())["receipts"] if r["outcome"] == "cancelled" and len(r["aborts"]) == 2]
            return len(receipts) == expected

        await self.until(are_there)
        times = sorted(abort["blocks_free_s"] * 1000 for receipt in receipts for abort in receipt["aborts"])  # type: ignore[attr-defined]
        return times, len(receipts)

    async def _left_over(self, phase: str) -> dict[str, int]:
        status: dict[str, object] = {}

        async def rests() -> bool:
            nonlocal status
            status = await self.status()
            return not status["running"] and not any(status["in_flight"].values())  # type: ignore[attr-defined]

        await self.until(rests)
        still = sum(leg.ended is None for worker in self.workers for leg in worker.legs)
        # Connections to engines that answered are kept for the next requests, so what counts is whether a second storm leaves more than the first.
        grown = self.descriptors - self.kept.setdefault(phase, self.descriptors)
        return {"requests": int(str(status["running"])), "legs": still, "descriptors": max(0, grown - 2 * len(self.workers))}


async def main(clients: int, steps_s: Sequence[float], port: int, admin_port: int, router: "subprocess.Popen[bytes]") -> int:
    kv = FakeKv()
    async with AsyncExitStack() as stack:
        workers = [FakeWorker(f"{role}-{index}", kv, SECRET) for role in ("prefill", "decode") for index in range(2)]
        for worker in workers:
            await stack.enter_async_context(worker)
        client = await stack.enter_async_context(aiohttp.ClientSession(headers={"x-pdserve-secret": SECRET}))
        admin = f"http://127.0.0.1:{admin_port}"
        snapshots = [worker.snapshot(Role(worker.worker_id.split("-")[0]), max_running=clients) for worker in workers]
        told = msgspec.json.encode(fleet(1, *(replace(snapshot, kv_capacity_tokens=1 << 30) for snapshot in snapshots)))
        storm = Storm(port, admin, router, workers, client)

        async def is_told() -> bool:
            with suppress(aiohttp.ClientConnectorError):
                async with client.put(f"{admin}/admin/v1/fleet", data=told) as answer:
                    return answer.status == 200
            return False

        await storm.until(is_told)
        results = [await storm.run(clients, phase, step_s) for step_s in steps_s for phase in PHASES]
    return 0 if all(results) else 1


async def run_router(port: int, admin_port: int) -> None:
    configure("router", Path(os.devnull))
    config = Config.model_validate({"router": {"port": port, "admin_port": admin_port, "max_queued_requests": 1000}})
    await serve(config, SECRET, clock=MonotonicClock(), on_bound=lambda *_: None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--router", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.router:
        uvloop.run(run_router(*options.router))
    else:
        ports = free_ports(2)
        command = [sys.executable, "-m", "tests.bench.router_disconnects", "--router", *map(str, ports)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            sys.exit(uvloop.run(main(options.clients, options.step_s, *ports, process)))
        finally:
            process.terminate()
            process.wait()
