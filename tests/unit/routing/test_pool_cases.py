"""What the pool does at its bounds, and when the fleet changes under live leases."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
from routing_fleet import MODEL_LENGTH, demand, measure_rate, open_pool, worker

from pdserve.errors import NoReadyWorker, PoolSaturated
from pdserve.routing.breakers import FAILURES, FIRST_COOL_DOWN_S
from pdserve.routing.line import FLOOR_REQUESTS, MAX_RETRY_AFTER_S, TENANT_FLOOR_REQUESTS, UNKNOWN_RETRY_AFTER_S, PoolLimits
from pdserve.routing.pool import Pool
from pdserve.routing.queue import Entry, EntryState
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Policy
from pdserve.routing.slots import Slot
from pdserve.testing.clock import ManualClock
from pdserve.types import FleetSnapshot, Role, WorkerSnapshot, WorkerState

P0, P1, D0, D1 = worker("p0"), worker("p1"), worker("d0"), worker("d1")


class Stays:
    """Requests of one test, so that the end can see that all their traces go."""

    def __init__(self) -> None:
        self.entries: list[tuple[Pool, Entry]] = []

    def enter(self, pool: Pool, prompt_tokens: int = 10, *, again: bool = False, local: PathReason | None = None) -> Entry:
        entry = pool.enter(demand(prompt_tokens, local=local), again=again)
        self.entries.append((pool, entry))
        return entry

    def fill(self, pool: Pool, count: int, prompt_tokens: int) -> None:
        """Let `count` requests wait."""
        for _ in range(count):
            assert self.enter(pool, prompt_tokens).state is EntryState.WAITING


@pytest.fixture
def stays() -> Iterator[Stays]:
    """Requests; when all have left, no pool counts anything."""
    stays = Stays()
    yield stays
    for pool, entry in reversed(stays.entries):
        pool.leave(entry)
    for pool, _ in stays.entries:
        assert (pool.queued_requests, pool.queued_tokens, pool.in_flight(Role.PREFILL), pool.in_flight(Role.DECODE)) == (0, 0, 0, 0)
        assert not any(pool.load().values())


@pytest.fixture
def clock() -> ManualClock:
    """Time that stands still."""
    return ManualClock()


def put(pool: Pool, *workers: WorkerSnapshot) -> tuple[Entry, ...]:
    """Give the pool its next fleet."""
    return pool.update(FleetSnapshot(pool.version + 1, workers))


def shed_reason(stays: Stays, pool: Pool, prompt_tokens: int) -> str:
    """Return which bound sheds a prompt of this length."""
    with pytest.raises(PoolSaturated) as shed:
        stays.enter(pool, prompt_tokens)
    return shed.value.reason


# The queue's bound.


def test_as_many_requests_as_the_floor_wait_whatever_their_length(stays: Stays, clock: ManualClock) -> None:
    """With no rate measured and prompts of the model's length, 32 wait and the next is shed for its tokens."""
    pool = open_pool(clock, P0, D0, max_queued_requests=1)
    stays.enter(pool)
    stays.fill(pool, FLOOR_REQUESTS, MODEL_LENGTH)
    assert shed_reason(stays, pool, 1) == "requests"

    roomy = open_pool(clock, P0, D0)
    stays.enter(roomy)
    stays.fill(roomy, FLOOR_REQUESTS, MODEL_LENGTH)
    assert shed_reason(stays, roomy, 1) == "tokens"


def test_one_prompt_of_the_models_length_waits_for_each_prefill_worker(stays: Stays, clock: ManualClock) -> None:
    """However slow prefill was measured, the token bound holds the model's length once per ready prefill worker, and not one token more."""
    warming = replace(worker("p2"), state=WorkerState.WARMING)
    pool = open_pool(clock, P0, P1, warming, D0, ttft_objective_s=1.0)
    measure_rate(pool, 10, 10.0, clock.advance)
    stays.enter(pool)
    assert pool.max_queued_tokens == 2 * MODEL_LENGTH
    stays.fill(pool, FLOOR_REQUESTS, 1)
    stays.fill(pool, 1, MODEL_LENGTH)
    rest = 2 * MODEL_LENGTH - MODEL_LENGTH - FLOOR_REQUESTS
    assert shed_reason(stays, pool, rest + 1) == "tokens"
    stays.fill(pool, 1, rest)


