"""Decisions of single ticks that the state machine test does not pin down."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from pdserve.control.actions import Action, PutFleet, PutPeers, RunCanary, StartRouter, StartWorker
from pdserve.control.observation import Observation, Outcome, RouterSeen
from pdserve.control.plan import ControlState, Policy, initial_state, plan
from pdserve.control.state import Phase
from pdserve.control.workers import Limits
from pdserve.ports import AgentStatus, PeerHandshake
from pdserve.testing.fleet import specs
from pdserve.types import FleetSnapshot, RankAddress, Role, WorkerSnapshot, WorkerState

POLICY = Policy(Limits(load_s=100, link_s=60), canary_attempts=3, canary_pause_s=1)
BOUND = RouterSeen(1, running=True, pid=7, url="http://127.0.0.1:8000")
A = TypeVar("A", bound=Action)
Handshakes = Callable[[str, str], tuple[str, str]]


def connected(_worker: str, _peer: str) -> tuple[str, str]:
    return "connected", ""


def view(ids: list[str], now_s: float, handshake: Handshakes = connected, outcomes: tuple[Outcome, ...] = ()) -> Observation:
    """What is seen when these engines answer; `handshake` gives state and reason of (worker, peer)."""
    rows = tuple(
        WorkerSnapshot(worker, f"{worker}/1", Role(worker.split("-")[0]), WorkerState.LOADING, f"http://{worker}", "m", 0, 4, 0)
        for worker in ids
    )
    agents = {
        worker: AgentStatus(
            *(worker, f"{worker}/1", "m", 64, 16, 9, 9, 0, 0, 0, 1, (RankAddress(0, "h", 1),)),
            tuple(PeerHandshake(peer, f"{peer}/1", 0, 0, *handshake(worker, peer)) for peer in ids if peer != worker),
        )
        for worker in ids
    }
    return Observation(now_s, FleetSnapshot(1, rows), agents, BOUND, outcomes)


def kind(actions: tuple[Action, ...], wanted: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, wanted)]


def warm(prefill: int, decode: int, handshake: Handshakes = connected) -> tuple[ControlState, tuple[Action, ...]]:
    """Bring all workers up to the tick that runs the first canary, or would."""
    ids = [spec.worker_id for spec in specs(prefill, decode)]
    state, actions = plan(initial_state(specs(prefill, decode), 0.0), Observation(0.0), POLICY)
    for tick in range(1, 4):
        state, actions = plan(state, view(ids, float(tick), handshake, tuple(map(Outcome, actions))), POLICY)
        if kind(actions, RunCanary):
            break
    return state, actions


def states(state: ControlState) -> dict[str, WorkerState]:
    return {worker.worker_id: worker.state for worker in state.workers}


def test_first_tick_starts_router_and_all_workers() -> None:
    """Nothing waits for anything else at the start."""
    _, actions = plan(initial_state(specs(2, 1), 0.0), Observation(0.0), POLICY)
    assert actions == (StartRouter(), *map(StartWorker, specs(2, 1)))


def test_every_worker_gets_the_whole_peer_table_and_the_router_the_fleet() -> None:
    """Once the engines answer, one table of all of them goes to each."""
    state, actions = plan(initial_state(specs(2, 1), 0.0), Observation(0.0), POLICY)
    ids = ["prefill-0", "prefill-1", "decode-0"]
    _, actions = plan(state, view(ids, 1.0, outcomes=tuple(map(Outcome, actions))), POLICY)
    puts = kind(actions, PutPeers)
    assert sorted(put.worker_id for put in puts) == sorted(ids)
    assert all([entry.worker_id for entry in put.peers] == ids for put in puts)
    assert [row.state for put in kind(actions, PutFleet) for row in put.snapshot.workers] == [WorkerState.WARMING] * 3


def test_one_token_proves_both_ends() -> None:
    """Two prefills and one decode: the decode is proven with the first, then serves the second's canary."""
    state, actions = warm(2, 1)
    (first,) = kind(actions, RunCanary)
    assert (first.prefill_worker, first.decode_worker) == ("prefill-0", "decode-0")
    ids = list(states(state))
    state, actions = plan(state, view(ids, 4.0, outcomes=(Outcome(first),)), POLICY)
    assert states(state) == {"prefill-0": WorkerState.READY, "prefill-1": WorkerState.WARMING, "decode-0": WorkerState.READY}
    state, actions = plan(state, view(ids, 5.0, outcomes=tuple(map(Outcome, actions))), POLICY)
    (second,) = kind(actions, RunCanary)
    assert (second.prefill_worker, second.decode_worker) == ("prefill-1", "decode-0")
    state, actions = plan(state, view(ids, 6.0, outcomes=(Outcome(second),)), POLICY)
    state, _ = plan(state, view(ids, 7.0, outcomes=tuple(map(Outcome, actions))), POLICY)
    assert (state.phase, state.ready_at_s) == (Phase.READY, 7.0)


