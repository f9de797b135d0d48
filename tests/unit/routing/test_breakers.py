"""Which pairings are not used for a while, and how they come back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.routing.breakers import FAILURES, FIRST_COOL_DOWN_S, LONGEST_COOL_DOWN_S, Breakers, BreakerState, Incarnation, Pairing
from pdserve.testing.clock import ManualClock

P0, P1, D0, D1 = (("p0", "i0"), ("p1", "i0"), ("d0", "i0"), ("d1", "i0"))
PAIR: Pairing = (P0, D0)


@pytest.fixture
def clock() -> ManualClock:
    """Time that stands still."""
    return ManualClock()


def opened(clock: ManualClock, pairing: Pairing = PAIR) -> Breakers:
    """Return breakers of which this one has just opened."""
    breakers = Breakers(clock)
    for _ in range(FAILURES - 1):
        assert breakers.failed(pairing) is None
    assert breakers.failed(pairing) == FIRST_COOL_DOWN_S
    return breakers


def test_failures_in_a_row_open_it(clock: ManualClock) -> None:
    """One fewer does not, nor does the same number with a success between them."""
    breakers = Breakers(clock)
    for _ in range(FAILURES - 1):
        breakers.failed(PAIR)
    assert not breakers.refuses(P0, D0)
    breakers.succeeded(PAIR)
    for _ in range(FAILURES - 1):
        breakers.failed(PAIR)
    assert breakers.state(PAIR) is BreakerState.CLOSED
    breakers.failed(PAIR)
    assert breakers.state(PAIR) is BreakerState.OPEN


def test_a_pair_is_judged_apart_from_its_workers(clock: ManualClock) -> None:
    """A link that fails between two workers leaves both to others."""
    breakers = opened(clock)
    assert breakers.refuses(P0, D0)
    assert not any(breakers.refuses(*pair) for pair in ((P0, D1), (P1, D0), (P1, D1), (None, D0), (P0, None)))


@pytest.mark.parametrize(
    ("pairing", "hit", "spared"),
    [
        ((P0, None), [(P0, D0), (P0, D1)], [(P1, D0), (None, D0)]),
        ((None, D0), [(P0, D0), (None, D0)], [(P0, D1)]),
    ],
)
def test_a_worker_that_cannot_be_reached_is_out_of_all_its_pairs(
    clock: ManualClock, pairing: Pairing, hit: list[Pairing], spared: list[Pairing]
) -> None:
    """Whoever is at the other end."""
    breakers = opened(clock, pairing)
    assert all(breakers.refuses(*pair) for pair in hit)
    assert not any(breakers.refuses(*pair) for pair in spared)


def test_after_the_cool_down_one_whole_request_decides(clock: ManualClock) -> None:
    """A second one is refused while the first is under way; its success closes the breaker."""
    breakers = opened(clock)
    clock.advance(FIRST_COOL_DOWN_S)
    assert not breakers.refuses(P0, D0)
    assert breakers.begin(P0, D0) == (PAIR,)
    assert breakers.refuses(P0, D0)
    breakers.succeeded(PAIR)
    assert not breakers.refuses(P0, D0)
    assert breakers.states() == {}


def test_a_failed_probe_doubles_the_cool_down_up_to_the_longest(clock: ManualClock) -> None:
    """One failure is enough when half open."""
    breakers = opened(clock)
    cool_downs = [FIRST_COOL_DOWN_S]
    for _ in range(8):
        clock.advance(cool_downs[-1])
        breakers.begin(P0, D0)
        cool_down_s = breakers.failed(PAIR)
        assert cool_down_s is not None
        cool_downs.append(cool_down_s)
    assert cool_downs == [min(LONGEST_COOL_DOWN_S, FIRST_COOL_DOWN_S * 2**n) for n in range(9)]


def test_a_probe_that_proved_nothing_can_be_made_again(clock: ManualClock) -> None:
    """Its client left, say."""
    breakers = opened(clock)
    clock.advance(FIRST_COOL_DOWN_S)
    breakers.end(breakers.begin(P0, D0))
    assert breakers.state(PAIR) is BreakerState.HALF_OPEN
    assert not breakers.refuses(P0, D0)


def test_failures_of_an_open_breaker_are_late_news(clock: ManualClock) -> None:
    """A hundred requests that fail together cost one cool-down."""
    breakers = opened(clock)
    for _ in range(100):
        assert breakers.failed(PAIR) is None
    clock.advance(FIRST_COOL_DOWN_S)
    assert breakers.state(PAIR) is BreakerState.HALF_OPEN


def test_a_new_incarnation_starts_closed_and_the_old_one_is_forgotten(clock: ManualClock) -> None:
    """Whatever its predecessor did."""
    breakers = opened(clock)
    reborn: Incarnation = ("d0", "i1")
    breakers.keep({P0, reborn})
    assert not breakers.refuses(P0, reborn)
    assert breakers.states() == {}


class BreakersMachine(RuleBasedStateMachine):
    """Any order of requests, verdicts and time."""

    pairings = st.tuples(st.sampled_from([None, P0, P1]), st.sampled_from([D0, D1]))

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.breakers = Breakers(self.clock)
        self.probes: list[tuple[Pairing, ...]] = []

    @rule(pair=pairings)
    def begins(self, pair: Pairing) -> None:
        if not self.breakers.refuses(*pair):
            probed = self.breakers.begin(*pair)
            under_way = {pairing for probe in self.probes for pairing in probe}
            assert not under_way & set(probed)
            self.probes.append(probed)

    @rule(pick=st.integers(0, 99), verdict=st.sampled_from(["good", "bad", None]))
    def ends(self, pick: int, verdict: str | None) -> None:
        if not self.probes:
            return
        probed = self.probes.pop(pick % len(self.probes))
        for pairing in probed:
            if verdict == "good":
                self.breakers.succeeded(pairing)
            elif verdict == "bad":
                self.breakers.failed(pairing)
        self.breakers.end(probed)

    @rule(pair=pairings, half=st.sampled_from(["prefill", "decode", "both"]))
    def fails(self, pair: Pairing, half: str) -> None:
        prefill, decode = pair
        pairing: Pairing = pair if half == "both" else (prefill, None) if half == "prefill" and prefill else (None, decode)
        before = self.breakers.state(pairing)
        cool_down_s = self.breakers.failed(pairing)
        # A probe of a breaker that opened again proves nothing any more.
        if before is BreakerState.HALF_OPEN:
            self.probes = [tuple(p for p in probe if p != pairing) for probe in self.probes]
        assert cool_down_s is None or (0 < cool_down_s <= LONGEST_COOL_DOWN_S and before is not BreakerState.OPEN)

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def a_breaker_that_is_not_closed_has_failed_enough(self) -> None:
        assert self.breakers.count(BreakerState.OPEN) + self.breakers.count(BreakerState.HALF_OPEN) <= len(self.breakers.states())

    def teardown(self) -> None:
        """With every probe ended and time gone by, everything may be tried again."""
        for probed in self.probes:
            self.breakers.end(probed)
        self.clock.advance(LONGEST_COOL_DOWN_S)
        assert not any(self.breakers.refuses(p, d) for p in (None, P0, P1) for d in (D0, D1))


BreakersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBreakers = BreakersMachine.TestCase