def test_the_bound_is_the_objective_times_the_measured_rate(stays: Stays, clock: ManualClock) -> None:
    """3,000 tokens per second and an objective of 60 s let 180,000 tokens wait."""
    pool = open_pool(clock, P0, D0, ttft_objective_s=60.0)
    measure_rate(pool, 6000, 2.0, clock.advance)
    assert pool.max_queued_tokens == 180_000
    stays.enter(pool)
    stays.fill(pool, FLOOR_REQUESTS + 8, 4500)
    assert shed_reason(stays, pool, 1) == "tokens"


@pytest.mark.parametrize(("setting", "bound"), [(1, FLOOR_REQUESTS), (FLOOR_REQUESTS, FLOOR_REQUESTS), (40, 40)])
def test_the_number_of_waiters_is_bounded(stays: Stays, clock: ManualClock, setting: int, bound: int) -> None:
    """The setting counts unless it is below the floor; it sheds though tokens are left."""
    pool = open_pool(clock, P0, D0, max_queued_requests=setting)
    measure_rate(pool, 6000, 1.0, clock.advance)
    stays.enter(pool)
    stays.fill(pool, bound, 1)
    assert shed_reason(stays, pool, 1) == "requests"


@pytest.mark.parametrize(
    ("tokens", "elapsed_s", "retry_after_s"),
    [
        (0, 0.0, UNKNOWN_RETRY_AFTER_S),
        (16, 1.0, FLOOR_REQUESTS / 16),
        (10**9, 1.0, 1.0),
        (1, 3600.0, MAX_RETRY_AFTER_S),
    ],
)
def test_retry_after_is_when_the_queue_is_through(
    stays: Stays, clock: ManualClock, tokens: int, elapsed_s: float, retry_after_s: float
) -> None:
    """Queued tokens over the measured rate, from 1 s to 120 s; a fixed value while no rate is known."""
    pool = open_pool(clock, P0, D0, max_queued_requests=1)
    if tokens:
        measure_rate(pool, tokens, elapsed_s, clock.advance)
    stays.enter(pool)
    stays.fill(pool, FLOOR_REQUESTS, 1)
    with pytest.raises(PoolSaturated) as shed:
        stays.enter(pool)
    assert shed.value.retry_after_s == pytest.approx(retry_after_s)
    assert 0 < shed.value.retry_after_s <= 120


def test_a_cancelled_prefill_teaches_no_rate(clock: ManualClock) -> None:
    """Only what was computed counts, so the token bound stays at its floor."""
    pool = open_pool(clock, P0, D0)
    entry = pool.enter(demand(6000))
    clock.advance(1.0)
    pool.leave(entry)
    assert pool.max_queued_tokens == MODEL_LENGTH


def test_a_second_attempt_is_never_shed_and_goes_first(stays: Stays, clock: ManualClock) -> None:
    """It is older than all that wait."""
    pool = open_pool(clock, P0, D0, max_queued_requests=1)
    running = stays.enter(pool)
    stays.fill(pool, FLOOR_REQUESTS, MODEL_LENGTH)
    again = stays.enter(pool, MODEL_LENGTH, again=True)
    assert again.state is EntryState.WAITING and pool.queued_requests == FLOOR_REQUESTS + 1
    assert pool.leave(running) == (again,)
    assert again.state is EntryState.GRANTED


# Order and halves.


def test_nobody_overtakes_a_head_that_must_wait(stays: Stays, clock: ManualClock) -> None:
    """A local request that could run at once still waits behind one that needs prefill."""
    pool = open_pool(clock, P0, replace(D0, max_running=4))
    first = stays.enter(pool)
    head = stays.enter(pool)
    local = stays.enter(pool, local=PathReason.N_ABOVE_ONE)
    assert (head.state, local.state) == (EntryState.WAITING, EntryState.WAITING)
    assert first.lease is not None
    assert pool.release_prefill(first.lease, computed=True) == (head, local)


