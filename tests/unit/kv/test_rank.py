"""Ranks over real sockets: they find each other, move the right bytes, refuse those they must not mix with, and leave nothing behind."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from rank_place import LEASE_S, PATIENCE_S, Rank, blocks, join, running
from shapes import M3_SMALL, Model, Prompt

from pdserve.kv.actions import PeerRank, ReportReceived
from pdserve.kv.link import FrameStream
from pdserve.kv.pages import CachePages
from pdserve.kv.peers import PeerAddress
from pdserve.kv.rank import RankIo
from pdserve.kv.ticket import TransferKey
from pdserve.kv.transports.base import Transport
from pdserve.kv.transports.memory import MemoryTransport
from pdserve.kv.transports.shm import ShmTransport
from pdserve.kv.transports.tcp import TcpTransport
from pdserve.kv.wire import Parcel
from pdserve.testing.fault_plan import FaultPlan
from pdserve.types import CloseReason

pytestmark = pytest.mark.usefixtures("no_leaks")

PREFILL, DECODE = "prefill-0", "decode-0"
TOKENS = 21


def worker(name: str, size: int = 1, *, incarnation: str = "a", transport: Transport | None = None, **more: object) -> list[Rank]:
    return [Rank(PeerRank(name, incarnation, rank), size, transport=transport, **more) for rank in range(size)]  # type: ignore[arg-type]


def move(number: int, producers: list[Rank], consumers: list[Rank], *, tokens: int = TOKENS) -> list[CloseReason]:
    """Move one prompt and return how each rank ended, producers first; checks the bytes of every rank that says landed."""
    key, prompt = TransferKey(f"{number:032x}", 1), Prompt(M3_SMALL, number, tokens)
    for rank in consumers:
        rank.consume(key, prompt, producers[0].me, blocks(M3_SMALL, tokens, first=10))
    for rank in producers:
        rank.produce(key, prompt, consumers[0].me, blocks(M3_SMALL, tokens, first=3))
    reports = [rank.report_of(key) for rank in (*producers, *consumers)]
    for rank, report in zip(consumers, reports[len(producers) :], strict=True):
        if isinstance(report, ReportReceived) and report.landed:
            assert rank.memory.holds(prompt, blocks(M3_SMALL, tokens, first=10), 0, tokens)
    return [report.record.outcome for report in reports]


@pytest.mark.parametrize("make", [TcpTransport, ShmTransport, MemoryTransport])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_prompts_land_with_the_right_bytes(make: Callable[[], Transport], prefill: int, decode: int) -> None:
    """Several at once and one after the other, in both directions, whatever carries them."""
    transport = make()
    first, second = worker(PREFILL, prefill, transport=transport), worker(DECODE, decode, transport=transport)
    with running(*first, *second):
        join([*first, *second])
        for number in range(5):
            assert set(move(number, first, second)) == {CloseReason.RELEASED, CloseReason.LANDED}
        assert set(move(99, second, first)) == {CloseReason.RELEASED, CloseReason.LANDED}
        for rank in (*first, *second):
            rank.sync()
            assert (len(rank.io.sends), len(rank.io.receives)) == (0, 0)


@pytest.mark.parametrize("make", [TcpTransport, ShmTransport])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_many_prompts_at_once_through_few_slots_all_land(num_slots: int, make: Callable[[], Transport]) -> None:
    """Four producer ranks and one slot: decode orders twenty prompts, prefill computes them in the opposite order, and no deadline is needed."""
    transport = make()
    producers, (consumer,) = worker(PREFILL, 4, transport=transport), worker(DECODE, transport=transport, num_slots=num_slots)
    keys = [TransferKey(f"{number:032x}", 1) for number in range(20)]
    tables = [blocks(M3_SMALL, 9, first=3 * number) for number in range(20)]
    with running(*producers, consumer):
        join([*producers, consumer])
        for number, key in enumerate(keys):
            consumer.consume(key, Prompt(M3_SMALL, number, 9), producers[0].me, tables[number])
        for number, key in reversed([*enumerate(keys)]):
            for rank in producers:
                rank.produce(key, Prompt(M3_SMALL, number, 9), consumer.me, tables[number])
        for number, key in enumerate(keys):
            assert {rank.report_of(key).record.outcome for rank in producers} == {CloseReason.RELEASED}
            assert consumer.report_of(key).record.outcome is CloseReason.LANDED
            assert consumer.memory.holds(Prompt(M3_SMALL, number, 9), tables[number], 0, 9)
        wait_slots(consumer)


def wait_slots(consumer: Rank) -> None:
    """Wait until all of a rank's slots are free: producers confirm an end a moment after the reports."""
    deadline_s = time.monotonic() + PATIENCE_S
    while consumer.io.slots.num_free < consumer.io.slots.num_slots:
        assert time.monotonic() < deadline_s
        consumer.sync()


