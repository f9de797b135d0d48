"""How many requests may be tried again at once."""

import pytest

from pdserve.routing.budget import FLOOR, RetryBudget


@pytest.mark.parametrize(("live", "limit"), [(0, FLOOR), (1, FLOOR), (15, FLOOR), (20, 4), (100, 20), (999, 199)])
def test_a_fifth_of_the_live_requests_may_be_tried_again(live: int, limit: int) -> None:
    """And never fewer than the floor."""
    budget = RetryBudget()
    claims = [budget.claim() for _ in range(limit + 5)]
    assert [claim.try_take(live) for claim in claims] == [True] * limit + [False] * 5
    assert budget.in_use == limit


def test_a_request_holds_its_place_from_its_second_attempt_to_its_end() -> None:
    """One place, however often it is tried, and back it goes whatever ends it."""
    budget = RetryBudget()
    with pytest.raises(ZeroDivisionError), budget.claim() as claim:
        assert budget.in_use == 0
        assert claim.try_take(1)
        assert claim.try_take(1)
        assert budget.in_use == 1
        raise ZeroDivisionError
    assert budget.in_use == 0


def test_a_place_that_comes_back_is_anothers() -> None:
    """A full budget lets the next one in when one has ended."""
    budget = RetryBudget()
    claims = [budget.claim() for _ in range(FLOOR)]
    assert all(claim.try_take(1) for claim in claims)
    with budget.claim() as late:
        assert not late.try_take(1)
        with claims[0]:
            pass
        assert late.try_take(1)
    assert budget.in_use == FLOOR - 1


def test_a_request_that_needed_no_second_attempt_took_nothing() -> None:
    """Nothing is given back that was not taken."""
    budget = RetryBudget()
    with budget.claim():
        pass
    assert budget.in_use == 0