def test_a_head_that_leaves_lets_the_next_in(stays: Stays, clock: ManualClock) -> None:
    """What stood behind a cancelled waiter is granted by the cancellation itself."""
    pool = open_pool(clock, P0, replace(D0, max_running=4))
    stays.enter(pool)
    head = stays.enter(pool)
    local = stays.enter(pool, local=PathReason.N_ABOVE_ONE)
    assert pool.leave(head) == (local,)
    assert (head.state, local.state) == (EntryState.LEFT, EntryState.GRANTED)


def test_prefill_is_free_again_while_decode_streams(stays: Stays, clock: ManualClock) -> None:
    """The prefill half ends alone, once; the decode half stays counted."""
    pool = open_pool(clock, P0, replace(D0, max_running=2))
    first = stays.enter(pool)
    second = stays.enter(pool)
    assert first.lease is not None
    assert pool.release_prefill(first.lease, computed=True) == (second,)
    assert pool.release_prefill(first.lease, computed=True) == ()
    assert pool.load() == {"p0": 1, "d0": 2}


def test_equal_workers_take_turns(stays: Stays, clock: ManualClock) -> None:
    """Idle workers are granted in rotation, not the first one always."""
    pool = open_pool(clock, P0, P1, D0, D1)
    pairs = []
    for _ in range(4):
        entry = stays.enter(pool)
        assert entry.lease is not None and entry.lease.prefill is not None
        pairs.append((entry.lease.prefill.worker_id, entry.lease.decode.worker_id))
        pool.leave(entry)
    assert pairs == [("p0", "d0"), ("p1", "d1")] * 2


def test_a_finished_prompt_weighs_no_longer_on_its_worker(stays: Stays, clock: ManualClock) -> None:
    """Prefill is chosen by the tokens it still has to compute, not by those it ever had."""
    pool = open_pool(clock, replace(P0, max_running=2), replace(P1, max_running=2), replace(D0, max_running=8))
    long, short = stays.enter(pool, 90), stays.enter(pool, 10)
    assert long.lease is not None and long.lease.prefill is not None and short.lease is not None
    pool.release_prefill(long.lease, computed=True)
    third = stays.enter(pool, 10)
    assert third.lease is not None and third.lease.prefill == long.lease.prefill != short.lease.prefill


# The fleet changes.


def test_an_empty_pool_refuses_at_once(clock: ManualClock) -> None:
    """Before the first fleet there is nothing to wait for."""
    pool = Pool(clock, PoolLimits(64, 60.0), Policy())
    assert pool.version == -1
    with pytest.raises(NoReadyWorker) as refused:
        pool.enter(demand())
    assert refused.value.role == "decode"


def test_waiters_are_refused_when_the_last_decode_worker_goes(stays: Stays, clock: ManualClock) -> None:
    """Each learns it by the change itself and names the role that is missing."""
    pool = open_pool(clock, P0, D0)
    stays.enter(pool)
    stays.fill(pool, 3, 10)
    settled = put(pool, P0, replace(D0, state=WorkerState.DRAINING))
    assert [entry.state for entry in settled] == [EntryState.REFUSED] * 3
    assert {entry.error.args for entry in settled if entry.error is not None} == {("decode",)}
    assert (pool.queued_requests, pool.in_flight(Role.DECODE)) == (0, 1)


def test_a_waiter_is_served_locally_when_the_last_prefill_worker_goes(stays: Stays, clock: ManualClock) -> None:
    """The reason is decided at the grant, not at the door."""
    pool = open_pool(clock, P0, replace(D0, max_running=2))
    stays.enter(pool)
    waiter = stays.enter(pool)
    assert put(pool, replace(D0, max_running=2)) == (waiter,)
    assert waiter.lease is not None and waiter.lease.reason is PathReason.NO_READY_PREFILL


def test_a_restarted_worker_starts_empty(stays: Stays, clock: ManualClock) -> None:
    """Leases of the old incarnation stay in the total, not in the new one's way, and end without touching it."""
    pool = open_pool(clock, P0, D0)
    old = stays.enter(pool)
    waiter = stays.enter(pool)
    assert put(pool, replace(P0, incarnation="i1"), replace(D0, incarnation="i1")) == (waiter,)
    assert (pool.load(), pool.in_flight(Role.DECODE)) == ({"p0": 1, "d0": 1}, 2)
    pool.leave(old)
    assert (pool.load(), pool.in_flight(Role.DECODE)) == ({"p0": 1, "d0": 1}, 1)


