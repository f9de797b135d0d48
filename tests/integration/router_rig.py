"""The real router process, in this event loop, over fake workers: what the router's integration tests stand on.

Teardown is the leak check: nothing waits, no lease is live, no task is left over.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from pdserve.clock import MonotonicClock
from pdserve.config import Config
from pdserve.server.serve import serve
from pdserve.testing import wire
from pdserve.testing.fake_worker import FakeKv, FakeWorker, Leg, fleet
from pdserve.types import Receipt, Role, WorkerState

SECRET = "5ec7e7"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
PATIENCE_S = 5.0


@dataclass
class Rig:
    """A router, its workers, and clients for both of its ports."""

    url: str
    admin_url: str
    prefills: Sequence[FakeWorker]
    decodes: Sequence[FakeWorker]
    client: aiohttp.ClientSession
    version: int = 0
    served: asyncio.Task[None] = field(repr=False, default=None)  # type: ignore[assignment]

    @property
    def workers(self) -> Sequence[FakeWorker]:
        return (*self.prefills, *self.decodes)

    @property
    def legs(self) -> list[Leg]:
        return [leg for worker in self.workers for leg in worker.legs]

    @property
    def aborts(self) -> list[str]:
        return [request_id for worker in self.workers for request_id in worker.aborts]

    async def put_fleet(self, *, max_running: int = 16, max_model_len: int = 4096, **states: WorkerState) -> None:
        """Tell the router about all workers; `states` (worker id with `_` for `-`) differ from READY."""
        self.version += 1
        workers = [
            worker.snapshot(role, states.get(worker.worker_id.replace("-", "_"), WorkerState.READY), max_running, max_model_len)
            for role, workers in ((Role.PREFILL, self.prefills), (Role.DECODE, self.decodes))
            for worker in workers
        ]
        await self.put_workers(fleet(self.version, *workers))

    async def put_workers(self, snapshot: object) -> None:
        async with self.client.put(f"{self.admin_url}/admin/v1/fleet", data=msgspec.json.encode(snapshot)) as answer:
            assert answer.status == 200, await answer.text()

    async def post(self, path: str = CHAT, **body: Any) -> tuple[int, Any]:
        """Post a request that is not streamed; returns status and parsed body."""
        async with self.client.post(self.url + path, json=filled(path, body)) as answer:
            return answer.status, await answer.json()

    async def stream(self, path: str = CHAT, **body: Any) -> tuple[int, bytes]:
        """Post a streamed request and read it to its end; returns status and body."""
        async with self.client.post(self.url + path, json=filled(path, {"stream": True, **body})) as answer:
            return answer.status, await answer.read()

    async def admin(self, path: str) -> Any:
        async with self.client.get(f"{self.admin_url}/admin/v1/{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def receipts(self, count: int, timeout_s: float = PATIENCE_S) -> list[Receipt]:
        """Wait for `count` receipts; newest first."""
        receipts: list[Receipt] = []

        async def are_there() -> bool:
            nonlocal receipts
            receipts = msgspec.convert((await self.admin("receipts?limit=1000"))["receipts"], list[Receipt])
            return len(receipts) >= count

        await until(are_there, timeout_s=timeout_s)
        assert len(receipts) == count
        return receipts

    async def metrics(self) -> dict[str, float]:
        """Return every sample by its name and labels, as in the exposition."""
        async with self.client.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    async def at_rest(self) -> None:
        """Wait until nothing runs, waits or is leased; fails with what is left."""
        status: dict[str, Any] = {}

        async def rests() -> bool:
            nonlocal status
            status = await self.admin("status")
            counts = (status["running"], status["queue"]["requests"], status["queue"]["tokens"], *status["in_flight"].values())
            return not any(counts)

        try:
            await until(rests)
        except TimeoutError:
            raise AssertionError(f"not at rest: {status}") from None


@asynccontextmanager
async def rig(prefills: int = 1, decodes: int = 1, limits: Mapping[str, Any] | None = None, **router: Any) -> AsyncIterator[Rig]:
    """Run a router with this many workers per role; `router` overrides `Config.router`, `limits` overrides `Config.limits`."""
    before = asyncio.all_tasks()
    kv = FakeKv()
    async with AsyncExitStack() as stack:
        workers = [FakeWorker(f"prefill-{i}", kv, SECRET) for i in range(prefills)] + [
            FakeWorker(f"decode-{i}", kv, SECRET) for i in range(decodes)
        ]
        for worker in workers:
            await stack.enter_async_context(worker)
        bound: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        config = Config.model_validate({"router": {"port": 0, **router}, "limits": limits or {}})
        served = asyncio.create_task(serve(config, SECRET, clock=MonotonicClock(), on_bound=lambda *ports: bound.set_result(ports)))
        await asyncio.wait({served, bound}, return_when=asyncio.FIRST_COMPLETED)
        port, admin_port = bound.result()
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers={"x-pdserve-secret": SECRET})
        )
        made = Rig(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", workers[:prefills], workers[prefills:], client)
        made.served = served
        try:
            await made.put_fleet()
            yield made
            if not served.done():
                await made.at_rest()
        finally:
            served.cancel()
            await asyncio.gather(served, return_exceptions=True)
    await until(lambda: asyncio.all_tasks() <= before, "tasks left over")


async def until(condition: Callable[[], Any], what: str = "it never came about", timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition, plain or awaitable, with a limit. Raises `TimeoutError`."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        result = condition()
        if await result if asyncio.iscoroutine(result) else result:
            return
        if asyncio.get_running_loop().time() > deadline_s:
            raise TimeoutError(what)
        await asyncio.sleep(0.01)


def filled(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Complete a body with a model and a prompt."""
    messages = [{"role": "user", "content": "Hello?"}]
    prompts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages},
        COMPLETIONS: {"prompt": "Hello"},
        RESPONSES: {"input": "Hello?"},
        MESSAGES: {"messages": messages, "max_tokens": 100},
    }
    prompt = prompts.get(path, {})
    return {"model": wire.MODEL, **prompt, **body}
