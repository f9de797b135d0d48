"""Real ranks with numpy memory in one process: their own threads and sockets, the calls that an engine would make, and a peer of the test's own."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from shapes import M3_SMALL, BlockIds, Model, Prompt, RankMemory

from pdserve.clock import MonotonicClock
from pdserve.kv.actions import PeerRank, ReceiveOrder, Report, SendOrder
from pdserve.kv.link import FrameStream, Stream, shake_hands
from pdserve.kv.peers import Handshake, PeerAddress
from pdserve.kv.rank import RankIo
from pdserve.kv.settings import KvSettings
from pdserve.kv.ticket import TransferKey
from pdserve.kv.transports.base import Transport
from pdserve.kv.transports.tcp import TcpTransport
from pdserve.kv.wire import Body, Hello, Identity

SECRET = bytes(range(32))
LEASE_S, TIMEOUT_S = 2.0, 30.0
SLOT_BYTES, NUM_SLOTS = 128, 8
NUM_BLOCKS = 64
PATIENCE_S = 15.0


def identity_of(model: Model, size: int, rank: int, arenas: dict[str, str]) -> Identity:
    return Identity("0.32.0", "weights", "config", model.geometry(size, rank), arenas, SLOT_BYTES)


class Rank:
    """One rank of one worker.

    Args:
        me: worker, incarnation and rank.
        size: of the worker.
    """

    def __init__(
        self,
        me: PeerRank,
        size: int = 1,
        *,
        model: Model = M3_SMALL,
        secret: bytes = SECRET,
        transport: Transport | None = None,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self.me = me
        self.size = size
        self.memory = RankMemory(model, model.geometry(size, me.rank), NUM_BLOCKS)
        settings = KvSettings(
            me.worker,
            me.incarnation,
            slot_bytes=SLOT_BYTES,
            arena_bytes=num_slots * SLOT_BYTES,
            lease_s=LEASE_S,
            transfer_timeout_s=TIMEOUT_S,
        )
        self.io = RankIo(
            settings,
            secret,
            self.memory.geometry,
            lambda arenas: identity_of(model, size, me.rank, arenas),
            self.memory.pages,
            transport or TcpTransport(),
            MonotonicClock(),
        )
        self.reports: list[Report] = []

    @property
    def address(self) -> PeerAddress:
        host, port = self.io.address
        return PeerAddress(self.me, host, port, self.size)

    def produce(self, key: TransferKey, prompt: Prompt, peer: PeerRank, block_ids: BlockIds) -> None:
        """Compute a whole prompt in one step, seal it, and finish the request."""
        ledger, now_s = self.io.sends, time.monotonic()
        self.memory.write(prompt, block_ids, 0, prompt.tokens)
        order = SendOrder(key, f"send-{key.transfer_id}", peer.worker, peer.incarnation, prompt.digest, prompt.tokens, TIMEOUT_S)
        self.io.submit(lambda: self.io.open([order], now_s))
        self.io.submit(lambda: ledger.set_blocks(key, block_ids, 0))
        self.io.submit(lambda: ledger.wrote(key, 1, range(len(self.memory.views)), prompt.tokens))
        self.io.submit(lambda: ledger.seal(key, 1, now_s))
        self.io.submit(lambda: ledger.finished(order.request_id))

    def consume(self, key: TransferKey, prompt: Prompt, peer: PeerRank, block_ids: BlockIds) -> None:
        """Reserve blocks for a whole prompt and order it."""
        self.memory.scribble(block_ids)
        order = ReceiveOrder(
            key, f"receive-{key.transfer_id}", peer.worker, peer.incarnation, prompt.digest, prompt.tokens, 0, block_ids, TIMEOUT_S
        )
        self.io.submit(lambda: self.io.open([order], time.monotonic()))

    def report_of(self, key: TransferKey) -> Report:
        """Wait for this rank's report of a transfer."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            for report in self.reports:
                if (report.record.transfer_id, report.record.attempt) == key:
                    return report
            self.io.wait_report(0.2)
            self.reports += self.io.take_reports()
        raise AssertionError(f"{self.me} has not reported {key}; handshakes {self.io.handshakes()}")

    def sync(self) -> None:
        """Wait until the rank's thread has done what it was given before."""
        self.io.submit(lambda: None).result(timeout=PATIENCE_S)

    def wait_states(self, states: dict[PeerRank, str]) -> None:
        """Wait until the handshakes stand as asked."""
        deadline_s = time.monotonic() + PATIENCE_S
        while {shake.peer: shake.state for shake in self.io.handshakes()} != states:
            assert time.monotonic() < deadline_s, f"{self.me}: {self.io.handshakes()}, wanted {states}"
            time.sleep(0.01)

    def wait_distrusted(self, reason: str) -> None:
        """Wait until the rank has counted a link that it does not trust."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.io.distrusted[reason]:
            assert time.monotonic() < deadline_s, f"{self.me}: {self.io.distrusted}, wanted {reason}"
            time.sleep(0.01)


@contextlib.contextmanager
def running(*ranks: Rank) -> Iterator[None]:
    """Start ranks, and close them whatever happens."""
    try:
        for rank in ranks:
            rank.io.start()
        yield
    finally:
        for rank in ranks:
            rank.io.close()


def join(ranks: Sequence[Rank], version: int = 1) -> None:
    """Give all ranks one peer table and wait until every link is up."""
    table = [rank.address for rank in ranks]
    for rank in ranks:
        rank.io.set_peers(version, table)
    for rank in ranks:
        rank.sync()
        wanted = {shake.peer: "connected" for shake in rank.io.handshakes()}
        rank.wait_states(wanted)


def blocks(model: Model, tokens: int, first: int = 0) -> BlockIds:
    """Return a block table that is not in order."""
    return tuple(tuple(first + number for number in reversed(range(count))) for count in model.blocks_of(tokens))


class Outsider:
    """A peer whose every byte the test decides; dials a rank and shakes hands as the product does.

    Use as an async context manager.
    """

    def __init__(self, rank: Rank, me: PeerRank, *, secret: bytes = SECRET, model: Model = M3_SMALL) -> None:
        self.me = me
        self._rank = rank
        self._secret = secret
        self._model = model
        self._socket = socket.socket()
        self.frames: FrameStream

    async def __aenter__(self) -> "Outsider":
        self._socket.connect(self._rank.io.address)
        self.frames = FrameStream(Stream(self._socket))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    async def greet(self) -> None:
        """Shake hands as the dialer, and wait until the rank takes the link for connected too."""

        def welcome(_: Hello | Identity) -> None: ...

        await shake_hands(
            self.frames,
            is_dialer=True,
            secret=self._secret,
            me=self.me,
            identity=identity_of(self._model, 1, self.me.rank, {}),
            admit=welcome,
            judge=welcome,
        )
        async with asyncio.timeout(PATIENCE_S):
            while Handshake(self.me, "connected", "") not in self._rank.io.handshakes():
                await asyncio.sleep(0.005)

    async def hear(self) -> Body:
        """Return the next message."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.frames.receive()

    async def read_past(self) -> None:
        """Read and forget whatever the rank says, for as long as the link stands."""
        with contextlib.suppress(ConnectionError):
            while True:
                await self.frames.stream.read_exactly(1)

    async def is_cut_off(self) -> bool:
        """Whether the rank closes the link; reads past what it had to say before."""
        async with asyncio.timeout(PATIENCE_S):
            await self.read_past()
        return True