def test_slots_return_when_transfers_are_over() -> None:
    """All of them, soon after the last report."""
    (producer,), (consumer,) = worker(PREFILL), worker(DECODE)
    with running(producer, consumer):
        join([producer, consumer])
        for number in range(30):
            move(number, [producer], [consumer], tokens=1 + number % 24)
        wait_slots(consumer)


def test_other_secret_is_refused() -> None:
    """Nobody connects, the dialer's status says why, both count it, and a transfer ends as refused where that is known."""
    (dialer,), (listener,) = worker(DECODE), worker(PREFILL, secret=b"x" * 32)
    with running(dialer, listener):
        for rank in (dialer, listener):
            rank.io.set_peers(1, [dialer.address, listener.address])
        dialer.wait_states({listener.me: "refused"})
        listener.wait_states({dialer.me: "connecting"})
        assert "bad_tag" in dialer.io.handshakes()[0].reason
        dialer.wait_distrusted("bad_tag")
        listener.wait_distrusted("bad_tag")
        assert move(1, [listener], [dialer]) == [CloseReason.PEER_UNKNOWN, CloseReason.REFUSED]
        assert move(2, [dialer], [listener]) == [CloseReason.REFUSED, CloseReason.PEER_UNKNOWN]


def test_other_geometry_is_refused_by_name_on_both_sides() -> None:
    """The layer, the field and both values, each side seeing its own first."""
    other = Model((*M3_SMALL.shapes[:-1], M3_SMALL.shapes[-1]._replace(block_tokens=16)), heads=4)
    (dialer,), (listener,) = worker(DECODE), worker(PREFILL, model=other)
    with running(dialer, listener):
        for rank in (dialer, listener):
            rank.io.set_peers(1, [dialer.address, listener.address])
        dialer.wait_states({listener.me: "refused"})
        listener.wait_states({dialer.me: "refused"})
        assert dialer.io.handshakes()[0].reason == "layers.2.attn: block_tokens differs: ours 8, peer's 16"
        assert listener.io.handshakes()[0].reason == "layers.2.attn: block_tokens differs: ours 16, peer's 8"
        listener.wait_distrusted("mismatch")


def test_transports_that_cannot_meet_are_refused() -> None:
    """One side has shared memory, the other does not: a reason at the handshake, no transfer that hangs."""
    (dialer,), (listener,) = worker(DECODE, transport=ShmTransport()), worker(PREFILL)
    with running(dialer, listener):
        for rank in (dialer, listener):
            rank.io.set_peers(1, [dialer.address, listener.address])
        dialer.wait_states({listener.me: "refused"})
        assert "shared memory" in dialer.io.handshakes()[0].reason


def test_transfer_without_a_link_fails_at_once() -> None:
    """A ticket that names nobody in the table is reported, not waited for."""
    (producer,), (consumer,) = worker(PREFILL), worker(DECODE)
    with running(producer, consumer):
        assert move(1, [producer], [consumer]) == [CloseReason.PEER_UNKNOWN, CloseReason.PEER_UNKNOWN]


