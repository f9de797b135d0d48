"""Clients that are slow, endless or not speaking HTTP: each costs its own connection, for a bounded time and with bounded memory.

Raw sockets, because no HTTP client would send what is sent here.
"""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import psutil
import pytest
from router_rig import CHAT, COMPLETIONS, Rig, filled, rig, until

from pdserve.server.http_protocol import GuardedProtocol
from pdserve.testing.fake_worker import Fault, Phase, Script

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GET = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
GUARD_S = 10.0
SOON_S = 0.3


def request(body: bytes | None = None, head: bytes = HEAD) -> bytes:
    """Return a whole request."""
    body = orjson.dumps(filled(COMPLETIONS, {})) if body is None else body
    return head + f"content-length: {len(body)}\r\n\r\n".encode() + body


class Wire:
    """One connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Read one answer with a length; returns its status and body."""
        async with asyncio.timeout(GUARD_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def refused(self) -> tuple[int, str]:
        """Read an answer that ends the connection; returns its status and its error's code."""
        async with asyncio.timeout(GUARD_S):
            answer = await self.reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        error = orjson.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return int(head.split()[1]), error["code"]

    async def is_closed(self) -> bool:
        """Wait for the end of the connection; says whether nothing came before it."""
        async with asyncio.timeout(GUARD_S):
            return await self.reader.read() == b""

    async def trickle(self, data: bytes = b"a") -> None:
        """Send `data` again and again until the router closes."""
        while not self.reader.at_eof() and not self.writer.is_closing():
            try:
                await self.send(data)
            except ConnectionError:
                return
            await asyncio.sleep(SOON_S / 10)


@asynccontextmanager
async def wire(r: Rig) -> AsyncIterator[Wire]:
    """Open a connection; leaving drops it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /",
        b"POST /v1/chat",
        HEAD,
        HEAD + b"x-a: b\r\nx-b",
        HEAD + b"content-length: 500\r\n\r\n",
        HEAD + b"content-length: 500\r\n\r\n{",
    ],
    ids=["method", "path", "headers", "half a header", "no body", "half a body"],
)
async def test_a_request_that_trickles_in_is_cut_off(sent: bytes) -> None:
    """Wherever it stands when its time is up, byte by byte or silent: 408 and the end. Others are served meanwhile, and no engine hears of it."""
    async with rig(header_timeout_s=SOON_S, body_timeout_s=SOON_S) as r:
        async with wire(r) as slow, wire(r) as silent:
            await slow.send(sent)
            await silent.send(sent)
            trickling = asyncio.create_task(slow.trickle())
            assert (await r.post())[0] == 200
            assert await silent.refused() == (408, "request_timeout")
            async with asyncio.timeout(GUARD_S):
                assert (await slow.reader.read(12)) == b"HTTP/1.1 408"
            trickling.cancel()
            await asyncio.gather(trickling, return_exceptions=True)
        assert len(r.decodes[0].legs) == 1


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"\r\n\r\n\r\n"])
async def test_a_connection_that_asks_nothing_is_closed(sent: bytes) -> None:
    """Also one that was used before, and one that sends what begins no request; there is no question to answer."""
    async with rig(header_timeout_s=SOON_S, client_idle_timeout_s=1) as r:
        async with wire(r) as fresh:
            await fresh.send(sent)
            assert await fresh.is_closed()
        async with wire(r) as used:
            await used.send(GET)
            async with asyncio.timeout(GUARD_S):
                await used.reader.readuntil(b"\r\n\r\n")
            await used.send(sent)
            assert await used.is_closed()


async def test_the_headers_time_and_the_bodys_are_two() -> None:
    """A body may take longer than a header."""
    async with rig(header_timeout_s=SOON_S) as r, wire(r) as client:
        whole = request()
        await client.send(whole[:-10])
        await asyncio.sleep(2 * SOON_S)
        await client.send(whole[-10:])
        assert (await client.answer())[0] == 200


async def test_a_long_answer_is_not_cut_off_by_the_next_requests_time() -> None:
    """A client that sends the beginning of its next request early does not lose the answer that is under way."""
    async with rig(header_timeout_s=SOON_S, body_timeout_s=SOON_S) as r, wire(r) as client:
        r.decodes[0].script = Script(tokens=("a", "b"), token_delay_s=4 * SOON_S)
        whole = request()
        await client.send(whole + whole[:-5])
        assert (await client.answer())[0] == 200
        await client.send(whole[-5:])
        assert (await client.answer())[0] == 200


async def test_a_late_next_request_is_refused_after_the_answer() -> None:
    """Its time begins when it is its turn; its refusal comes behind the answer, never into it."""
    async with rig(header_timeout_s=SOON_S, body_timeout_s=SOON_S) as r, wire(r) as client:
        r.decodes[0].script = Script(tokens=("a", "b"), token_delay_s=4 * SOON_S)
        await client.send(request() + b"POST /v1/comp")
        assert (await client.answer())[0] == 200
        assert await client.refused() == (408, "request_timeout")


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Many small ones in one write, larger together than one header may be."""
    async with rig(limits={"max_header_bytes": 1024}) as r, wire(r) as client:
        await client.send(request() * 30 + request()[:20])
        for _ in range(30):
            assert (await client.answer())[0] == 200
        await client.send(request()[20:])
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"".join(b"x-%d: y\r\n" % i for i in range(200)) + b"\r\n",
        HEAD + b"x-a: " + b"y" * 5000 + b"\r\n\r\n",
        b"POST /" + b"y" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["many", "long", "path"],
)
async def test_a_header_beyond_its_limits_is_refused(head: bytes) -> None:
    """431 in the usual shape, whether it comes at once or in pieces."""
    async with rig(limits={"max_header_bytes": 4096, "max_headers": 50}) as r:
        async with wire(r) as client:
            await client.send(head)
            assert await client.refused() == (431, "header_too_large")
        async with wire(r) as client:
            for start in range(0, len(head), 512):
                if client.reader.at_eof():
                    break
                await client.send(head[start : start + 512])
                await asyncio.sleep(0)
            assert await client.refused() == (431, "header_too_large")
        assert (await r.post())[0] == 200


