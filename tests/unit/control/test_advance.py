"""How one observation moves one worker."""

from dataclasses import replace

import pytest

from pdserve.control.workers import Limits, Worker, advance
from pdserve.ports import AgentStatus, WorkerSpec
from pdserve.types import FleetSnapshot, RankAddress, Role, WorkerSnapshot, WorkerState

SPEC = WorkerSpec("decode-0", Role.DECODE, 1)
LIMITS = Limits(load_s=100, link_s=60, silence_s=15, lost_s=120)
ENTERED_S = 1000.0
S = WorkerState


def row(state: WorkerState = S.LOADING, incarnation: str = "one") -> WorkerSnapshot:
    return WorkerSnapshot("decode-0", incarnation, Role.DECODE, state, "http://engine", "m", 0, 4, 0, detail="engine said so")


def agent(incarnation: str = "one") -> AgentStatus:
    return AgentStatus("decode-0", incarnation, "m", 2048, 16, 100, 100, 0, 0, 0, 1, (RankAddress(0, "127.0.0.1", 1),), ())


def worker_in(state: WorkerState) -> Worker:
    """A worker that has been in `state` since `ENTERED_S`, with what a worker in that state has behind it."""
    worker = Worker(SPEC, ((state, ENTERED_S),), placed=None if state is S.PENDING else row())
    if state in {S.WARMING, S.READY, S.DRAINING}:
        worker = replace(worker, agent=agent(), answered_s=ENTERED_S, peers_version=3)
    return worker


UNKNOWN = None
GONE = FleetSnapshot(1, ())
PLACED = FleetSnapshot(1, (row(S.PLACED),))
RUNS = FleetSnapshot(1, (row(),))
RESTARTED = FleetSnapshot(1, (row(incarnation="two"),))
FAILED = FleetSnapshot(1, (row(S.FAILED),))
STOPPED = FleetSnapshot(1, (row(S.STOPPED),))

TRANSITIONS = [
    # state before, fleet, agent, seconds in the state, state after
    (S.PENDING, UNKNOWN, None, 1, S.PENDING),
    (S.PENDING, GONE, None, 1, S.PENDING),  # asked for; nothing is placed yet
    (S.PENDING, PLACED, None, 1, S.PLACED),
    (S.PENDING, RUNS, None, 1, S.LOADING),
    (S.PENDING, RUNS, agent(), 1, S.WARMING),
    (S.PENDING, FAILED, None, 1, S.FAILED),
    (S.PENDING, UNKNOWN, None, 1e6, S.PENDING),  # the fleet answers for how long placing may take
    (S.PLACED, UNKNOWN, None, 1, S.PLACED),
    (S.PLACED, PLACED, None, 1, S.PLACED),
    (S.PLACED, RUNS, None, 1, S.LOADING),
    (S.PLACED, RUNS, agent(), 1, S.WARMING),
    (S.PLACED, PLACED, agent("two"), 1, S.PLACED),  # an answer of another incarnation proves nothing
    (S.PLACED, GONE, None, 1, S.FAILED),
    (S.PLACED, STOPPED, None, 1, S.FAILED),
    (S.PLACED, PLACED, None, 101, S.FAILED),
    (S.LOADING, UNKNOWN, None, 1, S.LOADING),
    (S.LOADING, RUNS, None, 99, S.LOADING),
    (S.LOADING, RUNS, None, 101, S.FAILED),
    (S.LOADING, RUNS, agent(), 101, S.WARMING),  # late, but there
    (S.LOADING, UNKNOWN, agent(), 1, S.WARMING),
    (S.LOADING, RUNS, agent("two"), 1, S.LOADING),
    (S.LOADING, RESTARTED, agent("two"), 1, S.WARMING),
    (S.LOADING, GONE, agent(), 1, S.FAILED),
    (S.LOADING, FAILED, agent(), 1, S.FAILED),
    (S.WARMING, RUNS, agent(), 1e6, S.WARMING),  # it waits for its peers, which is no fault of its own
    (S.WARMING, RUNS, None, 119, S.WARMING),
    (S.WARMING, RUNS, None, 121, S.FAILED),
    (S.WARMING, RESTARTED, None, 1, S.LOADING),
    (S.WARMING, FAILED, None, 1, S.FAILED),
    (S.WARMING, GONE, None, 1, S.FAILED),
    (S.READY, RUNS, agent(), 1e6, S.READY),
    (S.READY, UNKNOWN, agent(), 1e6, S.READY),  # Ray is away; the engine is not
    (S.READY, UNKNOWN, None, 14, S.READY),
    (S.READY, RUNS, None, 14, S.READY),
    (S.READY, RUNS, None, 16, S.WARMING),
    (S.READY, RESTARTED, None, 1, S.LOADING),
    (S.READY, RESTARTED, agent("one"), 1, S.LOADING),
    (S.READY, FAILED, agent(), 1, S.FAILED),
    (S.READY, GONE, agent(), 1, S.FAILED),
    (S.DRAINING, RUNS, agent(), 1, S.DRAINING),
    (S.DRAINING, FAILED, None, 1, S.FAILED),
    (S.FAILED, RUNS, agent(), 1, S.FAILED),
    (S.FAILED, RESTARTED, agent("two"), 1, S.FAILED),
    (S.FAILED, GONE, None, 1e6, S.FAILED),
    (S.STOPPED, RUNS, agent(), 1, S.STOPPED),
    (S.STOPPED, GONE, None, 1e6, S.STOPPED),
]


