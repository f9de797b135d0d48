"""Few slots for many prompts: who may hold one, who gets the next, and why nobody waits for a clock.

Scenes here have no deadline and no lease that could help.
"""

from collections.abc import Callable

import pytest
from deployment import Setup
from scene import Scene

from pdserve.kv.actions import PostParcel, SendFrame
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Close, Grant, Message, Offer, Parcel, Return, Seal, Want
from pdserve.types import CloseReason, TransferSide


def scene(prefill_ranks: int = 1, decode_ranks: int = 1, **more: object) -> Scene:
    """Return a deployment with one slot unless given."""
    setup: dict[str, object] = {"num_slots": 1, "num_blocks": 12, "slot_bytes": 64, "max_requests": 8}
    return Scene(Setup(prefill_ranks, decode_ranks, **(setup | more)))  # type: ignore[arg-type]


def sent(stage: Scene, kind: type[Message], *, towards_decode: bool) -> list[Message]:
    """Return the messages of a kind that are under way between the first two ranks."""
    lane = stage.links[stage.producer().me, stage.consumer().me].lanes[0 if towards_decode else 1]
    return [delivery.message for delivery in lane.wire if isinstance(delivery.message, kind)]


def run_until(stage: Scene, is_there: Callable[[], bool], *steps: Callable[[int], bool]) -> None:
    """Take steps of the given kinds, the first that is possible each time, until something has come about."""
    while not is_there():
        assert any(step(0) for step in steps)


def held(stage: Scene, key: TransferKey) -> int:
    return stage.consumer().slots.held(key, stage.producer().me)


def until_want(stage: Scene, key: TransferKey) -> None:
    """Play a transfer to where its producer has a parcel and no slot, and has just said so."""
    stage.reserve_for(key)
    stage.drain()
    stage.chunk(key)
    run_until(stage, lambda: bool(sent(stage, Want, towards_decode=True)), stage.call, stage.write)


def line_up(stage: Scene, *keys: TransferKey) -> None:
    """Let the producer want a slot for each of these in turn, and the consumer hear it; what that answers is under way."""
    for key in keys:
        stage.reserve_for(key)
    stage.drain()
    for key in keys:
        stage.chunk(key)
        while stage.call(0):
            pass
    while sent(stage, Want, towards_decode=True) or sent(stage, Seal, towards_decode=True):
        stage.deliver(0)


# ---- nobody waits for ever -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_finished_prefill_does_not_wait_for_one_that_needs_its_blocks(num_slots: int) -> None:
    """Decode has room for two prompts; the second is computed first and fills prefill's blocks, so the first cannot begin until it has landed."""
    stage = scene(num_slots=num_slots, num_blocks=14)
    first, second = stage.request(24), stage.request(24)
    for key in (first, second):
        stage.reserve_for(key)
        stage.drain()
    blocker = stage.request(24)
    assert stage.chunk(second)
    assert stage.chunk(blocker)
    assert not stage.chunk(first)
    stage.drain()
    stage.finish_prefill(second)
    stage.drain()
    assert stage.has_landed(second)
    assert stage.chunk(first)
    stage.finish(is_reliable=True)
    assert all(stage.has_landed(key) for key in (first, second, blocker))


def test_prompt_that_stops_between_chunks_holds_up_nobody() -> None:
    """It has sent what it had and cannot go on without the blocks of others: the slot it used is theirs meanwhile."""
    stage = scene(num_blocks=12)
    halfway, whole = stage.request(24), stage.request(24)
    for key in (halfway, whole):
        stage.reserve_for(key)
    assert stage.chunk(halfway, 12)
    stage.drain()
    assert stage.chunk(whole)
    assert stage.chunk(halfway, 12)
    stage.preempt_leg(halfway)
    stage.drain()
    stage.finish_prefill(whole)
    stage.drain()
    assert stage.has_landed(whole)
    stage.finish(is_reliable=True)
    assert stage.has_landed(halfway)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7])
@pytest.mark.parametrize("pair", [(8, 1), (8, 2), (4, 1), (2, 4)], ids=str)
def test_arena_smaller_than_the_plan_serves_every_rank(pair: tuple[int, int], num_slots: int) -> None:
    """Fewer slots than producer ranks: they take turns."""
    stage = scene(*pair, num_slots=num_slots, decode_first=True)
    keys = [stage.request(tokens) for tokens in (9, 24, 17, 24)]
    stage.settle()
    assert all(stage.has_landed(key) for key in keys)
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_long_prompts_through_few_slots_all_land(num_slots: int, is_direct: bool) -> None:
    """Eight prompts in three chunks each, all of them begun before any is done."""
    stage = scene(2, 1, num_slots=num_slots, num_blocks=64, is_direct=is_direct)
    keys = [stage.request(24) for _ in range(8)]
    for key in keys:
        stage.reserve_for(key)
    for tokens in (8, 8, 8):
        for key in keys:
            stage.chunk(key, tokens)
    stage.settle()
    assert all(stage.has_landed(key) for key in keys)
    stage.finish(is_reliable=True)


