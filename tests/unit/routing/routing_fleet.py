"""Small fleets and demands for tests of the room that routes."""

from collections.abc import Callable
from dataclasses import replace

from pdserve.clock import Clock
from pdserve.routing.line import PoolLimits
from pdserve.routing.pool import Pool
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Disaggregation, Policy
from pdserve.types import FleetSnapshot, Role, WorkerSnapshot, WorkerState

MODEL = "m"
MODEL_LENGTH = 100
"""tokens; `max_model_len` of every worker here unless a test says otherwise"""


def worker(worker_id: str, **changes: object) -> WorkerSnapshot:
    """Return a ready worker with room for one lease; its id begins with its role's letter: ``p0``, ``d1``."""
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    row = WorkerSnapshot(
        worker_id=worker_id,
        incarnation="i0",
        role=role,
        state=WorkerState.READY,
        url=f"http://{worker_id}",
        model=MODEL,
        max_model_len=MODEL_LENGTH,
        max_running=1,
        kv_capacity_tokens=1000,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def demand(
    prompt_tokens: int = 10, *, local: PathReason | None = None, avoid: tuple[str, ...] = (), model: str = MODEL, **more: object
) -> Demand:
    """Return what one request asks; `more` are fields of `Demand`."""
    return Demand(model, prompt_tokens, local, frozenset(avoid), **more)  # type: ignore[arg-type]


def open_pool(
    clock: Clock,
    *workers: WorkerSnapshot,
    max_queued_requests: int = 512,
    ttft_objective_s: float = 60.0,
    disaggregation: Disaggregation = "auto",
    policy: Policy | None = None,
    **limits: int,
) -> Pool:
    """Return a pool whose first fleet, version 1, is `workers`."""
    pool = Pool(clock, PoolLimits(max_queued_requests, ttft_objective_s, **limits), policy or Policy(disaggregation))
    pool.update(FleetSnapshot(1, workers))
    return pool


def measure_rate(pool: Pool, tokens: int, elapsed_s: float, advance: Callable[[float], None]) -> None:
    """Let an idle pool prefill one prompt, so that it knows `tokens` / `elapsed_s`."""
    entry = pool.enter(demand(tokens))
    assert entry.lease is not None
    advance(elapsed_s)
    pool.release_prefill(entry.lease, computed=True)
    pool.leave(entry)
