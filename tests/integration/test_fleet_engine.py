"""A real vLLM engine through the fleet: its private door, and what SIGKILL in its process tree leaves."""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdserve.config import Config
from pdserve.fleet.engine_command import ServedModel
from pdserve.fleet.files import DeploymentFiles
from pdserve.fleet.incarnation import read_record
from pdserve.fleet.processes import marked
from pdserve.fleet.ray_fleet import RayFleet
from pdserve.fleet.shm import entries
from pdserve.models.catalog import resolve
from pdserve.ports import WorkerSpec
from pdserve.types import Role, WorkerSnapshot, WorkerState

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SPEC = WorkerSpec("prefill-0", Role.PREFILL, 1)
SECRET = secrets.token_hex(32)
LOAD_LIMIT_S = 300.0
CLEAN_LIMIT_S = 30.0
PRIVATE_PATHS = ("/health", "/metrics", "/v1/models", "/pdserve/v1/status")
"""vLLM's own and the agent's"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> DeploymentFiles:
    return DeploymentFiles(tmp_path_factory.mktemp("deployment"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(files: DeploymentFiles) -> AsyncIterator[RayFleet]:
    model = await asyncio.to_thread(resolve, Config().model)
    fleet = RayFleet(Config(name=f"test-{secrets.token_hex(4)}"), files.state_dir, SECRET, ServedModel(Path(model.path), model.served_name))
    yield fleet
    await fleet.close()
    assert not files.workers_dir.exists()


async def answering(fleet: RayFleet) -> WorkerSnapshot:
    """Start the worker and wait until its engine answers."""
    await fleet.start(SPEC)
    deadline_s = time.monotonic() + LOAD_LIMIT_S
    async with httpx.AsyncClient(headers={"x-pdserve-secret": SECRET}, trust_env=False) as client:
        while True:
            worker = (await fleet.snapshot()).workers[0]
            assert worker.state is not WorkerState.FAILED, worker
            assert time.monotonic() < deadline_s, worker
            try:
                if worker.url and (await client.get(f"{worker.url}/health")).status_code == 200:
                    return worker
            except httpx.TransportError:
                pass  # the port is bound, but refuses until the model is loaded
            await asyncio.sleep(0.5)


async def failed(fleet: RayFleet) -> WorkerSnapshot:
    deadline_s = time.monotonic() + CLEAN_LIMIT_S
    while (worker := (await fleet.snapshot()).workers[0]).state is not WorkerState.FAILED:
        assert time.monotonic() < deadline_s, worker
        await asyncio.sleep(0.2)
    return worker


def api_server(worker: WorkerSnapshot) -> int:
    assert worker.pid is not None
    return worker.pid


def engine_core(worker: WorkerSnapshot) -> int:
    for process in marked(worker.incarnation):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            if b"EngineCore" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                return process.pid
    raise AssertionError("no engine core")


@pytest.mark.parametrize("victim", [api_server, engine_core])
async def test_engine_is_private_and_its_death_leaves_nothing(
    fleet: RayFleet, files: DeploymentFiles, victim: Callable[[WorkerSnapshot], int]
) -> None:
    """Every path wants the secret; SIGKILL of one process ends the whole tree, its memory and its port."""
    worker = await answering(fleet)
    async with httpx.AsyncClient(base_url=worker.url, trust_env=False) as client:
        for path in PRIVATE_PATHS:
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"x-pdserve-secret": "0" * 64})).status_code == 401
            assert (await client.get(path, headers={"x-pdserve-secret": SECRET})).status_code == 200
        record = read_record(files.worker(SPEC.worker_id).incarnation)
        assert record is not None
        assert record.shared_memory
        os.kill(victim(worker), signal.SIGKILL)
        after = await failed(fleet)
        assert after.detail
        assert marked(worker.incarnation) == frozenset()
        assert not set(record.shared_memory) & entries()
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
