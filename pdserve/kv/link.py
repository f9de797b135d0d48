"""One connection between two ranks: framing, tags, the handshake, and the order in which things leave. Runs on the rank's event loop.

Knows what a frame looks like and how a peer proves who it is; takes no decision about transfers. A link that sees one bad frame is closed:
after a forged or torn byte nothing on the stream can be trusted.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from pdserve.errors import ProtocolMismatch, TransferError
from pdserve.kv.actions import PeerRank
from pdserve.kv.pages import Bytes
from pdserve.kv.wire import (
    HEADER_BYTES,
    LENGTH_BYTES,
    NONCE_BYTES,
    WIRE_VERSION,
    Accept,
    Body,
    Hello,
    Identity,
    LinkCipher,
    link_keys,
)

READ_BUFFER_BYTES = 256 << 10
SOCKET_BUFFER_BYTES = 4 << 20
MAX_QUEUED = 65536
"""entries that may wait for a peer that does not read; one more closes the link"""

B = TypeVar("B")


class Stream:
    """A socket with a read buffer: small frames come many to a system call, pages go straight to where they belong.

    Every method raises `ConnectionError` when the peer is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self._start = self._end = 0

    async def read_exactly(self, num_bytes: int) -> bytes:
        out = bytearray(num_bytes)
        await self.read_into(memoryview(out))
        return bytes(out)

    async def read_into(self, view: memoryview) -> None:
        """Fill `view`, first from what is buffered, then from the socket: directly where much is missing."""
        done = 0
        while done < len(view):
            if self._start < self._end:
                count = min(self._end - self._start, len(view) - done)
                view[done : done + count] = self._buffer[self._start : self._start + count]
                self._start += count
                done += count
            elif len(view) - done >= READ_BUFFER_BYTES:
                done += self._checked(await self._loop.sock_recv_into(self._sock, view[done:]))
            else:
                self._start, self._end = 0, 0
                self._end = self._checked(await self._loop.sock_recv_into(self._sock, self._buffer))

    async def drain(self, num_bytes: int) -> None:
        """Read and forget."""
        scratch = memoryview(bytearray(min(num_bytes, READ_BUFFER_BYTES)))
        while num_bytes > 0:
            count = min(num_bytes, len(scratch))
            await self.read_into(scratch[:count])
            num_bytes -= count

    async def write(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self._sock, data)

    def close(self) -> None:
        """End the conversation: a pending read or write fails. The owner of the socket closes it. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _checked(count: int) -> int:
        if count == 0:
            raise ConnectionResetError("peer closed the link")
        return count


class FrameStream:
    """Frames on a stream, each direction under its own cipher."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._out = LinkCipher(None)
        self._in = LinkCipher(None)

    def rekey(self, outgoing: bytes, incoming: bytes) -> None:
        self._out, self._in = LinkCipher(outgoing), LinkCipher(incoming)

    async def send(self, body: Body, pages: Bytes | None = None) -> None:
        await self.stream.write(self._out.seal(body))
        if pages is not None:
            await self.stream.write(pages.data)

    async def receive(self) -> Body:
        """Return the next frame's message. Raises `TransferError` on a frame that cannot be trusted."""
        header = await self.stream.read_exactly(HEADER_BYTES)
        encoded = await self.stream.read_exactly(self._in.body_length(header))
        return self._in.open(header[LENGTH_BYTES:], encoded)

    async def expect(self, kind: type[B]) -> B:
        body = await self.receive()
        if not isinstance(body, kind):
            raise TransferError("bad_frame", f"{type(body).__name__} where {kind.__name__} was due")
        return body


async def shake_hands(
    frames: FrameStream,
    *,
    is_dialer: bool,
    secret: bytes,
    me: PeerRank,
    identity: Identity,
    admit: Callable[[Hello], None],
    judge: Callable[[Identity], None],
) -> tuple[Hello, Identity]:
    """Prove to each other who we are and that our plans agree.

    Args:
        admit: raises `ProtocolMismatch` for a worker or incarnation that is not in the peer table.
        judge: raises `ProtocolMismatch` for an identity whose KV must not mix with ours.

    Raises:
        ProtocolMismatch: ours or the peer's verdict, with both values.
        TransferError: ``bad_tag`` where the secrets differ, ``bad_frame``.
        ConnectionError: the peer left.
    """
    mine = Hello(WIRE_VERSION, me.worker, me.incarnation, me.rank, os.urandom(NONCE_BYTES))
    if is_dialer:
        await frames.send(mine)
        theirs = await frames.expect(Hello)
    else:
        theirs = await frames.expect(Hello)
        await frames.send(mine)
    if theirs.wire_version != WIRE_VERSION:
        raise ProtocolMismatch("wire version", WIRE_VERSION, theirs.wire_version)
    if len(theirs.nonce) != NONCE_BYTES:
        raise TransferError("bad_frame", f"nonce of {len(theirs.nonce)} bytes")
    admit(theirs)
    dialer, listener = (mine, theirs) if is_dialer else (theirs, mine)
    to_listener, to_dialer = link_keys(secret, dialer, listener)
    frames.rekey(*((to_listener, to_dialer) if is_dialer else (to_dialer, to_listener)))
    await frames.send(identity)
    peer_identity = await frames.expect(Identity)
    mismatch: ProtocolMismatch | None = None
    try:
        judge(peer_identity)
    except ProtocolMismatch as error:
        mismatch = error
    await frames.send(Accept(str(mismatch) if mismatch else ""))
    verdict = await frames.expect(Accept)
    if mismatch:
        raise mismatch
    if verdict.reason:
        raise ProtocolMismatch("peer refuses", "", verdict.reason)
    return theirs, peer_identity


class Outbox(deque[B]):
    """What waits to leave on one link, in order; the writer sleeps while it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self._filled = asyncio.Event()

    def put(self, entry: B) -> bool:
        """Append; False when the peer has let too much pile up."""
        if len(self) >= MAX_QUEUED:
            return False
        self.append(entry)
        self._filled.set()
        return True

    async def get(self) -> B:
        while not self:
            self._filled.clear()
            await self._filled.wait()
        return self.popleft()
