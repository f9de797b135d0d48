"""What every transport promises the driver and, under real ranks, the engines; whatever carries its bytes.

A new transport joins by a line in `MAKERS`. Where its slots lie in a GPU's memory, `Rank` needs caches there.
"""

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from pdserve.clock import MonotonicClock
from pdserve.errors import ConfigError, TransferError
from pdserve.kv.actions import PeerRank, ReceiveOrder, Report, ReportReceived, SendOrder
from pdserve.kv.geometry import Geometry, LayerGeometry, Sharding
from pdserve.kv.loop_thread import LoopThread
from pdserve.kv.pages import Bytes, CachePages, Memory
from pdserve.kv.peers import PeerAddress
from pdserve.kv.plan import HeadSlice
from pdserve.kv.rank import RankIo
from pdserve.kv.settings import KvSettings
from pdserve.kv.ticket import TransferKey
from pdserve.kv.transports import TRANSPORTS, make_transport
from pdserve.kv.transports.base import Arena, Mover, Transport
from pdserve.kv.transports.memory import MemoryTransport
from pdserve.kv.wire import Identity, Item
from pdserve.testing.fault_plan import FaultPlan
from pdserve.types import CloseReason

NUM_SLOTS, SLOT_BYTES = 3, 10_000

MAKERS: dict[str, Callable[[], Transport]] = {**TRANSPORTS, "memory": MemoryTransport}
DIRECT = [name for name, maker in MAKERS.items() if not maker().carries_inline]
BETWEEN_PROCESSES = sorted(TRANSPORTS)


@pytest.fixture(scope="session", autouse=True)
def what_stays_is_open() -> None:
    """The first event loop and the first child of a process open descriptors that stay."""
    resource_tracker.ensure_running()
    thread = LoopThread("first")
    thread.start()
    thread.submit(lambda: None).result()
    thread.close()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No thread, no descriptor, no mapped slot and no name in shared memory outlives a test."""
    threads, before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= before
    assert "memfd:pdserve" not in Path("/proc/self/maps").read_text()
    assert [*Path("/dev/shm").glob("*pdserve*")] == []


@pytest.fixture(params=sorted(MAKERS))
def transport(request: pytest.FixtureRequest) -> Transport:
    return MAKERS[request.param]()


def opened(transport: Transport) -> tuple[Arena, Mover]:
    arena = transport.open_arena(NUM_SLOTS, SLOT_BYTES)
    return arena, transport.connect(arena.descriptor, SLOT_BYTES)


def test_configured_name_makes_the_transport_of_that_name() -> None:
    """What an operator may write, and a refusal that lists it."""
    assert {name: make_transport(name).name for name in TRANSPORTS} == {name: name for name in TRANSPORTS}
    with pytest.raises(ConfigError, match="choose one of shm, tcp"):
        make_transport("carrier-pigeon")


def test_slots_are_apart_and_whole(transport: Transport) -> None:
    """Each has its full size; writing one leaves the others alone."""
    arena, mover = opened(transport)
    for number in range(NUM_SLOTS):
        arena.slot(number)[:] = number + 1
    assert [(len(arena.slot(n)), set(arena.slot(n).tolist())) for n in range(NUM_SLOTS)] == [
        (SLOT_BYTES, {n + 1}) for n in range(NUM_SLOTS)
    ]
    mover.close()
    arena.close()


def test_gather_gets_room_for_exactly_its_parcel(transport: Transport) -> None:
    """Writable, contiguous, of the asked length, up to a whole slot."""
    arena, mover = opened(transport)
    for num_bytes in (1, 4097, SLOT_BYTES):
        target = mover.target(1, num_bytes)
        assert (target.shape, target.dtype, target.flags.c_contiguous) == ((num_bytes,), np.uint8, True)
        target[:] = 7
    del target
    mover.close()
    arena.close()


@pytest.mark.parametrize("name", DIRECT)
def test_gather_writes_the_slot_itself(name: str) -> None:
    """Where pages do not follow the notice they are in the slot before it: those bytes and no others."""
    transport = MAKERS[name]()
    arena, mover = opened(transport)
    for number in range(NUM_SLOTS):
        arena.slot(number)[:] = 0
    mover.target(1, 5000)[:] = 9
    assert (arena.slot(1)[:5000] == 9).all()
    assert not any(slot.any() for slot in (arena.slot(0), arena.slot(1)[5000:], arena.slot(2)))
    mover.close()
    arena.close()


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize(("slot", "num_bytes"), [(-1, 10), (NUM_SLOTS, 10), (1 << 40, 10), (0, SLOT_BYTES + 1)])
def test_slot_that_the_peer_does_not_have_is_refused(name: str, slot: int, num_bytes: int) -> None:
    """A peer's grant is only a number: nothing is written outside its arena."""
    arena, mover = opened(MAKERS[name]())
    with pytest.raises(TransferError):
        mover.target(slot, num_bytes)
    mover.close()
    arena.close()


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("descriptor", ["", "nowhere", "{}", "[1]"])
def test_peer_that_cannot_be_reached_is_refused_at_the_handshake(name: str, descriptor: str) -> None:
    """A descriptor of another transport, machine or process is an error there, not at the first parcel."""
    with pytest.raises(TransferError, match="unreachable"):
        MAKERS[name]().connect(descriptor, SLOT_BYTES)