def test_canary_of_an_older_incarnation_proves_nothing() -> None:
    """An engine that was started again while its canary ran has to run another."""
    state, actions = warm(1, 1)
    (canary,) = kind(actions, RunCanary)
    stale = replace(canary, decode_incarnation="decode-0/0")
    state = replace(state, in_flight=(stale,))
    state, _ = plan(state, view(list(states(state)), 4.0, outcomes=(Outcome(stale),)), POLICY)
    assert states(state) == {"prefill-0": WorkerState.READY, "decode-0": WorkerState.WARMING}


def test_refused_handshake_fails_the_worker_with_both_values() -> None:
    """The reason of the refusal reaches the operator as it was given, and the deployment fails with it."""

    def refuse(worker: str, peer: str) -> tuple[str, str]:
        refused = (worker, peer) == ("decode-0", "prefill-0")
        return ("refused", "block_tokens differs: ours 16, peer's 32") if refused else ("connected", "")

    state, actions = warm(1, 1, refuse)
    assert states(state)["decode-0"] is WorkerState.FAILED
    assert state.detail == "decode-0: refused by prefill-0: block_tokens differs: ours 16, peer's 32"
    assert (state.phase, actions) == (Phase.FAILED, ())


def test_missing_link_is_waited_for_then_fails_by_name() -> None:
    """Time runs from when both ends answer."""

    def deaf(worker: str, _peer: str) -> tuple[str, str]:
        return ("connecting" if worker == "prefill-0" else "connected"), ""

    state, actions = warm(1, 1, deaf)
    assert kind(actions, RunCanary) == []
    assert next(w.detail for w in state.workers if w.worker_id == "prefill-0") == "linking to decode-0"
    state, _ = plan(state, view(list(states(state)), 60.0, deaf), POLICY)
    assert state.phase is Phase.STARTING
    state, _ = plan(state, view(list(states(state)), 62.0, deaf), POLICY)
    assert state.detail == "prefill-0: no KV link to decode-0 within 60 s"


def test_link_time_runs_from_when_both_ends_answer() -> None:
    """A worker that waited long for a slow partner is not blamed for the time before."""

    def deaf(_worker: str, _peer: str) -> tuple[str, str]:
        return "connecting", ""

    state, actions = plan(initial_state(specs(1, 1), 0.0), Observation(0.0), POLICY)
    state, actions = plan(state, view(["prefill-0"], 1.0, outcomes=tuple(map(Outcome, actions[:2]))), POLICY)
    both = ["prefill-0", "decode-0"]
    state, _ = plan(state, view(both, 90.0, deaf, tuple(map(Outcome, actions))), POLICY)
    state, _ = plan(state, view(both, 149.0, deaf), POLICY)
    assert states(state) == {"prefill-0": WorkerState.WARMING, "decode-0": WorkerState.WARMING}
    state, _ = plan(state, view(both, 151.0, deaf), POLICY)
    assert state.phase is Phase.FAILED


def test_peer_that_reports_no_handshake_is_not_linked() -> None:
    """Silence about a peer is no link, from either end."""
    for quiet in ("prefill-0", "decode-0"):
        ids = ["prefill-0", "decode-0"]
        state, actions = plan(initial_state(specs(1, 1), 0.0), Observation(0.0), POLICY)
        for tick in range(1, 5):
            seen = view(ids, float(tick), outcomes=tuple(map(Outcome, actions)))
            agents = {**seen.agents, quiet: replace(seen.agents[quiet], handshakes=())}
            state, actions = plan(state, replace(seen, agents=agents), POLICY)
            assert kind(actions, RunCanary) == []


def test_peer_table_of_an_older_incarnation_does_not_count() -> None:
    """An engine that was started again while its table was sent gets it again."""
    ids = ["prefill-0", "decode-0"]
    state, actions = plan(initial_state(specs(1, 1), 0.0), Observation(0.0), POLICY)
    state, actions = plan(state, view(ids, 1.0, outcomes=tuple(map(Outcome, actions))), POLICY)
    stale = replace(kind(actions, PutPeers)[0], incarnation="prefill-0/0")
    state = replace(state, in_flight=(stale,))
    _, actions = plan(state, view(ids, 2.0, outcomes=(Outcome(stale),)), POLICY)
    assert {put.worker_id for put in kind(actions, PutPeers)} == set(ids)


