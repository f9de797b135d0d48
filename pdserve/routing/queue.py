"""Who waits for a pair, and whose turn it is: a lane per tenant, deficit round robin over prompt tokens between lanes.

In a round every lane gets `QUANTUM_TOKENS` of credit, and lanes in turn let requests go while their credit covers the prompt. Within a lane order
is strict: lower priority value first, then first come, first served; nobody passes the lane's head. A lane whose head does not fit now is passed by
the others, until it was passed `MAX_PASSED` times: from then on only those go that leave its head what it waits for. A request that was admitted
before and failed goes ahead of all lanes, and its prompt was paid for.

Whether a request fits is asked of the caller. Knows no worker and no time.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from pdserve.errors import PdserveError
from pdserve.routing.select import Demand

if TYPE_CHECKING:
    from pdserve.routing.slots import Lease

QUANTUM_TOKENS = 1024
MAX_PASSED = 8
"""rounds in which a head that does not fit is passed by"""

OfferT = TypeVar("OfferT")
Spares = Callable[["Entry", OfferT, "Entry"], bool]


class EntryState(Enum):
    WAITING = auto()
    GRANTED = auto()
    REFUSED = auto()
    """`Entry.error` says why"""
    LEFT = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """One request's stay in the pool, from `enter` to `leave`."""

    demand: Demand
    entered_s: float
    is_again: bool = False
    state: EntryState = EntryState.WAITING
    granted_s: float | None = None
    lease: "Lease | None" = None
    error: PdserveError | TimeoutError | None = None
    order: tuple[int, int] = (0, 0)
    """priority and arrival: its place in its lane"""


@dataclass(slots=True, eq=False)
class _Lane:
    """One tenant's requests."""

    waiting: list[Entry] = field(default_factory=list)
    credit_tokens: int = 0
    passed: int = 0
    """rounds in which others went while the head did not fit"""

    @property
    def head(self) -> Entry:
        return self.waiting[0]

    @property
    def can_pay(self) -> bool:
        return self.credit_tokens >= self.head.demand.prompt_tokens


class FairQueue:
    """One model's queue. Every entry in it is WAITING."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._ring: deque[_Lane] = deque()
        self._again: list[Entry] = []
        self._arrivals = 0
        self._length = 0
        self.tokens = 0
        """prompt tokens that wait"""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry]:
        yield from self._again
        for lane in self._lanes.values():
            yield from lane.waiting

    def heads(self) -> Iterator[Entry]:
        """Yield the entries that may be next, those that were admitted before included."""
        yield from self._again
        for lane in self._ring:
            yield lane.head

    def waiting_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        lane = self._lanes.get(tenant)
        return 0 if lane is None else len(lane.waiting)

    def push(self, entry: Entry) -> bool:
        """Put an entry in its place; returns whether nothing of its own tenant is ahead of it."""
        self._length += 1
        self.tokens += entry.demand.prompt_tokens
        if entry.is_again:
            self._again.append(entry)
            return True
        lane = self._lanes.get(entry.demand.tenant)
        if lane is None:
            lane = self._lanes[entry.demand.tenant] = _Lane()
            self._ring.append(lane)
        self._arrivals += 1
        entry.order = (entry.demand.priority, self._arrivals)
        insort(lane.waiting, entry, key=lambda waiting: waiting.order)
        if is_head := lane.head is entry:
            lane.passed = 0
        return is_head

    def remove(self, entry: Entry) -> None:
        """Take an entry out, wherever it stands. Raises `ValueError` if it is not in."""
        if entry.is_again:
            self._again.remove(entry)
        else:
            lane = self._lanes[entry.demand.tenant]
            if lane.head is entry:
                lane.passed = 0
            lane.waiting.remove(entry)
            if not lane.waiting:
                del self._lanes[entry.demand.tenant]
                self._ring.remove(lane)
        self._length -= 1
        self.tokens -= entry.demand.prompt_tokens

    def take(self, offer: Callable[[Entry], OfferT | None], spares: "Spares[OfferT]") -> tuple[Entry, OfferT] | None:
        """Take out the next entry that fits.

        Args:
            offer: what an entry could have now, None if it does not fit.
            spares: whether an entry's taking its offer leaves another entry what that one waits for.
        """
        for entry in self._again:
            if (found := offer(entry)) is not None:
                self.remove(entry)
                return entry, found
        due = self._due()
        fitting: list[tuple[_Lane, OfferT]] = []
        for lane in self._ring:
            found = offer(lane.head)
            if found is None or (due is not None and lane is not due and not spares(lane.head, found, due.head)):
                continue
            if lane.can_pay:
                return self._serve(lane), found
            fitting.append((lane, found))
        if not fitting:
            return None
        self._next_round(fitting)
        lane, found = next((lane, found) for lane, found in fitting if lane.can_pay)
        return self._serve(lane), found

    def take_new(self, entry: Entry, found: OfferT, spares: "Spares[OfferT]") -> bool:
        """Take out an entry that has just come and fits, unless that is at the cost of one that was passed too often. No other fits."""
        due = self._due()
        if due is not None and due.head is not entry and not entry.is_again and not spares(entry, found, due.head):
            return False
        self.remove(entry)
        for lane in self._ring:
            lane.passed += 1
        return True

    def _due(self) -> _Lane | None:
        """Return the lane that was passed too often, the one most often passed of several."""
        lane = max(self._ring, key=lambda lane: lane.passed, default=None)
        return lane if lane is not None and lane.passed >= MAX_PASSED else None

    def _next_round(self, fitting: list[tuple[_Lane, OfferT]]) -> None:
        """Give credit for as many rounds as it takes until a lane that fits can pay. One that does not fit saves up for its head and no more."""
        rounds = min(-((lane.credit_tokens - lane.head.demand.prompt_tokens) // QUANTUM_TOKENS) for lane, _ in fitting)
        could_go = {id(lane) for lane, _ in fitting}
        for lane in self._ring:
            lane.credit_tokens += rounds * QUANTUM_TOKENS
            if id(lane) not in could_go:
                lane.credit_tokens = min(lane.credit_tokens, lane.head.demand.prompt_tokens + QUANTUM_TOKENS)
                lane.passed += 1

    def _serve(self, lane: _Lane) -> Entry:
        """Take out a lane's head for its price; the lane stays first in the ring while it can pay."""
        entry = lane.head
        lane.credit_tokens -= entry.demand.prompt_tokens
        while self._ring[0] is not lane:
            self._ring.rotate(-1)
        self.remove(entry)
        if lane.waiting and not lane.can_pay:
            self._ring.rotate(-1)
        return entry