@pytest.mark.parametrize("name", DIRECT)
def test_write_after_the_arena_is_closed_goes_nowhere(name: str) -> None:
    """A producer that is late spoils nothing, also not the arena that takes the closed one's place."""
    transport = MAKERS[name]()
    arena, late = opened(transport)
    target = late.target(0, SLOT_BYTES)
    arena.close()
    successor, mover = opened(transport)
    for number in range(NUM_SLOTS):
        successor.slot(number)[:] = 0
    target[:] = 9
    late.target(1, SLOT_BYTES)[:] = 9
    assert not any(successor.slot(number).any() for number in range(NUM_SLOTS))
    for side in (late, mover, successor):
        side.close()


@pytest.mark.parametrize("name", sorted({*DIRECT} & {*TRANSPORTS}))
def test_closed_arena_cannot_be_reached(name: str) -> None:
    """Its descriptor leads to nothing, also not to the arena that takes its place."""
    transport = MAKERS[name]()
    arena = transport.open_arena(NUM_SLOTS, SLOT_BYTES)
    descriptor = arena.descriptor
    arena.close()
    with pytest.raises(TransferError, match="unreachable"):
        transport.connect(descriptor, SLOT_BYTES)
    successor = transport.open_arena(NUM_SLOTS, SLOT_BYTES)
    with pytest.raises(TransferError, match="unreachable"):
        transport.connect(descriptor, SLOT_BYTES)
    successor.close()


def test_arena_beyond_the_machine_is_refused_by_its_size(transport: Transport) -> None:
    """Before anything is allocated: the bytes asked for, what there is, and the setting that asks for less."""
    with pytest.raises(TransferError, match=rf"overflow.*{(1 << 50) // 10**6}\d{{6}} bytes, \d+ are free; set kv.arena_bytes"):
        transport.open_arena(1 << 20, 1 << 30)


def test_closing_twice_is_harmless(transport: Transport) -> None:
    """Of either side, in either order."""
    arena, mover = opened(transport)
    for _ in range(2):
        arena.close()
        mover.close()


def test_planned_faults_strike_by_number() -> None:
    """The second post fails, the first read is torn, all others pass."""
    plan = FaultPlan(fail_posts=frozenset({1}), tear_reads=frozenset({0}))
    arena, mover = opened(MemoryTransport(plan))
    mover.target(0, 4)[:] = 1
    with pytest.raises(TransferError, match="post 1"):
        mover.target(1, 4)
    assert arena.slot(0)[:4].tolist() == [254, 1, 1, 1]
    mover.target(0, 4)[:] = 1
    assert arena.slot(0)[:4].tolist() == [1, 1, 1, 1]


# ---- under real ranks ----------------------------------------------------------------------------------------------------------------

SECRET = bytes(range(32))
PATIENCE_S = 30.0
NUM_BLOCKS, BLOCK_TOKENS = 48, 4
UNTOUCHED = 0xEE


def layer(number: int, heads: int, run_bytes: int) -> LayerGeometry:
    """One layer whose heads are all on one rank."""
    size = heads * run_bytes
    return LayerGeometry(
        f"layers.{number}", 0, BLOCK_TOKENS, Sharding.SPLIT, heads, run_bytes, "uint8", "FullAttentionSpec", heads, size, run_bytes
    )


GEOMETRY = Geometry(1, 0, (layer(0, 2, 700), layer(1, 2, 700), layer(2, 1, 36)), 1)


