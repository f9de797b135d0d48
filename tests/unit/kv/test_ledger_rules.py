"""The rules of a hand-over one by one: who acknowledges, what a pass is worth, how long anyone waits, and who holds a slot."""

import random
from collections.abc import Callable

import pytest
from deployment import Setup
from scene import Scene

from pdserve.kv.actions import PostParcel, ReportReceived, Scatter, SendFrame
from pdserve.kv.receive_transfer import ReceiveState
from pdserve.kv.send_transfer import SendState
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Ack, Close, Grant, Item, Message, Offer, Parcel, Renew, Seal, set_digest
from pdserve.types import CloseReason, TransferSide

SEND, RECEIVE = TransferSide.SEND, TransferSide.RECEIVE
LEASE_S, TIMEOUT_S = 10.0, 120.0


def scene(prefill_ranks: int = 1, decode_ranks: int = 1, **more: object) -> Scene:
    """Return a deployment with real leases and deadlines."""
    setup: dict[str, object] = {"num_slots": 2 * prefill_ranks, "slot_bytes": 48, "timeout_s": TIMEOUT_S, "lease_s": LEASE_S}
    return Scene(Setup(prefill_ranks, decode_ranks, **(setup | more)))  # type: ignore[arg-type]


def take(stage: Scene, kind: type[Message], *, consumer: int = 0, producer: int = 0, towards_decode: bool = False) -> list[Message]:
    """Take messages of a kind off the wire between two ranks."""
    ends = (stage.producer(producer).me, stage.consumer(consumer).me)
    wire = stage.links[ends].lanes[0 if towards_decode else 1].wire
    taken = [sent.message for sent in wire if isinstance(sent.message, kind)]
    kept = [sent for sent in wire if not isinstance(sent.message, kind)]
    wire.clear()
    wire.extend(kept)
    return taken


def hear(stage: Scene, message: Message, *, consumer: int = 0, producer: int = 0) -> list[Message]:
    """Let a prefill rank hear a message; returns what it answers to that decode rank."""
    rank, peer = stage.producer(producer), stage.consumer(consumer).me
    assert isinstance(message, Offer | Grant | Ack | Close)
    actions = rank.ledger.on_message(peer, message, stage.now_s)
    stage.execute(rank, actions)
    return [action.message for action in actions if isinstance(action, SendFrame) and action.peer == peer]


def until_acks(stage: Scene, key: TransferKey, consumers: int = 1, *, is_finished: bool = True) -> list[Message]:
    """Play a transfer to where all decode ranks have acknowledged, and keep the acknowledgements back."""
    acks: dict[int, Message] = {}
    script: list[Callable[[], object]] = [lambda: stage.reserve_for(key), lambda: stage.chunk(key)]
    if is_finished:
        script.append(lambda: stage.finish_prefill(key))
    for _ in stage.play(script):
        for consumer in range(consumers):
            for ack in take(stage, Ack, consumer=consumer):
                acks[consumer] = ack
    return [acks[consumer] for consumer in range(consumers)]


# ---- acknowledgements ----------------------------------------------------------------------------------------------------------------


def test_blocks_are_free_when_each_consumer_rank_has_acknowledged() -> None:
    """The same rank twice counts once; another attempt's acknowledgement counts for nothing."""
    stage = scene(1, 2)
    key = stage.request(9)
    first, second = until_acks(stage, key, consumers=2)
    other = TransferKey(key.transfer_id, 2)
    for ack in (first, first, Ack(*other, 1), first):
        hear(stage, ack)
    hear(stage, Ack(*other, 1), consumer=1)
    assert stage.outcomes_of(SEND) == {}
    hear(stage, second, consumer=1)
    assert stage.outcomes_of(SEND) == {CloseReason.RELEASED: 1}


