"""The I/O thread of one rank: drives both ledgers, owns arena and pages. The engine's step never waits for what happens here.

The engine's thread hands in work with `submit` and collects reports with `take_reports`; everything else runs on this thread's event loop, so
ledgers and tables need no locks. Gathers and scatters are short copies of at most one slot and run on the loop itself: when a call on the loop
returns, no copy is half done, which is what lets a new pass or a close free blocks at once.

Knows the ledgers' actions; not sockets (`links`), not vLLM, and not why a transfer exists.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog
import xxhash

from pdserve.clock import Clock
from pdserve.errors import TransferError
from pdserve.kv.actions import (
    Action,
    Actions,
    PeerRank,
    PostParcel,
    ReceiveOrder,
    Report,
    ReportReceived,
    ReportSent,
    Scatter,
    SendFrame,
    SendOrder,
)
from pdserve.kv.geometry import Geometry
from pdserve.kv.links import Links
from pdserve.kv.loop_thread import LoopThread
from pdserve.kv.pages import Bytes, CachePages
from pdserve.kv.peers import Handshake, PeerAddress, PeerTable
from pdserve.kv.proof import Proofs
from pdserve.kv.receive_ledger import ReceiveLedger
from pdserve.kv.send_ledger import SendLedger
from pdserve.kv.settings import KvSettings
from pdserve.kv.slots import SlotPool
from pdserve.kv.transports.base import Mover, Transport
from pdserve.kv.wire import Ack, Body, Close, Grant, Identity, Offer, Parcel, Renew, Return, Seal, Want
from pdserve.types import CloseReason

log = structlog.get_logger("pdserve.kv")

TICKS_PER_LEASE = 10


class RankIo:
    """One rank's side of the KV layer.

    Args:
        settings: of this worker.
        secret: the cluster secret.
        geometry: of this rank.
        identity: what peers compare.
        pages: this rank's blocks.
        transport: what moves slots.
        clock: monotonic.
    """

    def __init__(
        self,
        settings: KvSettings,
        secret: bytes,
        geometry: Geometry,
        identity: Callable[[dict[str, str]], Identity],
        pages: CachePages,
        transport: Transport,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._pages = pages
        self._proofs = Proofs(geometry, pages)
        self._transport = transport
        self._clock = clock
        self._arena = transport.open_arena(settings.num_slots, settings.slot_bytes)
        shown = identity({transport.name: self._arena.descriptor} if self._arena.descriptor else {})
        self.table = PeerTable(settings.worker_id, geometry, shown)
        self.slots = SlotPool(settings.num_slots)
        self.sends = SendLedger(
            geometry,
            self.table.sending_plan,
            self.table.connected_ranks,
            worker=settings.worker_id,
            incarnation=settings.incarnation,
            slot_bytes=settings.slot_bytes,
            lease_s=settings.lease_s,
            parking_s=settings.transfer_timeout_s,
        )
        self.receives = ReceiveLedger(
            geometry,
            self.table.receiving_plan,
            self.table.connected_ranks,
            self.slots,
            worker=settings.worker_id,
            incarnation=settings.incarnation,
            slot_bytes=settings.slot_bytes,
            renew_s=settings.lease_s / 3,
            parking_s=settings.transfer_timeout_s,
        )
        self._reports: deque[Report] = deque()
        self._reported = threading.Event()
        self._thread = LoopThread("pdserve-kv")
        me = PeerRank(settings.worker_id, settings.incarnation, geometry.rank)
        self._links = Links(self._thread, settings, secret, me, shown, self.table, transport, self)

    # ---- the engine's side ----------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """Where peers reach this rank."""
        return self._links.address

    @property
    def distrusted(self) -> Counter[str]:
        """Links that were refused, or closed over a frame that cannot be right, by reason."""
        return self._links.distrusted

    def start(self) -> None:
        self._thread.start()
        self._thread.submit(self._begin)

    def submit(self, call: Callable[[], Actions | None]) -> Future[None]:
        """Run a ledger call on the loop and carry out its actions. Never blocks; the future is for the few who must wait."""
        return self._thread.submit(lambda: self._execute(call() or ()))

    def take_reports(self) -> Sequence[Report]:
        """Return what ended since the last call."""
        self._reported.clear()
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def wait_report(self, timeout_s: float) -> None:
        """Sleep until there is a report, at most `timeout_s`; for engine steps that have nothing to compute."""
        self._reported.wait(timeout_s)

    def open(self, orders: Sequence[SendOrder | ReceiveOrder], now_s: float) -> Actions:
        """Begin transfers; to be called on the loop, through `submit`."""
        actions: list[Action] = []
        for order in orders:
            self._proofs.open(order)
            actions += self.sends.open(order, now_s) if isinstance(order, SendOrder) else self.receives.open(order, now_s)
        return actions

    def set_peers(self, version: int, entries: Sequence[PeerAddress]) -> None:
        """Install a peer table; handshakes go on in the background."""
        self.submit(lambda: self._set_peers(version, entries))

    def handshakes(self) -> Sequence[Handshake]:
        return self.table.handshakes()

    def close(self) -> None:
        """Stop the thread and free slots and sockets. Transfers in flight are lost; peers see the links close."""
        self._thread.close()
        self._links.close()
        self._arena.close()

    # ---- the loop -------------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._links.listen()
        self._thread.spawn(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / TICKS_PER_LEASE)
            now_s = self._clock.now_s()
            self._execute([*self.sends.tick(now_s), *self.receives.tick(now_s)])

    def _execute(self, actions: Actions) -> None:
        """Carry out actions in order. Scatters are done here and now; what they lead to is done next."""
        work: deque[Action] = deque(actions)
        while work:
            action = work.popleft()
            match action:
                case SendFrame(peer, message):
                    self._links.enqueue(peer, message)
                case PostParcel():
                    self._links.enqueue(action.peer, action)
                case Scatter():
                    work.extend(self._scatter(action))
                case ReportSent() | ReportReceived():
                    self._reports.append(self._proofs.complete(action))
                    self._reported.set()

    def _scatter(self, scatter: Scatter) -> Actions:
        parcel = scatter.parcel
        pages = self._arena.slot(parcel.slot)[: parcel.num_bytes]
        now_s = self._clock.now_s()
        if xxhash.xxh3_64_intdigest(pages.data) != parcel.checksum:
            return self.receives.corrupt(scatter, now_s)
        try:
            self._pages.scatter(parcel.items, scatter.slices, scatter.block_ids, pages)
            self._proofs.scattered(scatter)
        except Exception:  # a bug, or memory that is gone: this transfer must end, with its blocks, and no other
            log.exception("kv.scatter_failed", peer=scatter.peer.worker, rank=scatter.peer.rank)
            return self.receives.corrupt(scatter, now_s)
        return self.receives.scattered(scatter, now_s)

    def _set_peers(self, version: int, entries: Sequence[PeerAddress]) -> Actions:
        dial, gone = self.table.replace(version, entries)
        actions: list[Action] = []
        for peer in gone:
            self._links.drop(peer)
            # The controller drops an incarnation from the table only once its process group is reaped.
            actions += self.receives.release_slots(peer)
        self._links.dial(dial)
        return actions

    # ---- what links tell and ask ----------------------------------------------------------------------------------------------------

    def connected(self, peer: PeerRank) -> None:
        self.table.set_connected(peer, connected=True)
        self._execute(self.receives.connected(peer))

    def lost(self, peer: PeerRank) -> None:
        self.table.set_connected(peer, connected=False)
        self._execute(self.sends.peer_lost(peer.worker, peer.incarnation))
        self._execute(self.receives.peer_lost(peer, self._clock.now_s(), may_still_write=self._transport.peer_writes))

    def heard(self, peer: PeerRank, message: Body) -> None:
        self._execute(self._dispatch(peer, message))

    def room_for(self, peer: PeerRank, parcel: Parcel) -> Bytes | None:
        """Return the slot that a parcel names, None if it is not the sender's to fill."""
        if not 0 < parcel.num_bytes <= self._settings.slot_bytes:
            raise TransferError("bad_frame", f"parcel of {parcel.num_bytes} bytes, slots hold {self._settings.slot_bytes}")
        if not self.receives.may_fill(peer, parcel):
            return None
        return self._arena.slot(parcel.slot)[: parcel.num_bytes]

    def gather(self, post: PostParcel, mover: Mover) -> tuple[Parcel, Bytes] | None:
        """Copy one parcel out of this rank's blocks. Between `begin_gather` and `gathered` nothing else runs on the loop."""
        if not self.sends.begin_gather(post):
            self._execute(self.sends.pump(post.key, self._clock.now_s()))
            return None
        try:
            pages = mover.target(post.slot, post.num_bytes)
            self._pages.gather(post.items, post.slices, post.block_ids, pages)
            self._proofs.gathered(post)
        except TransferError as error:
            log.warning("kv.post_failed", peer=post.peer.worker, rank=post.peer.rank, reason=str(error))
            self._execute(self.sends.cancel(post.key, CloseReason.PEER_LOST))
            return None
        finally:
            self._execute(self.sends.gathered(post))
        checksum = xxhash.xxh3_64_intdigest(pages.data)
        return Parcel(*post.key, post.pass_number, post.slot, post.num_bytes, checksum, post.items), pages

    def _dispatch(self, peer: PeerRank, message: Body) -> Actions:
        now_s = self._clock.now_s()
        match message:
            case Parcel():
                return self.receives.on_parcel(peer, message, now_s)
            case Want():
                return self.receives.on_want(peer, message)
            case Return():
                return self.receives.on_return(peer, message)
            case Seal():
                return self.receives.on_seal(peer, message, now_s)
            case Close(side="send"):
                return self.receives.on_close(peer, message, now_s)
            case Offer() | Grant() | Ack() | Close():
                return self.sends.on_message(peer, message, now_s)
            case Renew():
                self.sends.on_renew(peer, message, now_s)
                return ()
            case _:
                raise TransferError("bad_frame", f"{type(message).__name__} after the handshake")