def test_a_worker_that_was_out_of_sight_keeps_its_leases(stays: Stays, clock: ManualClock) -> None:
    """The same incarnation comes back as full as it went, so its limit holds."""
    pool = open_pool(clock, P0, D0)
    stays.enter(pool)
    put(pool, P0)
    put(pool, P0, D0)
    assert pool.load() == {"p0": 1, "d0": 1}
    assert stays.enter(pool).state is EntryState.WAITING


def test_a_lower_limit_ends_no_lease_and_grants_none(stays: Stays, clock: ManualClock) -> None:
    """Above its new limit a worker only loses leases, until it is below."""
    wide = replace(D0, max_running=2)
    pool = open_pool(clock, replace(P0, max_running=8), wide)
    first, second = stays.enter(pool), stays.enter(pool)
    waiter = stays.enter(pool)
    assert put(pool, replace(P0, max_running=8), D0) == ()
    assert pool.load()["d0"] == 2
    assert pool.leave(first) == ()
    assert pool.leave(second) == (waiter,)


def test_a_flipped_worker_counts_what_it_did_in_its_old_role(stays: Stays, clock: ManualClock) -> None:
    """Old streams fill the limit of the new role and still count as decode."""
    pool = open_pool(clock, P0, D0, D1)
    stream = stays.enter(pool)
    assert stream.lease is not None and stream.lease.decode.worker_id == "d0"
    put(pool, replace(D0, role=Role.PREFILL), D1)
    assert (pool.in_flight(Role.DECODE), pool.load()["d0"]) == (1, 1)
    waiter = stays.enter(pool)
    assert waiter.state is EntryState.WAITING
    assert pool.leave(stream) == (waiter,)
    assert waiter.lease is not None and waiter.lease.prefill is not None and waiter.lease.prefill.worker_id == "d0"


def test_workers_that_are_gone_leave_nothing_behind(clock: ManualClock) -> None:
    """A hundred restarts under live leases leave as many slots in memory as the fleet has workers."""

    def slots() -> int:
        gc.collect()
        return sum(type(thing) is Slot for thing in gc.get_objects())

    before = slots()
    pool = open_pool(clock, P0, D0)
    for number in range(100):
        entry = pool.enter(demand())
        put(pool, replace(P0, incarnation=f"i{number}"), replace(D0, incarnation=f"i{number}"))
        pool.leave(entry)
    del entry
    assert slots() - before == 2


def test_models_have_the_length_that_every_worker_serves(clock: ManualClock) -> None:
    """The shortest of a model's workers bounds its prompts."""
    pool = open_pool(clock, P0, replace(D0, max_model_len=60), replace(D1, model="other"))
    assert pool.models == {"m": 60, "other": MODEL_LENGTH}
    assert (pool.ready(Role.PREFILL), pool.ready(Role.DECODE)) == (1, 2)


# Deadlines.


def test_waiting_longer_than_the_deadline_is_refused_at_the_door(stays: Stays, clock: ManualClock) -> None:
    """Past the floor, at 100 tokens per second: 3,200 tokens ahead are 32 s, which a request with 20 s does not have."""
    pool = open_pool(clock, P0, D0)
    measure_rate(pool, 100, 1.0, clock.advance)
    stays.enter(pool)
    stays.fill(pool, FLOOR_REQUESTS, 100)
    with pytest.raises(PoolSaturated) as shed:
        pool.enter(demand(100, deadline_s=clock.now_s() + 20))
    assert (shed.value.reason, shed.value.retry_after_s) == ("deadline", 32.0)
    stays.entries.append((pool, pool.enter(demand(100, deadline_s=clock.now_s() + 40))))