# ---- who gets the next ---------------------------------------------------------------------------------------------------------------


def test_slots_in_plenty_come_with_the_offer() -> None:
    """The first parcels leave without asking, and what came back is granted again unasked."""
    stage = scene(num_slots=16)
    key = stage.request(24)
    stage.reserve_for(key)
    stage.call(0)
    (offer,) = sent(stage, Offer, towards_decode=False)
    assert isinstance(offer, Offer)
    assert len(offer.slots) == 8
    stage.drain()
    stage.chunk(key, 16)
    while stage.call(0) or stage.write(0):
        pass
    assert len(sent(stage, Parcel, towards_decode=True)) > 2
    assert not sent(stage, Want, towards_decode=True)
    stage.deliver(0)
    stage.scatter(0)
    assert len(sent(stage, Grant, towards_decode=False)) == 1
    stage.finish(is_reliable=True)


def test_short_prompt_is_offered_no_more_slots_than_it_can_fill() -> None:
    """The others stay for whoever comes next."""
    stage = scene(num_slots=64, slot_bytes=4096)
    key = stage.request(4)
    stage.reserve_for(key)
    stage.drain()
    assert held(stage, key) == 1
    stage.finish(is_reliable=True)


def test_spare_slots_even_out_between_transfers() -> None:
    """One alone gets many; what it gives back goes to others that move until each has its share."""
    stage = scene(num_slots=8, slot_bytes=32, num_blocks=64)
    first = stage.request(24)
    stage.reserve_for(first)
    stage.drain()
    assert held(stage, first) == 6
    second = stage.request(24)
    stage.reserve_for(second)
    stage.drain()
    assert held(stage, second) == 0
    for key in (second, first):
        stage.chunk(key, 12)
    stage.drain()
    assert held(stage, second) >= 2
    assert held(stage, first) <= 4
    stage.finish(is_reliable=True)


def test_wants_are_served_in_order_and_before_anything_else() -> None:
    """A slot that comes back goes to whoever has waited longest, not to the producer that it came from."""
    stage = scene(num_blocks=64)
    keys = [stage.request(24) for _ in range(3)]
    line_up(stage, *keys)
    assert [held(stage, key) for key in keys] == [1, 0, 0]
    served = []
    consumer, peer = stage.consumer(), stage.producer().me
    for key in (keys[0], keys[1]):
        parcel = Parcel(*key, 1, 0, 1, 0, ())
        served += consumer.ledger.on_parcel(peer, parcel, stage.now_s)
    grants = [action.message for action in served if isinstance(action, SendFrame) and isinstance(action.message, Grant)]
    assert grants == [Grant(*keys[1], 0), Grant(*keys[2], 0)]


def test_want_is_said_once_until_a_slot_comes() -> None:
    """However often the producer looks for one."""
    stage = scene(num_blocks=64)
    key = stage.request(24)
    until_want(stage, key)
    producer = stage.producer()
    for _ in range(5):
        assert not producer.ledger.pump(key, stage.now_s, flush=True)
    assert len(sent(stage, Want, towards_decode=True)) == 1
    stage.finish(is_reliable=True)


# ---- crossings -----------------------------------------------------------------------------------------------------------------------


def test_want_that_crosses_a_grant_is_satisfied_by_it() -> None:
    """By the consumer's account the producer holds a slot, so it gets no second one."""
    stage = scene(num_slots=4, num_blocks=64)
    key = stage.request(24)
    stage.reserve_for(key)
    stage.drain()
    consumer, peer = stage.consumer(), stage.producer().me
    assert held(stage, key) == 3
    assert consumer.ledger.on_want(peer, Want(*key)) == []
    assert held(stage, key) == 3
    stage.chunk(key)
    stage.finish(is_reliable=True)
    assert stage.has_landed(key)


@pytest.mark.parametrize("written_again", [0, 3])
def test_slot_that_was_asked_for_by_a_dead_pass_is_returned(written_again: int) -> None:
    """Preempted while its grant is under way, with less than a block written anew: the slot goes back at once, and the next one lands."""
    stage = scene(num_blocks=64)
    key, other = stage.request(24), stage.request(24)
    until_want(stage, key)
    run_until(stage, lambda: bool(sent(stage, Grant, towards_decode=False)), stage.deliver)
    stage.preempt_leg(key)
    if written_again:
        stage.chunk(key, written_again)
    while stage.call(0):
        pass
    run_until(stage, lambda: not sent(stage, Grant, towards_decode=False), stage.deliver)
    assert sent(stage, Return, towards_decode=True) == [Return(*key, (0,))]
    stage.drain()
    assert stage.consumer().slots.num_free == 1
    stage.reserve_for(other)
    stage.chunk(other)
    stage.drain()
    assert stage.has_landed(other)
    stage.finish(is_reliable=True)
    assert stage.has_landed(key)


