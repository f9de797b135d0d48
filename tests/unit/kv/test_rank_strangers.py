"""A rank among peers that lie, break off, flood or sleep: it cuts their link, counts it, and serves the others."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
import structlog
from rank_place import NUM_SLOTS, PATIENCE_S, SECRET, SLOT_BYTES, Outsider, Rank, blocks, running
from shapes import M3_SMALL, Prompt

from pdserve.kv.actions import PeerRank, ReceiveOrder
from pdserve.kv.parking import MAX_PARKED_TRANSFERS, MAX_TOMBSTONES
from pdserve.kv.peers import PeerAddress
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import (
    HEADER_BYTES,
    LENGTH_BYTES,
    NONCE_BYTES,
    WIRE_VERSION,
    Ack,
    Body,
    Close,
    Grant,
    Hello,
    Item,
    LinkCipher,
    Offer,
    Parcel,
    Renew,
    Return,
    Seal,
    Want,
    link_keys,
)
from pdserve.types import CloseReason

pytestmark = pytest.mark.usefixtures("no_leaks")

TOKENS = 21
ALICE, BOB = PeerRank("alice", "x", 0), PeerRank("bob", "x", 0)
"""two outsiders, whose ids sort before the rank's, so that they dial"""


@contextlib.contextmanager
def rank_and_friend() -> Iterator[tuple[Rank, Rank]]:
    """A rank that knows two outsiders, and a rank that it is really connected with."""
    rank, friend = Rank(PeerRank("worker", "a", 0)), Rank(PeerRank("yet-another", "a", 0))
    outside = [PeerAddress(peer, "127.0.0.1", 1, 1) for peer in (ALICE, BOB)]
    with running(rank, friend):
        friend.io.set_peers(1, [rank.address])
        rank.io.set_peers(1, [friend.address, *outside])
        rank.sync()
        rank.wait_states({friend.me: "connected", ALICE: "connecting", BOB: "connecting"})
        friend.wait_states({rank.me: "connected"})
        yield rank, friend


def move(rank: Rank, friend: Rank, number: int = 1) -> CloseReason:
    """Move a prompt from the rank to its friend."""
    key, prompt = TransferKey(f"{number:032x}", 1), Prompt(M3_SMALL, number, TOKENS)
    friend.consume(key, prompt, rank.me, blocks(M3_SMALL, TOKENS))
    rank.produce(key, prompt, friend.me, blocks(M3_SMALL, TOKENS))
    outcome = friend.report_of(key).record.outcome
    if outcome is CloseReason.LANDED:
        assert friend.memory.holds(prompt, blocks(M3_SMALL, TOKENS), 0, TOKENS)
    return outcome


# ---- frames --------------------------------------------------------------------------------------------------------------------------


def sealed(outsider: Outsider) -> bytes:
    """Return the next good frame of an outsider's link."""
    return outsider.frames._out.seal(Ack("unknown", 1, 1))


def flipped(outsider: Outsider) -> bytes:
    frame = bytearray(sealed(outsider))
    frame[-1] ^= 1
    return bytes(frame)


def twice(outsider: Outsider) -> bytes:
    return sealed(outsider) * 2


def out_of_order(outsider: Outsider) -> bytes:
    first, second = sealed(outsider), sealed(outsider)
    return second + first


def oversized(outsider: Outsider) -> bytes:
    return b"\xff" * HEADER_BYTES


def empty(outsider: Outsider) -> bytes:
    return bytes(HEADER_BYTES)


def garbage(outsider: Outsider) -> bytes:
    return (4).to_bytes(LENGTH_BYTES, "little") + bytes(16) + b"junk"


def handshake_again(outsider: Outsider) -> bytes:
    return outsider.frames._out.seal(Hello(WIRE_VERSION, "alice", "x", 0, bytes(NONCE_BYTES)))


def parcel_beyond_a_slot(outsider: Outsider) -> bytes:
    return outsider.frames._out.seal(Parcel("unknown", 1, 1, 0, SLOT_BYTES + 1, 0, ()))


def parcel_of_nothing(outsider: Outsider) -> bytes:
    return outsider.frames._out.seal(Parcel("unknown", 1, 1, 0, 0, 0, ()))


def endless_id(outsider: Outsider) -> bytes:
    return outsider.frames._out.seal(Want("x" * 100_000, 1))


