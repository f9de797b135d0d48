"""When a failed worker is started again."""

from dataclasses import replace

import pytest

from pdserve.control.restarts import BACKOFF_S, STABLE_S, follow, is_due, replaced
from pdserve.control.workers import Worker, new_worker
from pdserve.testing.fleet import specs
from pdserve.types import WorkerState

SPEC = specs(1, 0)[0]


def failed(now_s: float, failures: int = 0) -> Worker:
    return replace(new_worker(SPEC, 0.0), failures=failures).to(WorkerState.FAILED, now_s, "killed")


@pytest.mark.parametrize(("failures", "wait_s"), [*enumerate(BACKOFF_S), (len(BACKOFF_S), BACKOFF_S[-1]), (1000, BACKOFF_S[-1])])
def test_waits_grow_with_failures_in_a_row_and_never_end(failures: int, wait_s: float) -> None:
    """However often it failed, there is a next time, and the worker says when."""
    worker = follow(failed(100.0, failures), 100.0)
    assert not is_due(worker, 100.0 + wait_s - 0.01)
    assert is_due(worker, 100.0 + wait_s)
    assert worker.detail == f"killed; starts again after {wait_s:.0f} s (failure {failures + 1} in a row)"


def test_start_is_dated_once() -> None:
    """Looking again changes nothing, or the start would never come."""
    worker = follow(failed(100.0), 100.0)
    assert follow(worker, 100.5) == worker


def test_failed_replacement_is_a_failure_more() -> None:
    """It waits longer, and says what was in the way."""
    worker = follow(failed(0.0), 0.0)
    again = follow(replaced(worker, "no node has room", 5.0), 5.0)
    assert (again.failures, again.restart_at_s) == (2, 5.0 + BACKOFF_S[1])
    assert again.detail.startswith("no node has room; starts again after 5 s")


def test_replacement_starts_from_nothing_but_its_failures() -> None:
    """The new engine has told nothing yet."""
    worker = replaced(follow(failed(3.0), 3.0), None, 9.0)
    assert worker == Worker(SPEC, ((WorkerState.PENDING, 0.0), (WorkerState.PLACED, 9.0)), failures=1)


@pytest.mark.parametrize(("ready_for_s", "failures"), [(0.0, 3), (STABLE_S - 0.1, 3), (STABLE_S, 0)])
def test_long_service_forgets_failures(ready_for_s: float, failures: int) -> None:
    """Not at once: an engine that dies under every load would be started again every second."""
    worker = replace(new_worker(SPEC, 0.0), failures=3).to(WorkerState.READY, 50.0)
    assert follow(worker, 50.0 + ready_for_s).failures == failures


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.FAILED])
def test_nothing_else_is_replaced(state: WorkerState) -> None:
    """Least of all what was stopped on purpose."""
    worker = follow(new_worker(SPEC, 0.0).to(state, 1.0), 2.0)
    assert worker.restart_at_s is None and not is_due(worker, 1e9)