def test_slot_of_a_parcel_that_died_in_the_queue_is_returned() -> None:
    """Posted, then preempted before its pages were read: the slot serves the new pass if that has anything, else it goes back."""
    for written_again in (0, 24):
        stage = scene(num_blocks=64)
        key = stage.request(24)
        until_want(stage, key)
        lane = stage.links[stage.producer().me, stage.consumer().me].lanes[0]
        run_until(stage, lambda lane=lane: any(isinstance(entry, PostParcel) for entry in lane.outbox), stage.deliver)  # type: ignore[misc]
        stage.preempt_leg(key)
        if written_again:
            stage.chunk(key)
        while stage.call(0):
            pass
        stage.write(0)
        assert bool(sent(stage, Return, towards_decode=True)) is not bool(written_again)
        stage.finish(is_reliable=True)
        assert stage.has_landed(key)


def test_preempted_prefill_gives_back_what_it_holds_ahead_of_need() -> None:
    """At the next tick, if it has written nothing by then; a new pass asks again."""
    stage = scene(num_slots=8, num_blocks=64)
    key = stage.request(24)
    stage.reserve_for(key)
    stage.chunk(key, 3)
    stage.drain()
    assert held(stage, key) == 6
    stage.preempt_leg(key)
    stage.drain()
    assert held(stage, key) == 6
    stage.tick(0.1)
    stage.drain()
    assert held(stage, key) == 0
    stage.finish(is_reliable=True)
    assert stage.has_landed(key)


@pytest.mark.parametrize("side", [TransferSide.SEND, TransferSide.RECEIVE])
def test_close_of_a_transfer_takes_its_want_along(side: TransferSide) -> None:
    """Whoever closes while a want waits: no slot is granted for it, and the next in line gets one."""
    stage = scene(num_blocks=64)
    holder, closed, waiting = (stage.request(24) for _ in range(3))
    line_up(stage, holder, closed, waiting)
    if side is TransferSide.SEND:
        producer = stage.producer()
        stage.execute(producer, producer.ledger.cancel(closed, CloseReason.ABORTED))
    else:
        stage.end_decode(closed)
    stage.drain()
    stage.settle()
    assert [stage.has_landed(key) for key in (holder, closed, waiting)] == [True, False, True]
    stage.finish(is_reliable=True)


def test_slot_of_a_closed_transfer_goes_to_who_waits() -> None:
    """It is free again once its producer has confirmed the close, not before."""
    stage = scene(num_blocks=64)
    closed, waiting = stage.request(24), stage.request(24)
    line_up(stage, closed, waiting)
    stage.end_decode(closed)
    while stage.call(0):
        pass
    assert (held(stage, closed), held(stage, waiting)) == (1, 0)
    consumer, peer = stage.consumer(), stage.producer().me
    actions = consumer.ledger.on_close(peer, Close(*closed, "send", "peer_closed"), stage.now_s)
    assert actions == [SendFrame(peer, Grant(*waiting, 0))]
    stage.execute(consumer, actions)
    stage.finish(is_reliable=True)
    assert stage.has_landed(waiting)


def test_wants_of_a_lost_peer_are_forgotten() -> None:
    """Its slot and its place in the line are others' at once."""
    stage = scene(num_blocks=64, prefill_workers=2)
    lost = [stage.request(24) for _ in range(2)]
    line_up(stage, *lost)
    stage.restart(sorted((*stage.prefills, *stage.decodes)).index("prefill-0"))
    while stage.notice(0):
        pass
    other = stage.request(24, prefill="prefill-1")
    stage.reserve_for(other)
    stage.chunk(other, prefill="prefill-1")
    stage.drain()
    assert stage.has_landed(other)
    stage.finish(is_reliable=True)


def test_late_and_foreign_words_about_slots_are_counted() -> None:
    """A want for a transfer that is over or of another, and a return of what was never held, change nothing."""
    stage = scene(num_slots=4, num_blocks=64)
    over, live = stage.request(9), stage.request(9)
    stage.serve(over)
    stage.reserve_for(live)
    stage.drain()
    consumer, peer = stage.consumer(), stage.producer().me
    stranger = peer._replace(worker="prefill-9")
    before = held(stage, live)
    for who, key in ((peer, over), (peer, TransferKey("unknown", 1)), (stranger, live)):
        assert consumer.ledger.on_want(who, Want(*key)) == []
    for who, key in ((peer, over), (peer, TransferKey("unknown", 1)), (stranger, live)):
        assert consumer.ledger.on_return(who, Return(*key, (0, -1, 99))) == []
    assert consumer.ledger.dropped == {"late": 3, "slot_not_granted": 9}
    assert held(stage, live) == before
    stage.finish(is_reliable=True)
    assert stage.has_landed(live)