@pytest.mark.parametrize("missing", [0, 1])
def test_rank_that_is_not_there_costs_no_deadline(missing: int) -> None:
    """Of a worker of two ranks one is not up: the decode rank fails at once, and the prefill rank that is up hears of it; both ways round."""
    pair, (single,) = worker(PREFILL, 2), worker(DECODE)
    up = pair[1 - missing]
    with running(up, single):
        for rank in (up, single):
            rank.io.set_peers(1, [entry.address for entry in (*pair, single)])
        up.wait_states({single.me: "connected"})
        single.wait_states({up.me: "connected", pair[missing].me: "connecting"})
        assert move(1, [up], [single]) == [CloseReason.PEER_CLOSED, CloseReason.PEER_UNKNOWN]
        assert move(2, [single], [up]) == [CloseReason.PEER_UNKNOWN, CloseReason.PEER_CLOSED]
    pair[missing].io.close()


def test_torn_slot_fails_its_transfer_and_no_other() -> None:
    """Both sides name the reason; the next prompt lands on the same link."""
    plan = FaultPlan(tear_reads=frozenset({0}))
    transport = MemoryTransport(plan)
    (producer,), (consumer,) = worker(PREFILL, transport=transport), worker(DECODE, transport=transport)
    with running(producer, consumer):
        join([producer, consumer])
        assert move(1, [producer], [consumer]) == [CloseReason.DIGEST_MISMATCH, CloseReason.DIGEST_MISMATCH]
        assert move(2, [producer], [consumer]) == [CloseReason.RELEASED, CloseReason.LANDED]
        assert producer.io.handshakes()[0].state == "connected"


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_post_that_fails_ends_its_transfer_on_both_sides(failing: int) -> None:
    """Any one of its parcels: failing to start is a message too. The link and the next prompt are not touched."""
    transport = MemoryTransport(FaultPlan(fail_posts=frozenset({failing})))
    (producer,), (consumer,) = worker(PREFILL, transport=transport), worker(DECODE, transport=transport)
    with running(producer, consumer):
        join([producer, consumer])
        assert move(1, [producer], [consumer]) == [CloseReason.PEER_LOST, CloseReason.PEER_CLOSED]
        assert move(2, [producer], [consumer]) == [CloseReason.RELEASED, CloseReason.LANDED]


