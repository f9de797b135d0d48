"""The asynchronous edge of the pool: wait for a pair, hold it in a scope, tell the pool how it went, wake whoever that lets in.

Owns the futures of those that wait. All decisions are the pool's.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType

from pdserve.errors import WorkerLost
from pdserve.routing.breakers import Pairing
from pdserve.routing.pool import Pool
from pdserve.routing.queue import Entry, EntryState
from pdserve.routing.select import Demand
from pdserve.routing.slots import Lease
from pdserve.types import CloseReason, FleetSnapshot, TransferRecord

LINK_FAILURES = frozenset(
    {
        *(CloseReason.PEER_LOST, CloseReason.PEER_UNKNOWN, CloseReason.REFUSED, CloseReason.EXPIRED),
        *(CloseReason.DIGEST_MISMATCH, CloseReason.SEAL_MISMATCH),
    }
)
"""ends of a transfer that speak against the link between two workers; the others are about one request"""


class Admission:
    """One per pool.

    Args:
        on_opened: told each time a breaker opens.
    """

    def __init__(self, pool: Pool, on_opened: Callable[[], None] = lambda: None) -> None:
        self.pool = pool
        self._on_opened = on_opened
        self._waiters: dict[Entry, asyncio.Future[None]] = {}

    def pair(self, demand: Demand, *, again: bool = False) -> "HeldPair":
        """Return a scope that waits for a pair and holds it."""
        return HeldPair(self, demand, again=again)

    def pinned(self, demand: Demand, prefill_worker: str, decode_worker: str) -> "PinnedPair":
        """Return a scope that holds exactly this pair, without waiting."""
        return PinnedPair(self, demand, prefill_worker, decode_worker)

    def prefill_done(self, lease: Lease, prompt_tokens: int | None) -> None:
        """Return the prefill half of a lease ahead of the rest. Idempotent.

        Args:
            prompt_tokens: what prefill says the prompt has, 0 if it computed it and does not say; None if it did not compute it.
        """
        if prompt_tokens is not None:
            self.pool.breakers.succeeded((lease.prefill_key, None))
        if prompt_tokens:
            self.wake(self.pool.correct(lease, prompt_tokens))
        self.wake(self.pool.release_prefill(lease, computed=prompt_tokens is not None))

    def answered(self, lease: Lease, first_data_s: float | None) -> None:
        """Note that decode served a request whole.

        Args:
            first_data_s: time from the lease to the first data, None if nobody saw it.
        """
        self.pool.breakers.succeeded((None, lease.decode_key))
        if lease.prefill is None:
            self.pool.holds(lease)
        if first_data_s is not None:
            self.pool.note_first_data(lease, first_data_s)

    def received(self, lease: Lease, record: TransferRecord) -> None:
        """Note what decode recorded of the lease's transfer."""
        if record.outcome in (CloseReason.LANDED, CloseReason.NOTHING_TO_MOVE):
            self.pool.holds(lease)
        if record.outcome is CloseReason.LANDED:
            self.pool.breakers.succeeded((lease.prefill_key, lease.decode_key))
        elif record.outcome in LINK_FAILURES:
            self._failed((lease.prefill_key, lease.decode_key))

    def lost(self, lease: Lease, error: WorkerLost) -> None:
        """Note that transport failed. Decode is silent while it waits for KV, so its silence speaks against the pair."""
        if lease.prefill is not None and error.worker_id == lease.prefill.worker_id:
            self._failed((lease.prefill_key, None))
        elif lease.prefill is not None and error.phase in ("first_byte", "idle"):
            self._failed((lease.prefill_key, lease.decode_key))
        else:
            self._failed((None, lease.decode_key))

    def _failed(self, pairing: Pairing) -> None:
        """Count a failure; once the breaker that it opened is half open, waiters may fit where they did not."""
        cool_down_s = self.pool.breakers.failed(pairing)
        if cool_down_s is not None:
            self._on_opened()
            asyncio.get_running_loop().call_later(cool_down_s, self._settle)

    def _settle(self) -> None:
        self.wake(self.pool.settle())

    def update(self, fleet: FleetSnapshot) -> None:
        """Take over a new fleet and let in whom it has room for."""
        self.wake(self.pool.update(fleet))

    async def settled(self, entry: Entry) -> None:
        """Wait until the pool has granted or refused an entry."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[entry] = waiter
        try:
            await waiter
        finally:
            del self._waiters[entry]

    def wake(self, entries: Iterable[Entry]) -> None:
        """Resume those that the pool has settled."""
        for entry in entries:
            waiter = self._waiters.get(entry)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


class HeldPair:
    """A stay in the pool. Leaving the scope returns what is left of the lease; cancellation while waiting leaves the queue.

    Entering raises:
        NoReadyWorker: at once, or later when the fleet loses the last worker of a role.
        PoolSaturated: at once, or later when the deadline cannot be met any more.
        TimeoutError: the deadline has passed.
    """

    __slots__ = ("_admission", "_again", "_demand", "_entry")

    def __init__(self, admission: Admission, demand: Demand, *, again: bool) -> None:
        self._admission = admission
        self._demand = demand
        self._again = again
        self._entry: Entry | None = None

    async def __aenter__(self) -> Lease:
        entry = self._entry = self._admission.pool.enter(self._demand, again=self._again)
        try:
            if entry.state is EntryState.WAITING:
                await self._admission.settled(entry)
            if entry.error is not None:
                raise entry.error
        except BaseException:
            self._admission.wake(self._admission.pool.leave(entry))
            raise
        assert entry.lease is not None
        return entry.lease

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._entry is not None
        self._admission.wake(self._admission.pool.leave(self._entry))


class PinnedPair:
    """A pair reserved past the queue. Entering raises what `Pool.pin` raises; leaving returns what is left of the lease."""

    __slots__ = ("_admission", "_arguments", "_lease")

    def __init__(self, admission: Admission, demand: Demand, prefill_worker: str, decode_worker: str) -> None:
        self._admission = admission
        self._arguments = (demand, prefill_worker, decode_worker)
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        self._lease = self._admission.pool.pin(*self._arguments)
        return self._lease

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._lease is not None
        self._admission.wake(self._admission.pool.release(self._lease))
