"""Whose turn it is: fair between tenants, in order within one, and nobody passed by for ever."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_fleet import demand

from pdserve.routing.queue import MAX_PASSED, QUANTUM_TOKENS, Entry, FairQueue

LENGTHS = st.integers(1, 5000)
BACKLOGS = st.lists(st.lists(LENGTHS, min_size=1, max_size=40), min_size=2, max_size=5)


def entry(tokens: int = 10, tenant: str = "", priority: int = 0, *, again: bool = False) -> Entry:
    """Return one request that is not in a queue yet."""
    return Entry(demand(tokens, tenant=tenant, priority=priority), 0.0, is_again=again)


def queue_of(*entries: Entry) -> FairQueue:
    """Return a queue with these in it, in the order in which they came."""
    queue = FairQueue()
    for each in entries:
        queue.push(each)
    return queue


def take(queue: FairQueue, *blocked: Entry, spares: bool = False) -> Entry | None:
    """Take the next one; those in `blocked` do not fit now."""
    taken = queue.take(lambda asked: None if asked in blocked else asked, lambda _entry, _offer, _due: spares)
    return None if taken is None else taken[0]


def drain(queue: FairQueue) -> list[Entry]:
    """Take all, in the queue's order."""
    taken: list[Entry] = []
    while (each := take(queue)) is not None:
        taken.append(each)
    return taken


def test_one_tenants_requests_go_in_the_order_they_came() -> None:
    """However long they are."""
    entries = [entry(tokens) for tokens in (5000, 1, 300, 70_000, 2)]
    assert drain(queue_of(*entries)) == entries


def test_lower_priority_values_go_first_and_equals_in_order() -> None:
    """Among the requests of one tenant."""
    last, first, second, third = entry(priority=5), entry(priority=-3), entry(priority=0), entry(priority=0)
    assert drain(queue_of(last, first, second, third)) == [first, second, third, last]


def test_priority_takes_nothing_from_another_tenant() -> None:
    """A tenant that calls all of its requests urgent gets its share and no more."""
    urgent = [entry(QUANTUM_TOKENS, "a", -100) for _ in range(8)]
    patient = [entry(QUANTUM_TOKENS, "b", 100) for _ in range(8)]
    order = [each.demand.tenant for each in drain(queue_of(*urgent, *patient))]
    assert all(first != second for first, second in pairwise(order))


def test_a_tenant_with_few_requests_is_not_behind_one_with_many() -> None:
    """The second tenant's only request goes after one turn of the first's."""
    flood = [entry(QUANTUM_TOKENS, "a") for _ in range(100)]
    single = entry(QUANTUM_TOKENS, "b")
    assert drain(queue_of(*flood, single)).index(single) <= 1


@given(BACKLOGS)
def test_while_tenants_wait_each_gets_the_same_number_of_tokens(backlogs: list[list[int]]) -> None:
    """At every moment at which two tenants still wait, what they were given differs by less than a quantum and two of the longest prompts."""
    queue = queue_of(*(entry(tokens, str(tenant)) for tenant, lengths in enumerate(backlogs) for tokens in lengths))
    given_tokens = dict.fromkeys(map(str, range(len(backlogs))), 0)
    left = {str(tenant): len(lengths) for tenant, lengths in enumerate(backlogs)}
    bound = QUANTUM_TOKENS + 2 * max(map(max, backlogs))
    while (each := take(queue)) is not None:
        given_tokens[each.demand.tenant] += each.demand.prompt_tokens
        left[each.demand.tenant] -= 1
        waiting = [given_tokens[tenant] for tenant, count in left.items() if count]
        assert not waiting or max(waiting) - min(waiting) <= bound
    assert not any(left.values())


@given(BACKLOGS, st.data())
def test_counts_are_those_that_wait(backlogs: list[list[int]], data: st.DataObject) -> None:
    """Through pushes, takes and removals in any order; an emptied queue counts nothing."""
    queue, waiting = FairQueue(), list[Entry]()
    for tenant, lengths in enumerate(backlogs):
        for tokens in lengths:
            waiting.append(entry(tokens, str(tenant), again=data.draw(st.booleans())))
            queue.push(waiting[-1])
            if data.draw(st.integers(0, 3)) == 0:
                gone = data.draw(st.sampled_from(waiting))
                queue.remove(gone)
                waiting.remove(gone)
            assert (len(queue), queue.tokens, set(queue)) == (len(waiting), sum(e.demand.prompt_tokens for e in waiting), set(waiting))
    assert set(drain(queue)) == set(waiting)
    assert (len(queue), queue.tokens, list(queue.heads())) == (0, 0, [])


def test_what_does_not_fit_blocks_its_own_tenant_only() -> None:
    """The next of the same tenant waits behind it, another tenant's goes."""
    large, behind, other = entry(900, "a"), entry(1, "a"), entry(1, "b")
    queue = queue_of(large, behind, other)
    assert take(queue, large) is other
    assert take(queue, large) is None
    assert drain(queue) == [large, behind]


def test_what_was_passed_often_enough_is_passed_no_more() -> None:
    """After so many rounds others wait too, until it fits, unless they leave it what it waits for."""
    large = entry(50_000, "a")
    queue = queue_of(large, *(entry(QUANTUM_TOKENS, "b") for _ in range(3 * MAX_PASSED)))
    passed = 0
    while take(queue, large) is not None:
        passed += 1
    assert passed <= MAX_PASSED + 1
    assert take(queue, large, spares=True) is not None
    assert take(queue) is large


def test_a_head_that_comes_new_starts_to_count_anew() -> None:
    """A tenant whose blocked head left has no claim from it."""
    large, small = entry(50_000, "a"), entry(10, "a")
    queue = queue_of(large, small, *(entry(QUANTUM_TOKENS, "b") for _ in range(3 * MAX_PASSED)))
    while take(queue, large) is not None:
        pass
    queue.remove(large)
    assert take(queue, small) is not None


def test_a_request_that_was_admitted_before_goes_first_and_has_paid() -> None:
    """Ahead of every tenant; its tenant's credit is not asked."""
    waiting = [entry(10, tenant) for tenant in "ab"]
    again = entry(9000, "a", again=True)
    queue = queue_of(*waiting, again)
    assert drain(queue) == [again, *waiting]


def test_a_new_request_does_not_pass_one_that_was_passed_too_often() -> None:
    """Not at once either; one that leaves what the other waits for does."""
    large = entry(50_000, "a")
    queue = queue_of(large)
    for _ in range(MAX_PASSED):
        new = entry(1, "b")
        assert queue.push(new)
        assert queue.take_new(new, new, lambda _entry, _offer, _due: False)
    late = entry(1, "b")
    queue.push(late)
    assert not queue.take_new(late, late, lambda _entry, _offer, _due: False)
    assert queue.take_new(late, late, lambda _entry, _offer, due: due is large)


def test_an_entry_that_is_not_in_cannot_be_taken_out() -> None:
    """It would be a count below zero."""
    queue = queue_of(entry(1, "a"))
    with pytest.raises((KeyError, ValueError)):
        queue.remove(entry(1, "b"))
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(entry(1, "a"))
    assert (len(queue), queue.tokens) == (1, 1)
