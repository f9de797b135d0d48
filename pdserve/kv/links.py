"""All links of one rank: dials and accepts, shakes hands, and carries each link until it ends. Runs on the rank's event loop.

Knows sockets, frames, the transport's way into a peer's slots, and whom the peer table wants. What a message means, what a parcel holds and
where its pages belong is the rank's, behind `LinkUser`.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import structlog

from pdserve.errors import ProtocolMismatch, TransferError
from pdserve.kv.actions import PeerRank, PostParcel
from pdserve.kv.link import FrameStream, Outbox, Stream, shake_hands
from pdserve.kv.loop_thread import LoopThread
from pdserve.kv.pages import Bytes
from pdserve.kv.peers import PeerAddress, PeerTable
from pdserve.kv.settings import KvSettings
from pdserve.kv.transports.base import Mover, Transport
from pdserve.kv.wire import Body, Hello, Identity, Message, Parcel

log = structlog.get_logger("pdserve.kv")

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
HANDSHAKE_TIMEOUT_S = 10.0


class LinkUser(Protocol):
    """What links tell and ask their rank. Every call is made on the loop and returns without waiting."""

    def connected(self, peer: PeerRank) -> None:
        """A link is up; what an earlier link of this peer had begun is over."""
        ...

    def lost(self, peer: PeerRank) -> None:
        """The link is gone; nothing more will be heard from the peer on it."""
        ...

    def heard(self, peer: PeerRank, message: Body) -> None:
        """One message arrived, after the pages that follow it. Raises `TransferError` for one that no honest peer sends."""
        ...

    def room_for(self, peer: PeerRank, parcel: Parcel) -> Bytes | None:
        """Return where the pages that follow a notice go, None if they are not wanted. Raises `TransferError` if they cannot be right."""
        ...

    def gather(self, post: PostParcel, mover: Mover) -> tuple[Parcel, Bytes] | None:
        """Return the notice and the pages of a posted parcel, None if it is not wanted any more. The pages are valid until the next call."""
        ...


class _Link:
    """A connected peer rank."""

    def __init__(self, peer: PeerRank, frames: FrameStream, mover: Mover) -> None:
        self.peer = peer
        self.frames = frames
        self.mover = mover
        self.task = asyncio.current_task()
        self.outbox: Outbox[Message | PostParcel] = Outbox()


class Links:
    """The links of one rank.

    Args:
        thread: whose loop everything here runs on.
        settings: of this worker.
        secret: the cluster secret.
        me: this rank.
        identity: what peers compare.
        table: whom to talk to; hears how each handshake ended.
        transport: what moves slots.
        user: the rank.
    """

    def __init__(
        self,
        thread: LoopThread,
        settings: KvSettings,
        secret: bytes,
        me: PeerRank,
        identity: Identity,
        table: PeerTable,
        transport: Transport,
        user: LinkUser,
    ) -> None:
        self._thread = thread
        self._slot_bytes = settings.slot_bytes
        self._secret = secret
        self._me = me
        self._identity = identity
        self._table = table
        self._transport = transport
        self._user = user
        self.distrusted: Counter[str] = Counter()
        """links that were refused, or closed over a frame that cannot be right, by reason"""
        self._links: dict[PeerRank, _Link] = {}
        self._dialers: dict[PeerRank, asyncio.Task[None]] = {}
        self._listener = socket.create_server((settings.host, 0), backlog=128)
        self._listener.setblocking(False)

    @property
    def address(self) -> tuple[str, int]:
        """Where peers reach this rank."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def listen(self) -> None:
        """Begin to accept."""
        self._thread.spawn(self._accept())

    def dial(self, entries: Sequence[PeerAddress]) -> None:
        """Keep a link up with each of these for as long as the table wants it."""
        for entry in entries:
            self._dialers[entry.peer] = self._thread.spawn(self._dial(entry))

    def drop(self, peer: PeerRank) -> None:
        """Stop dialing a peer and close its link, if there is one."""
        if dialer := self._dialers.pop(peer, None):
            dialer.cancel()
        if link := self._links.get(peer):
            link.frames.stream.close()

    def enqueue(self, peer: PeerRank, entry: Message | PostParcel) -> None:
        """Send after what was enqueued before; nothing happens where there is no link."""
        link = self._links.get(peer)
        if link is not None and not link.outbox.put(entry):
            log.warning("kv.peer_does_not_read", peer=peer.worker, rank=peer.rank)
            link.frames.stream.close()

    def close(self) -> None:
        """Stop listening, once the thread has ended and with it all links. Idempotent."""
        self._listener.close()

    # ---- how a link begins ----------------------------------------------------------------------------------------------------------

    async def _dial(self, entry: PeerAddress) -> None:
        """Keep one link up for as long as the table wants it."""
        attempt = 0
        while self._table.is_wanted(entry.peer):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                await asyncio.wait_for(self._thread.loop.sock_connect(sock, (entry.host, entry.port)), HANDSHAKE_TIMEOUT_S)
                if await self._converse(sock, expected=entry.peer):
                    attempt = 0
            except (OSError, TimeoutError) as error:
                self._table.set_state(entry.peer, "connecting", f"{type(error).__name__}: {error}")
            finally:
                sock.close()
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._thread.loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, or the peer left before it was served
                log.warning("kv.accept_failed", reason=str(error))
                await asyncio.sleep(RETRY_S[-1])
            else:
                self._thread.spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        with contextlib.closing(sock):
            await self._converse(sock, expected=None)

    async def _converse(self, sock: socket.socket, expected: PeerRank | None) -> bool:
        """Shake hands, then carry the link until it ends. True if the handshake succeeded."""
        frames = FrameStream(Stream(sock))
        peer, claimed = expected, expected

        def admit(hello: Hello) -> None:
            nonlocal claimed
            claimed = self._admit(hello, expected)

        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello, identity = await shake_hands(
                    frames,
                    is_dialer=expected is not None,
                    secret=self._secret,
                    me=self._me,
                    identity=self._identity,
                    admit=admit,
                    judge=self._table.judge,
                )
            peer = PeerRank(hello.worker, hello.incarnation, hello.rank)
            mover = self._transport.connect(identity.arenas.get(self._transport.name, ""), self._slot_bytes)
            await self._carry(_Link(peer, frames, mover))
        except (ProtocolMismatch, TransferError) as error:
            log.warning("kv.handshake_refused", peer=claimed, reason=str(error))
            self.distrusted[error.reason if isinstance(error, TransferError) else "mismatch"] += 1
            refused = claimed if isinstance(error, ProtocolMismatch) else peer  # a mismatch is proven under the peer's key
            if refused is not None:
                self._table.set_state(refused, "refused", str(error))
            return False
        except (ConnectionError, OSError, TimeoutError) as error:
            if peer is not None:
                self._table.set_state(peer, "connecting", f"{type(error).__name__}: {error}")
            return False
        finally:
            frames.stream.close()
        return True

    def _admit(self, hello: Hello, expected: PeerRank | None) -> PeerRank:
        peer = self._table.admit(hello)
        if expected is not None and peer != expected:
            raise ProtocolMismatch("peer at this address", expected, peer)
        return peer

    # ---- while it lives -------------------------------------------------------------------------------------------------------------

    async def _carry(self, link: _Link) -> None:
        """Read and write until either side fails; then the rank hears that the peer is lost."""
        while (previous := self._links.get(link.peer)) is not None and previous.task is not None:
            previous.task.cancel()
            await asyncio.wait([previous.task])
        self._links[link.peer] = link
        self._user.connected(link.peer)
        log.info("kv.connected", peer=link.peer.worker, rank=link.peer.rank)
        writer = self._thread.spawn(self._write(link))
        reason = "closed"
        try:
            await self._read(link)
        except (ConnectionError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        except TransferError as error:
            reason = str(error)
            self.distrusted[error.reason] += 1
        except Exception as error:  # a bug in what a message led to: it ends this link, which is dialed again
            reason = f"{type(error).__name__}: {error}"
            log.exception("kv.link_failed", peer=link.peer.worker, rank=link.peer.rank)
        finally:
            writer.cancel()
            link.mover.close()
            del self._links[link.peer]
            log.info("kv.disconnected", peer=link.peer.worker, rank=link.peer.rank, reason=reason)
            self._user.lost(link.peer)

    async def _read(self, link: _Link) -> None:
        while True:
            message = await link.frames.receive()
            if isinstance(message, Parcel) and self._transport.carries_inline:
                room = self._user.room_for(link.peer, message)
                if room is None:
                    await link.frames.stream.drain(message.num_bytes)
                else:
                    await link.frames.stream.read_into(room.data)
            self._user.heard(link.peer, message)
            await asyncio.sleep(0)  # what it leads to leaves before the next is read, and calls and other links have their turn

    async def _write(self, link: _Link) -> None:
        """Send what is enqueued; however this ends, the link ends with it."""
        try:
            while True:
                entry = await link.outbox.get()
                if not isinstance(entry, PostParcel):
                    await link.frames.send(entry)
                elif (gathered := self._user.gather(entry, link.mover)) is not None:
                    notice, pages = gathered
                    await link.frames.send(notice, pages if self._transport.carries_inline else None)
                await asyncio.sleep(0)  # a send that finds room does not give way
        except (ConnectionError, OSError, TransferError) as error:
            log.warning("kv.link_write_failed", peer=link.peer.worker, rank=link.peer.rank, reason=str(error))
        finally:
            link.frames.stream.close()
