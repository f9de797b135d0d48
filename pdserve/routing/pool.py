"""The pool: the fleet as the router sees it, one bounded queue per model in front of it, and the leases on it.

Life of an entry:

    enter() ──► GRANTED  at once when nobody of its tenant waits and a pair with room is free
       │
       └──► WAITING ──► GRANTED   in the queue's order, by whatever frees room: release(), release_prefill(), update(), leave(), settle()
               │   └──► REFUSED   a needed role has no ready worker left, or its deadline cannot be met any more
               └──────► LEFT      leave(): its client is gone

State changes first; what a caller must do, wake the entries that are returned, comes back as a value. Picking a pair and reserving its leases and its
KV room is one step of one thread. Knows no I/O, no event loop, no HTTP. A worker's restart gives it a new incarnation and so a new, empty slot;
leases of the old incarnation end in the old one. A worker that is out of the fleet for a while and returns as the same incarnation has its leases
still.
"""

from collections.abc import Iterator, Mapping

from pdserve.clock import Clock
from pdserve.errors import NoReadyWorker, PoolSaturated
from pdserve.routing.breakers import Breakers
from pdserve.routing.line import UNKNOWN_RETRY_AFTER_S, ModelLine, PoolLimits
from pdserve.routing.prefixes import CHUNK_BYTES, MAX_HELD_CHUNKS
from pdserve.routing.queue import Entry, EntryState
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Pick, Policy, View, choose, has_room
from pdserve.routing.slots import Lease, Slot
from pdserve.routing.verdict import Verdict
from pdserve.types import FleetSnapshot, Role, ServePath, WorkerSnapshot, WorkerState