@pytest.mark.parametrize("decode_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("prefill_ranks", [1, 2, 4, 8])
def test_acknowledgements_are_a_set_of_ranks(prefill_ranks: int, decode_ranks: int) -> None:
    """In any order, repeated, mixed with another attempt's: each prefill rank frees on the last distinct one of its own consumers, not before."""
    stage = scene(prefill_ranks, decode_ranks)
    key, die = stage.request(9), random.Random(prefill_ranks * 8 + decode_ranks)
    acks: dict[int, list[tuple[int, Message]]] = {rank: [] for rank in range(prefill_ranks)}
    script: list[Callable[[], object]] = [
        lambda: stage.reserve_for(key),
        lambda: stage.chunk(key),
        lambda: stage.finish_prefill(key),
    ]
    for _ in stage.play(script):
        for producer, consumer in stage.plan.slices:
            acks[producer] += [(consumer, ack) for ack in take(stage, Ack, consumer=consumer, producer=producer)]
    for producer, heard in acks.items():
        assert {consumer for consumer, _ in heard} == {*stage.plan.consumers_of(producer)}
        die.shuffle(heard)
        for number, (consumer, ack) in enumerate(heard):
            assert stage.producer(producer).ledger.state(key) is SendState.SEALED
            hear(stage, Ack(key.transfer_id, 2, 1), consumer=consumer, producer=producer)
            for _ in range(2):
                hear(stage, ack, consumer=heard[die.randint(0, number)][0], producer=producer)
            hear(stage, ack, consumer=consumer, producer=producer)
        assert stage.producer(producer).ledger.state(key) is None
    stage.finish(is_reliable=True)


def test_acknowledgement_of_what_was_not_sealed_counts_for_nothing() -> None:
    """Whatever a consumer says early, its blocks are kept until it has answered the seal."""
    stage = scene()
    key = stage.request(9)
    stage.reserve_for(key)
    stage.chunk(key, 4)
    stage.drain()
    assert hear(stage, Ack(*key, 1)) == []
    assert stage.producer().ledger._live[key].dropped == {"stale_ack": 1}
    stage.finish(is_reliable=True)
    assert stage.has_landed(key)


def test_rank_that_nobody_reads_frees_at_its_seal() -> None:
    """With 8 prefill ranks and 4 heads, one decode rank reads every other one; the others wait for nobody."""
    stage = scene(8, 1, num_slots=8)
    key = stage.request(9)
    stage.chunk(key)
    stage.drain()
    stage.finish_prefill(key)
    stage.drain()
    assert stage.outcomes_of(SEND) == {CloseReason.RELEASED: 4}
    stage.finish(is_reliable=True)
    assert stage.has_landed(key)


def test_acknowledgement_of_an_earlier_pass_is_counted_and_asked_for_again() -> None:
    """After a preemption only the seal of the present pass may be acknowledged; a consumer that has landed does so without new bytes."""
    stage = scene()
    key = stage.request(9)
    (ack,) = until_acks(stage, key, is_finished=False)
    stage.preempt_leg(key)
    stage.drain()
    assert hear(stage, ack) == []
    stage.chunk(key)
    while stage.call(0):
        pass
    assert hear(stage, ack) == []
    assert stage.producer().ledger._live[key].dropped == {"stale_ack": 2}
    stage.finish_prefill(key)
    stage.drain()
    assert stage.outcomes_of(SEND) == {CloseReason.RELEASED: 1}
    stage.finish(is_reliable=True)


def test_nothing_more_is_sent_to_a_consumer_that_has_acknowledged() -> None:
    """Its slots are its own again, so neither what was queued for it nor another pass may fill them."""
    stage = scene(1, 2, num_slots=4, slot_bytes=256)
    key = stage.request(9)
    until_acks(stage, key, consumers=2, is_finished=False)
    stage.preempt_leg(key)
    stage.chunk(key)
    while stage.call(0):
        pass
    lane = stage.links[stage.producer().me, stage.consumer().me].lanes[0]
    assert any(isinstance(entry, PostParcel) for entry in lane.outbox)
    (seal,) = take(stage, Seal, towards_decode=True)
    assert isinstance(seal, Seal)
    assert stage.consumer().ledger.on_seal(stage.producer().me, seal, 0.0) == (SendFrame(stage.producer().me, Ack(*key, 2)),)
    hear(stage, Ack(*key, 2))
    stage.preempt_leg(key)
    stage.chunk(key)
    while stage.call(0):
        pass
    hear(stage, Grant(*key, 0))
    while stage.write(0):
        assert lane.gathering is None
    stage.finish(is_reliable=True)


# ---- passes --------------------------------------------------------------------------------------------------------------------------


def test_parcel_of_an_earlier_pass_is_not_copied() -> None:
    """It counts as stale, and its slot is granted for the pass that is under way."""
    stage = scene(num_slots=2)
    key = stage.request(9)
    stage.reserve_for(key)
    stage.chunk(key)
    stale: list[Message] = []
    while not stale:
        assert stage.call(0) or stage.write(0) or stage.deliver(0)
        stale = take(stage, Parcel, towards_decode=True)
    stage.preempt_leg(key)
    stage.chunk(key)
    stage.drain()
    consumer, (parcel,) = stage.consumer(), stale
    assert isinstance(parcel, Parcel)
    actions = consumer.ledger.on_parcel(stage.producer().me, parcel, stage.now_s)
    assert actions == [SendFrame(stage.producer().me, Grant(*key, parcel.slot))]
    assert consumer.ledger._live[key].dropped == {"stale_pass": 1}
    stage.execute(consumer, actions)
    stage.finish(is_reliable=True)
    assert stage.has_landed(key)


@pytest.mark.parametrize("first", ["seal", "parcel"])
def test_new_pass_forgets_what_the_old_one_brought(first: str) -> None:
    """Blocks of pass 1 never complete the seal of pass 2, even if all of them are there; whichever of its messages comes first."""
    stage = scene(num_slots=4)
    key = stage.request(4)
    stage.reserve_for(key)
    stage.chunk(key)
    seals: list[Message] = []
    while stage.call(0) or stage.write(0) or stage.deliver(0) or stage.scatter(0):
        seals += take(stage, Seal, towards_decode=True)
    (entry,) = stage.consumer().ledger._live[key].producers.values()
    assert entry.scattered == entry.expected
    assert len(seals) == 1
    consumer, producer = stage.consumer(), stage.producer().me
    if first == "seal":
        seal = Seal(*key, 2, len(entry.expected), set_digest(entry.expected), 0)
        assert consumer.ledger.on_seal(producer, seal, stage.now_s) == []
    else:
        slot = next(slot for slot in range(4) if consumer.slots.may_fill(slot, key, producer))
        (scatter,) = consumer.ledger.on_parcel(producer, Parcel(*key, 2, slot, 32, 0, (Item(0, 0, 1),)), stage.now_s)
        assert isinstance(scatter, Scatter)
    assert entry.scattered == set()


def test_copy_of_an_earlier_pass_counts_for_nothing() -> None:
    """It was asked for before the new pass began and ends after: its blocks are not those that the new seal names."""
    stage = scene(num_slots=2, slot_bytes=256)
    key = stage.request(4)
    stage.reserve_for(key)
    stage.chunk(key)
    while not stage.consumer().scatters:
        assert stage.call(0) or stage.write(0) or stage.deliver(0)
    old, consumer = stage.consumer().scatters.popleft(), stage.consumer()
    (entry,) = consumer.ledger._live[key].producers.values()
    seal = Seal(*key, 2, len(entry.expected), set_digest(entry.expected), 0)
    consumer.ledger.on_seal(stage.producer().me, seal, stage.now_s)
    assert not any(isinstance(action, ReportReceived) for action in consumer.ledger.scattered(old, stage.now_s))
    assert entry.scattered == set()


def test_landing_waits_for_copies_that_are_going_on() -> None:
    """A copy of an earlier pass still writes the blocks after the present pass is complete: the report comes when it is done."""
    stage = scene(num_slots=2, slot_bytes=256)
    key = stage.request(4)
    stage.reserve_for(key)
    stage.chunk(key)
    while not stage.consumer().scatters:
        assert stage.call(0) or stage.write(0) or stage.deliver(0)
    old = stage.consumer().scatters.popleft()
    stage.preempt_leg(key)
    stage.chunk(key)
    stage.drain()
    assert stage.consumer().ledger.state(key) is ReceiveState.RECEIVING
    assert stage.outcomes_of(RECEIVE) == {}
    (landed,) = [a for a in stage.consumer().ledger.scattered(old, stage.now_s) if isinstance(a, ReportReceived)]
    assert landed.landed


# ---- time ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0])
def test_renewals_keep_a_transfer_that_decode_cannot_take_yet(skew_s: float) -> None:
    """While a consumer says that it still wants a transfer, its silence otherwise ends nothing, however long it lasts and whatever its clock says."""
    stage = scene(skew_s=skew_s)
    key = stage.request(9)
    stage.reserve_for(key)
    stage.chunk(key, 4)
    stage.drain()
    for _ in range(40):
        stage.tick(LEASE_S / 5)
        stage.drain()
    stage.settle()
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0])
def test_lost_renewals_end_the_lease_and_decode_hears_it(skew_s: float) -> None:
    """The producer closes after one lease of silence, counts it as expired, and decode computes the prompt itself; clocks may differ."""
    stage = scene(skew_s=skew_s)
    key = stage.request(9)
    stage.reserve_for(key)
    stage.chunk(key, 4)
    stage.drain()
    for _ in range(6):
        stage.tick(LEASE_S / 5)
        take(stage, Renew)
    stage.drain()
    assert stage.outcomes_of(RECEIVE) == {CloseReason.PEER_CLOSED: 1}
    stage.settle()
    assert stage.outcomes_of(SEND) == {CloseReason.EXPIRED: 1}
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("side", [SEND, RECEIVE])
def test_peer_that_never_comes_costs_one_deadline(side: TransferSide) -> None:
    """Each side ends by its own clock when the other's leg never arrives."""
    stage = scene(2, 2, timeout_s=30.0)
    key = stage.request(9)
    if side is SEND:
        stage.chunk(key)
        stage.finish_prefill(key)
        del stage.decodes["decode-0"].requests[key]
    else:
        stage.reserve_for(key)
        del stage.prefills["prefill-0"].requests[key]
    stage.drain()
    stage.tick(29.0)
    stage.drain()
    assert stage.outcomes_of(side) == {}
    stage.tick(2.0)
    stage.drain()
    assert stage.outcomes_of(side) == {CloseReason.EXPIRED: 2}
    stage.finish(is_reliable=True)


