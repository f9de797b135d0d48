"""One worker as the controller follows it, and how an observation moves it. Pure; knows nothing of other workers.

    PENDING ──start──► PLACED ──engine runs──► LOADING ──agent answers──► WARMING ──canary──► READY
       any ──fleet says so, or a limit passed──► FAILED          READY ──agent silent──► WARMING
       any ──new incarnation──► LOADING

READY is given in `plan`, which sees pairs; a failed worker's next start is `restarts`' to date.
"""

from dataclasses import dataclass, replace

from pdserve.ports import AgentStatus, WorkerSpec
from pdserve.types import FleetSnapshot, WorkerSnapshot, WorkerState

ENDED = frozenset({WorkerState.FAILED, WorkerState.STOPPED})
SERVING = frozenset({WorkerState.WARMING, WorkerState.READY, WorkerState.DRAINING})
"""states in which an engine answers, so that it takes part in the peer table"""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may take. Seconds on the controller's clock."""

    load_s: float
    """from placed until the agent answers"""
    link_s: float = 60.0
    """from the moment that a worker and its peer both answer until they are linked"""
    silence_s: float = 15.0
    """a ready worker whose engine loop answers nothing for so long is not advertised as ready"""
    lost_s: float = 120.0
    """a warming worker that answers nothing for so long has failed"""


@dataclass(frozen=True, slots=True)
class Worker:
    """What the controller knows about one worker."""

    spec: WorkerSpec
    entered_s: tuple[tuple[WorkerState, float], ...]
    """states in the order they were entered, with the time; the last is the present one, and going back forgets what came after"""
    placed: WorkerSnapshot | None = None
    """the fleet's last word"""
    agent: AgentStatus | None = None
    """the present incarnation's last answer"""
    answered_s: float = 0.0
    peers_version: int = 0
    """the peer table that this incarnation took"""
    canary_failures: int = 0
    canary_after_s: float = 0.0
    failures: int = 0
    """ends in a row"""
    restart_at_s: float | None = None
    """when a failed worker is started again, None while that is not decided"""
    detail: str = ""

    @property
    def worker_id(self) -> str:
        return self.spec.worker_id

    @property
    def state(self) -> WorkerState:
        return self.entered_s[-1][0]

    @property
    def since_s(self) -> float:
        return self.entered_s[-1][1]

    @property
    def incarnation(self) -> str:
        return self.placed.incarnation if self.placed is not None else ""

    @property
    def may_touch_memory(self) -> bool:
        """Whether its engine, failed or not, may still write to its peers' slots: it has answered, and is not known to have ended."""
        if self.placed is None or self.agent is None or self.agent.incarnation != self.placed.incarnation:
            return False
        return self.state in SERVING or (self.state is WorkerState.FAILED and self.placed.state not in ENDED)

    def to(self, state: WorkerState, now_s: float, detail: str = "") -> "Worker":
        """Return the worker in `state`, with one line about it."""
        if state is self.state:
            return replace(self, detail=detail)
        names = [name for name, _ in self.entered_s]
        kept = self.entered_s[: names.index(state)] if state in names else self.entered_s
        return replace(self, entered_s=(*kept, (state, now_s)), detail=detail)

    def advertised(self) -> WorkerSnapshot | None:
        """Return what the router is told about it, None while it has no address."""
        if self.placed is None or not self.placed.url:
            return None
        known = replace(self.placed, role=self.spec.role, state=self.state, detail=self.detail)
        if self.agent is None:
            return known
        return replace(
            known,
            max_model_len=self.agent.max_model_len,
            block_tokens=self.agent.block_tokens,
            kv_capacity_tokens=self.agent.blocks_total * self.agent.block_tokens,
            tensor_parallel_size=self.agent.tensor_parallel_size,
        )


def new_worker(spec: WorkerSpec, now_s: float) -> Worker:
    """Return a worker that was asked for just now."""
    return Worker(spec, ((WorkerState.PENDING, now_s),))


def advance(worker: Worker, fleet: FleetSnapshot | None, agent: AgentStatus | None, now_s: float, limits: Limits) -> Worker:
    """Return the worker after what the fleet and its agent say, and after its limits."""
    placed = worker.placed if fleet is None else next((row for row in fleet.workers if row.worker_id == worker.worker_id), None)
    if worker.state in ENDED:
        return replace(worker, placed=placed)
    if fleet is not None:
        worker = _follow_fleet(worker, placed, now_s)
    if agent is not None and worker.incarnation and agent.incarnation == worker.incarnation and worker.state not in ENDED:
        worker = replace(worker, agent=agent, answered_s=now_s)
        if worker.state in {WorkerState.PLACED, WorkerState.LOADING}:
            worker = worker.to(WorkerState.WARMING, now_s)
    return _apply_limits(worker, now_s, limits)


def _follow_fleet(worker: Worker, placed: WorkerSnapshot | None, now_s: float) -> Worker:
    if placed is None:
        return worker if worker.state is WorkerState.PENDING else worker.to(WorkerState.FAILED, now_s, "its actor is gone")
    restarted = worker.incarnation not in {"", placed.incarnation}
    worker = replace(worker, placed=placed)
    if placed.state in ENDED:
        return worker.to(WorkerState.FAILED, now_s, placed.detail or f"its engine {placed.state}")
    if restarted:
        worker = replace(worker, agent=None, peers_version=0, canary_failures=0, canary_after_s=0.0)
        return worker.to(WorkerState.LOADING, now_s, "its engine was started again")
    if placed.state is WorkerState.LOADING and worker.state in {WorkerState.PENDING, WorkerState.PLACED}:
        return worker.to(WorkerState.LOADING, now_s)
    if placed.state is WorkerState.PLACED and worker.state is WorkerState.PENDING:
        return worker.to(WorkerState.PLACED, now_s)
    return worker


def _apply_limits(worker: Worker, now_s: float, limits: Limits) -> Worker:
    silent_s = now_s - worker.answered_s
    match worker.state:
        case WorkerState.PLACED | WorkerState.LOADING if now_s - worker.since_s > limits.load_s:
            return worker.to(WorkerState.FAILED, now_s, f"its engine did not answer within {limits.load_s:.0f} s; see its log")
        case WorkerState.READY if silent_s > limits.silence_s:
            return worker.to(WorkerState.WARMING, now_s, "its engine loop stopped answering")
        case WorkerState.WARMING if silent_s > limits.lost_s:
            return worker.to(WorkerState.FAILED, now_s, f"its engine loop has not answered for {silent_s:.0f} s")
        case _:
            return worker