@pytest.mark.parametrize("piece", [b"x-a: b\r\n" * 100, b"y" * 1000], ids=["headers", "value"])
async def test_an_endless_header_ends_at_its_limit(piece: bytes) -> None:
    """Long before its time is up, and before it takes memory."""
    async with rig() as r, wire(r) as client:
        await client.send(HEAD + b"x-long: ")
        sent = 0
        while not client.reader.at_eof() and sent < 1 << 20:
            try:
                await client.send(piece)
            except ConnectionError:
                break
            sent += len(piece)
            await asyncio.sleep(0)
            if client.reader._buffer:  # type: ignore[attr-defined]
                break
        assert sent < 1 << 20
        async with asyncio.timeout(GUARD_S):
            assert (await client.reader.read(12)) == b"HTTP/1.1 431"


async def test_a_refused_client_that_still_sends_can_read_why() -> None:
    """Its megabytes are read past for a while: a reset would take the refusal along."""
    async with rig() as r, wire(r) as client:
        await client.send(HEAD + b"x-long: " + b"y" * (8 << 20))
        assert await client.refused() == (431, "header_too_large")


async def test_trailers_are_nobodys() -> None:
    """Headers after a chunked body neither count as headers nor pile up."""
    async with rig() as r, wire(r) as client:
        body = orjson.dumps(filled(COMPLETIONS, {}))
        trailers = b"".join(b"x-request-id: evil%d\r\n" % i for i in range(5000))
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body) + trailers + b"\r\n")
        async with asyncio.timeout(GUARD_S):
            head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"evil" not in head


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: elsewhere:443\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 0x5\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"x: y\r\n : z\r\n\r\n",
        HEAD + b"x\0: y\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_as_everything_else(sent: bytes) -> None:
    """TLS, nonsense, and what two servers could read as two different requests: 400 in the usual shape, and the connection ends."""
    async with rig() as r:
        async with wire(r) as client:
            await client.send(sent)
            assert await client.refused() in ((400, "invalid_http"), (404, None))
        assert r.legs == []