def slots_without_number(outsider: Outsider) -> bytes:
    return outsider.frames._out.seal(Return("unknown", 1, tuple(range(10_000))))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (flipped, "bad_tag"),
        (twice, "bad_tag"),
        (out_of_order, "bad_tag"),
        (garbage, "bad_tag"),
        (oversized, "bad_frame"),
        (empty, "bad_frame"),
        (handshake_again, "bad_frame"),
        (parcel_beyond_a_slot, "bad_frame"),
        (parcel_of_nothing, "bad_frame"),
        (endless_id, "bad_frame"),
        (slots_without_number, "bad_frame"),
    ],
)
async def test_frame_that_cannot_be_right_closes_its_link_only(make: object, reason: str) -> None:
    """It is counted, the sender is cut off, and everybody else's prompts land."""
    assert callable(make)
    with rank_and_friend() as (rank, friend):
        async with Outsider(rank, ALICE) as alice, Outsider(rank, BOB) as bob:
            await alice.greet()
            await bob.greet()
            await alice.frames.stream.write(make(alice))
            assert await alice.is_cut_off()
            await asyncio.to_thread(rank.wait_distrusted, reason)
            assert rank.io.distrusted == {reason: 1}
            await bob.frames.send(Offer("real", 1, bytes(16), 0, TOKENS, (0,)))
            states = {shake.peer: shake.state for shake in rank.io.handshakes()}
            assert (states[ALICE], states[BOB], states[friend.me]) == ("connecting", "connected", "connected")
        assert move(rank, friend) is CloseReason.LANDED


@pytest.mark.parametrize("part", [1, LENGTH_BYTES, HEADER_BYTES, HEADER_BYTES + 5])
async def test_frame_that_breaks_off_ends_its_link_only(part: int) -> None:
    """A peer that dies in the middle of a frame is lost, nothing else."""
    with rank_and_friend() as (rank, friend):
        async with Outsider(rank, ALICE) as alice:
            await alice.greet()
            await alice.frames.stream.write(sealed(alice)[:part])
        rank.wait_states({friend.me: "connected", ALICE: "connecting", BOB: "connecting"})
        assert rank.io.distrusted == {}
        assert move(rank, friend) is CloseReason.LANDED


async def test_frame_of_another_link_is_refused() -> None:
    """A good frame of one peer is a forged one on the link of another."""
    with rank_and_friend() as (rank, _):
        async with Outsider(rank, ALICE) as alice, Outsider(rank, BOB) as bob:
            await alice.greet()
            await bob.greet()
            await bob.frames.stream.write(sealed(alice))
            assert await bob.is_cut_off()
            await asyncio.to_thread(rank.wait_distrusted, "bad_tag")


# ---- who asks ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(64),
        LinkCipher(None).seal(Hello(WIRE_VERSION + 1, "alice", "x", 0, bytes(NONCE_BYTES))),
        LinkCipher(None).seal(Hello(WIRE_VERSION, "mallory", "x", 0, bytes(NONCE_BYTES))),
        LinkCipher(None).seal(Hello(WIRE_VERSION, "alice", "y", 0, bytes(NONCE_BYTES))),
        LinkCipher(None).seal(Hello(WIRE_VERSION, "alice", "x", 0, b"short")),
        (5000).to_bytes(LENGTH_BYTES, "little") + bytes(16) + b"\x91" * 5000,
    ],
    ids=["http", "wire version", "unknown worker", "old incarnation", "nonce", "nested"],
)
async def test_stranger_is_turned_away(opening: bytes) -> None:
    """Before it has proven anything: closed, counted, nobody's status changes."""
    with rank_and_friend() as (rank, friend):
        async with Outsider(rank, ALICE) as stranger:
            await stranger.frames.stream.write(opening)
            assert await stranger.is_cut_off()
        assert sum(rank.io.distrusted.values()) == 1
        rank.wait_states({friend.me: "connected", ALICE: "connecting", BOB: "connecting"})
        assert move(rank, friend) is CloseReason.LANDED


async def test_impostor_without_the_secret_does_not_disturb_the_real_peer() -> None:
    """Whoever claims to be a connected worker is refused, and that worker's link and status stay."""
    with rank_and_friend() as (rank, friend):
        async with Outsider(rank, ALICE) as alice, Outsider(rank, ALICE, secret=b"guess" * 8) as impostor:
            await alice.greet()
            with pytest.raises(Exception, match=r"bad_tag|closed|reset"):
                await impostor.greet()
            await asyncio.to_thread(rank.wait_distrusted, "bad_tag")
            states = {shake.peer: shake.state for shake in rank.io.handshakes()}
            assert (states[ALICE], states[friend.me]) == ("connected", "connected")
            await alice.frames.send(Close("unknown", 1, "receive", "aborted"))
            assert await alice.hear() == Close("unknown", 1, "send", "peer_closed")


