"""A rank that cannot take part says so to every rank that it can reach, and to the others when it can; nobody finds out by a clock.

Scenes here have no deadline and no lease that could help.
"""

import pytest
from deployment import Setup
from scene import Scene

from pdserve.kv.actions import PeerRank
from pdserve.kv.parking import MAX_PARKED_TRANSFERS, UntoldEnds
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Close
from pdserve.types import CloseReason, TransferSide

SEND, RECEIVE = TransferSide.SEND, TransferSide.RECEIVE
PAIRS = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 2)]


def scene(prefill_ranks: int, decode_ranks: int) -> Scene:
    return Scene(Setup(prefill_ranks, decode_ranks, num_slots=2 * prefill_ranks))


def lose(stage: Scene, number: int) -> None:
    """Break one link, and let both ends notice."""
    stage.cut(number)
    while stage.notice(0):
        pass


def links(pair: tuple[int, int]) -> range:
    return range(len(scene(*pair).links))


@pytest.mark.parametrize("first", [SEND, RECEIVE])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_missing_link_ends_the_transfer_on_every_rank(pair: tuple[int, int], first: TransferSide) -> None:
    """Whichever of several links is down when the orders come, and whichever side gets them first: all ranks report, and none of the two that
    lack the link says landed."""
    for number in links(pair):
        stage = scene(*pair)
        (producer, consumer) = list(stage.links)[number]
        lose(stage, number)
        key = stage.request(9)
        begin = [lambda key=key, stage=stage: stage.chunk(key), lambda key=key, stage=stage: stage.reserve_for(key)]  # type: ignore[misc]
        for step in begin if first is SEND else reversed(begin):
            step()
            stage.drain()
        stage.finish_prefill(key)
        stage.drain()
        assert sum(stage.outcomes_of(SEND).values()) == pair[0], number
        assert sum(stage.outcomes_of(RECEIVE).values()) == pair[1], number
        assert (key, consumer) not in stage.landed
        assert stage.outcomes_of(SEND)[CloseReason.PEER_UNKNOWN] >= 1
        assert producer in stage.producers
        stage.finish(is_reliable=True)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_rank_whose_link_comes_late_hears_what_ended_without_it(pair: tuple[int, int]) -> None:
    """Decode gives up while a link is down; the prefill that opens once it is up does not wait for an offer that nobody will make."""
    for number in links(pair):
        stage = scene(*pair)
        lose(stage, number)
        key = stage.request(9)
        stage.reserve_for(key)
        stage.drain()
        while stage.connect(0):
            pass
        stage.chunk(key)
        stage.drain()
        stage.finish_prefill(key)
        stage.drain()
        assert sum(stage.outcomes_of(SEND).values()) == pair[0], number
        stage.finish(is_reliable=True)


@pytest.mark.parametrize("is_up_again", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_decline_reaches_every_rank_that_is_connected(pair: tuple[int, int], is_up_again: bool) -> None:
    """Also where one of several links is down, and that one when it is up again."""
    for number in links(pair):
        stage = scene(*pair)
        lose(stage, number)
        key = stage.request(9)
        stage.end_decode(key, CloseReason.NOTHING_TO_MOVE)
        stage.drain()
        while is_up_again and stage.connect(0):
            pass
        stage.chunk(key)
        stage.drain()
        stage.finish_prefill(key)
        stage.drain()
        outcomes = stage.outcomes_of(SEND)
        assert sum(outcomes.values()) == pair[0], number
        assert set(outcomes) <= {CloseReason.NOTHING_TO_MOVE, CloseReason.PEER_UNKNOWN, CloseReason.RELEASED}
        assert not is_up_again or CloseReason.PEER_UNKNOWN not in outcomes
        stage.finish(is_reliable=True)


@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (1, 2), (4, 2)], ids=str)
def test_abort_while_a_link_is_down_is_told_when_it_is_up(pair: tuple[int, int]) -> None:
    """The prefill had not begun, so that it has no memory of what was lost with the link."""
    for number in links(pair):
        stage = scene(*pair)
        key = stage.request(9)
        stage.reserve_for(key)
        while stage.call(0):
            pass
        stage.cut(number)
        stage.end_decode(key)
        while stage.notice(0):
            pass
        stage.drain()
        while stage.connect(0):
            pass
        stage.chunk(key)
        stage.drain()
        stage.finish_prefill(key)
        stage.drain()
        assert sum(stage.outcomes_of(SEND).values()) == pair[0], number
        assert not stage.landed
        stage.finish(is_reliable=True)


def test_prefill_rank_without_all_its_links_says_so_at_once() -> None:
    """To the decode rank that it can reach, before that one has said anything."""
    stage = scene(1, 2)
    lose(stage, 1)
    key = stage.request(9)
    stage.chunk(key)
    stage.call(0)
    (link,) = (link for link in stage.links.values() if link.is_up)
    assert [delivery.message for delivery in link.lanes[0].wire] == [Close(*key, "send", "peer_unknown")]
    stage.finish(is_reliable=True)


def test_untold_ends_are_of_one_incarnation_bounded_and_timed() -> None:
    """Each rank hears of each once; too many or too old ones are forgotten."""
    untold = UntoldEnds(10.0)
    here, there = PeerRank("p", "a", 0), PeerRank("p", "a", 1)
    for number in range(MAX_PARKED_TRANSFERS + 1):
        untold.add(TransferKey(f"t{number}", 1), "p", "a", CloseReason.ABORTED, [here], 0.0)
    assert len(untold) == MAX_PARKED_TRANSFERS
    assert untold.due(here) == untold.due(there._replace(incarnation="b")) == []
    due = untold.due(there)
    assert len(due) == MAX_PARKED_TRANSFERS
    assert due[0] == (TransferKey("t1", 1), CloseReason.ABORTED)
    assert untold.due(there) == []
    untold.expire(9.9)
    assert len(untold) == MAX_PARKED_TRANSFERS
    untold.expire(10.0)
    assert len(untold) == 0
