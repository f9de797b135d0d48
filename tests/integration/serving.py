"""A real router process over engines that a test started itself."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from engine_requests import MODEL
from engines import Engine, Pair

from pdserve.config import Config
from pdserve.control.folder import StateFolder
from pdserve.types import FleetSnapshot, Receipt, Role, WorkerSnapshot, WorkerState

START_LIMIT_S = 30


@dataclass
class Router:
    """One router process and clients for its two ports."""

    url: str
    public: httpx.Client
    admin: httpx.Client

    def receipt(self, request_id: str, timeout_s: float = 20) -> Receipt:
        """Wait for the receipt of the request that the router answered with this `x-request-id`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = self.admin.get("/admin/v1/receipts", params={"limit": 100}).raise_for_status().json()
            for receipt in msgspec.convert(answer["receipts"], list[Receipt]):
                if request_id in (receipt.request_id, receipt.client_request_id):
                    return receipt
            time.sleep(0.05)
        raise AssertionError(f"no receipt of {request_id}")

    def at_rest(self) -> None:
        """Wait until nothing waits, runs or is leased."""
        deadline = time.monotonic() + 20
        while True:
            values = [
                float(line.rsplit(" ", 1)[1])
                for line in self.public.get("/metrics").text.splitlines()
                if line.startswith(("pdserve_queue_depth", "pdserve_in_flight"))
            ]
            if values and not any(values):
                return
            assert time.monotonic() < deadline, values
            time.sleep(0.05)


def snapshot(pair: Pair, config: Config) -> FleetSnapshot:
    """Describe a pair of engines as the controller would."""
    return FleetSnapshot(1, (_worker(pair.prefill, Role.PREFILL, config), _worker(pair.decode, Role.DECODE, config)))


def _worker(engine: Engine, role: Role, config: Config) -> WorkerSnapshot:
    status = engine.status()
    return WorkerSnapshot(
        worker_id=engine.worker_id,
        incarnation=engine.incarnation,
        role=role,
        state=WorkerState.READY,
        url=str(engine.client.base_url).rstrip("/"),
        model=MODEL,
        max_model_len=status.max_model_len,
        max_running=config.engine.max_num_seqs,
        kv_capacity_tokens=status.blocks_total * status.block_tokens,
        block_tokens=status.block_tokens,
    )


@contextlib.contextmanager
def running_router(pair: Pair, config: Config, tmp_path: Path) -> Iterator[Router]:
    """Start a router, give it the pair, and stop it with SIGTERM at the end."""
    secret = pair.decode.client.headers["x-pdserve-secret"]
    folder = StateFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    folder.prepare(config)
    (folder.path / "secret").write_text(secret)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    process = subprocess.Popen([sys.executable, "-m", "pdserve", "router", "--state-dir", str(folder.path)], env=environment)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while (binding := folder.binding()) is None:
            assert process.poll() is None and time.monotonic() < deadline, "the router does not start"
            time.sleep(0.05)
        url = f"http://127.0.0.1:{binding.port}"
        with (
            httpx.Client(base_url=url, timeout=120, trust_env=False) as public,
            httpx.Client(
                base_url=f"http://127.0.0.1:{binding.admin_port}", headers={"x-pdserve-secret": secret}, timeout=30, trust_env=False
            ) as admin,
        ):
            body = msgspec.to_builtins(snapshot(pair, config))
            admin.put("/admin/v1/fleet", json=body).raise_for_status()
            yield Router(url, public, admin)
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0
