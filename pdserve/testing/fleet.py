"""A fleet, its agents and a router in memory, to run the real controller without engines.

One `FakeFleet` is the world; `FakeAgents` and `FakeRouter` look at it. Tests script it: what cannot start, who refuses whom, what dies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdserve.errors import FleetError, WorkerLost
from pdserve.ports import AgentStatus, PeerEntry, PeerHandshake, WorkerSpec
from pdserve.types import FleetSnapshot, RankAddress, Receipt, Role, ServePath, WorkerSnapshot, WorkerState

MAX_MODEL_LEN = 2048
BLOCK_TOKENS = 16
BLOCKS = 512


@dataclass(slots=True)
class FakeWorker:
    """One engine that does not exist."""

    spec: WorkerSpec
    incarnation: str
    polls_to_load: int
    state: WorkerState = WorkerState.LOADING
    detail: str = ""
    is_silent: bool = False
    peers_version: int = 0
    peers: tuple[PeerEntry, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{self.spec.worker_id}.{self.incarnation}"


@dataclass(slots=True)
class FakeFleet:
    """The `Fleet` port, and what tests do to its workers."""

    polls_to_load: int = 1
    """times an agent is asked in vain before its engine answers"""
    cannot_start: dict[str, str] = field(default_factory=dict)
    """worker id → reason"""
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)
    """(worker, peer) → reason the worker gives"""
    is_unreachable: bool = False
    """`snapshot` fails, as with Ray's head away"""
    is_closed: bool = False
    stopped: list[str] = field(default_factory=list)
    """workers that were stopped, in order"""
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    incarnations: int = 0

    async def start(self, spec: WorkerSpec) -> None:
        if spec.worker_id in self.cannot_start:
            raise FleetError(spec.worker_id, self.cannot_start[spec.worker_id])
        self.workers[spec.worker_id] = FakeWorker(spec, self._incarnation(), self.polls_to_load)

    async def stop(self, worker_id: str) -> None:
        self.stopped.append(worker_id)
        self.workers.pop(worker_id, None)

    async def snapshot(self) -> FleetSnapshot:
        if self.is_unreachable:
            raise FleetError("ray", "does not answer")
        return FleetSnapshot(1, tuple(self._row(worker) for worker in self.workers.values()))

    async def close(self) -> None:
        self.workers.clear()
        self.is_closed = True

    def fail(self, worker_id: str, detail: str) -> None:
        """End a worker's engine."""
        self.workers[worker_id].state = WorkerState.FAILED
        self.workers[worker_id].detail = detail

    def restart(self, worker_id: str) -> None:
        """Replace a worker's engine by a new incarnation that has to load."""
        self.workers[worker_id] = FakeWorker(self.workers[worker_id].spec, self._incarnation(), self.polls_to_load)

    def at(self, url: str) -> FakeWorker:
        """Return the worker that answers at `url`. Raises `WorkerLost`."""
        for worker in self.workers.values():
            if worker.url == url and worker.state is WorkerState.LOADING and not worker.is_silent:
                return worker
        raise WorkerLost(url, "connect", "refused")

    def _incarnation(self) -> str:
        self.incarnations += 1
        return f"{self.incarnations:08x}"

    def _row(self, worker: FakeWorker) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker_id=worker.spec.worker_id,
            incarnation=worker.incarnation,
            role=worker.spec.role,
            state=worker.state,
            url=worker.url,
            model="fake",
            max_model_len=0,
            max_running=4,
            kv_capacity_tokens=0,
            detail=worker.detail,
        )


@dataclass(slots=True)
class FakeAgents:
    """The `AgentControl` port over a `FakeFleet`. Two workers are connected once each has the other in its peer table."""

    fleet: FakeFleet

    async def status(self, url: str) -> AgentStatus:
        worker = self.fleet.at(url)
        if worker.polls_to_load > 0:
            worker.polls_to_load -= 1
            raise WorkerLost(url, "connect", "still loading")
        return AgentStatus(
            worker_id=worker.spec.worker_id,
            incarnation=worker.incarnation,
            model="fake",
            max_model_len=MAX_MODEL_LEN,
            block_tokens=BLOCK_TOKENS,
            blocks_total=BLOCKS,
            blocks_free=BLOCKS,
            running=0,
            waiting=0,
            transfers_open=0,
            tensor_parallel_size=worker.spec.tensor_parallel_size,
            ranks=(RankAddress(0, "127.0.0.1", 1),),
            handshakes=tuple(self._handshake(worker, peer) for peer in worker.peers if peer.worker_id != worker.spec.worker_id),
        )

    async def put_peers(self, url: str, version: int, peers: Sequence[PeerEntry]) -> None:
        worker = self.fleet.at(url)
        worker.peers_version, worker.peers = version, tuple(peers)

    def _handshake(self, worker: FakeWorker, peer: PeerEntry) -> PeerHandshake:
        shake = PeerHandshake(peer.worker_id, peer.incarnation, 0, 0, "connecting")
        refusal = self.fleet.refusals.get((worker.spec.worker_id, peer.worker_id))
        if refusal is not None:
            return replace(shake, state="refused", reason=refusal)
        other = self.fleet.workers.get(peer.worker_id)
        if other is None or other.incarnation != peer.incarnation:
            return shake
        knows = any(entry.incarnation == worker.incarnation for entry in other.peers)
        return replace(shake, state="connected") if knows else shake


@dataclass(slots=True)
class FakeRouter:
    """The `RouterControl` port: serves a canary if both workers are in the fleet it was given and answer."""

    fleet: FakeFleet
    view: FleetSnapshot | None = None
    canaries: list[tuple[str, str]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """workers through which no token goes"""

    async def put_fleet(self, snapshot: FleetSnapshot) -> None:
        self.view = snapshot

    async def canary(self, prefill_worker: str, decode_worker: str) -> Receipt:
        self.canaries.append((prefill_worker, decode_worker))
        rows = {row.worker_id: row for row in self.view.workers} if self.view is not None else {}
        for worker_id in (prefill_worker, decode_worker):
            row = rows.get(worker_id)
            if row is None or row.state not in {WorkerState.WARMING, WorkerState.READY}:
                raise FleetError("router", f"{worker_id} is not in the fleet")
            if worker_id in self.broken:
                raise FleetError("router", f"{worker_id} gave no token")
            self._answer(row)
        return Receipt(
            request_id=f"canary-{len(self.canaries)}",
            client_request_id=None,
            route="canary",
            model="fake",
            stream=False,
            status=200,
            outcome="finished",
            path=ServePath.DISAGGREGATED,
            reason="canary",
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            transfer_id=f"{len(self.canaries):032x}",
            attempts=1,
            queue_wait_s=0.0,
            ttft_s=0.0,
            duration_s=0.0,
            prompt_tokens=1,
            completion_tokens=1,
            cached_tokens=0,
        )

    def _answer(self, row: WorkerSnapshot) -> None:
        try:
            self.fleet.at(row.url)
        except WorkerLost as lost:
            raise FleetError("router", str(lost)) from lost


def specs(prefill: int, decode: int) -> tuple[WorkerSpec, ...]:
    """Return that many workers of each role, of one rank each."""
    return tuple(
        WorkerSpec(f"{role}-{number}", role, 1)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for number in range(count)
    )