async def test_peer_that_dials_again_starts_over() -> None:
    """The old link is lost with all that was open on it, reported once; the new one serves."""
    with rank_and_friend() as (rank, _):
        async with Outsider(rank, ALICE) as first, Outsider(rank, ALICE) as second:
            await first.greet()
            key = TransferKey("open", 1)
            order = ReceiveOrder(key, "r", *ALICE[:2], bytes(16), 4, 0, blocks(M3_SMALL, 4), 60.0)
            rank.io.submit(lambda: rank.io.open([order], time.monotonic()))
            assert isinstance(await first.hear(), Offer)
            await second.greet()
            assert await first.is_cut_off()
            assert rank.report_of(key).record.outcome is CloseReason.PEER_LOST
            await second.frames.send(Close("unknown", 1, "receive", "aborted"))
            assert isinstance(await second.hear(), Close)
            assert {shake.peer: shake.state for shake in rank.io.handshakes()}[ALICE] == "connected"
            assert rank.io.slots.num_free == NUM_SLOTS
        assert len(rank.reports) == 1


# ---- in the middle -------------------------------------------------------------------------------------------------------------------


async def test_link_cut_inside_a_parcel_is_reported_once() -> None:
    """The consumer ends as lost; half a parcel is in no block, and its slots are free again."""
    with rank_and_friend() as (rank, friend):
        key = TransferKey("half", 1)
        async with Outsider(rank, ALICE) as alice:
            await alice.greet()
            rank.memory.scribble(blocks(M3_SMALL, 4))
            order = ReceiveOrder(key, "r", *ALICE[:2], bytes(16), 4, 0, blocks(M3_SMALL, 4), 60.0)
            rank.io.submit(lambda: rank.io.open([order], time.monotonic()))
            offer = await alice.hear()
            assert isinstance(offer, Offer)
            await alice.frames.send(Parcel(*key, 1, offer.slots[0], 32, 0, (Item(0, 0, 1),)))
            await alice.frames.stream.write(bytes(16))
        assert rank.report_of(key).record.outcome is CloseReason.PEER_LOST
        assert move(rank, friend) is CloseReason.LANDED
        assert len(rank.reports) == 1 + sum(report.record.transfer_id != "half" for report in rank.reports)
        assert (rank.memory.views[0] == 0xFF).sum() > 0
        assert rank.io.slots.num_free == NUM_SLOTS


async def test_consumer_that_breaks_off_frees_the_producer_once() -> None:
    """With parcels on their way to it."""
    with rank_and_friend() as (rank, friend):
        key, prompt = TransferKey("gone", 1), Prompt(M3_SMALL, 4, TOKENS)
        async with Outsider(rank, ALICE) as alice:
            await alice.greet()
            await alice.frames.send(Offer(*key, prompt.digest, 0, TOKENS, (0, 1)))
            rank.produce(key, prompt, ALICE, blocks(M3_SMALL, TOKENS))
            await alice.frames.stream.read_exactly(HEADER_BYTES + 10)
        assert rank.report_of(key).record.outcome is CloseReason.PEER_LOST
        assert move(rank, friend) is CloseReason.LANDED


# ---- floods --------------------------------------------------------------------------------------------------------------------------


def made_up(number: int, outsider: Outsider) -> bytes:
    """Return a frame of each kind in turn, for a transfer that does not exist."""
    key = (f"made-up-{number}", 1)
    messages: tuple[Body, ...] = (
        Offer(*key, bytes(16), 0, 9, (0,)),
        Grant(*key, number),
        Ack(*key, 1),
        Close(*key, "receive", "aborted"),
        Parcel(*key, 1, number, 8, 0, ()),
        Want(*key),
        Return(*key, (number,)),
        Seal(*key, 1, 1, bytes(16), 0),
        Close(*key, "send", "aborted"),
        Renew((TransferKey(*key),)),
    )
    message = messages[number % len(messages)]
    return outsider.frames._out.seal(message) + (bytes(8) if isinstance(message, Parcel) else b"")


