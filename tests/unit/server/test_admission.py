"""Waiting for a pair: in order, cancellable at any moment, and never forgotten."""

import asyncio
from collections.abc import Iterator

import pytest

from pdserve.clock import MonotonicClock
from pdserve.errors import NoReadyWorker, PoolSaturated, WorkerLost
from pdserve.routing import breakers as breakers_module
from pdserve.routing.breakers import FAILURES, BreakerState, Pairing
from pdserve.routing.line import PoolLimits
from pdserve.routing.pool import Pool
from pdserve.routing.select import Demand, Policy
from pdserve.server.admission import LINK_FAILURES, Admission
from pdserve.testing.clock import ManualClock
from pdserve.types import CloseReason, FleetSnapshot, Role, TransferRecord, TransferSide, WorkerSnapshot, WorkerState

DEMAND = Demand("m", 10)


def fleet(version: int, *, decode: WorkerState = WorkerState.READY, max_running: int = 1) -> FleetSnapshot:
    def worker(role: Role, state: WorkerState) -> WorkerSnapshot:
        return WorkerSnapshot(role.value, "1", role, state, "http://x", "m", 4096, max_running, 1000)

    return FleetSnapshot(version, (worker(Role.PREFILL, WorkerState.READY), worker(Role.DECODE, decode)))


@pytest.fixture
def admission() -> Iterator[Admission]:
    """One pair with one lease; at the end nothing is leased and nobody waits."""
    made = Admission(Pool(ManualClock(), PoolLimits(64, 60), Policy()))
    made.update(fleet(1))
    yield made
    assert made.pool.queued_requests == 0
    assert [made.pool.in_flight(role) for role in Role] == [0, 0]


async def hold(admission: Admission, name: str, order: list[str], release: asyncio.Event) -> None:
    async with admission.pair(DEMAND):
        order.append(name)
        await release.wait()


async def test_waiters_are_let_in_one_by_one_in_order(admission: Admission) -> None:
    """Each return lets in the one that waited longest."""
    order: list[str] = []
    events = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(hold(admission, str(index), order, event)) for index, event in enumerate(events)]
    await asyncio.sleep(0)
    assert order == ["0"]
    for index, event in enumerate(events):
        event.set()
        await tasks[index]
        await asyncio.sleep(0)
        assert order == [str(number) for number in range(min(index + 2, 4))]


async def test_cancelled_waiters_leave_and_others_move_up(admission: Admission) -> None:
    """Wherever in the queue it stood."""
    order: list[str] = []
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, str(index), order, release)) for index in range(5)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[3].cancel()
    await asyncio.sleep(0)
    assert admission.pool.queued_requests == 2
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["0", "2", "4"]


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_returns_the_lease(admission: Admission) -> None:
    """The lease was its own for an instant; the next one gets it."""
    order: list[str] = []
    release = asyncio.Event()
    first, second, third = (asyncio.create_task(hold(admission, name, order, release)) for name in "abc")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert "c" in order


async def test_prefill_comes_back_ahead_of_decode(admission: Admission) -> None:
    """The rest of the lease stays; returning it twice changes nothing."""
    async with admission.pair(DEMAND) as lease:
        admission.prefill_done(lease, 7)
        admission.prefill_done(lease, 7)
        assert [admission.pool.in_flight(role) for role in (Role.PREFILL, Role.DECODE)] == [0, 1]


async def test_a_fleet_that_can_serve_nobody_ends_the_wait(admission: Admission) -> None:
    """Waiters are told at once, not at their deadline."""
    order: list[str] = []
    release = asyncio.Event()
    holder, waiter = (asyncio.create_task(hold(admission, name, order, release)) for name in "ab")
    await asyncio.sleep(0)
    admission.update(fleet(2, decode=WorkerState.FAILED))
    with pytest.raises(NoReadyWorker):
        await waiter
    with pytest.raises(NoReadyWorker):
        async with admission.pair(DEMAND):
            pass
    release.set()
    await holder


