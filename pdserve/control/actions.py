"""What a plan asks to be done. Values only; `subject` tells which two may not run at once."""

from dataclasses import dataclass

from pdserve.ports import PeerEntry, WorkerSpec
from pdserve.types import FleetSnapshot


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Place a worker and start its engine."""

    spec: WorkerSpec

    @property
    def subject(self) -> str:
        return f"start {self.spec.worker_id}"


@dataclass(frozen=True, slots=True)
class ReplaceWorker:
    """End what is left of a failed worker, and start it again."""

    spec: WorkerSpec

    @property
    def subject(self) -> str:
        return f"start {self.spec.worker_id}"


@dataclass(frozen=True, slots=True)
class StartRouter:
    """Start the router process, on the ports it had before if it had any."""

    @property
    def subject(self) -> str:
        return "start router"


@dataclass(frozen=True, slots=True)
class PutPeers:
    """Give one worker the peer table."""

    worker_id: str
    incarnation: str
    url: str
    version: int
    peers: tuple[PeerEntry, ...]

    @property
    def subject(self) -> str:
        return f"peers {self.worker_id}"


@dataclass(frozen=True, slots=True)
class PutFleet:
    """Give the router its view of the fleet."""

    router_start: int
    snapshot: FleetSnapshot

    @property
    def subject(self) -> str:
        return "fleet"


@dataclass(frozen=True, slots=True)
class RunCanary:
    """Serve one token through a pair of workers."""

    prefill_worker: str
    prefill_incarnation: str
    decode_worker: str
    decode_incarnation: str

    @property
    def subject(self) -> str:
        return f"canary {self.prefill_worker} {self.decode_worker}"

    def incarnation_of(self, worker_id: str) -> str | None:
        """Return the incarnation the canary was sent to, None for a worker outside the pair."""
        return {self.prefill_worker: self.prefill_incarnation, self.decode_worker: self.decode_incarnation}.get(worker_id)


Action = StartWorker | ReplaceWorker | StartRouter | PutPeers | PutFleet | RunCanary