@pytest.mark.parametrize("dialer", [PREFILL, DECODE])
@pytest.mark.parametrize(
    ("owner", "step", "first"),
    [
        (CachePages, "gather", [CloseReason.PEER_LOST, CloseReason.PEER_LOST]),
        (FrameStream, "send", [CloseReason.PEER_LOST, CloseReason.PEER_LOST]),
        (CachePages, "scatter", [CloseReason.DIGEST_MISMATCH, CloseReason.DIGEST_MISMATCH]),
        (RankIo, "heard", [CloseReason.PEER_LOST, CloseReason.PEER_LOST]),
    ],
    ids=["gather", "send", "scatter", "heard"],
)
def test_bug_on_a_parcels_way_costs_one_prompt(
    owner: type, step: str, first: list[CloseReason], dialer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody foresaw is loud, ends what it touched with all blocks and slots free, and the next prompt lands, whoever dialed."""
    (producer,), (consumer,) = worker("a" if dialer == PREFILL else "z"), worker("m")
    whole, broken = getattr(owner, step), []

    def breaks_once(self: object, *args: Any, **kwargs: Any) -> object:
        if not broken and (owner is CachePages or isinstance(args[-1], Parcel) or isinstance(args[0], Parcel)):
            broken.append(args)
            raise ValueError("nobody foresaw this")
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(owner, step, breaks_once)
    with running(producer, consumer):
        join([producer, consumer])
        assert move(1, [producer], [consumer]) == first
        for rank, peer in ((producer, consumer), (consumer, producer)):
            rank.wait_states({peer.me: "connected"})
        assert move(2, [producer], [consumer]) == [CloseReason.RELEASED, CloseReason.LANDED]
        wait_slots(consumer)
    assert broken


@pytest.mark.parametrize("stopped", [PREFILL, DECODE])
def test_rank_that_stops_is_reported_by_the_other(stopped: str) -> None:
    """Once, as lost, for every transfer that was open with it; with its next incarnation the next prompt lands."""
    (producer,), (consumer,) = worker(PREFILL), worker(DECODE)
    gone, stays = (producer, consumer) if stopped == PREFILL else (consumer, producer)
    (fresh,) = worker(stopped, incarnation="b")
    with running(producer, consumer, fresh):
        join([producer, consumer])
        keys = [TransferKey(f"open-{number}", 1) for number in range(3)]
        for key in keys:
            prompt = Prompt(M3_SMALL, 1, TOKENS)
            (stays.produce if stays is producer else stays.consume)(key, prompt, gone.me, blocks(M3_SMALL, TOKENS))
        stays.sync()
        gone.io.close()
        assert [stays.report_of(key).record.outcome for key in keys] == [CloseReason.PEER_LOST] * 3
        join([stays, fresh], version=2)
        pair = ([stays], [fresh]) if stays is producer else ([fresh], [stays])
        assert move(7, *pair) == [CloseReason.RELEASED, CloseReason.LANDED]
        assert len(stays.reports) == 4


class Forwarder:
    """A port that stays the same while what is behind it changes."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Forwarder":
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result()
        self._server, self.port = server, server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.target is None:
            writer.close()
            return
        there, back = await asyncio.open_connection(*self.target)
        self._writers.append(back)
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()


def test_worker_replaced_behind_its_address_is_another_worker() -> None:
    """The dialer refuses the new incarnation until its table names it; what was in flight fails, the next prompt lands."""
    (consumer,), (old,), (new,) = worker(DECODE), worker(PREFILL, incarnation="old"), worker(PREFILL, incarnation="new")
    with Forwarder() as forwarder, running(consumer, old, new):
        forwarder.target = old.io.address
        at = PeerAddress(old.me, "127.0.0.1", forwarder.port, 1)
        consumer.io.set_peers(1, [at])
        old.io.set_peers(1, [consumer.address])
        consumer.wait_states({old.me: "connected"})
        key = TransferKey("in-flight", 1)
        consumer.consume(key, Prompt(M3_SMALL, 1, TOKENS), old.me, blocks(M3_SMALL, TOKENS))
        consumer.sync()
        forwarder.target = new.io.address
        new.io.set_peers(1, [consumer.address])
        old.io.close()
        assert consumer.report_of(key).record.outcome is CloseReason.PEER_LOST
        consumer.wait_states({old.me: "refused"})
        consumer.io.set_peers(2, [at._replace(peer=new.me)])
        consumer.sync()
        consumer.wait_states({new.me: "connected"})
        new.wait_states({consumer.me: "connected"})
        assert move(2, [new], [consumer]) == [CloseReason.RELEASED, CloseReason.LANDED]


def test_transfer_outlives_many_leases_while_both_live() -> None:
    """The consumer renews; the producer's blocks wait for as long as decode wants them."""
    (producer,), (consumer,) = worker(PREFILL), worker(DECODE)
    with running(producer, consumer):
        join([producer, consumer])
        key, prompt = TransferKey("slow", 1), Prompt(M3_SMALL, 3, TOKENS)
        consumer.consume(key, prompt, producer.me, blocks(M3_SMALL, TOKENS))
        time.sleep(1.5 * LEASE_S)
        producer.produce(key, prompt, consumer.me, blocks(M3_SMALL, TOKENS))
        assert consumer.report_of(key).record.outcome is CloseReason.LANDED


def test_closing_without_starting_leaves_nothing() -> None:
    """Also twice."""
    (rank,) = worker(PREFILL)
    rank.io.close()
    rank.io.close()