@pytest.mark.parametrize(("before", "fleet", "answer", "elapsed_s", "after"), TRANSITIONS)
def test_observation_moves_worker(
    before: WorkerState, fleet: FleetSnapshot | None, answer: AgentStatus | None, elapsed_s: float, after: WorkerState
) -> None:
    """Every state meets every kind of observation."""
    moved = advance(worker_in(before), fleet, answer, ENTERED_S + elapsed_s, LIMITS)
    assert moved.state is after


def test_failed_worker_says_why() -> None:
    """The detail is the fleet's own word where it has one, and a limit names its length."""
    assert advance(worker_in(S.READY), FAILED, None, ENTERED_S, LIMITS).detail == "engine said so"
    assert "within 100 s" in advance(worker_in(S.LOADING), RUNS, None, ENTERED_S + 101, LIMITS).detail
    assert advance(worker_in(S.READY), GONE, None, ENTERED_S, LIMITS).detail == "its actor is gone"


def test_new_incarnation_forgets_what_the_old_one_had() -> None:
    """Peers, answers and canary failures belong to one incarnation."""
    before = replace(worker_in(S.READY), canary_failures=2, canary_after_s=9e9)
    after = advance(before, RESTARTED, None, ENTERED_S + 1, LIMITS)
    assert (after.incarnation, after.agent, after.peers_version, after.canary_failures, after.canary_after_s) == ("two", None, 0, 0, 0.0)


def test_going_back_keeps_a_timeline_without_repeats() -> None:
    """A worker that flaps between two states for ever has a bounded history, in order of time."""
    worker = worker_in(S.PENDING)
    for step in range(1, 100):
        worker = worker.to(S.READY if step % 2 else S.WARMING, ENTERED_S + step)
    assert [state for state, _ in worker.entered_s] == [S.PENDING, S.READY]
    assert worker.since_s == ENTERED_S + 99


def test_advertised_facts_come_from_the_agent() -> None:
    """Before the agent answers the fleet's row stands; then length and capacity are the engine's own."""
    loading = worker_in(S.LOADING).advertised()
    ready = worker_in(S.READY).advertised()
    assert loading is not None and (loading.state, loading.kv_capacity_tokens) == (S.LOADING, 0)
    assert ready is not None and (ready.state, ready.max_model_len, ready.kv_capacity_tokens, ready.block_tokens) == (
        S.READY,
        2048,
        1600,
        16,
    )
    assert worker_in(S.PENDING).advertised() is None