def test_failing_canary_is_repeated_after_a_pause_then_fails() -> None:
    """Three in a row; the pause keeps a quick failure from using them up."""
    state, actions = warm(1, 1)
    ids = list(states(state))
    for attempt, at_s in enumerate((4.0, 6.0, 8.0), start=1):
        (canary,) = kind(actions, RunCanary)
        state, actions = plan(state, view(ids, at_s, outcomes=(Outcome(canary, "no token"),)), POLICY)
        assert kind(actions, RunCanary) == []
        if attempt < 3:
            # the changed detail is a new fleet version; canaries wait until the router has it
            state, actions = plan(state, view(ids, at_s + 1.5, outcomes=tuple(map(Outcome, actions))), POLICY)
    assert state.detail == "prefill-0: no token through prefill-0 and decode-0: no token"


def test_a_bad_partner_does_not_fail_a_good_worker() -> None:
    """After a failure the decode is tried with the other prefill first."""
    state, actions = warm(2, 1)
    ids = list(states(state))
    (canary,) = kind(actions, RunCanary)
    state, actions = plan(state, view(ids, 4.0, outcomes=(Outcome(canary, "no token"),)), POLICY)
    state, actions = plan(state, view(ids, 5.5, outcomes=tuple(map(Outcome, actions))), POLICY)
    (second,) = kind(actions, RunCanary)
    assert (canary.prefill_worker, second.prefill_worker) == ("prefill-0", "prefill-1")


def ready() -> ControlState:
    """One prefill and one decode, ready."""
    state, actions = warm(1, 1)
    ids = list(states(state))
    for tick in (4.0, 5.0):
        state, actions = plan(state, view(ids, tick, outcomes=tuple(map(Outcome, actions))), POLICY)
    assert state.phase is Phase.READY
    return state


def test_restarted_router_is_given_the_fleet_again() -> None:
    """A new router process knows nothing, though the fleet did not change."""
    state = ready()
    version = state.fleet.version
    seen = replace(view(list(states(state)), 6.0), router=RouterSeen(1, running=False))
    state, actions = plan(state, seen, POLICY)
    assert (actions, state.phase) == ((StartRouter(),), Phase.DEGRADED)
    seen = replace(view(list(states(state)), 7.0, outcomes=(Outcome(StartRouter()),)), router=replace(BOUND, starts=2))
    state, actions = plan(state, seen, POLICY)
    assert actions == (PutFleet(2, state.fleet),) and state.fleet.version == version
    state, actions = plan(state, replace(seen, now_s=8.0, outcomes=(Outcome(actions[0]),)), POLICY)
    assert (actions, state.phase) == ((), Phase.READY)


def test_failed_worker_is_advertised_and_degrades() -> None:
    """A deployment that was ready stays up; the router is told who failed and peers forget it."""
    state = ready()
    seen = view(list(states(state)), 6.0)
    assert seen.fleet is not None
    failed = FleetSnapshot(
        1, tuple(replace(row, state=WorkerState.FAILED) if row.role is Role.DECODE else row for row in seen.fleet.workers)
    )
    state, actions = plan(state, replace(seen, fleet=failed, agents={}), POLICY)
    assert (state.phase, state.detail) == (Phase.DEGRADED, "decode-0 is failed")
    (put,) = kind(actions, PutFleet)
    assert [row.state for row in put.snapshot.workers] == [WorkerState.READY, WorkerState.FAILED]
    (peers,) = kind(actions, PutPeers)
    assert (peers.worker_id, [entry.worker_id for entry in peers.peers]) == ("prefill-0", ["prefill-0"])


def test_unreachable_fleet_changes_nothing() -> None:
    """With Ray's head away the engines go on, and so does what the router is told."""
    state = ready()
    seen = replace(view(list(states(state)), 500.0), fleet=None)
    after, actions = plan(state, seen, POLICY)
    assert (after.phase, after.fleet, actions) == (Phase.READY, state.fleet, ())


@pytest.mark.parametrize("detail", ["router.port: 8000: taken", ""])
def test_router_that_never_serves_fails_the_deployment(detail: str) -> None:
    """Three ends in a row before the first readiness; the reason is its last line."""
    state = initial_state(specs(1, 1), 0.0)
    for start in range(1, 4):
        state, _ = plan(state, Observation(10.0 * start, router=RouterSeen(start, running=False, detail=detail)), POLICY)
    assert state.phase is Phase.FAILED
    assert state.detail == f"router: {detail or 'ended again and again; see its log'}"