class Pool:
    """Fleet view, queues and leases of one router.

    Args:
        clock: dates entries, measures rates, cools breakers down.
    """

    def __init__(self, clock: Clock, limits: PoolLimits, policy: Policy) -> None:
        self._clock = clock
        self._limits = limits
        self._policy = policy
        self._version = -1
        self._slots: dict[tuple[str, str], Slot] = {}
        self._retired: set[Slot] = set()
        self._lines: dict[str, ModelLine] = {}
        self._models: dict[str, int] = {}
        self._grants = 0
        self._leases = 0
        self.breakers = Breakers(clock)

    @property
    def version(self) -> int:
        """Version of the fleet in use, -1 before the first."""
        return self._version

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        return tuple(slot.snapshot for slot in self._slots.values())

    @property
    def queued_requests(self) -> int:
        return sum(len(line.queue) for line in self._lines.values())

    @property
    def queued_tokens(self) -> int:
        return sum(line.queue.tokens for line in self._lines.values())

    @property
    def max_queued_tokens(self) -> int:
        """How many prompt tokens may wait, all models together."""
        return sum(line.max_queued_tokens for line in self._lines.values())

    @property
    def leases(self) -> int:
        """Requests that hold a pair, or what is left of one."""
        return self._leases

    def in_flight(self, role: Role) -> int:
        """Return the live leases in one role, those on past incarnations included."""
        return sum(slot.in_role(role) for slot in (*self._slots.values(), *self._retired))

    def reserved_tokens(self, role: Role) -> int:
        """Return the KV tokens reserved in one role, those on past incarnations included."""
        return sum(slot.reserved_in(role) for slot in (*self._slots.values(), *self._retired))

    def load(self) -> dict[str, int]:
        """Return the live leases of each worker's present incarnation."""
        return {slot.snapshot.worker_id: slot.in_flight for slot in self._slots.values()}

    def kv_load(self) -> dict[str, int]:
        """Return the KV tokens reserved on each worker's present incarnation."""
        return {slot.snapshot.worker_id: slot.kv_tokens for slot in self._slots.values()}

    def ready(self, role: Role) -> int:
        """Return how many workers are ready in one role."""
        return sum(s.role is role and s.state is WorkerState.READY for s in self.workers)

    @property
    def models(self) -> Mapping[str, int]:
        """The served models, each with the shortest `max_model_len` among its workers."""
        return self._models

    def update(self, fleet: FleetSnapshot) -> tuple[Entry, ...]:
        """Take over a new fleet; a version that is not newer is ignored. Returns the entries this settled."""
        if fleet.version <= self._version:
            return ()
        self._version = fleet.version
        before = {slot.key: slot for slot in (*self._slots.values(), *self._retired)}
        self._slots = {}
        for snapshot in fleet.workers:
            slot = before.pop((snapshot.worker_id, snapshot.incarnation), None) or Slot(snapshot)
            slot.snapshot = snapshot
            self._slots[slot.key] = slot
        self._retired = {slot for slot in before.values() if slot.in_flight}
        self.breakers.keep(self._slots.keys())
        self._set_lines()
        return (*self._refuse_hopeless(), *self.settle())

    def enter(self, demand: Demand, *, again: bool = False) -> Entry:
        """Admit a request: granted at once, or put into its model's queue.

        Args:
            again: it was admitted before and its attempt failed. It is older than all that wait, so it goes first, and no bound sheds it.

        Raises:
            NoReadyWorker: there is nothing to wait for.
            PoolSaturated: the queue is full, or too long for the request's deadline.
        """
        line, now_s = self._lines.get(demand.model), self._clock.now_s()
        if line is None:
            raise NoReadyWorker(Role.DECODE.value)
        pick = choose(demand, self._view(line, now_s), self._policy)
        entry = Entry(demand, now_s, is_again=again)
        if pick is not None and not line.queue and self._has_lease_left():
            self._grant(entry, pick)
            return entry
        is_next = line.queue.push(entry)
        if is_next and pick is not None and self._has_lease_left() and line.queue.take_new(entry, pick, line.spares):
            self._grant(entry, pick)
            return entry
        if not again:
            line.queue.remove(entry)
            line.check_bounds(demand, now_s)
            line.queue.push(entry)
        line.drain_rate.started(now_s)
        return entry

    def pin(self, demand: Demand, prefill_id: str, decode_id: str) -> Lease:
        """Reserve exactly this pair now, past the queue and whatever KV room is left; the workers may still be warming.

        Raises:
            NoReadyWorker: one of them is not there, or neither warming nor ready.
            PoolSaturated: one of them has no lease left.
        """
        slots = {slot.snapshot.worker_id: slot for slot in self._slots.values()}
        pair = slots.get(prefill_id), slots.get(decode_id)
        for role, slot in zip((Role.PREFILL, Role.DECODE), pair, strict=True):
            if slot is None or slot.snapshot.state not in (WorkerState.WARMING, WorkerState.READY):
                raise NoReadyWorker(role.value)
            if slot.in_flight >= slot.snapshot.max_running:
                raise PoolSaturated("requests", UNKNOWN_RETRY_AFTER_S)
        prefill, decode = pair
        assert decode is not None
        return self._reserve(demand, Pick(ServePath.DISAGGREGATED, PathReason.PINNED, prefill, decode))

    def release_prefill(self, lease: Lease, *, computed: bool) -> tuple[Entry, ...]:
        """End the prefill half of a lease; `computed` says that the prompt was prefilled. Returns the entries this settled."""
        if not self._end_prefill(lease, computed=computed):
            return ()
        return self.settle()

    def release(self, lease: Lease) -> tuple[Entry, ...]:
        """End what is left of a lease. Idempotent. Returns the entries this settled."""
        self._end_prefill(lease, computed=False)
        slot = lease.end_decode()
        if slot is None:
            return ()
        slot.give_back(Role.DECODE, lease.kv_tokens)
        lease.kv_tokens = 0
        self._leases -= 1
        self.breakers.end(lease.probed)
        self._forget_if_drained(slot)
        return self.settle()

    def leave(self, entry: Entry) -> tuple[Entry, ...]:
        """End an entry's stay in any state: out of the queue, or its lease released. Idempotent. Returns the entries this settled."""
        if entry.lease is not None:
            return self.release(entry.lease)
        if entry.state is not EntryState.WAITING:
            return ()
        self._take_out(entry, EntryState.LEFT)
        return self.settle()

    def correct(self, lease: Lease, prompt_tokens: int) -> tuple[Entry, ...]:
        """Replace the estimate of a prompt by its length, once an engine has told it. Returns the entries this settled."""
        slot = lease.decode_slot
        by_tokens = prompt_tokens + lease.demand.output_tokens - lease.kv_tokens
        if slot is None or not by_tokens:
            return ()
        slot.correct(Role.DECODE, by_tokens)
        lease.kv_tokens += by_tokens
        return self.settle() if by_tokens < 0 else ()

    def holds(self, lease: Lease) -> None:
        """Note that decode's cache has this request's prompt: it landed there, or was computed there."""
        self._remember(self._slots.get((lease.decode.worker_id, lease.decode.incarnation)), lease.demand)

    def note_first_data(self, lease: Lease, first_data_s: float) -> None:
        """Take into account how long after its lease a request got its first data, in seconds."""
        line = self._lines[lease.demand.model]
        streams = sum(slot.in_flight for slot in line.decodes) / max(1, len(line.decodes))
        line.comparison.add(
            self._clock.now_s(),
            is_local=lease.prefill is None,
            tokens=lease.demand.prompt_tokens,
            first_data_s=first_data_s,
            decode_streams=streams,
        )

    def verdicts(self) -> dict[str, Verdict]:
        """Return for each model whether disaggregation pays by the measured rates."""
        now_s = self._clock.now_s()
        return {model: line.comparison.verdict(now_s) for model, line in self._lines.items()}

    def settle(self) -> tuple[Entry, ...]:
        """Refuse who is too late, then grant while somebody fits. Returns the entries this settled."""
        settled: list[Entry] = []
        for line in self._lines.values():
            if line.queue:
                now_s = self._clock.now_s()
                settled += self._refuse_late(line, now_s)
                settled += self._grant_fitting(line, now_s)
        return tuple(settled)

    def _grant_fitting(self, line: ModelLine, now_s: float) -> Iterator[Entry]:
        view = self._view(line, now_s)
        while line.queue and self._has_lease_left() and any(map(has_room, line.decodes)):
            taken = line.queue.take(lambda entry: choose(entry.demand, view, self._policy), line.spares)
            if taken is None:
                return
            entry, pick = taken
            line.drain_rate.ended(now_s, entry.demand.prompt_tokens)
            self._grant(entry, pick)
            yield entry

    def _refuse_late(self, line: ModelLine, now_s: float) -> Iterator[Entry]:
        while late := [entry for entry in line.queue.heads() if line.is_too_late(entry, now_s)]:
            for entry in late:
                is_over = now_s > entry.demand.deadline_s
                entry.error = TimeoutError() if is_over else PoolSaturated("deadline", line.retry_after_s())
                self._take_out(entry, EntryState.REFUSED)
                yield entry

    def _refuse_hopeless(self) -> Iterator[Entry]:
        """Refuse, after a change of the fleet, all that wait for a role without a ready worker."""
        for line in self._lines.values():
            view = self._view(line, self._clock.now_s())
            for entry in list(line.queue):
                try:
                    choose(entry.demand, view, self._policy)
                except NoReadyWorker as error:
                    entry.error = error
                    self._take_out(entry, EntryState.REFUSED)
                    yield entry

    def _take_out(self, entry: Entry, state: EntryState) -> None:
        line = self._lines[entry.demand.model]
        line.queue.remove(entry)
        line.drain_rate.ended(self._clock.now_s(), 0)
        entry.state = state

    def _grant(self, entry: Entry, pick: Pick[Slot]) -> None:
        entry.lease = self._reserve(entry.demand, pick)
        entry.state, entry.granted_s = EntryState.GRANTED, self._clock.now_s()

    def _reserve(self, demand: Demand, pick: Pick[Slot]) -> Lease:
        self._grants += 1
        self._leases += 1
        lease = Lease(demand, pick)
        if pick.prefill is not None:
            pick.prefill.take(Role.PREFILL, demand.prompt_tokens, self._grants)
            self._lines[demand.model].prefill_rate.started(self._clock.now_s())
            self._remember(pick.prefill, demand)
        pick.decode.take(Role.DECODE, lease.kv_tokens, self._grants)
        lease.probed = self.breakers.begin(None if pick.prefill is None else pick.prefill.key, pick.decode.key)
        return lease

    def _end_prefill(self, lease: Lease, *, computed: bool) -> bool:
        slot = lease.end_prefill()
        if slot is None:
            return False
        slot.give_back(Role.PREFILL, lease.demand.prompt_tokens)
        self._lines[lease.demand.model].prefill_rate.ended(self._clock.now_s(), lease.demand.prompt_tokens if computed else 0)
        self._forget_if_drained(slot)
        return True

    def _remember(self, slot: Slot | None, demand: Demand) -> None:
        """Note that a worker has the prompt, as far as its cache can hold it."""
        if slot is None or not demand.prefix:
            return
        capacity_tokens = slot.snapshot.kv_capacity_tokens
        bytes_per_token = max(1, demand.prompt_bytes) / demand.prompt_tokens
        slot.holdings.add(demand.prefix, int(capacity_tokens * bytes_per_token / CHUNK_BYTES) if capacity_tokens else MAX_HELD_CHUNKS)

    def _forget_if_drained(self, slot: Slot) -> None:
        if not slot.in_flight:
            self._retired.discard(slot)

    def _has_lease_left(self) -> bool:
        return self._limits.max_leases is None or self._leases < self._limits.max_leases

    def _view(self, line: ModelLine, now_s: float) -> View[Slot]:
        return View(line.prefills, line.decodes, self.breakers.refuses, line.comparison.verdict(now_s))

    def _set_lines(self) -> None:
        by_model: dict[str, list[Slot]] = {model: [] for model in self._lines}
        for slot in self._slots.values():
            by_model.setdefault(slot.snapshot.model, []).append(slot)
        for model, slots in by_model.items():
            line = self._lines.setdefault(model, ModelLine(self._limits))
            line.set_workers(slots)
        self._models = {model: self._lines[model].max_model_len for model, slots in by_model.items() if slots}