def test_worker_that_stops_ends_its_transfers_at_once() -> None:
    """Ten prefills that nobody has read yet: decode hears of their loss from the links, not from a clock."""
    stage = scene(max_requests=10, num_slots=16)
    keys = [stage.request(9) for _ in range(10)]
    for key in keys:
        stage.reserve_for(key)
        stage.chunk(key, 4)
    stage.drain()
    stage.restart(sorted((*stage.prefills, *stage.decodes)).index("prefill-0"))
    while stage.notice(0):
        pass
    assert stage.outcomes_of(RECEIVE) == {CloseReason.PEER_LOST: 10}
    stage.finish(is_reliable=True)


# ---- ends before the beginning -------------------------------------------------------------------------------------------------------


def test_every_consumer_rank_hears_of_an_end_before_the_beginning() -> None:
    """Rank 0 closes before the prefill opens, rank 1 while it is open, closed and unfinished: both get an answer and their slots back."""
    stage = scene(1, 2)
    key = stage.request(9)
    stage.reserve_for(key)
    stage.drain()
    assert hear(stage, Close(*key, "receive", "aborted")) == [Close(*key, "send", "peer_closed")]
    stage.chunk(key)
    stage.call(0)
    assert hear(stage, Close(*key, "receive", "aborted"), consumer=1) == [Close(*key, "send", "peer_closed")]
    stage.finish(is_reliable=True)


