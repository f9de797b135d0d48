"""When the router process is started again."""

from pdserve.control.observation import RouterSeen
from pdserve.control.router_plan import BACKOFF_S, STABLE_S, RouterPlan, follow, must_start

DEAD = RouterSeen(1, running=False)


def test_first_death_restarts_at_once() -> None:
    """A router that dies once is missed at once."""
    router = follow(RouterPlan(), DEAD, 5.0)
    assert router.failures == 1 and must_start(router, DEAD, 5.0)


def test_one_death_counts_once() -> None:
    """Seeing the same end again changes nothing."""
    router = follow(RouterPlan(), DEAD, 5.0)
    assert follow(router, DEAD, 6.0) == router


def test_deaths_in_a_row_wait_longer_up_to_a_bound() -> None:
    """The wait grows with each failure, then stays."""
    router, waits = RouterPlan(), []
    for start in range(1, len(BACKOFF_S) + 3):
        router = follow(router, RouterSeen(start, running=False), 0.0)
        waits.append(router.retry_at_s)
    assert waits == [*BACKOFF_S, BACKOFF_S[-1], BACKOFF_S[-1]]


def test_long_service_forgets_failures() -> None:
    """A router that served for long starts with a clean record; one that only just bound does not."""
    router = RouterPlan(exits=3, failures=3)
    bound = RouterSeen(4, running=True, url="http://x")
    router = follow(router, bound, 0.0)
    assert router.failures == 3
    assert follow(router, bound, STABLE_S - 1).failures == 3
    assert follow(router, bound, STABLE_S).failures == 0


def test_starting_router_is_not_started_twice() -> None:
    """A process that runs but has not bound yet is waited for."""
    starting = RouterSeen(2, running=True)
    assert not must_start(follow(RouterPlan(exits=1), starting, 0.0), starting, 1e9)


def test_fleet_counts_only_for_the_start_that_took_it() -> None:
    """The same version in another process is not there."""
    router = RouterPlan(fleet_start=1, fleet_version=7)
    assert router.has_fleet(RouterSeen(1, running=True, url="u"), 7)
    assert not router.has_fleet(RouterSeen(2, running=True, url="u"), 7)
    assert not router.has_fleet(RouterSeen(1, running=True, url="u"), 8)
    assert not router.has_fleet(RouterSeen(1, running=True), 7)