def test_what_comes_too_late_to_be_served_is_refused_when_its_turn_comes(stays: Stays, clock: ManualClock) -> None:
    """Its time is up, or what is left is less than its prompt takes by itself; those behind it are served."""
    pool = open_pool(clock, P0, D0)
    measure_rate(pool, 100, 1.0, clock.advance)
    running = stays.enter(pool, 100)
    assert running.lease is not None
    clock.advance(1)
    pool.release_prefill(running.lease, computed=True)
    begun_s = clock.now_s()
    late, tight, good = (pool.enter(demand(100, deadline_s=begun_s + left_s)) for left_s in (9, 10.5, 12))
    stays.entries += [(pool, entry) for entry in (late, tight, good)]
    clock.advance(10)
    assert pool.leave(running) == (late, tight, good)
    assert [entry.state for entry in (late, tight, good)] == [EntryState.REFUSED, EntryState.REFUSED, EntryState.GRANTED]
    assert isinstance(late.error, TimeoutError)
    assert isinstance(tight.error, PoolSaturated) and tight.error.reason == "deadline"


def test_a_ruined_rate_refuses_nobody_early(stays: Stays, clock: ManualClock) -> None:
    """After a prompt that hung, prefill seems to take for ever; a request still gets three quarters of its time."""
    pool = open_pool(clock, P0, D0)
    measure_rate(pool, 1, 600.0, clock.advance)
    running = stays.enter(pool)
    waiter = pool.enter(demand(100, deadline_s=clock.now_s() + 100))
    stays.entries.append((pool, waiter))
    clock.advance(74)
    assert pool.leave(running) == (waiter,)
    assert waiter.state is EntryState.GRANTED


# Tenants.


def test_a_tenant_that_fills_the_queue_leaves_room_for_others(stays: Stays, clock: ManualClock) -> None:
    """Each other tenant may let a few wait though the bound is reached; the one that reached it may not."""
    pool = open_pool(clock, P0, D0, max_queued_requests=1)
    stays.enter(pool)
    stays.fill(pool, FLOOR_REQUESTS, 10)
    assert shed_reason(stays, pool, 1) == "requests"
    for _ in range(TENANT_FLOOR_REQUESTS):
        stays.entries.append((pool, pool.enter(demand(MODEL_LENGTH, tenant="other"))))
    with pytest.raises(PoolSaturated):
        pool.enter(demand(1, tenant="other"))


def test_room_for_other_tenants_has_an_end(stays: Stays, clock: ManualClock) -> None:
    """With ever more tenants the queue grows to twice its bound and no further."""
    pool = open_pool(clock, P0, D0, max_queued_requests=1)
    stays.enter(pool)
    stays.fill(pool, FLOOR_REQUESTS, 10)
    for tenant in range(FLOOR_REQUESTS):
        stays.entries.append((pool, pool.enter(demand(1, tenant=str(tenant)))))
    with pytest.raises(PoolSaturated):
        pool.enter(demand(1, tenant="one more"))


def test_a_blocked_tenant_does_not_block_another(stays: Stays, clock: ManualClock) -> None:
    """One waits for prefill; another tenant's local request goes at once, as long as decode has room for both."""
    pool = open_pool(clock, P0, replace(D0, max_running=3))
    stays.enter(pool)
    blocked = pool.enter(demand(tenant="a"))
    local = pool.enter(demand(tenant="b", local=PathReason.N_ABOVE_ONE))
    stays.entries += [(pool, blocked), (pool, local)]
    assert (blocked.state, local.state) == (EntryState.WAITING, EntryState.GRANTED)


def test_a_request_that_needs_much_is_not_starved_by_those_that_need_little(stays: Stays, clock: ManualClock) -> None:
    """Small requests of others come as fast as they go; the large one is served after they passed it a few times."""
    pool = open_pool(clock, replace(P0, max_running=8), replace(D0, max_running=8, kv_capacity_tokens=100))
    small = [pool.enter(demand(10, tenant="b")) for _ in range(2)]
    large = pool.enter(demand(90, tenant="a"))
    assert large.state is EntryState.WAITING
    rounds = 0
    while large.state is EntryState.WAITING:
        rounds += 1
        assert rounds < 40
        new = pool.enter(demand(10, tenant="b"))
        pool.leave(small.pop(0))
        small.append(new)
    for entry in (large, *small):
        pool.leave(entry)
    assert pool.kv_load() == {"p0": 0, "d0": 0}


# Room on decode.


