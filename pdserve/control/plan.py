"""The decision of one tick: state and observation in, new state and actions out. Pure: no I/O, no clock of its own.

Level-triggered: each tick compares what should be with what is seen, so what failed is asked for again. An action stays *in flight* from
the tick that asks for it until an outcome names it; two of one subject never run at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pdserve.control import restarts, router_plan
from pdserve.control.actions import Action, PutFleet, PutPeers, ReplaceWorker, RunCanary, StartRouter, StartWorker
from pdserve.control.observation import Observation, Outcome
from pdserve.control.peers import is_linked, links, of_interest, peer_table
from pdserve.control.router_plan import RouterPlan
from pdserve.control.state import Phase
from pdserve.control.workers import ENDED, SERVING, Limits, Worker, advance, new_worker
from pdserve.ports import PeerEntry, WorkerSpec
from pdserve.types import FleetSnapshot, Role, WorkerState


@dataclass(frozen=True, slots=True)
class Policy:
    """What the plan keeps to."""

    limits: Limits
    canary_attempts: int = 3
    """failures in a row after which a warming worker has failed"""
    canary_pause_s: float = 1.0
    """between two canaries of one worker"""
    router_attempts: int = 3
    """router failures in a row after which a deployment that was never ready has failed"""


@dataclass(frozen=True, slots=True)
class ControlState:
    """All that one tick hands to the next."""

    workers: tuple[Worker, ...]
    peer_version: int = 0
    peers: tuple[PeerEntry, ...] = ()
    fleet: FleetSnapshot = field(default_factory=lambda: FleetSnapshot(0, ()))
    """what the router is to know"""
    router: RouterPlan = field(default_factory=RouterPlan)
    in_flight: tuple[Action, ...] = ()
    phase: Phase = Phase.STARTING
    ready_at_s: float | None = None
    detail: str = ""

    def is_busy(self, subject: str) -> bool:
        """Return whether an action on `subject` is in flight."""
        return any(action.subject == subject for action in self.in_flight)


def initial_state(specs: Sequence[WorkerSpec], now_s: float) -> ControlState:
    """Return the state before the first tick; workers are started in the order of `specs`."""
    return ControlState(tuple(new_worker(spec, now_s) for spec in specs))


def plan(state: ControlState, seen: Observation, policy: Policy) -> tuple[ControlState, tuple[Action, ...]]:
    """Decide one tick.

    Args:
        state: what the tick before returned; its actions are being done.
        seen: what is there now, seen after the outcomes in it.
        policy: limits.

    Returns:
        The state for the next tick, and the actions to begin now: none shares its subject with another of them or with one in flight.
        Once the phase is FAILED there are none.
    """
    for outcome in seen.outcomes:
        state = _settle(state, outcome, seen.now_s, policy)
    state = _each(state, lambda w: advance(w, seen.fleet, seen.agents.get(w.worker_id), seen.now_s, policy.limits))
    workers = state.workers
    state = _each(state, lambda w: _judge_links(w, workers, seen.now_s, policy.limits))
    if state.ready_at_s is not None:
        state = _each(state, lambda w: restarts.follow(w, seen.now_s))
    state = _version_tables(state)
    state = replace(state, router=router_plan.follow(state.router, seen.router, seen.now_s))
    state = _judge_phase(state, seen, policy)
    if state.phase is Phase.FAILED:
        return state, ()
    wanted = (*_router_actions(state, seen), *_start_actions(state, seen), *_peer_actions(state), *_canary_actions(state, seen))
    actions = tuple(action for action in wanted if not state.is_busy(action.subject))
    return replace(state, in_flight=(*state.in_flight, *actions)), actions


def _each(state: ControlState, change: Callable[[Worker], Worker]) -> ControlState:
    return replace(state, workers=tuple(change(worker) for worker in state.workers))


def _settle(state: ControlState, outcome: Outcome, now_s: float, policy: Policy) -> ControlState:
    """Take an ended action out of flight and note what it did."""
    state = replace(state, in_flight=tuple(action for action in state.in_flight if action != outcome.action))
    error = outcome.error
    match outcome.action:
        case StartWorker() as start:
            return _each(state, lambda w: _after_start(w, error, now_s) if w.spec == start.spec else w)
        case ReplaceWorker() as again:
            return _each(state, lambda w: restarts.replaced(w, error, now_s) if w.spec == again.spec else w)
        case PutPeers() as put if error is None:
            return _each(state, lambda w: replace(w, peers_version=put.version) if w.incarnation == put.incarnation else w)
        case PutFleet(router_start, snapshot) if error is None:
            return replace(state, router=replace(state.router, fleet_start=router_start, fleet_version=snapshot.version))
        case RunCanary() as canary:
            return _each(state, lambda w: _after_canary(w, canary, error, now_s, policy))
        case _:
            return state


def _after_start(worker: Worker, error: str | None, now_s: float) -> Worker:
    if error is not None and worker.state not in ENDED:
        return worker.to(WorkerState.FAILED, now_s, error)
    return worker.to(WorkerState.PLACED, now_s) if worker.state is WorkerState.PENDING else worker


def _after_canary(worker: Worker, canary: RunCanary, error: str | None, now_s: float, policy: Policy) -> Worker:
    if worker.state is not WorkerState.WARMING or canary.incarnation_of(worker.worker_id) != worker.incarnation:
        return worker
    if error is None:
        return replace(worker, canary_failures=0).to(WorkerState.READY, now_s)
    failures = worker.canary_failures + 1
    detail = f"no token through {canary.prefill_worker} and {canary.decode_worker}: {error}"
    if failures >= policy.canary_attempts:
        return worker.to(WorkerState.FAILED, now_s, detail)
    return replace(worker, canary_failures=failures, canary_after_s=now_s + policy.canary_pause_s, detail=detail)


def _judge_links(worker: Worker, workers: Sequence[Worker], now_s: float, limits: Limits) -> Worker:
    """Fail a warming worker that a peer refused or never linked to; else say what it waits for."""
    if worker.state is not WorkerState.WARMING:
        return worker
    standing = links(worker, workers)
    if standing.refusal:
        return worker.to(WorkerState.FAILED, now_s, standing.refusal)
    overdue = [peer.worker_id for peer in standing.missing if now_s - max(worker.since_s, peer.since_s) > limits.link_s]
    if overdue:
        return worker.to(WorkerState.FAILED, now_s, f"no KV link to {', '.join(overdue)} within {limits.link_s:.0f} s")
    if standing.missing:
        return replace(worker, detail=f"linking to {', '.join(peer.worker_id for peer in standing.missing)}")
    if not of_interest(worker, workers):
        return replace(worker, detail="waiting for a worker of the other role")
    return worker if worker.canary_failures else replace(worker, detail="canary")


def _version_tables(state: ControlState) -> ControlState:
    """Give the peer table and the fleet a new version where their content changed."""
    peers = peer_table(state.workers)
    if peers != state.peers:
        state = replace(state, peers=peers, peer_version=state.peer_version + 1)
    rows = tuple(row for worker in state.workers if (row := worker.advertised()) is not None)
    if rows != state.fleet.workers:
        state = replace(state, fleet=FleetSnapshot(state.fleet.version + 1, rows))
    return state


def _judge_phase(state: ControlState, seen: Observation, policy: Policy) -> ControlState:
    waiting = [worker for worker in state.workers if worker.state is not WorkerState.READY]
    has_router = state.router.has_fleet(seen.router, state.fleet.version)
    if not waiting and has_router:
        return replace(state, phase=Phase.READY, detail="", ready_at_s=seen.now_s if state.ready_at_s is None else state.ready_at_s)
    if state.ready_at_s is not None:
        missing = [f"{worker.worker_id} is {worker.state}" for worker in waiting]
        return replace(state, phase=Phase.DEGRADED, detail=", ".join(missing if waiting else ["the router is being brought up to date"]))
    failed = next((worker for worker in waiting if worker.state is WorkerState.FAILED), None)
    if failed is not None:
        return replace(state, phase=Phase.FAILED, detail=f"{failed.worker_id}: {failed.detail}")
    if state.router.failures >= policy.router_attempts:
        return replace(state, phase=Phase.FAILED, detail=f"router: {seen.router.detail or 'ended again and again; see its log'}")
    return state


def _router_actions(state: ControlState, seen: Observation) -> Iterator[Action]:
    if router_plan.must_start(state.router, seen.router, seen.now_s):
        yield StartRouter()
    elif seen.router.url is not None and state.fleet.version and not state.router.has_fleet(seen.router, state.fleet.version):
        yield PutFleet(seen.router.starts, state.fleet)


def _start_actions(state: ControlState, seen: Observation) -> Iterator[Action]:
    """Start all that wait, at once: engines load in parallel in less than half the time that they take in turn, also on two cores.

    A fleet that cannot be asked is not asked to replace anything.
    """
    for worker in state.workers:
        if worker.state is WorkerState.PENDING:
            yield StartWorker(worker.spec)
        elif seen.fleet is not None and restarts.is_due(worker, seen.now_s):
            yield ReplaceWorker(worker.spec)


def _peer_actions(state: ControlState) -> Iterator[Action]:
    for worker in state.workers:
        if worker.placed is not None and worker.state in SERVING and worker.peers_version < state.peer_version:
            yield PutPeers(worker.worker_id, worker.incarnation, worker.placed.url, state.peer_version, state.peers)


def _canary_actions(state: ControlState, seen: Observation) -> Iterator[Action]:
    """Pair each warming worker that is linked with a free partner; a partner that is warming too is proven by the same token.

    Those with the fewest failures come first, so that one bad worker does not use up a good one's attempts.
    """
    if not state.router.has_fleet(seen.router, state.fleet.version):
        return
    running = [action for action in state.in_flight if isinstance(action, RunCanary)]
    taken = {worker_id for canary in running for worker_id in (canary.prefill_worker, canary.decode_worker)}
    for worker in sorted(state.workers, key=lambda worker: worker.canary_failures):
        if worker.state is not WorkerState.WARMING or worker.worker_id in taken or not _may_pair(worker, seen.now_s):
            continue
        if links(worker, state.workers).missing:
            continue
        partners = [
            peer
            for peer in of_interest(worker, state.workers)
            if peer.worker_id not in taken and is_linked(peer, worker) and _may_pair(peer, seen.now_s)
        ]
        if partners:
            partner = min(partners, key=lambda peer: (peer.canary_failures, peer.state is not WorkerState.WARMING, peer.worker_id))
            taken |= {worker.worker_id, partner.worker_id}
            prefill, decode = (worker, partner) if worker.spec.role is Role.PREFILL else (partner, worker)
            yield RunCanary(prefill.worker_id, prefill.incarnation, decode.worker_id, decode.incarnation)


def _may_pair(worker: Worker, now_s: float) -> bool:
    return worker.state in {WorkerState.WARMING, WorkerState.READY} and now_s >= worker.canary_after_s
