"""Real vLLM engines for tests, without Ray or router: started from the product's own command, joined by a peer table, reaped at the end."""

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from pdserve.config import Config
from pdserve.fleet.endpoint import read_endpoint
from pdserve.fleet.engine_command import EnginePlace, ServedModel, engine_command
from pdserve.fleet.processes import MARK
from pdserve.ports import AgentStatus, PeerEntry, WorkerSpec
from pdserve.types import Role, Ticket, TransferRecord, TransferSide

READY_TIMEOUT_S = 300
Started = tuple[str, str, subprocess.Popen[bytes], Path, Path]
"""worker id, incarnation, process, endpoint file, log"""


@dataclass
class Engine:
    """One running engine and a client that has its secret."""

    worker_id: str
    incarnation: str
    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path
    secret: str

    def status(self) -> AgentStatus:
        return msgspec.convert(self.client.get("/pdserve/v1/status").raise_for_status().json(), AgentStatus)

    def records(self, after: int = 0) -> list[TransferRecord]:
        answer = self.client.get("/pdserve/v1/records", params={"after": after}).raise_for_status().json()
        return msgspec.convert(answer["records"], list[TransferRecord])

    def record(self, transfer_id: str, timeout_s: float = 20) -> TransferRecord:
        """Wait for the record of one transfer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for record in self.records():
                if record.transfer_id == transfer_id:
                    return record
            time.sleep(0.05)
        raise AssertionError(f"{self.worker_id} has no record of {transfer_id}")

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample of the engine's own metrics, summed over what `labels` leaves open."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_blocks(self, free: int, timeout_s: float = 15) -> None:
        """Wait until as many blocks are free as before: the block ledger is clean."""
        deadline = time.monotonic() + timeout_s
        while (status := self.status()).blocks_free != free or status.transfers_open:
            assert time.monotonic() < deadline, f"{self.worker_id}: {status.blocks_free} blocks free, {free} before; {status}"
            time.sleep(0.1)


@dataclass
class Pair:
    """Which engine produces and which consumes."""

    prefill: Engine
    decode: Engine

    def ticket(self, attempt: int = 1, timeout_s: float = 60) -> Ticket:
        return Ticket(
            transfer_id=secrets.token_hex(16),
            attempt=attempt,
            prefill_worker=self.prefill.worker_id,
            prefill_incarnation=self.prefill.incarnation,
            decode_worker=self.decode.worker_id,
            decode_incarnation=self.decode.incarnation,
            timeout_s=timeout_s,
        )


def legs(body: dict[str, Any], ticket: Ticket) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the bodies of the two legs, as the router would send them."""
    prefill = {key: value for key, value in body.items() if key not in ("max_tokens", "stream", "stream_options")}
    prefill |= {"max_tokens": 1, "stream": False, "kv_transfer_params": ticket.params(TransferSide.SEND)}
    return prefill, body | {"kv_transfer_params": ticket.params(TransferSide.RECEIVE)}


@contextlib.contextmanager
def running_engines(config: Config, model: ServedModel, tmp_path: Path, sizes: Sequence[int] = (1, 1)) -> Iterator[list[Engine]]:
    """Start one engine per tensor-parallel size, one after the other's port is bound, and join them all by handshakes."""
    secret = secrets.token_hex(32)
    engines: list[Engine] = []
    started: list[Started] = []
    before = set(Path("/dev/shm").iterdir())
    try:
        for index, size in enumerate(sizes):
            started.append(_start(config, model, tmp_path, secret, index, size))
        engines += [_connect(secret, *what) for what in started]
        join(engines)
        yield engines
    finally:
        for engine in engines:
            engine.client.close()
        for _, _, process, _, _ in started:
            _kill_tree(process)
        for path in set(Path("/dev/shm").iterdir()) - before:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def join(engines: Sequence[Engine], version: int = 1) -> None:
    """Give every engine the peer table and wait until all handshakes are made."""
    states = [engine.status() for engine in engines]
    peers = [PeerEntry(s.worker_id, s.incarnation, s.tensor_parallel_size, s.ranks) for s in states]
    for engine in engines:
        engine.client.put("/pdserve/v1/peers", json={"version": version, "peers": msgspec.to_builtins(peers)}).raise_for_status()
    deadline = time.monotonic() + 30
    while True:
        shakes = [(engine.worker_id, shake) for engine in engines for shake in engine.status().handshakes]
        if shakes and all(shake.state == "connected" for _, shake in shakes):
            return
        assert time.monotonic() < deadline, f"handshakes: {shakes}"
        time.sleep(0.1)


def _start(config: Config, model: ServedModel, tmp_path: Path, secret: str, index: int, size: int) -> Started:
    role = Role.PREFILL if index == 0 else Role.DECODE
    worker_id, incarnation = f"worker-{index}", secrets.token_hex(8)
    endpoint = tmp_path / f"{worker_id}.endpoint"
    place = EnginePlace(incarnation=incarnation, host="127.0.0.1", endpoint_file=endpoint, platform="cpu", cpus_per_rank=1)
    command = engine_command(config, WorkerSpec(worker_id, role, size), model, secret, place)
    log = tmp_path / f"{worker_id}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env, MARK: incarnation}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return worker_id, incarnation, process, endpoint, log


def _connect(secret: str, worker_id: str, incarnation: str, process: subprocess.Popen[bytes], endpoint_file: Path, log: Path) -> Engine:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{worker_id} ended:\n{log.read_text()[-4000:]}"
        endpoint = read_endpoint(endpoint_file, incarnation)
        if endpoint is not None:
            client = httpx.Client(
                base_url=f"http://{endpoint.host}:{endpoint.port}", headers={"x-pdserve-secret": secret}, timeout=120, trust_env=False
            )
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return Engine(worker_id, incarnation, process, client, log, secret)
            client.close()
        time.sleep(0.5)
    raise AssertionError(f"{worker_id} is not ready after {READY_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End an engine and all it started: its core and workers outlive a killed API server."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        tree = [*top.children(recursive=True), top]
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        _, alive = psutil.wait_procs(tree[:-1], timeout=10)
        assert not alive, alive
    process.wait(timeout=10)