async def test_a_refused_request_takes_its_connection_along_only_if_it_must() -> None:
    """The rest of a body whose request is answered already is read past, for as long as a body may take."""
    async with rig(body_timeout_s=SOON_S) as r:
        async with wire(r) as client:
            await client.send(b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
            assert (await client.answer())[0] == 404
            await client.send(b"67890" + request())
            assert (await client.answer())[0] == 200
        async with wire(r) as client:
            await client.send(b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
            assert (await client.answer())[0] == 404
            assert await client.is_closed()


async def test_a_client_learns_that_its_body_is_too_large_also_if_it_sends_all_of_it() -> None:
    """The rest is read past, not reset; the connection goes on."""
    async with rig(max_body_bytes=4096) as r, wire(r) as client:
        for head, body in (
            (HEAD + b"content-length: %d\r\n\r\n" % (8 << 20), b" " * (8 << 20)),
            (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"100000\r\n" + b" " * (1 << 20) + b"\r\n0\r\n\r\n"),
        ):
            await client.send(head + body)
            assert (await client.answer())[0] == 413
        await client.send(request())
        assert (await client.answer())[0] == 200


async def test_an_idle_connection_is_kept_for_its_time_and_no_longer() -> None:
    """Longer than clients keep theirs: one that sends just in time is served."""
    async with rig(client_idle_timeout_s=2) as r, wire(r) as client:
        for _ in range(2):
            await client.send(request())
            assert (await client.answer())[0] == 200
            await asyncio.sleep(1)
        assert await client.is_closed()


@asynccontextmanager
async def stalled(r: Rig, count: int) -> AsyncIterator[list[socket.socket]]:
    """Send this many streamed requests from clients that then read nothing."""
    body = orjson.dumps(filled(COMPLETIONS, {"stream": True, "max_tokens": 4000}))
    loop = asyncio.get_running_loop()
    clients = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            clients.append(client)
            await loop.sock_connect(client, ("127.0.0.1", int(r.url.rpartition(":")[2])))
            await loop.sock_sendall(client, request(body))
        yield clients
    finally:
        for client in clients:
            client.close()


def connections() -> list[GuardedProtocol]:
    return [each for each in gc.get_objects() if isinstance(each, GuardedProtocol) and each.transport and not each.transport.is_closing()]


async def test_a_client_that_does_not_read_holds_64_kib_and_its_engine_waits() -> None:
    """Engines that have megabytes to say to each of many such clients are read no further; memory stays flat, others are served as ever."""
    big = "x" * 200_000
    clients = 16
    async with rig() as r:
        await r.put_fleet(max_running=64)
        r.decodes[0].script = Script(tokens=(big,) * 100)
        process = psutil.Process()
        async with stalled(r, clients):
            await until(lambda: len(r.decodes[0].legs) == clients)

            async def is_full() -> bool:
                sizes = [each.transport.get_write_buffer_size() for each in connections()]
                return sum(size > 32 << 10 for size in sizes) == clients

            await until(is_full, timeout_s=GUARD_S)
            before = process.memory_info().rss
            r.decodes[0].script = Script()
            for _ in range(20):
                assert (await r.post())[0] == 200
            await asyncio.sleep(0.5)
            sizes = [each.transport.get_write_buffer_size() for each in connections()]
            assert max(sizes) <= 64 << 10
            assert process.memory_info().rss - before < clients * (256 << 10)
            assert all(leg.ended is None for leg in r.decodes[0].legs[:clients])
        await r.at_rest()


async def test_a_client_that_does_not_read_ends_at_its_limit() -> None:
    """Its connection is dropped, both engines are told, and it is counted; a reader that is slow but reads is waited for."""
    async with rig(slow_client_timeout_s=1) as r:
        r.decodes[0].script = Script(tokens=("x" * 8000,) * 2000)
        async with stalled(r, 1):
            await until(lambda: len(r.aborts) >= 1, timeout_s=GUARD_S)
            await r.at_rest()
            (receipt,) = await r.receipts(1)
            assert (receipt.outcome, receipt.status) == ("cancelled", 499)
            assert (await r.metrics())["pdserve_slow_clients_total"] == 1
        r.decodes[0].script = Script(tokens=("x" * 8000,) * 60)
        async with stalled(r, 1) as (client,):
            received = b""
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(60):
                while b"[DONE]" not in received[-64:]:
                    piece = await loop.sock_recv(client, 8 << 10)
                    assert piece
                    received += piece
                    await asyncio.sleep(0.02)
        assert received.count(b"x") >= 60 * 8000


async def test_an_answer_in_one_piece_that_nobody_reads_does_not_last() -> None:
    """Its writer is done with it; the connection ends all the same."""
    async with rig(slow_client_timeout_s=1, client_idle_timeout_s=1) as r:
        r.decodes[0].script = Script(tokens=("x" * 200_000,) * 20)
        body = orjson.dumps(filled(COMPLETIONS, {}))
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(r.url.rpartition(":")[2])))
            await loop.sock_sendall(client, request(body))
            await until(lambda: len(r.legs) == 2)
            await until(_is_counted(r), timeout_s=GUARD_S)


