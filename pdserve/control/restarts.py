"""When a worker that failed is started again. Pure; knows one worker at a time.

    FAILED ──BACKOFF_S──► replaced: what is left of it is ended, then it starts anew as PLACED
    READY for STABLE_S ──► its failures are forgotten

A worker that fails again and again is tried ever more rarely, but never given up: what broke it may be mended without telling us. A deployment that
was never ready is not repaired at all; it fails and says why, since its operator is watching.
"""

from dataclasses import replace

from pdserve.control.workers import Worker
from pdserve.types import WorkerState

BACKOFF_S = (1.0, 5.0, 15.0, 60.0, 300.0)
"""wait before a start, by failures in a row; the last one goes on"""
STABLE_S = 120.0
"""a worker that was ready for so long has its failures forgotten"""


def follow(worker: Worker, now_s: float) -> Worker:
    """Return the worker with its next start dated if it has failed, and without its failures if it has served long enough."""
    match worker.state:
        case WorkerState.FAILED if worker.restart_at_s is None:
            wait_s = BACKOFF_S[min(worker.failures, len(BACKOFF_S) - 1)]
            failures = worker.failures + 1
            detail = f"{worker.detail}; starts again after {wait_s:.0f} s (failure {failures} in a row)"
            return replace(worker, failures=failures, restart_at_s=now_s + wait_s, detail=detail)
        case WorkerState.READY if worker.failures and now_s - worker.since_s >= STABLE_S:
            return replace(worker, failures=0)
        case _:
            return worker


def is_due(worker: Worker, now_s: float) -> bool:
    """Return whether a failed worker is to be replaced now."""
    return worker.state is WorkerState.FAILED and worker.restart_at_s is not None and now_s >= worker.restart_at_s


def replaced(worker: Worker, error: str | None, now_s: float) -> Worker:
    """Return a failed worker after a try to replace it, `error` says why it did not succeed."""
    if error is not None:
        return replace(worker, restart_at_s=None, detail=error)
    return Worker(worker.spec, ((WorkerState.PENDING, worker.entered_s[0][1]), (WorkerState.PLACED, now_s)), failures=worker.failures)