def test_late_messages_meet_a_tombstone() -> None:
    """What comes for a transfer that is over is answered and counted, and opens or parks nothing."""
    stage = scene()
    key = stage.request(9)
    stage.serve(key)
    ledger = stage.producer().ledger
    closing = [Close(*key, "send", "released")]
    assert hear(stage, Offer(*key, b"", 0, 9, (0,))) == closing
    assert hear(stage, Ack(*key, 1)) == closing
    assert hear(stage, Grant(*key, 0)) == []
    assert (ledger.dropped["late"], [len(parking) for parking in ledger._parking.values() if len(parking)]) == (3, [])


def test_offers_parked_before_a_link_broke_are_not_used_after() -> None:
    """Their slots serve others by then; the transfer ends instead of filling them."""
    stage = scene(is_direct=True)
    key = stage.request(9)
    stage.reserve_for(key)
    stage.drain()
    stage.cut(0)
    while stage.notice(0) or stage.connect(0):
        pass
    other = stage.request(9)
    stage.serve(other)
    stage.chunk(key)
    stage.finish(is_reliable=True)
    assert stage.has_landed(other)
    assert not stage.has_landed(key)


# ---- slots ---------------------------------------------------------------------------------------------------------------------------


def test_long_prompts_through_few_slots_all_land() -> None:
    """Slots for one and a half requests, eight prompts in three chunks each, none of them waits for ever."""
    stage = scene(2, 1, num_slots=3, max_requests=8, num_blocks=64)
    keys = [stage.request(24) for _ in range(8)]
    for key in keys:
        stage.reserve_for(key)
    for tokens in (8, 8, 8):
        for key in keys:
            stage.chunk(key, tokens)
    stage.settle()
    assert all(stage.has_landed(key) for key in keys)
    stage.finish(is_reliable=True)