def test_kv_room_is_reserved_with_the_pair_and_waited_for(stays: Stays, clock: ManualClock) -> None:
    """Prompt and answer together; leases are left, tokens are not."""
    pool = open_pool(clock, replace(P0, max_running=9), replace(D0, max_running=9, kv_capacity_tokens=100))
    first = pool.enter(demand(30, output_tokens=40))
    second = pool.enter(demand(30, output_tokens=1))
    stays.entries += [(pool, first), (pool, second)]
    assert (first.state, second.state, pool.kv_load()) == (EntryState.GRANTED, EntryState.WAITING, {"p0": 30, "d0": 70})
    assert pool.leave(first) == (second,)
    assert pool.kv_load() == {"p0": 30, "d0": 31}


def test_an_idle_worker_takes_a_request_of_any_size(stays: Stays, clock: ManualClock) -> None:
    """A bound that nothing could meet would make it wait for ever."""
    pool = open_pool(clock, P0, replace(D0, max_running=2, kv_capacity_tokens=50))
    assert stays.enter(pool, 90).state is EntryState.GRANTED


def test_a_prompt_that_turns_out_shorter_frees_room_at_once(stays: Stays, clock: ManualClock) -> None:
    """Prefill tells its length before decode has finished; a longer one takes more, and all of it comes back."""
    pool = open_pool(clock, replace(P0, max_running=9), replace(D0, max_running=9, kv_capacity_tokens=100))
    first = stays.enter(pool, 80)
    second = stays.enter(pool, 80)
    assert first.lease is not None
    assert pool.correct(first.lease, 120) == ()
    assert pool.kv_load()["d0"] == 120
    assert pool.correct(first.lease, 20) == (second,)
    assert pool.kv_load()["d0"] == 100


def test_no_more_requests_run_than_the_process_can_hold(stays: Stays, clock: ManualClock) -> None:
    """The limit holds over all workers; the rest waits in the queue, which is as short as the process says, below the floor too."""
    pool = open_pool(clock, replace(P0, max_running=9), replace(D0, max_running=9), max_leases=2, max_waiting=TENANT_FLOOR_REQUESTS)
    running = [stays.enter(pool) for _ in range(2)]
    stays.fill(pool, TENANT_FLOOR_REQUESTS, 10)
    assert shed_reason(stays, pool, 1) == "requests"
    assert len(pool.leave(running[0])) == 1


# Prefixes.


def test_a_prompt_goes_to_the_prefill_worker_that_was_given_its_beginning(stays: Stays, clock: ManualClock) -> None:
    """Turns of one conversation meet the same worker, though the other was idle longer; a new incarnation holds nothing."""
    pool = open_pool(clock, replace(P0, max_running=9), replace(P1, max_running=9), replace(D0, max_running=9))
    turns = [demand(40, prefix=tuple(range(1, 4 + turn)), prompt_bytes=512 * (3 + turn)) for turn in range(4)]
    chosen = []
    for turn in turns:
        entry = pool.enter(turn)
        assert entry.lease is not None and entry.lease.prefill is not None
        chosen.append((entry.lease.prefill.worker_id, entry.lease.reuse_tokens[0]))
        pool.leave(entry)
    assert chosen == [("p0", 0), ("p0", 30), ("p0", 32), ("p0", 33)]
    put(pool, replace(P0, incarnation="i1", max_running=9), replace(P1, max_running=9), replace(D0, max_running=9))
    entry = pool.enter(turns[-1])
    assert entry.lease is not None and entry.lease.reuse_tokens == (0, 0)
    pool.leave(entry)


def test_a_prompt_that_decode_holds_is_served_there(stays: Stays, clock: ManualClock) -> None:
    """Known only once a transfer has landed; then the next one like it needs no prefill."""
    pool = open_pool(clock, P0, D0, D1, policy=Policy(local_prefix_share=0.75))
    asked = demand(40, prefix=(1, 2, 3, 4), prompt_bytes=512 * 4)
    first = pool.enter(asked)
    assert first.lease is not None and first.lease.reason is PathReason.DEFAULT
    pool.holds(first.lease)
    pool.leave(first)
    second = pool.enter(asked)
    assert second.lease is not None
    assert (second.lease.reason, second.lease.decode) == (PathReason.PREFIX_ON_DECODE, first.lease.decode)
    pool.leave(second)


