"""What the router costs: time to first token of one stream, requests per second of many, with short prompts and with long ones.

    python -m tests.bench.router_overhead [--rival PATH_OF_VLLM_ROUTER] [--rounds 5]

Two prefill and one decode worker that answer at once (`router_bench_worker`), the router in a process of its own with everything switched on, and the
same load straight at the decode worker for comparison; with `--rival` also against vllm-router in its prefill/decode mode. The targets take turns
in every round, because a shared machine is not the same from one minute to the next. Prints one JSON line per target and load, medians over rounds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import httpx
import msgspec
import uvloop

from pdserve.clock import MonotonicClock
from pdserve.config import Config
from pdserve.observe.log import configure
from pdserve.server.serve import serve
from pdserve.types import FleetSnapshot, Role, WorkerSnapshot, WorkerState

SECRET = "bench"
TOKENS = 8
START_S = 60.0


@dataclass(frozen=True)
class Load:
    """One closed-loop load: so many streams at once until so many requests are answered."""

    name: str
    at_once: int
    requests: int
    prompt_bytes: int


LOADS = (Load("1 stream", 1, 200, 200), Load("32 streams", 32, 1500, 200), Load("8 streams of 240 KB", 8, 400, 240_000))


@dataclass
class Target:
    """Something that answers chat completions."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    results: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    """load → per round: requests per second, median TTFT in ms, CPU µs of the process per request"""

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_load(target: Target, load: Load) -> tuple[float, float]:
    """Run one load; returns requests per second and the median time to first byte in ms. Any answer that is not a whole stream ends the run."""
    prompt = "a" * load.prompt_bytes
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "stream": True}).encode()
    first_ms: list[float] = []
    remaining = iter(range(load.requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers={"content-type": "application/json"}) as client:

        async def stream() -> None:
            for _ in remaining:
                begin_s, tail = time.perf_counter(), b""
                async with client.post(f"http://127.0.0.1:{target.port}/v1/chat/completions", data=body) as answer:
                    async for chunk in answer.content.iter_any():
                        if not tail:
                            first_ms.append((time.perf_counter() - begin_s) * 1000)
                        tail = (tail + chunk)[-64:]
                    if answer.status != 200 or b"[DONE]" not in tail:
                        raise SystemExit(f"{target.name}: {answer.status} {tail!r}")

        begin_s = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(load.at_once)))
        return load.requests / (time.perf_counter() - begin_s), statistics.median(first_ms)


async def run_router(port: int, prefills: Sequence[int], decode: int) -> None:
    """The router process: tells itself about the workers once it is bound."""
    configure("router", Path(os.devnull))
    ports = [*((f"prefill-{p}", Role.PREFILL, p) for p in prefills), ("decode", Role.DECODE, decode)]
    workers = tuple(
        WorkerSnapshot(name, "1", role, WorkerState.READY, f"http://127.0.0.1:{p}", "m", 131_072, 256, 1 << 20, 16)
        for name, role, p in ports
    )
    tasks: list[asyncio.Task[httpx.Response]] = []

    async def put_fleet(admin_port: int) -> httpx.Response:
        async with httpx.AsyncClient(headers={"x-pdserve-secret": SECRET}) as client:
            return await client.put(f"http://127.0.0.1:{admin_port}/admin/v1/fleet", content=msgspec.json.encode(FleetSnapshot(1, workers)))

    def bound(_port: int, admin_port: int) -> None:
        tasks.append(asyncio.create_task(put_fleet(admin_port)))

    await serve(Config.model_validate({"router": {"port": port}}), SECRET, clock=MonotonicClock(), on_bound=bound)


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; entered once its port answers `/health`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def rival_command(binary: str, port: int, metrics_port: int, prefills: Sequence[int], decode: int) -> list[str]:
    """vllm-router as its own documentation starts it for prefill and decode pools."""
    pools = [argument for p in prefills for argument in ("--prefill", f"http://127.0.0.1:{p}")]
    options = ["--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(metrics_port)]
    return [
        binary,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--vllm-pd-disaggregation",
        *pools,
        "--decode",
        f"http://127.0.0.1:{decode}",
        *options,
    ]


def report(targets: Sequence[Target]) -> None:
    """Print medians over rounds."""
    for load in LOADS:
        for target in targets:
            rates, firsts, cpus = zip(*target.results[load.name], strict=True)
            row = {
                "load": load.name,
                "target": target.name,
                "requests_per_s": round(statistics.median(rates)),
                "ttft_ms": round(statistics.median(firsts), 2),
                "cpu_us_per_request": round(statistics.median(cpus)),
                "rounds": len(rates),
            }
            print(json.dumps(row), flush=True)


def main() -> None:
    """Start everything, take turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rival", help="the vllm-router executable of an environment of its own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--router", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.router:
        uvloop.run(run_router(options.router[0], options.router[1:3], options.router[3]))
        return
    *prefills, decode, router_port, rival_port, metrics_port = free_ports(6)
    with contextlib.ExitStack() as stack:
        start = lambda command, port: stack.enter_context(running(command, port))  # noqa: E731
        python = [sys.executable, "-m"]
        worker = start([*python, "tests.bench.router_bench_worker", *map(str, [*prefills, decode])], decode)
        arguments = [str(port) for port in (router_port, *prefills, decode)]
        router = start([*python, "tests.bench.router_overhead", "--router", *arguments], router_port)
        targets = [Target("no router", decode, worker), Target("pdserve", router_port, router)]
        if options.rival:
            rival = start(rival_command(options.rival, rival_port, metrics_port, prefills, decode), rival_port)
            targets.append(Target("vllm-router", rival_port, rival))
        for _ in range(options.rounds):
            for load in LOADS:
                for target in targets:
                    before_s = target.cpu_s()
                    rate, first_ms = uvloop.run(run_load(target, load))
                    cpu_us = (target.cpu_s() - before_s) * 1e6 / load.requests
                    target.results.setdefault(load.name, []).append((rate, first_ms, cpu_us))
    report(targets)


if __name__ == "__main__":
    main()