async def test_hundred_thousand_made_up_transfers_leave_memory_flat() -> None:
    """Every kind of message for transfers that do not exist: answered or dropped, counted, and forgotten."""
    with rank_and_friend() as (rank, friend):
        async with Outsider(rank, ALICE) as alice:
            await alice.greet()
            reader = asyncio.create_task(alice.read_past())
            resident: list[int] = []
            for batch in range(10):
                frames = b"".join(made_up(number, alice) for number in range(batch * 10_000, (batch + 1) * 10_000))
                await alice.frames.stream.write(frames)
                await asyncio.to_thread(rank.sync)
                resident.append(psutil.Process().memory_info().rss)
            deadline_s = time.monotonic() + PATIENCE_S
            while rank.io.receives.dropped["slot_not_granted"] < 20_000:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.01)
            assert rank.io.sends.dropped == {"parking_full": 30_000 - MAX_PARKED_TRANSFERS}
            assert rank.io.receives.dropped == {"slot_not_granted": 20_000, "late": 20_000}
            assert (len(rank.io.sends), len(rank.io.receives), rank.io.slots.num_free) == (0, 0, NUM_SLOTS)
            assert len(rank.io.sends._ended) == MAX_TOMBSTONES
            assert resident[-1] - resident[4] < 4 << 20
            assert await asyncio.to_thread(move, rank, friend) is CloseReason.LANDED
            assert not reader.done()
            reader.cancel()
        assert rank.io.distrusted == {}


async def test_peer_that_never_reads_is_cut_off_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not read piles up to a bound; meanwhile calls return at once and others' prompts land."""
    monkeypatch.setattr("pdserve.kv.link.SOCKET_BUFFER_BYTES", 64 << 10)
    monkeypatch.setattr("pdserve.kv.link.MAX_QUEUED", 5_000)
    with rank_and_friend() as (rank, friend):
        async with Outsider(rank, ALICE) as sleeper:
            await sleeper.greet()
            sent, slowest_s = 0, 0.0
            with contextlib.suppress(ConnectionError, OSError):
                while sent < 200_000:
                    await sleeper.frames.stream.write(
                        b"".join(sleeper.frames._out.seal(Close(f"n-{n}", 1, "receive", "")) for n in range(1000))
                    )
                    sent += 1000
                    began_s = time.perf_counter()
                    rank.io.submit(lambda: None)
                    slowest_s = max(slowest_s, time.perf_counter() - began_s)
                    if sent == 3_000:
                        assert await asyncio.to_thread(move, rank, friend, 2) is CloseReason.LANDED
            assert 5_000 <= sent < 200_000
            assert slowest_s < 1.0
        assert move(rank, friend, 3) is CloseReason.LANDED
        rank.wait_states({friend.me: "connected", ALICE: "connecting", BOB: "connecting"})


async def test_rank_stops_in_time_though_a_reader_is_stuck() -> None:
    """Ten prompts that are sealed and that nobody has acknowledged, towards a peer that never reads and one that is healthy: closing waits for
    neither, and the healthy one loses its transfers at once, with nothing half-moved taken for whole."""
    with rank_and_friend() as (rank, friend):
        async with Outsider(rank, ALICE) as sleeper:
            await sleeper.greet()
            keys = [TransferKey(f"{number:032x}", 1) for number in range(10)]
            prompts = [Prompt(M3_SMALL, number, TOKENS) for number in range(10)]
            for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
                peer = ALICE if number % 2 else friend.me
                if peer == ALICE:
                    await sleeper.frames.send(Offer(*key, prompt.digest, 0, TOKENS, (0, 1)))
                rank.produce(key, prompt, peer, blocks(M3_SMALL, TOKENS))
            await asyncio.to_thread(rank.sync)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.to_thread(rank.io.close)
        for key, prompt in zip(keys[::2], prompts[::2], strict=True):
            friend.consume(key, prompt, rank.me, blocks(M3_SMALL, TOKENS))
            assert friend.report_of(key).record.outcome in (CloseReason.PEER_LOST, CloseReason.PEER_UNKNOWN)
        await asyncio.to_thread(friend.sync)
        assert friend.io.slots.num_free == NUM_SLOTS


async def test_accepting_goes_on_after_descriptors_ran_out() -> None:
    """A process without free descriptors turns links away and takes them again when there are some."""
    with rank_and_friend() as (rank, friend), structlog.testing.capture_logs() as logs:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held: list[socket.socket] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, hard))
        try:
            with pytest.raises(OSError) as full:
                while True:
                    held.append(socket.socket())
            assert full.value.errno == errno.EMFILE
            held[0].connect(rank.io.address)
            deadline_s = time.monotonic() + 5
            while not any(entry["event"] == "kv.accept_failed" for entry in logs):
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for sock in held:
                sock.close()
        async with Outsider(rank, BOB) as bob:
            await bob.greet()
        assert move(rank, friend) is CloseReason.LANDED


def test_link_keys_need_the_secret() -> None:
    """What the tests above forge with is what the product derives."""
    hello = Hello(WIRE_VERSION, "alice", "x", 0, bytes(NONCE_BYTES))
    assert link_keys(SECRET, hello, hello) != link_keys(b"guess" * 8, hello, hello)
