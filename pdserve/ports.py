"""The protocols between rooms: what the control loop and the router need from the outside, without naming who gives it.

Owns no state. Concrete classes are chosen in `assembly.py` alone.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from pdserve.types import FleetSnapshot, RankAddress, Receipt, Role, TransferRecord


@dataclass(frozen=True, slots=True)
class PeerHandshake:
    """State of one KV link as one rank of a worker sees it."""

    peer_worker: str
    peer_incarnation: str
    rank: int
    peer_rank: int
    state: str
    """``connecting``, ``connected`` or ``refused``"""
    reason: str = ""
    """why refused, with both values"""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """One answer of a worker's agent. The call runs between engine steps, so an answer proves that the engine loop turns."""

    worker_id: str
    incarnation: str
    model: str
    max_model_len: int
    block_tokens: int
    blocks_total: int
    blocks_free: int
    running: int
    waiting: int
    transfers_open: int
    tensor_parallel_size: int
    ranks: tuple[RankAddress, ...]
    handshakes: tuple[PeerHandshake, ...]


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """One row of the peer table that the controller gives to every worker."""

    worker_id: str
    incarnation: str
    tensor_parallel_size: int
    ranks: tuple[RankAddress, ...]


@dataclass(frozen=True, slots=True)
class AbortReport:
    """What an agent did about an abort; it is sent after a barrier call went through the engine loop."""

    aborted: int
    blocks_free_before: int
    blocks_free_after: int
    elapsed_s: float
    held: tuple[str, ...] = ()
    """of the ids asked for, those whose blocks the engine still keeps: a transfer from or to them has to end first"""


class AgentControl(Protocol):
    """What the controller asks of a worker's agent. Every method raises `WorkerLost` when the worker cannot be reached."""

    async def status(self, url: str) -> AgentStatus:
        """Return the engine's state, asked between two engine steps."""
        ...

    async def put_peers(self, url: str, version: int, peers: Sequence[PeerEntry]) -> None:
        """Replace the worker's peer table; its ranks handshake in the background."""
        ...


class AgentRecords(Protocol):
    """What the router asks of a worker's agent. Every method raises `WorkerLost` when the worker cannot be reached."""

    async def records(self, url: str, after: int) -> tuple[int, Sequence[TransferRecord]]:
        """Return the cursor and the transfer records that ended after cursor `after`."""
        ...

    async def abort(self, url: str, request_ids: Sequence[str]) -> AbortReport:
        """Abort requests by the router's ids and wait until the engine has done it. Idempotent; asked again, it says whose blocks are still held."""
        ...


class UpstreamResponse(Protocol):
    """An engine's answer, head received, body not read yet."""

    @property
    def status(self) -> int: ...

    @property
    def content_type(self) -> str: ...

    @property
    def is_whole(self) -> bool:
        """Say whether the end of the body has come, read or not."""
        ...

    async def read(self) -> bytes:
        """Read the whole body. Raises `WorkerLost` (phase ``body``)."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, bytes as received. Raises `WorkerLost` (phase ``body``, ``first_byte`` or ``idle``)."""
        ...


class EngineClient(Protocol):
    """Sends one leg of a request to an engine."""

    def post(
        self,
        worker_id: str,
        url: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        idle_timeout_s: float | None = None,
        first_byte_timeout_s: float | None = None,
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Open a POST; leaving the context closes the exchange, which aborts the request on the engine.

        Args:
            idle_timeout_s: longest silence of the engine, head included; None leaves time to the caller's own limit (an answer that
                is not streamed is silent until it is whole).
            first_byte_timeout_s: longest time to the first byte of the answer's body, where `idle_timeout_s` does not count yet; None
                leaves it to that.

        Raises:
            WorkerLost: phase ``connect``, ``head``, ``first_byte`` or ``idle``.
        """
        ...


class ReceiptObserver(Protocol):
    """Receives every receipt once, on the router's event loop; must not block or raise."""

    def observe(self, receipt: Receipt) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the fleet is asked to run as one worker."""

    worker_id: str
    role: Role
    tensor_parallel_size: int


class Fleet(Protocol):
    """Places, starts and stops workers. Implemented over Ray in `fleet/`."""

    async def start(self, spec: WorkerSpec) -> None:
        """Ask for a worker; returns once it is placed. Raises `FleetError`."""
        ...

    async def stop(self, worker_id: str) -> None:
        """Stop a worker and reap its whole process group. Idempotent."""
        ...

    async def snapshot(self) -> FleetSnapshot:
        """Return what runs now, from the actors themselves. States beyond LOADING are the controller's to judge."""
        ...

    async def close(self) -> None:
        """Stop all workers and, if this deployment started it, Ray."""
        ...


class RouterControl(Protocol):
    """The controller's side of the router's admin port."""

    async def put_fleet(self, snapshot: FleetSnapshot) -> None:
        """Replace the router's view of the fleet. Raises `FleetError` if the router is away."""
        ...

    async def canary(self, prefill_worker: str, decode_worker: str) -> Receipt:
        """Serve one real token through this pair, warming or ready. Raises `FleetError` with the reason."""
        ...