def _is_counted(r: Rig) -> Any:
    async def is_counted() -> bool:
        return (await r.metrics())["pdserve_slow_clients_total"] == 1

    return is_counted


async def test_a_long_prefill_is_bridged_by_comments() -> None:
    """They begin after the pause and end with the data; the events are untouched."""
    async with rig(keepalive_s=0.05) as r:
        r.prefills[0].script = Script(head_delay_s=0.4)
        status, body = await r.stream()
        assert status == 200
        comments, _, events = body.rpartition(b": keep-alive\n\n")
        assert comments.replace(b": keep-alive\n\n", b"") == b""
        assert events.startswith(b"data: ")
        assert events.endswith(b"data: [DONE]\n\n")
        assert 3 <= body.count(b": keep-alive") <= 9
        assert (await r.post())[0] == 200


@pytest.mark.parametrize("router", [{"keepalive_s": 0}, {}])
async def test_without_need_there_is_no_comment(router: dict[str, Any]) -> None:
    """Off, or not due yet."""
    async with rig(**router) as r:
        r.prefills[0].script = Script(head_delay_s=0.3)
        assert b": keep-alive" not in (await r.stream())[1]


@pytest.mark.parametrize(
    "script",
    [Script(status=503, head_delay_s=0.3), Script(fault=Fault.RESET, head_delay_s=0.3), Script(fault=Fault.HANG, phase=Phase.AFTER_HEAD)],
)
async def test_a_retry_is_still_free_after_comments(script: Script) -> None:
    """Comments are no answer: another worker may give it, and the client sees one whole stream."""
    async with rig(prefills=2, decodes=2, keepalive_s=0.05, first_byte_timeout_s=0.5) as r:
        r.decodes[0].scripts.append(script)
        bodies = [await r.stream() for _ in range(2)]
        assert [status for status, _ in bodies] == [200, 200]
        assert all(body.endswith(b"data: [DONE]\n\n") and b"error" not in body for _, body in bodies)
        assert any(b": keep-alive" in body for _, body in bodies)
        assert max(receipt.attempts for receipt in await r.receipts(2)) == 2


async def test_a_failure_after_comments_is_an_error_event() -> None:
    """The status was said; the receipt knows that it failed."""
    async with rig(keepalive_s=0.05) as r:
        r.decodes[0].script = Script(status=400, head_delay_s=0.3)
        status, body = await r.stream(n=2)
        assert status == 200
        events = [event for event in body.split(b"\n\n") if event and not event.startswith(b":")]
        assert orjson.loads(events[0].removeprefix(b"data: "))["error"]
        assert events[1:] == [b"data: [DONE]"]
        (receipt,) = await r.receipts(1)
        assert (receipt.status, receipt.outcome) == (200, "client_error")


async def test_a_client_that_leaves_during_comments_is_noticed() -> None:
    """As at any other time."""
    async with rig(keepalive_s=0.05) as r:
        r.prefills[0].script = Script(fault=Fault.HANG)
        async with wire(r) as client:
            await client.send(request(orjson.dumps(filled(CHAT, {"stream": True})), HEAD.replace(b"completions", b"chat/completions")))
            async with asyncio.timeout(GUARD_S):
                await client.reader.readuntil(b": keep-alive")
        await until(lambda: len(set(r.aborts)) == 1 and len(r.aborts) == 2)
        (receipt,) = await r.receipts(1)
        assert receipt.outcome == "cancelled"
