"""The pool beside a plain model of it, under whatever order of requests, cancels, failures and fleet changes hypothesis can find."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from routing_fleet import demand, worker

from pdserve.errors import NoReadyWorker, PoolSaturated
from pdserve.routing.breakers import LONGEST_COOL_DOWN_S, BreakerState, Pairing
from pdserve.routing.budget import RetryBudget, RetryClaim
from pdserve.routing.line import FLOOR_REQUESTS, PoolLimits
from pdserve.routing.pool import Pool
from pdserve.routing.queue import Entry, EntryState
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Disaggregation, Policy
from pdserve.routing.slots import Lease
from pdserve.testing.clock import ManualClock
from pdserve.types import FleetSnapshot, Role, ServePath, WorkerSnapshot, WorkerState

IDS = ("p0", "p1", "d0", "d1")
KV_CAPACITY_TOKENS = 150
PICKS = st.integers(0, 2**16)
STATES = st.sampled_from([*[WorkerState.READY] * 6, *WorkerState])
DEMANDS = st.builds(
    demand,
    st.integers(1, 60),
    local=st.sampled_from([None, None, None, PathReason.N_ABOVE_ONE]),
    avoid=st.sampled_from([(), (), (), ("p0",), ("d0",), ("d0", "d1")]),
    model=st.sampled_from(["m", "m", "m", "m", "other"]),
    output_tokens=st.sampled_from([0, 0, 5, 100, 500]),
    tenant=st.sampled_from(["", "", "a", "b"]),
    priority=st.sampled_from([0, 0, 0, -1, 5]),
)

Incarnation = tuple[str, str]


def incarnation_of(row: WorkerSnapshot) -> Incarnation:
    """Return what a lease is counted on."""
    return (row.worker_id, row.incarnation)


@dataclass(eq=False)
class Held:
    """One live lease as the test knows it."""

    lease: Lease
    entry: Entry | None
    """None if pinned"""
    prefill: Incarnation | None
    """None on the local path, and once prefill is over"""
    decode: Incarnation
    kv_tokens: int
    """reserved on decode"""
    claim: RetryClaim
    is_retry: bool = False


class PoolMachine(RuleBasedStateMachine):
    """Mirrors every grant; `grant` asserts that it was allowed, the invariants that nothing else is counted and that nobody waits who could go."""

    @initialize(
        mode=st.sampled_from(["auto", "auto", "always", "never"]),
        max_queued_requests=st.sampled_from([1, FLOOR_REQUESTS + 4]),
        limit=st.integers(1, 3),
        max_leases=st.sampled_from([None, None, 3]),
        below=st.sampled_from([0, 0, 20]),
    )
    def open(self, mode: Disaggregation, max_queued_requests: int, limit: int, max_leases: int | None, below: int) -> None:
        self.clock = ManualClock()
        self.mode, self.below, self.max_leases = mode, below, max_leases
        self.pool = Pool(self.clock, PoolLimits(max_queued_requests, 1.0, max_leases), Policy(mode, below))
        self.budget = RetryBudget()
        self.rows: dict[str, WorkerSnapshot] = {}
        self.absent: dict[str, WorkerSnapshot] = {}
        self.version = 0
        self.incarnations = 0
        self.waiting: list[Entry] = []
        self.held: list[Held] = []
        self.over: list[Entry] = []
        self.claims: dict[Entry, RetryClaim] = {}
        self.put_fleet({worker_id: self.row(worker_id, limit) for worker_id in IDS})

    # What happens.

    @rule(pick=DEMANDS)
    def enter(self, pick: Demand) -> None:
        self.admit(pick)

    @rule(pick=DEMANDS, count=st.integers(2, 20))
    def crowd_enters(self, pick: Demand, count: int) -> None:
        for _ in range(count):
            self.admit(pick)

    @rule(pick=PICKS, computed=st.booleans())
    def prefill_ends(self, pick: int, *, computed: bool) -> None:
        if not self.held:
            return
        held = self.held[pick % len(self.held)]
        held.prefill = None
        self.settle(self.pool.release_prefill(held.lease, computed=computed))

    @rule(pick=PICKS, tokens=st.integers(1, 90))
    def prefill_tells_the_prompts_length(self, pick: int, tokens: int) -> None:
        if not self.held:
            return
        held = self.held[pick % len(self.held)]
        held.kv_tokens = tokens + held.lease.demand.output_tokens
        self.settle(self.pool.correct(held.lease, tokens))

    @rule(pick=PICKS)
    def request_ends(self, pick: int) -> None:
        if self.held:
            self.end(self.held[pick % len(self.held)])

    @rule(pick=PICKS)
    def waiter_leaves(self, pick: int) -> None:
        if self.waiting:
            self.quit_queue(self.waiting[pick % len(self.waiting)])

    @rule(pick=PICKS)
    def ends_again(self, pick: int) -> None:
        """What is over, whichever way it ended, stays over."""
        if self.over:
            entry = self.over[pick % len(self.over)]
            assert self.pool.leave(entry) == ()
            if entry.lease is not None:
                assert self.pool.release(entry.lease) == ()
                assert self.pool.release_prefill(entry.lease, computed=True) == ()
                assert self.pool.correct(entry.lease, 50) == ()

    @rule(pick=PICKS)
    def attempt_fails(self, pick: int) -> None:
        """A request's transport fails; if the budget allows it asks for a pair without the worker that failed."""
        entries = [held for held in self.held if held.entry is not None]
        if not entries:
            return
        held = entries[pick % len(entries)]
        failed = held.lease.decode if held.lease.prefill is None or pick % 2 else held.lease.prefill
        pairing: Pairing = (None, incarnation_of(failed)) if failed is held.lease.decode else (incarnation_of(failed), None)
        self.pool.breakers.failed(pairing)
        live, before = len(self.held) + len(self.waiting), self.budget.in_use
        may_retry = held.claim.try_take(live)
        assert may_retry == (held.is_retry or before < max(3, live // 5))
        self.end(held, ends_claim=not may_retry)
        if may_retry:
            self.admit(replace(held.lease.demand, avoid=held.lease.demand.avoid | {failed.worker_id}), claim=held.claim)

    @rule(pick=PICKS)
    def request_succeeds(self, pick: int) -> None:
        if self.held:
            lease = self.held[pick % len(self.held)].lease
            for pairing in ((lease.prefill_key, None), (None, lease.decode_key), (lease.prefill_key, lease.decode_key)):
                self.pool.breakers.succeeded(pairing)
            self.settle(self.pool.settle())

    @rule(prefill_id=st.sampled_from(IDS[:2]), decode_id=st.sampled_from(IDS[2:]))
    def pin(self, prefill_id: str, decode_id: str) -> None:
        pair = [self.rows.get(prefill_id), self.rows.get(decode_id)]
        error = next((fault for fault in map(self.pin_fault, pair) if fault is not None), None)
        if error is not None:
            with pytest.raises(error):
                self.pool.pin(demand(), prefill_id, decode_id)
            return
        lease = self.pool.pin(demand(), prefill_id, decode_id)
        assert [lease.prefill, lease.decode] == pair
        assert (lease.path, lease.reason) == (ServePath.DISAGGREGATED, PathReason.PINNED)
        self.hold(lease, None)

    @rule(worker_id=st.sampled_from(IDS), state=STATES, limit=st.integers(0, 3), role=st.sampled_from(Role), pick=PICKS)
    def worker_changes(self, worker_id: str, state: WorkerState, limit: int, role: Role, pick: int) -> None:
        row = self.rows.get(worker_id)
        if row is None:
            return
        model = "other" if pick % 16 == 0 else "m"
        changed = replace(row, state=state, max_running=limit, role=role if pick % 4 == 0 else row.role, model=model)
        self.put_fleet(self.rows | {worker_id: changed})

    @rule(worker_id=st.sampled_from(IDS))
    def worker_restarts(self, worker_id: str) -> None:
        self.incarnations += 1
        self.put_fleet(self.rows | {worker_id: replace(self.row(worker_id, 2), incarnation=f"i{self.incarnations}")})

    @rule(worker_id=st.sampled_from(IDS))
    def worker_goes_out_of_sight_or_comes_back(self, worker_id: str) -> None:
        """The fleet's view may lose a worker that lives on, and find the same incarnation again."""
        rows = dict(self.rows)
        if worker_id in rows:
            self.absent[worker_id] = rows.pop(worker_id)
        elif worker_id in self.absent:
            rows[worker_id] = self.absent.pop(worker_id)
        self.put_fleet(rows)

    @rule(behind=st.integers(0, 3))
    def stale_fleet_arrives(self, behind: int) -> None:
        before = self.pool.workers
        assert self.pool.update(FleetSnapshot(self.version - behind, ())) == ()
        assert self.pool.workers == before

    @rule(elapsed_s=st.sampled_from([0.0, 0.01, 2.0, 90.0]))
    def time_passes(self, elapsed_s: float) -> None:
        """Breakers cool down; the edge calls `settle` when one has."""
        self.clock.advance(elapsed_s)
        self.settle(self.pool.settle())

    # How the test keeps up.

    def row(self, worker_id: str, limit: int) -> WorkerSnapshot:
        return worker(worker_id, max_running=limit, kv_capacity_tokens=KV_CAPACITY_TOKENS)

    def put_fleet(self, rows: dict[str, WorkerSnapshot]) -> None:
        self.rows = rows
        self.version += 1
        self.settle(self.pool.update(FleetSnapshot(self.version, tuple(rows.values()))))

    def admit(self, asked: Demand, *, claim: RetryClaim | None = None) -> None:
        claim, is_again = claim or self.budget.claim(), claim is not None
        if self.is_hopeless(asked):
            with pytest.raises(NoReadyWorker):
                self.pool.enter(asked, again=is_again)
            self.end_claim(claim)
            return
        try:
            entry = self.pool.enter(asked, again=is_again)
        except PoolSaturated as shed:
            assert not is_again and 0 < shed.retry_after_s <= 120
            of_model = [waiting for waiting in self.waiting if waiting.demand.model == asked.model]
            assert len(of_model) >= FLOOR_REQUESTS
            self.end_claim(claim)
            return
        self.claims[entry] = claim
        if entry.state is EntryState.GRANTED:
            assert is_again or not [e for e in self.lane(asked) if e.demand.priority <= asked.priority]
            self.grant(entry, is_retry=is_again)
        else:
            assert (entry.state, entry.lease, entry.entered_s) == (EntryState.WAITING, None, self.clock.now_s())
            self.waiting.append(entry)

    def lane(self, asked: Demand) -> list[Entry]:
        """Return the waiting entries of a tenant and model that were not admitted before, next one first."""
        same = [e for e in self.waiting if (e.demand.tenant, e.demand.model, e.is_again) == (asked.tenant, asked.model, False)]
        return sorted(same, key=lambda entry: (entry.demand.priority, self.waiting.index(entry)))

    def settle(self, settled: tuple[Entry, ...]) -> None:
        for entry in settled:
            is_head = entry.is_again or self.lane(entry.demand)[0] is entry
            self.waiting.remove(entry)
            if entry.state is EntryState.REFUSED:
                assert self.is_hopeless(entry.demand) and isinstance(entry.error, NoReadyWorker) and entry.lease is None
                self.over.append(entry)
                self.end_claim(self.claims.pop(entry))
            else:
                assert is_head
                self.grant(entry, is_retry=entry.is_again)

    def grant(self, entry: Entry, *, is_retry: bool) -> None:
        lease, asked = entry.lease, entry.demand
        assert lease is not None and (entry.state, entry.granted_s) == (EntryState.GRANTED, self.clock.now_s())
        assert lease.decode in self.decodes(asked) and self.has_room(lease.decode, asked.kv_tokens)
        assert self.max_leases is None or sum(held.entry is not None for held in self.held) < self.max_leases
        reason = self.local_reason(asked)
        if reason is None:
            assert (lease.path, lease.reason) == (ServePath.DISAGGREGATED, PathReason.DEFAULT) or self.has_failed
            assert lease.prefill is None or (lease.prefill in self.prefills(asked) and self.has_room(lease.prefill, asked.prompt_tokens))
        else:
            assert (lease.path, lease.prefill) == (ServePath.LOCAL, None)
            assert lease.reason is reason or self.has_failed
        self.hold(lease, entry, is_retry=is_retry)

    def hold(self, lease: Lease, entry: Entry | None, *, is_retry: bool = False) -> None:
        prefill = None if lease.prefill is None else incarnation_of(lease.prefill)
        claim = self.budget.claim() if entry is None else self.claims.pop(entry)
        self.held.append(Held(lease, entry, prefill, incarnation_of(lease.decode), lease.demand.kv_tokens, claim, is_retry))

    def end(self, held: Held, *, ends_claim: bool = True) -> None:
        self.held.remove(held)
        if ends_claim:
            self.end_claim(held.claim)
        if held.entry is None:
            self.settle(self.pool.release(held.lease))
        else:
            self.over.append(held.entry)
            self.settle(self.pool.leave(held.entry))

    def end_claim(self, claim: RetryClaim) -> None:
        with claim:
            pass

    def quit_queue(self, entry: Entry) -> None:
        self.waiting.remove(entry)
        self.over.append(entry)
        self.end_claim(self.claims.pop(entry))
        settled = self.pool.leave(entry)
        assert entry.state is EntryState.LEFT
        self.settle(settled)

    # What the pool should see, told from rows and held leases alone.

    @property
    def has_failed(self) -> bool:
        return any(self.pool.breakers.states().values())

    def used(self, row: WorkerSnapshot) -> int:
        halves = [half for held in self.held for half in (held.prefill, held.decode)]
        return halves.count(incarnation_of(row))

    def used_tokens(self, row: WorkerSnapshot) -> int:
        key = incarnation_of(row)
        as_prefill = sum(held.lease.demand.prompt_tokens for held in self.held if held.prefill == key)
        return as_prefill + sum(held.kv_tokens for held in self.held if held.decode == key)

    def has_room(self, row: WorkerSnapshot, tokens: int) -> bool:
        used_tokens = self.used_tokens(row)
        return self.used(row) < row.max_running and (used_tokens == 0 or used_tokens + tokens <= row.kv_capacity_tokens)

    def ready(self, asked: Demand, role: Role) -> list[WorkerSnapshot]:
        return [row for row in self.rows.values() if (row.role, row.state, row.model) == (role, WorkerState.READY, asked.model)]

    def prefills(self, asked: Demand) -> list[WorkerSnapshot]:
        return [row for row in self.ready(asked, Role.PREFILL) if row.worker_id not in asked.avoid]

    def decodes(self, asked: Demand) -> list[WorkerSnapshot]:
        ready = self.ready(asked, Role.DECODE)
        return [row for row in ready if row.worker_id not in asked.avoid] or ready

    def local_reason(self, asked: Demand) -> PathReason | None:
        """Return why this goes to decode alone, breakers apart."""
        if self.mode == "never":
            return PathReason.CONFIGURED_NEVER
        if asked.local_reason is None and self.mode == "auto":
            if not self.prefills(asked):
                return PathReason.NO_READY_PREFILL
            return PathReason.SHORT_PROMPT if asked.prompt_tokens < self.below else None
        return asked.local_reason

    def is_hopeless(self, asked: Demand) -> bool:
        return not self.decodes(asked) or (self.local_reason(asked) is None and not self.prefills(asked))

    def is_free(self, asked: Demand) -> bool:
        if self.max_leases is not None and len(self.held) >= self.max_leases:
            return False
        prefill_free = self.local_reason(asked) is not None or any(self.has_room(row, asked.prompt_tokens) for row in self.prefills(asked))
        return prefill_free and any(self.has_room(row, asked.kv_tokens) for row in self.decodes(asked))

    def pin_fault(self, row: WorkerSnapshot | None) -> type[Exception] | None:
        if row is None or row.state not in (WorkerState.WARMING, WorkerState.READY):
            return NoReadyWorker
        return None if self.used(row) < row.max_running else PoolSaturated

    # What always holds.

    @invariant()
    def queue_holds_exactly_the_waiters(self) -> None:
        tokens = sum(entry.demand.prompt_tokens for entry in self.waiting)
        assert (self.pool.queued_requests, self.pool.queued_tokens) == (len(self.waiting), tokens)
        assert all(entry.state is EntryState.WAITING for entry in self.waiting)

    @invariant()
    def counts_are_the_live_leases(self) -> None:
        assert self.pool.in_flight(Role.DECODE) == self.pool.leases == len(self.held)
        assert self.pool.in_flight(Role.PREFILL) == sum(held.prefill is not None for held in self.held)
        assert self.pool.load() == {row.worker_id: self.used(row) for row in self.rows.values()}

    @invariant()
    def reserved_kv_is_that_of_the_live_leases(self) -> None:
        assert self.pool.kv_load() == {row.worker_id: self.used_tokens(row) for row in self.rows.values()}
        assert self.pool.reserved_tokens(Role.DECODE) == sum(held.kv_tokens for held in self.held)
        prompts = [held.lease.demand.prompt_tokens for held in self.held if held.prefill is not None]
        assert self.pool.reserved_tokens(Role.PREFILL) == sum(prompts)

    @invariant()
    def the_budget_is_what_retries_hold(self) -> None:
        retries = [held for held in self.held if held.is_retry]
        assert self.budget.in_use == len(retries) + sum(entry.is_again for entry in self.waiting)

    @invariant()
    def nobody_waits_who_could_go(self) -> None:
        """Unless others of its tenant are before it, a breaker stands against it, or somebody who does not fit was passed too often."""
        if self.has_failed:
            return
        heads = [e for e in self.waiting if e.is_again or self.lane(e.demand)[0] is e]
        for entry in heads:
            others_do_not_fit = any(
                other.demand.model == entry.demand.model and not other.is_again and not self.is_free(other.demand) for other in heads
            )
            assert not self.is_free(entry.demand) or (others_do_not_fit and not entry.is_again)
            assert not self.is_hopeless(entry.demand)

    def teardown(self) -> None:
        """When all have gone nothing is counted, and a new fleet has all of its room."""
        if not hasattr(self, "pool"):
            return
        while self.waiting:
            self.quit_queue(self.waiting[-1])
        while self.held:
            self.end(self.held[-1])
            self.counts_are_the_live_leases()
        assert (self.pool.queued_requests, self.pool.queued_tokens, self.pool.leases, self.budget.in_use) == (0, 0, 0, 0)
        assert not any((*self.pool.load().values(), *self.pool.kv_load().values(), *map(self.pool.reserved_tokens, Role)))
        self.clock.advance(LONGEST_COOL_DOWN_S)
        assert self.pool.breakers.count(BreakerState.OPEN) == 0
        self.max_leases = None
        self.put_fleet({worker_id: replace(row, max_running=1) for worker_id, row in self.rows.items()})
        ready = [row for row in self.rows.values() if row.role is Role.DECODE and row.state is WorkerState.READY]
        for decode in ready:
            entry = self.pool.enter(demand(local=PathReason.MEDIA, model=decode.model))
            assert entry.state is EntryState.GRANTED


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPool = PoolMachine.TestCase
