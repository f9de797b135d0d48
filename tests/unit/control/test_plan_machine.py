"""What holds of every plan, whatever the fleet, the agents, the router and time do."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.control import restarts
from pdserve.control.actions import Action, PutFleet, PutPeers, ReplaceWorker, RunCanary, StartRouter, StartWorker
from pdserve.control.observation import Observation, Outcome, RouterSeen
from pdserve.control.plan import ControlState, Policy, initial_state, plan
from pdserve.control.state import Phase
from pdserve.control.workers import SERVING, Limits
from pdserve.ports import AgentStatus, PeerHandshake
from pdserve.testing.fleet import specs
from pdserve.types import FleetSnapshot, RankAddress, WorkerSnapshot, WorkerState

POLICY = Policy(Limits(load_s=50, link_s=30, silence_s=10, lost_s=40))
SPECS = specs(2, 2)
IDS = [spec.worker_id for spec in SPECS]
ROLES = {spec.worker_id: spec.role for spec in SPECS}


class PlanMachine(RuleBasedStateMachine):
    """A world that may do anything, and the plan that watches it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.rows: dict[str, WorkerSnapshot] = {}
        self.silent: set[str] = set()
        self.refusing: set[tuple[str, str]] = set()
        self.is_fleet_known = True
        self.router = RouterSeen()
        self.router_seen = self.router
        self.rows_seen: dict[str, WorkerSnapshot] = {}
        self.outcomes: list[Outcome] = []
        self.state: ControlState = initial_state(SPECS, self.now_s)
        self.before: ControlState = self.state
        self.proven: set[str] = set()
        self.actions: tuple[Action, ...] = ()
        self.incarnations = 0

    @initialize()
    def first_tick(self) -> None:
        self.tick(0.0)

    @rule(elapsed_s=st.sampled_from([0.0, 0.5, 0.5, 5.0, 20.0]))
    def tick(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        for outcome in self.outcomes:
            if isinstance(outcome.action, RunCanary) and outcome.error is None:
                self.proven |= {outcome.action.prefill_incarnation, outcome.action.decode_incarnation}
        seen = Observation(
            now_s=self.now_s,
            fleet=FleetSnapshot(1, tuple(self.rows.values())) if self.is_fleet_known else None,
            agents={worker_id: self.answer(row) for worker_id, row in self.rows.items() if worker_id not in self.silent},
            router=self.router,
            outcomes=tuple(self.outcomes),
        )
        self.outcomes = []
        self.router_seen = self.router
        if self.is_fleet_known:
            self.rows_seen = dict(self.rows)
        self.before = self.state
        self.state, self.actions = plan(self.before, seen, POLICY)

    @precondition(lambda self: self.state.in_flight and self.outcomes == [])
    @rule(data=st.data(), ok=st.booleans())
    def finish(self, data: st.DataObject, ok: bool) -> None:
        action = data.draw(st.sampled_from(self.state.in_flight))
        if ok and isinstance(action, StartWorker | ReplaceWorker):
            self.place(action.spec.worker_id)
        if isinstance(action, StartRouter):
            self.router = RouterSeen(self.router.starts + 1, running=True, pid=1)
        self.outcomes = [Outcome(action, None if ok else "it did not")]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def restart_engine(self, data: st.DataObject) -> None:
        self.place(data.draw(st.sampled_from(sorted(self.rows))))

    @rule()
    def restart_during_canary(self) -> None:
        """The token went through an engine that is no more."""
        for _ in range(6):
            self.go_well(1)
            canary = next((action for action in self.state.in_flight if isinstance(action, RunCanary)), None)
            if canary is not None:
                break
        else:
            return
        self.place(canary.decode_worker)
        self.tick(0.5)
        self.outcomes = [Outcome(canary)]
        self.tick(0.5)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), state=st.sampled_from([WorkerState.FAILED, WorkerState.PLACED]))
    def fleet_says(self, data: st.DataObject, state: WorkerState) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.rows)))
        self.rows[worker_id] = replace(self.rows[worker_id], state=state)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def lose_actor(self, data: st.DataObject) -> None:
        del self.rows[data.draw(st.sampled_from(sorted(self.rows)))]

    @rule(worker_id=st.sampled_from(IDS))
    def toggle_silence(self, worker_id: str) -> None:
        self.silent ^= {worker_id}

    @rule(worker_id=st.sampled_from(IDS), peer_id=st.sampled_from(IDS))
    def toggle_refusal(self, worker_id: str, peer_id: str) -> None:
        self.refusing ^= {(worker_id, peer_id)}

    @rule()
    def toggle_fleet(self) -> None:
        self.is_fleet_known = not self.is_fleet_known

    @precondition(lambda self: self.router.running)
    @rule()
    def bind_router(self) -> None:
        self.router = replace(self.router, url="http://router")

    @precondition(lambda self: self.router.running)
    @rule()
    def kill_router(self) -> None:
        self.router = RouterSeen(self.router.starts, running=False)

    @rule(ticks=st.integers(1, 3))
    def go_well(self, ticks: int) -> None:
        """Nothing fails for some ticks, and every action is done by the next one."""
        self.is_fleet_known, self.silent, self.refusing = True, set(), set()
        self.rows = {worker_id: replace(row, state=WorkerState.LOADING) for worker_id, row in self.rows.items()}
        for _ in range(ticks):
            for action in self.state.in_flight:
                if isinstance(action, StartWorker | ReplaceWorker):
                    self.place(action.spec.worker_id)
                if isinstance(action, StartRouter):
                    self.router = RouterSeen(self.router.starts + 1, running=True, pid=1)
            if self.router.running:
                self.bind_router()
            self.outcomes = [Outcome(action) for action in self.state.in_flight]
            self.tick(1.0)

    def place(self, worker_id: str) -> None:
        self.incarnations += 1
        self.rows[worker_id] = WorkerSnapshot(
            worker_id, f"i{self.incarnations}", ROLES[worker_id], WorkerState.LOADING, f"http://{worker_id}", "m", 0, 4, 0
        )

    def answer(self, row: WorkerSnapshot) -> AgentStatus:
        shakes = tuple(
            PeerHandshake(peer, other.incarnation, 0, 0, "refused" if (row.worker_id, peer) in self.refusing else "connected", "a 1, b 2")
            for peer, other in self.rows.items()
            if peer != row.worker_id
        )
        return AgentStatus(row.worker_id, row.incarnation, "m", 64, 16, 9, 9, 0, 0, 0, 1, (RankAddress(0, "h", 1),), shakes)

    @invariant()
    def nothing_runs_twice(self) -> None:
        subjects = [action.subject for action in self.state.in_flight]
        assert len(subjects) == len(set(subjects))

    @invariant()
    def ready_needs_a_token_through_this_incarnation(self) -> None:
        assert all(worker.incarnation in self.proven for worker in self.state.workers if worker.state is WorkerState.READY)

    @invariant()
    def only_a_replacement_ends_a_failure(self) -> None:
        replaced = {action.spec for action in self.before.in_flight if isinstance(action, ReplaceWorker)} - {
            action.spec for action in self.state.in_flight if isinstance(action, ReplaceWorker)
        }
        for old, new in zip(self.before.workers, self.state.workers, strict=True):
            if old.state is WorkerState.FAILED and new.entered_s != old.entered_s:
                assert old.spec in replaced

    @invariant()
    def replacements_wait_for_their_time(self) -> None:
        for action in self.actions:
            if isinstance(action, ReplaceWorker):
                worker = next(worker for worker in self.state.workers if worker.spec == action.spec)
                assert worker.state is WorkerState.FAILED and worker.restart_at_s is not None and worker.restart_at_s <= self.now_s
                assert self.state.ready_at_s is not None

    @invariant()
    def versions_grow_exactly_with_content(self) -> None:
        assert self.state.fleet.version - self.before.fleet.version == (self.state.fleet.workers != self.before.fleet.workers)
        assert self.state.peer_version - self.before.peer_version == (self.state.peers != self.before.peers)

    @invariant()
    def peers_are_workers_that_serve(self) -> None:
        serving = {worker.incarnation for worker in self.state.workers if worker.state in SERVING}
        listed = {entry.incarnation for entry in self.state.peers}
        assert serving <= listed <= serving | {worker.incarnation for worker in self.state.workers if worker.state is WorkerState.FAILED}
        ended = {row.incarnation for row in self.rows_seen.values() if row.state is WorkerState.FAILED}
        assert not listed & ended
        assert {action.incarnation for action in self.actions if isinstance(action, PutPeers)} <= serving

    @invariant()
    def canaries_use_free_pairs_that_the_router_knows(self) -> None:
        running = [action for action in self.state.in_flight if isinstance(action, RunCanary)]
        used = [worker_id for canary in running for worker_id in (canary.prefill_worker, canary.decode_worker)]
        assert len(used) == len(set(used))
        for canary in (action for action in self.actions if isinstance(action, RunCanary)):
            assert self.router_seen.url is not None and self.state.router.has_fleet(self.router_seen, self.state.fleet.version)
            assert (ROLES[canary.prefill_worker], ROLES[canary.decode_worker]) == ("prefill", "decode")
            states = {worker.worker_id: worker.state for worker in self.state.workers}
            pair = {states[canary.prefill_worker], states[canary.decode_worker]}
            assert WorkerState.WARMING in pair and pair <= {WorkerState.WARMING, WorkerState.READY}

    @invariant()
    def the_router_is_told_the_newest_fleet(self) -> None:
        assert all(action.snapshot == self.state.fleet for action in self.actions if isinstance(action, PutFleet))

    @invariant()
    def phase_follows_the_workers(self) -> None:
        all_ready = all(worker.state is WorkerState.READY for worker in self.state.workers)
        assert self.state.phase is not Phase.READY or all_ready
        assert self.state.phase is not Phase.FAILED or (self.actions == () and self.state.ready_at_s is None and self.state.detail)

    def teardown(self) -> None:
        """After a long calm everything is ready, also what had failed, and nothing is left to do."""
        self.go_well(40)
        if self.state.phase is Phase.FAILED:
            return
        self.now_s += max(restarts.BACKOFF_S)
        self.go_well(40)
        assert self.actions == () and self.state.in_flight == ()
        assert {worker.state for worker in self.state.workers} == {WorkerState.READY}
        assert self.state.phase is Phase.READY


PlanMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPlan = PlanMachine.TestCase