def test_a_burst_is_spread_evenly_whatever_its_prompts_share(stays: Stays, clock: ManualClock) -> None:
    """256 at once over four idle prefill workers are 64 each, also when all prompts are the same."""
    workers = [worker(f"p{index}", max_running=256, kv_capacity_tokens=0) for index in range(4)]
    for prefix in ((), tuple(range(40))):
        pool = open_pool(clock, *workers, worker("d0", max_running=256, kv_capacity_tokens=0))
        entries = [pool.enter(demand(4000, prefix=prefix, prompt_bytes=512 * 40)) for _ in range(256)]
        assert {pool.load()[row.worker_id] for row in workers} == {64}
        for entry in entries:
            pool.leave(entry)


# Breakers.


def test_a_worker_out_of_reach_is_left_alone_until_its_breaker_has_cooled_down(stays: Stays, clock: ManualClock) -> None:
    """Waiters are let in when it has, one of them."""
    pool = open_pool(clock, replace(P0, max_running=9), D0, replace(D1, max_running=2))
    for _ in range(FAILURES):
        pool.breakers.failed((None, ("d1", "i0")))
    first, second, third = (stays.enter(pool) for _ in range(3))
    assert first.lease is not None and first.lease.decode.worker_id == "d0"
    assert (second.state, third.state) == (EntryState.WAITING, EntryState.WAITING)
    assert pool.settle() == ()
    clock.advance(FIRST_COOL_DOWN_S)
    assert pool.settle() == (second,)
    pool.breakers.succeeded((None, ("d1", "i0")))
    assert pool.settle() == (third,)


def test_a_probe_that_ends_without_a_verdict_lets_another_begin(stays: Stays, clock: ManualClock) -> None:
    """A client that left proved nothing, and must not leave the breaker half open for ever."""
    pool = open_pool(clock, replace(P0, max_running=9), replace(D0, max_running=1), replace(D1, max_running=2))
    for _ in range(FAILURES):
        pool.breakers.failed((None, ("d1", "i0")))
    clock.advance(FIRST_COOL_DOWN_S)
    stays.enter(pool)
    probe, waiter = stays.enter(pool), stays.enter(pool)
    assert (probe.state, waiter.state) == (EntryState.GRANTED, EntryState.WAITING)
    assert pool.leave(probe) == (waiter,)


# Pinned pairs.


def test_a_pinned_pair_may_warm_and_passes_the_queue(stays: Stays, clock: ManualClock) -> None:
    """A canary reserves the pair it names while others wait."""
    pool = open_pool(clock, P0, D0, replace(P1, state=WorkerState.WARMING), replace(D1, state=WorkerState.WARMING))
    stays.enter(pool)
    waiter = stays.enter(pool)
    lease = pool.pin(demand(1), "p1", "d1")
    assert (lease.reason, waiter.state) == (PathReason.PINNED, EntryState.WAITING)
    assert pool.load() == {"p0": 1, "d0": 1, "p1": 1, "d1": 1}
    assert pool.release(lease) == ()
    assert pool.release(lease) == ()


@pytest.mark.parametrize("state", [s for s in WorkerState if s not in (WorkerState.WARMING, WorkerState.READY)])
def test_a_worker_that_cannot_answer_is_not_pinned(clock: ManualClock, state: WorkerState) -> None:
    """Neither half is reserved when one worker's state forbids it."""
    pool = open_pool(clock, P0, replace(D0, state=state))
    with pytest.raises(NoReadyWorker):
        pool.pin(demand(1), "p0", "d0")
    assert pool.load() == {"p0": 0, "d0": 0}


def test_a_full_or_unknown_worker_is_not_pinned(stays: Stays, clock: ManualClock) -> None:
    """A pinned pair keeps to the limits too."""
    pool = open_pool(clock, P0, P1, D0)
    stays.enter(pool)
    with pytest.raises(PoolSaturated) as full:
        pool.pin(demand(1), "p1", "d0")
    assert 0 < full.value.retry_after_s <= 120
    with pytest.raises(NoReadyWorker):
        pool.pin(demand(1), "p1", "d9")
    assert pool.load() == {"p0": 1, "p1": 0, "d0": 1}