class HeldPages(CachePages):
    """Pages whose gather can be held after half of a parcel, as a thread that loses its core is."""

    def __init__(self, geometry: Geometry, memory: Sequence[Memory]) -> None:
        super().__init__(geometry, memory)
        self.half_done, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.breaks_off = False

    def gather(self, items: Sequence[Item], slices: Sequence[HeadSlice], block_ids: Sequence[Sequence[int]], out: Bytes) -> None:
        whole: Bytes = np.empty_like(out)
        super().gather(items, slices, block_ids, whole)
        middle = len(out) // 2
        out[:middle] = whole[:middle]
        self.half_done.set()
        assert self.go.wait(PATIENCE_S)
        if self.breaks_off:
            raise ConnectionResetError("the rank died here")
        out[middle:] = whole[middle:]


class Rank:
    """A worker of one rank with numpy caches. Use as a context manager."""

    def __init__(self, worker: str, transport: Transport, *, incarnation: str = "a") -> None:
        self.me = PeerRank(worker, incarnation, 0)
        self.caches = [np.full((NUM_BLOCKS, each.local_heads, each.run_bytes), UNTOUCHED, dtype=np.uint8) for each in GEOMETRY.layers]
        self.pages = HeldPages(GEOMETRY, [Memory(cache.ctypes.data, NUM_BLOCKS) for cache in self.caches])
        settings = KvSettings(worker, incarnation, slot_bytes=SLOT_BYTES, arena_bytes=NUM_SLOTS * SLOT_BYTES)
        self.io = RankIo(
            settings,
            SECRET,
            GEOMETRY,
            lambda arenas: Identity("0.32.0", "weights", "config", GEOMETRY, arenas, SLOT_BYTES),
            self.pages,
            transport,
            MonotonicClock(),
        )
        self.reports: dict[TransferKey, Report] = {}

    def __enter__(self) -> "Rank":
        self.io.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.pages.go.set()
        self.io.close()

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.me, *self.io.address, 1)

    def meet(self, *peers: PeerAddress, version: int = 1) -> None:
        """Install a peer table and wait for its links."""
        self.io.set_peers(version, peers)
        deadline_s = time.monotonic() + PATIENCE_S
        while {shake.peer for shake in self.io.handshakes() if shake.state == "connected"} != {peer.peer for peer in peers}:
            assert time.monotonic() < deadline_s, self.io.handshakes()
            time.sleep(0.005)

    def produce(self, number: int, tokens: int, peer: PeerRank, blocks: Sequence[int]) -> None:
        """Compute a prompt in one step, seal it, and finish the request."""
        key, sends, now_s = key_of(number), self.io.sends, time.monotonic()
        for cache, truth in zip(self.caches, kv_of(number, len(blocks)), strict=True):
            cache[list(blocks)] = truth
        order = SendOrder(key, f"s{number}", peer.worker, peer.incarnation, b"%016d" % number, tokens, PATIENCE_S)
        self.io.submit(lambda: self.io.open([order], now_s))
        self.io.submit(lambda: sends.set_blocks(key, (tuple(blocks),), 0))
        self.io.submit(lambda: sends.wrote(key, 1, range(len(self.caches)), tokens))
        self.io.submit(lambda: sends.seal(key, 1, now_s))
        self.io.submit(lambda: sends.finished(order.request_id))

    def consume(self, number: int, tokens: int, peer: PeerRank, blocks: Sequence[int]) -> None:
        key = key_of(number)
        prompt = b"%016d" % number
        order = ReceiveOrder(key, f"r{number}", peer.worker, peer.incarnation, prompt, tokens, 0, (tuple(blocks),), PATIENCE_S)
        self.io.submit(lambda: self.io.open([order], time.monotonic()))

    def outcome(self, number: int) -> CloseReason:
        """Wait for this rank's report of a transfer."""
        deadline_s = time.monotonic() + PATIENCE_S
        while key_of(number) not in self.reports:
            assert time.monotonic() < deadline_s, f"{self.me} does not report {number}"
            self.io.wait_report(0.1)
            for report in self.io.take_reports():
                key = TransferKey(report.record.transfer_id, report.record.attempt)
                assert self.reports.setdefault(key, report) is report, "reported twice"
        return self.reports[key_of(number)].record.outcome

    def landed(self, number: int, blocks: Sequence[int]) -> bool:
        """Wait for the end of a transfer; whether it landed, and all of its bytes are there."""
        self.outcome(number)
        report = self.reports[key_of(number)]
        truth = kv_of(number, len(blocks))
        holds = all(np.array_equal(cache[list(blocks)], want) for cache, want in zip(self.caches, truth, strict=True))
        return isinstance(report, ReportReceived) and report.landed and holds

    def touched(self) -> set[int]:
        """Return the blocks that were ever written."""
        return {int(block) for cache in self.caches for block in np.nonzero((cache != UNTOUCHED).any(axis=(1, 2)))[0]}

    def sync(self) -> None:
        self.io.submit(lambda: None).result(timeout=PATIENCE_S)

    def wait_free_slots(self, count: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.io.slots.num_free != count:
            assert time.monotonic() < deadline_s, self.io.slots.num_free
            self.sync()


def key_of(number: int) -> TransferKey:
    return TransferKey(f"{number:032x}", 1)


def kv_of(number: int, blocks: int) -> list[Bytes]:
    """Return what a prompt's blocks hold, per layer [blocks, heads, run_bytes]; never the untouched byte."""
    rng = np.random.default_rng(number)
    return [rng.integers(0, UNTOUCHED, size=(blocks, each.local_heads, each.run_bytes), dtype=np.uint8) for each in GEOMETRY.layers]


def scattered_blocks(count: int, seed: int) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count]]