async def test_a_larger_fleet_lets_waiters_in(admission: Admission) -> None:
    """Room comes with workers as well as with returned leases."""
    order: list[str] = []
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, name, order, release)) for name in "abc"]
    await asyncio.sleep(0)
    admission.update(fleet(2, max_running=3))
    await asyncio.sleep(0)
    assert order == ["a", "b", "c"]
    release.set()
    await asyncio.gather(*tasks)


async def test_a_pinned_pair_is_taken_now_or_not_at_all(admission: Admission) -> None:
    """A canary never waits."""
    async with admission.pinned(DEMAND, "prefill", "decode") as lease:
        assert lease.prefill is not None
        with pytest.raises(PoolSaturated):
            async with admission.pinned(DEMAND, "prefill", "decode"):
                pass


async def test_an_error_in_the_scope_returns_the_lease(admission: Admission) -> None:
    """Whatever ends it."""
    with pytest.raises(ZeroDivisionError):
        async with admission.pair(DEMAND):
            _ = 1 // 0


PREFILL, DECODE = ("prefill", "1"), ("decode", "1")


@pytest.mark.parametrize(
    ("error", "judged"),
    [
        (WorkerLost("prefill", "connect"), (PREFILL, None)),
        (WorkerLost("prefill", "first_byte"), (PREFILL, None)),
        (WorkerLost("decode", "connect"), (None, DECODE)),
        (WorkerLost("decode", "head"), (None, DECODE)),
        (WorkerLost("decode", "body"), (None, DECODE)),
        (WorkerLost("decode", "first_byte"), (PREFILL, DECODE)),
        (WorkerLost("decode", "idle"), (PREFILL, DECODE)),
    ],
)
async def test_a_loss_speaks_against_whom_it_names_and_silence_against_the_pair(
    admission: Admission, error: WorkerLost, judged: Pairing
) -> None:
    """Decode is silent while it waits for KV."""
    async with admission.pair(DEMAND) as lease:
        admission.lost(lease, error)
        assert set(admission.pool.breakers.states()) == {judged}


@pytest.mark.parametrize("outcome", CloseReason)
async def test_how_a_transfer_ended_judges_the_link(admission: Admission, outcome: CloseReason) -> None:
    """What lies between two workers counts against them; what was about one request does not."""
    async with admission.pair(DEMAND) as lease:
        record = TransferRecord("t", 1, TransferSide.RECEIVE, "decode", "1", outcome)
        admission.received(lease, record)
        assert set(admission.pool.breakers.states()) == ({(PREFILL, DECODE)} if outcome in LINK_FAILURES else set())
        for good in (CloseReason.LANDED,):
            admission.received(lease, TransferRecord("t", 1, TransferSide.RECEIVE, "decode", "1", good))
        assert admission.pool.breakers.states() == {}


async def test_an_answer_clears_decode_and_a_prompt_computed_clears_prefill(admission: Admission) -> None:
    """Each by its own evidence."""
    async with admission.pair(DEMAND) as lease:
        for worker_id in ("prefill", "decode"):
            admission.lost(lease, WorkerLost(worker_id, "connect"))
        admission.prefill_done(lease, 0)
        assert set(admission.pool.breakers.states()) == {(None, DECODE)}
        admission.answered(lease, 0.1)
        assert admission.pool.breakers.states() == {}


async def test_waiters_are_let_in_when_a_breaker_has_cooled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens in between that would wake them."""
    monkeypatch.setattr(breakers_module, "FIRST_COOL_DOWN_S", 0.05)
    opened: list[None] = []
    made = Admission(Pool(MonotonicClock(), PoolLimits(64, 60), Policy("never")), lambda: opened.append(None))
    rows = [WorkerSnapshot(f"d{n}", "1", Role.DECODE, WorkerState.READY, "http://x", "m", 4096, 1, 1000) for n in range(2)]
    made.update(FleetSnapshot(1, tuple(rows)))
    async with made.pair(DEMAND) as first:
        lost = "d1" if first.decode.worker_id == "d0" else "d0"
        for _ in range(FAILURES):
            made._failed((None, (lost, "1")))
        assert (opened, made.pool.breakers.count(BreakerState.OPEN)) == ([None], 1)
        async with asyncio.timeout(5), made.pair(DEMAND) as second:
            assert second.decode.worker_id == lost
