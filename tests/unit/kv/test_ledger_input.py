"""Whatever a connected peer says: both ledgers keep running, stay small, and count it."""

import itertools

import pytest
from deployment import Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from scene import Scene
from shapes import M3_SMALL

from pdserve.kv.actions import PeerRank, Scatter, SendFrame
from pdserve.kv.parking import MAX_PARKED_TRANSFERS
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Ack, Close, Grant, Item, Message, Offer, Parcel, Renew, Return, Seal, Want
from pdserve.types import CloseReason, TransferSide

LEASE_S, TIMEOUT_S = 10.0, 120.0


def scene(prefill_ranks: int = 1, decode_ranks: int = 1) -> Scene:
    """Return a deployment with real leases and deadlines."""
    return Scene(Setup(prefill_ranks, decode_ranks, num_slots=2 * prefill_ranks, timeout_s=TIMEOUT_S, lease_s=LEASE_S))


def answers(stage: Scene, message: Offer | Grant | Ack | Close) -> list[Message]:
    """Let the prefill rank hear a message of the decode rank, and return what it answers."""
    actions = stage.producer().ledger.on_message(stage.consumer().me, message, stage.now_s)
    return [action.message for action in actions if isinstance(action, SendFrame)]


NUMBERS = st.one_of(st.integers(-2, 5), st.sampled_from([-(1 << 63), 1 << 31, (1 << 63) - 1]))
IDS = st.sampled_from([f"{1:032x}", f"{2:032x}", "unknown", ""])
ATTEMPTS = st.integers(0, 2)
BYTES = st.sampled_from([b"", bytes(16), b"x" * 40])
FROM_DECODE = st.one_of(
    st.builds(Offer, IDS, ATTEMPTS, BYTES, NUMBERS, NUMBERS, st.tuples(NUMBERS)),
    st.builds(Grant, IDS, ATTEMPTS, NUMBERS),
    st.builds(Ack, IDS, ATTEMPTS, NUMBERS),
    st.builds(Close, IDS, ATTEMPTS, st.just("receive"), st.sampled_from(["", "aborted", "prompt_mismatch", "no such reason"])),
    st.builds(Renew, st.tuples(st.builds(TransferKey, IDS, ATTEMPTS))),
)
FROM_DECODE_KINDS = (Offer, Grant, Ack, Renew)
FROM_PREFILL = st.one_of(
    st.builds(
        Parcel,
        IDS,
        ATTEMPTS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.lists(st.builds(Item, NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple),
    ),
    st.builds(Want, IDS, ATTEMPTS),
    st.builds(Return, IDS, ATTEMPTS, st.lists(NUMBERS, max_size=4).map(tuple)),
    st.builds(Seal, IDS, ATTEMPTS, NUMBERS, NUMBERS, BYTES, NUMBERS),
    st.builds(Close, IDS, ATTEMPTS, st.just("send"), st.sampled_from(["", "aborted", "released", "digest_mismatch"])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(FROM_DECODE, FROM_PREFILL), max_size=25), st.integers(0, 40))
def test_no_message_of_a_peer_raises(messages: list[Message], began: int) -> None:
    """Any values in any message in any state: never an exception, and the real transfers still end."""
    stage = scene(2, 1)
    keys = [stage.request(9), stage.request(12)]
    lives = itertools.chain(*(stage.life(key, 4) for key in keys))
    for _ in itertools.islice(lives, began):
        pass
    producer, consumer = stage.producer(), stage.consumer()
    for message in messages:
        rank, peer = (producer, consumer) if isinstance(message, FROM_DECODE_KINDS) else (consumer, producer)
        if isinstance(message, Close):
            rank, peer = (producer, consumer) if message.side == "receive" else (consumer, producer)
        stage.execute(rank, rank.hear(peer.me, message, stage.now_s))
    stage.finish(is_reliable=False)


def test_hundred_thousand_unknown_transfers_leave_both_ledgers_small() -> None:
    """What cannot be parked is answered and counted; other workers have room of their own, and all is as before once they have expired."""
    stage = scene()
    producer, consumer = stage.producer(), stage.consumer()
    kinds = itertools.cycle((lambda key: Offer(*key, b"", 0, 9, (0,)), lambda key: Ack(*key, 1), lambda key: Grant(*key, 1)))
    for number, kind in zip(range(100_000), kinds, strict=False):
        key = TransferKey(f"made-up-{number}", 1)
        producer.ledger.on_message(consumer.me, kind(key), 0.0)
        consumer.ledger.on_seal(producer.me, Seal(*key, 1, 1, b"", 0), 0.0)
        consumer.ledger.on_parcel(producer.me, Parcel(*key, 1, 0, 1, 0, ()), 0.0)
    (parking,) = producer.ledger._parking.values()
    assert len(parking) == MAX_PARKED_TRANSFERS
    assert producer.ledger.dropped["parking_full"] == 100_000 - MAX_PARKED_TRANSFERS
    assert consumer.ledger.dropped == {"late": 100_000, "slot_not_granted": 100_000}
    assert (len(producer.ledger), len(consumer.ledger)) == (0, 0)
    assert producer.ledger.on_message(PeerRank("decode-9", "x", 0), Offer("early", 1, b"", 0, 9, (0,)), 0.0) == ()
    stage.tick(TIMEOUT_S)
    key = stage.request(9)
    stage.serve(key)
    assert stage.has_landed(key)


def test_offer_that_cannot_be_parked_is_refused_aloud() -> None:
    """A consumer hears at once that its offer found no place, instead of waiting for its deadline."""
    stage = scene()
    for number in range(MAX_PARKED_TRANSFERS):
        answers(stage, Offer(f"made-up-{number}", 1, b"", 0, 9, (0,)))
    assert answers(stage, Offer("one-more", 1, b"", 0, 9, (0,))) == [Close("one-more", 1, "send", "overflow")]


def test_rank_of_another_worker_has_no_say() -> None:
    """Messages for a live transfer from ranks that are not its consumers change nothing and are counted."""
    stage = scene()
    key = stage.request(9)
    stage.reserve_for(key)
    stage.chunk(key, 4)
    stage.drain()
    stranger = PeerRank("decode-9", "other", 0)
    ledger = stage.producer().ledger
    for message in (Offer(*key, b"", 0, 9, (0,)), Grant(*key, 3), Ack(*key, 1), Close(*key, "receive", "aborted")):
        ledger.on_message(stranger, message, 0.0)
    ledger.on_renew(stranger, Renew((key,)), 0.0)
    assert ledger._live[key].dropped == {"not_a_consumer": 4}
    stage.settle()
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("is_direct", [False, True])
def test_parcel_beyond_a_slot_ends_its_transfer(is_direct: bool) -> None:
    """Blocks that are owed, named again and again until they are more than a slot holds: nothing is copied, whoever wrote the slot."""
    stage = Scene(Setup(num_slots=4, slot_bytes=64, is_direct=is_direct))
    key = stage.request(9)
    stage.reserve_for(key)
    stage.drain()
    consumer, peer = stage.consumer(), stage.producer().me
    (slot, *_) = (slot for slot in range(4) if consumer.slots.may_fill(slot, key, peer))
    items = (Item(0, 0, 1), Item(0, 1, 2), Item(0, 0, 1))
    run_bytes = M3_SMALL.heads * M3_SMALL.shapes[0].block_tokens * M3_SMALL.shapes[0].token_bytes
    actions = consumer.ledger.on_parcel(peer, Parcel(*key, 1, slot, len(items) * run_bytes, 0, items), stage.now_s)
    assert not any(isinstance(action, Scatter) for action in actions)
    stage.execute(consumer, actions)
    assert stage.outcomes_of(TransferSide.RECEIVE) == {CloseReason.SEAL_MISMATCH: 1}
    stage.finish(is_reliable=True)