@contextlib.contextmanager
def connected_pair(transport: Transport) -> Iterator[tuple[Rank, Rank]]:
    with Rank("prefill", transport) as producer, Rank("decode", transport) as consumer:
        producer.io.set_peers(1, [consumer.address])
        consumer.meet(producer.address)
        producer.meet(consumer.address)
        yield producer, consumer


@pytest.mark.parametrize("tokens", [1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 12 * BLOCK_TOKENS - 1, 20 * BLOCK_TOKENS])
def test_all_bytes_arrive_and_no_others_change(transport: Transport, tokens: int) -> None:
    """One block, a block with a tail, a slot with room left, more parcels than there are slots."""
    blocks = -(-tokens // BLOCK_TOKENS)
    ours, theirs = scattered_blocks(blocks, 1), scattered_blocks(blocks, 2)
    with connected_pair(transport) as (producer, consumer):
        consumer.consume(1, tokens, producer.me, theirs)
        producer.produce(1, tokens, consumer.me, ours)
        assert consumer.landed(1, theirs)
        assert producer.outcome(1) is CloseReason.RELEASED
        assert consumer.touched() == set(theirs)
        consumer.wait_free_slots(NUM_SLOTS)


def test_many_producers_share_the_slots_of_one_consumer(transport: Transport) -> None:
    """More of them than slots, several prompts each, both sides in an order of their own: every prompt lands in its blocks."""
    workers, prompts = 5, 4
    with contextlib.ExitStack() as stack:
        consumer = stack.enter_context(Rank("decode", transport))
        producers = [stack.enter_context(Rank(f"prefill-{number}", transport)) for number in range(workers)]
        for producer in producers:
            producer.io.set_peers(1, [consumer.address])
        consumer.meet(*(producer.address for producer in producers))
        for producer in producers:
            producer.meet(consumer.address)
        theirs = {
            (worker, worker * prompts + prompt + 1): [2 * (worker * prompts + prompt), 2 * (worker * prompts + prompt) + 1]
            for worker, prompt in product(range(workers), range(prompts))
        }
        for (worker, number), blocks in theirs.items():
            consumer.consume(number, 2 * BLOCK_TOKENS, producers[worker].me, blocks)
        for (worker, number), blocks in reversed(theirs.items()):
            producers[worker].produce(number, 2 * BLOCK_TOKENS, consumer.me, blocks[::-1])
        assert all(consumer.landed(number, blocks) for (_, number), blocks in theirs.items())
        assert {producers[worker].outcome(number) for worker, number in theirs} == {CloseReason.RELEASED}
        consumer.wait_free_slots(NUM_SLOTS)


def test_parcel_that_comes_after_the_close_is_dropped(transport: Transport) -> None:
    """Its blocks have another owner by then, who keeps his bytes; its slot comes back."""
    tokens, blocks = 2 * BLOCK_TOKENS, [7, 3]
    with connected_pair(transport) as (producer, consumer):
        producer.pages.go.clear()
        consumer.consume(1, tokens, producer.me, blocks)
        producer.produce(1, tokens, consumer.me, [0, 1])
        assert producer.pages.half_done.wait(PATIENCE_S)
        consumer.io.submit(lambda: consumer.io.receives.cancel(key_of(1), CloseReason.ABORTED, time.monotonic()))
        assert consumer.outcome(1) is CloseReason.ABORTED
        consumer.consume(2, tokens, producer.me, blocks)
        producer.pages.go.set()
        assert producer.outcome(1) is CloseReason.PEER_CLOSED
        assert consumer.touched() == set()
        producer.produce(2, tokens, consumer.me, [2, 5])
        assert consumer.landed(2, blocks)
        consumer.wait_free_slots(NUM_SLOTS)


def test_producer_that_dies_in_mid_parcel_costs_its_slots_until_it_is_gone(transport: Transport) -> None:
    """The consumer reports it lost and reads nothing of it. Where the dead may still write, nobody gets its slots before the table drops it."""
    tokens, theirs = 12 * BLOCK_TOKENS, scattered_blocks(12, 2)
    with connected_pair(transport) as (producer, consumer), Rank("prefill-2", transport) as other:
        other.io.set_peers(1, [consumer.address])
        consumer.meet(producer.address, other.address, version=2)
        other.meet(consumer.address)
        producer.pages.go.clear()
        producer.pages.breaks_off = True
        consumer.consume(1, tokens, producer.me, theirs)
        producer.produce(1, tokens, consumer.me, scattered_blocks(12, 1))
        assert producer.pages.half_done.wait(PATIENCE_S)
        consumer.sync()
        granted = NUM_SLOTS - consumer.io.slots.num_free
        assert granted > 0
        closing = threading.Thread(target=producer.io.close)
        closing.start()
        producer.pages.go.set()
        closing.join()
        assert consumer.outcome(1) is CloseReason.PEER_LOST
        consumer.wait_free_slots(NUM_SLOTS - granted if transport.peer_writes else NUM_SLOTS)
        consumer.consume(2, tokens, other.me, theirs)
        other.produce(2, tokens, consumer.me, scattered_blocks(12, 3))
        assert consumer.landed(2, theirs)
        assert consumer.touched() == set(theirs)
        consumer.meet(other.address, version=3)
        consumer.wait_free_slots(NUM_SLOTS)


def produce_and_wait(pipe: Connection, name: str) -> None:
    """A producer's process: holds its first parcel half-way until it is killed."""
    with Rank("prefill", MAKERS[name]()) as rank:
        pipe.send(rank.address)
        rank.meet(pipe.recv())
        rank.pages.go.clear()
        rank.produce(1, 12 * BLOCK_TOKENS, PeerRank("decode", "a", 0), scattered_blocks(12, 1))
        rank.pages.half_done.wait(PATIENCE_S)
        pipe.send("half done")
        time.sleep(PATIENCE_S)


@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
def test_producer_process_that_is_killed_in_mid_parcel_leaves_nothing(name: str) -> None:
    """No byte in a block, no name in shared memory; its next incarnation serves."""
    spawn = multiprocessing.get_context("spawn")
    ours, pipe = spawn.Pipe()
    process = spawn.Process(target=produce_and_wait, args=(pipe, name))
    process.start()
    transport, theirs = MAKERS[name](), scattered_blocks(12, 2)
    with Rank("decode", transport) as consumer, Rank("prefill", transport, incarnation="b") as fresh:
        killed: PeerAddress = ours.recv()
        ours.send(consumer.address)
        consumer.meet(killed)
        consumer.consume(1, 12 * BLOCK_TOKENS, killed.peer, theirs)
        assert ours.recv() == "half done"
        process.kill()
        process.join()
        assert consumer.outcome(1) is CloseReason.PEER_LOST
        assert consumer.touched() == set()
        fresh.io.set_peers(1, [consumer.address])
        consumer.meet(fresh.address, version=2)
        fresh.meet(consumer.address)
        consumer.wait_free_slots(NUM_SLOTS)
        consumer.consume(2, 12 * BLOCK_TOKENS, fresh.me, theirs)
        fresh.produce(2, 12 * BLOCK_TOKENS, consumer.me, scattered_blocks(12, 3))
        assert consumer.landed(2, theirs)
    process.close()
    for end in (ours, pipe):
        end.close()
