"""A rank's loop gives way between two parcels or messages: calls of the engine, grants and other links wait for one at most."""

import threading
from collections.abc import Sequence

import pytest
from rank_place import PATIENCE_S, SLOT_BYTES, Outsider, Rank, blocks, join, running
from shapes import M3_SMALL, Prompt

from pdserve.kv.actions import Actions, PeerRank
from pdserve.kv.pages import Bytes
from pdserve.kv.peers import PeerAddress
from pdserve.kv.plan import HeadSlice
from pdserve.kv.send_ledger import FROM_CONSUMER
from pdserve.kv.ticket import TransferKey
from pdserve.kv.transports.memory import MemoryTransport
from pdserve.kv.wire import Close, Item
from pdserve.types import CloseReason

pytestmark = pytest.mark.usefixtures("no_leaks")

KEY = TransferKey("long", 1)
PROMPT = Prompt(M3_SMALL, 1, 24)
"""several slots long"""
COPY, MESSAGE, CALL = "copy", "message", "call"


def pair() -> tuple[Rank, Rank]:
    transport = MemoryTransport()
    return Rank(PeerRank("prefill-0", "a", 0), transport=transport), Rank(PeerRank("decode-0", "a", 0), transport=transport)


def test_call_waits_for_one_gather_at_most() -> None:
    """Parcels stand in line; what the engine asks for during one of them is done before the next. So a preempted step waits for one."""
    producer, consumer = pair()
    turns: list[str] = []
    gather = producer.memory.pages.gather

    def noted(items: Sequence[Item], slices: Sequence[HeadSlice], block_ids: Sequence[Sequence[int]], out: Bytes) -> None:
        turns.append(COPY)
        producer.io.submit(lambda: turns.append(CALL))
        gather(items, slices, block_ids, out)

    producer.memory.pages.gather = noted  # type: ignore[method-assign]
    with running(producer, consumer):
        join([producer, consumer])
        consumer.consume(KEY, PROMPT, producer.me, blocks(M3_SMALL, PROMPT.tokens, first=10))
        consumer.sync()
        producer.produce(KEY, PROMPT, consumer.me, blocks(M3_SMALL, PROMPT.tokens))
        assert consumer.report_of(KEY).record.outcome is CloseReason.LANDED
        producer.sync()
    assert turns.count(COPY) > 2
    assert turns == [COPY, CALL] * turns.count(COPY)


def test_call_waits_for_one_scatter_at_most() -> None:
    """Also when many parcels lie in their slots already; then a grant, too, leaves before the next scatter."""
    producer, consumer = pair()
    turns: list[str] = []
    all_are_here = threading.Event()
    scatter = consumer.memory.pages.scatter

    def noted(items: Sequence[Item], slices: Sequence[HeadSlice], block_ids: Sequence[Sequence[int]], pages: Bytes) -> None:
        assert all_are_here.wait(PATIENCE_S)
        turns.append(COPY)
        consumer.io.submit(lambda: turns.append(CALL))
        scatter(items, slices, block_ids, pages)

    consumer.memory.pages.scatter = noted  # type: ignore[method-assign]
    with running(producer, consumer):
        join([producer, consumer])
        consumer.consume(KEY, PROMPT, producer.me, blocks(M3_SMALL, PROMPT.tokens, first=10))
        consumer.sync()
        producer.produce(KEY, PROMPT, consumer.me, blocks(M3_SMALL, PROMPT.tokens))
        for _ in range(20):
            producer.sync()
        all_are_here.set()
        assert consumer.report_of(KEY).record.outcome is CloseReason.LANDED
        consumer.sync()
    assert turns.count(COPY) > 2
    assert turns == [COPY, CALL] * turns.count(COPY)
    assert consumer.report_of(KEY).record.bytes_moved > 2 * SLOT_BYTES


async def test_call_waits_for_one_message_at_most() -> None:
    """A peer that sends without a pause takes one turn in two, and what it is answered goes out meanwhile."""
    rank, alice, turns = Rank(PeerRank("worker", "a", 0)), PeerRank("alice", "x", 0), list[str]()
    take = rank.io.sends.on_message

    def noted(peer: PeerRank, message: FROM_CONSUMER, now_s: float) -> Actions:
        turns.append(MESSAGE)
        rank.io.submit(lambda: turns.append(CALL))
        return take(peer, message, now_s)

    rank.io.sends.on_message = noted  # type: ignore[method-assign]
    with running(rank):
        rank.io.set_peers(1, [PeerAddress(alice, "127.0.0.1", 1, 1)])
        rank.sync()
        async with Outsider(rank, alice) as outsider:
            await outsider.greet()
            closes = [Close(f"n-{number}", 1, "receive", "aborted") for number in range(200)]
            await outsider.frames.stream.write(b"".join(outsider.frames._out.seal(close) for close in closes))
            for close in closes:
                assert await outsider.hear() == Close(close.transfer_id, 1, "send", "peer_closed")
        rank.sync()
    assert turns == [MESSAGE, CALL] * len(closes)
