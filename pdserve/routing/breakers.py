"""Which pairs of workers are not to be used for now, because their transport fails.

    CLOSED ──`FAILURES` in a row──► OPEN ──cool-down over──► HALF_OPEN ──one whole request succeeded──► CLOSED
                                     ▲                            └──it failed; twice the cool-down──► OPEN

A pairing is (prefill, decode). Evidence that names one worker, such as a refused connection, judges its pairings with anyone: the other half is
None. Evidence that lies between the two, such as KV that did not cross, judges that pair alone. What an engine answers is no evidence, whatever its
status. A new incarnation starts closed. Knows no lease, no request and no policy: whether an open pairing is used for want of a better one is not
decided here.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from pdserve.clock import Clock

FAILURES = 3
"""failures without a success between them that open a breaker"""
FIRST_COOL_DOWN_S = 1.0
LONGEST_COOL_DOWN_S = 30.0

Incarnation = tuple[str, str]
"""worker id and incarnation"""
Pairing = tuple[Incarnation | None, Incarnation | None]
"""prefill and decode; None is any"""


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    """one request"""
    OPEN = "open"


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    cool_down_s: float = 0.0
    open_until_s: float = 0.0
    is_probed: bool = False


class Breakers:
    """One per pool; holds an entry only for pairings that failed since their last success."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers: dict[Pairing, _Breaker] = {}

    def state(self, pairing: Pairing) -> BreakerState:
        """Return the state of one breaker."""
        breaker = self._breakers.get(pairing)
        if breaker is None or breaker.failures < FAILURES:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock.now_s() < breaker.open_until_s else BreakerState.HALF_OPEN

    def refuses(self, prefill: Incarnation | None, decode: Incarnation | None) -> bool:
        """Say whether this pairing should not get a request now: one of its breakers is open, or half open with its one request under way."""
        if not self._breakers:
            return False
        return any(self._refuses(pairing) for pairing in _judged(prefill, decode))

    def begin(self, prefill: Incarnation | None, decode: Incarnation | None) -> tuple[Pairing, ...]:
        """Note that a request begins on this pairing; returns the half-open breakers that it probes."""
        if not self._breakers:
            return ()
        probed = tuple(pairing for pairing in _judged(prefill, decode) if self.state(pairing) is BreakerState.HALF_OPEN)
        for pairing in probed:
            self._breakers[pairing].is_probed = True
        return probed

    def end(self, probed: Iterable[Pairing]) -> None:
        """Note that a request is over; breakers that it probed and that nobody judged may be probed again."""
        for pairing in probed:
            if (breaker := self._breakers.get(pairing)) is not None:
                breaker.is_probed = False

    def succeeded(self, pairing: Pairing) -> None:
        """Close a breaker."""
        if self._breakers:
            self._breakers.pop(pairing, None)

    def failed(self, pairing: Pairing) -> float | None:
        """Count one transport failure; returns the cool-down in seconds if this opened the breaker. Late failures of an open one count nothing."""
        if self.state(pairing) is BreakerState.OPEN:
            return None
        breaker = self._breakers.setdefault(pairing, _Breaker())
        breaker.failures += 1
        breaker.is_probed = False
        if breaker.failures < FAILURES:
            return None
        breaker.cool_down_s = min(LONGEST_COOL_DOWN_S, 2 * breaker.cool_down_s or FIRST_COOL_DOWN_S)
        breaker.open_until_s = self._clock.now_s() + breaker.cool_down_s
        return breaker.cool_down_s

    def keep(self, alive: Collection[Incarnation]) -> None:
        """Forget the pairings of incarnations that are gone."""
        for pairing in [p for p in self._breakers if any(half is not None and half not in alive for half in p)]:
            del self._breakers[pairing]

    def states(self) -> dict[Pairing, BreakerState]:
        """Return the state of each pairing that failed since its last success."""
        return {pairing: self.state(pairing) for pairing in self._breakers}

    def count(self, state: BreakerState) -> int:
        """Return how many breakers are in a state; of the closed ones, those with a failure on record."""
        return Counter(self.states().values())[state]

    def _refuses(self, pairing: Pairing) -> bool:
        state = self.state(pairing)
        return state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._breakers[pairing].is_probed)


def _judged(prefill: Incarnation | None, decode: Incarnation | None) -> tuple[Pairing, ...]:
    """Return the pairings whose breakers a request on this pair meets."""
    if prefill is None:
        return ((None, decode),)
    if decode is None:
        return ((prefill, None),)
    return ((prefill, None), (None, decode), (prefill, decode))
