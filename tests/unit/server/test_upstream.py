"""Exchanges with an engine, byte by byte: what arrives, what a broken answer is called, which connections are used again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from engine_socket import CLOSE, PAUSE, RESET, engine_socket

from pdserve.errors import WorkerLost
from pdserve.server import upstream
from pdserve.server.upstream import EngineClient

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
SIZED = HEAD + b"content-length: 5\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
HELLO = [SIZED + b"hello"]


@asynccontextmanager
async def engines(connect_timeout_s: float = 1.0) -> AsyncIterator[EngineClient]:
    """A client whose tasks and connections are gone at the end."""
    before = asyncio.all_tasks()
    client = EngineClient("5ec7e7", connect_timeout_s)
    try:
        yield client
    finally:
        await client.close()
        await asyncio.sleep(0.02)
    assert not {task for task in asyncio.all_tasks() - before if "serve" not in repr(task)}


async def read(client: EngineClient, url: str, body: bytes = b"{}", idle_timeout_s: float | None = None) -> tuple[int, bytes]:
    async with client.post("d0", url, "/v1/x", body, {"X-Request-Id": "r-1"}, idle_timeout_s=idle_timeout_s) as answer:
        return answer.status, await answer.read()


async def lost(client: EngineClient, url: str, idle_timeout_s: float | None = None) -> str:
    """Run an exchange that fails; return the phase."""
    with pytest.raises(WorkerLost) as raised:
        await read(client, url, idle_timeout_s=idle_timeout_s)
    assert raised.value.worker_id == "d0"
    return raised.value.phase


async def test_a_request_is_written_as_it_should_be() -> None:
    """One request line, the router's own headers and nothing else, the body to the byte."""
    async with engine_socket(HELLO) as engine, engines() as client:
        assert await read(client, engine.url, b'{"a":1}') == (200, b"hello")
        head, _, body = engine.requests[0].partition(b"\r\n\r\n")
        assert body == b'{"a":1}'
        assert head.split(b"\r\n") == [
            b"POST /v1/x HTTP/1.1",
            f"host: 127.0.0.1:{engine.port}".encode(),
            b"x-pdserve-secret: 5ec7e7",
            b"content-type: application/json",
            b"content-length: 7",
            b"X-Request-Id: r-1",
        ]


@pytest.mark.parametrize(
    "answer",
    [
        HELLO,
        [CHUNKED, b"5\r\nhello\r\n0\r\n\r\n"],
        [CHUNKED + b"2\r\nhe\r\n", PAUSE, b"3\r\nllo\r\n", PAUSE, b"0\r\n\r\n"],
        [HEAD + b"connection: close\r\n\r\n", b"hello", CLOSE],
        [b"HTTP/1.1 100 Continue\r\n\r\n", PAUSE, SIZED + b"hello"],
        [bytes([byte]) for byte in SIZED + b"hello"],
        [piece for byte in CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" for piece in (bytes([byte]),)],
    ],
    ids=["sized", "chunked", "pieces", "until_close", "continue", "bytes", "chunked_bytes"],
)
async def test_an_answer_arrives_whole(answer: Sequence[bytes]) -> None:
    """However it is framed and cut."""
    async with engine_socket(answer) as engine, engines() as client, client.post("d0", engine.url, "/", b"", {}) as got:
        assert (got.status, got.content_type) == (200, "text/event-stream; charset=utf-8")
        assert b"".join([chunk async for chunk in got.chunks()]) == b"hello"


async def test_chunks_come_as_they_arrive() -> None:
    """The first is handed on while the engine has not sent the second."""
    pieces = [CHUNKED + b"1\r\na\r\n", *[PAUSE] * 20, b"1\r\nb\r\n0\r\n\r\n"]
    async with engine_socket(pieces) as engine, engines() as client, client.post("d0", engine.url, "/", b"", {}) as answer:
        chunks = answer.chunks()
        begin_s = asyncio.get_running_loop().time()
        assert await anext(chunks) == b"a"
        assert asyncio.get_running_loop().time() - begin_s < 0.1
        assert await anext(chunks) == b"b"
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)


@pytest.mark.parametrize(
    ("answer", "phase"),
    [
        ([CLOSE], "head"),
        ([RESET], "head"),
        ([b"HTTP/1.1 200 OK\r\nconte", CLOSE], "head"),
        ([b"SSH-2.0-OpenSSH\r\n"], "head"),
        ([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000], "head"),
        ([SIZED + b"hel", PAUSE, CLOSE], "body"),
        ([SIZED + b"hel", CLOSE], "body"),
        ([CHUNKED + b"5\r\nhello\r\n", PAUSE, RESET], "body"),
        ([CHUNKED + b"5\r\nhello\r\n", PAUSE, CLOSE], "body"),
        ([CHUNKED + b"zz\r\n"], "body"),
    ],
)
async def test_a_broken_answer_is_named_by_its_phase(answer: Sequence[bytes], phase: str) -> None:
    """Lost before the head or inside the body; a body cut short is never taken for a whole one."""
    async with engine_socket(answer) as engine, engines() as client:
        assert await lost(client, engine.url) == phase


@pytest.mark.parametrize("answer", [[PAUSE] * 100, [CHUNKED, *[PAUSE] * 100], [CHUNKED + b"1\r\na\r\n", *[PAUSE] * 100]])
async def test_silence_beyond_the_limit_is_idle(answer: Sequence[bytes]) -> None:
    """Before the head, after it, and inside the body."""
    async with engine_socket(answer) as engine, engines() as client:
        assert await lost(client, engine.url, idle_timeout_s=0.1) == "idle"


async def test_an_engine_that_keeps_talking_is_not_idle() -> None:
    """The limit is on silence, not on the whole."""
    pieces = [piece for _ in range(30) for piece in (b"1\r\na\r\n", PAUSE)]
    async with engine_socket([CHUNKED, *pieces, b"0\r\n\r\n"]) as engine, engines() as client:
        assert await read(client, engine.url, idle_timeout_s=0.1) == (200, b"a" * 30)


async def test_a_port_that_refuses_is_lost_in_connecting() -> None:
    """No engine, no wait."""
    async with engines() as client:
        assert await lost(client, "http://127.0.0.1:1") == "connect"


async def test_an_address_that_never_answers_is_lost_in_connecting() -> None:
    """Connecting has its own limit."""
    async with engines(connect_timeout_s=0.1) as client:
        assert await lost(client, "http://192.0.2.1:9") == "connect"


async def test_a_kept_connection_is_used_again() -> None:
    """Ten exchanges in a row, one connection."""
    async with engine_socket(HELLO) as engine, engines() as client:
        for _ in range(10):
            await read(client, engine.url)
        assert (engine.connections, len(engine.requests)) == (1, 10)


@pytest.mark.parametrize(
    "answer",
    [
        [HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\nhello"],
        [HEAD + b"\r\nhello", CLOSE],
        [b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"],
    ],
)
async def test_a_connection_the_engine_ends_is_not_used_again(answer: Sequence[bytes]) -> None:
    """Whatever way it says so."""
    async with engine_socket(answer) as engine, engines() as client:
        for _ in range(3):
            assert await read(client, engine.url) == (200, b"hello")
        assert engine.connections == 3


async def test_leaving_an_answer_in_the_middle_drops_its_connection() -> None:
    """That is how an engine learns that nobody listens; the next exchange has a fresh one."""
    async with engine_socket([CHUNKED + b"1\r\na\r\n", *[PAUSE] * 1000]) as engine, engines() as client:
        async with client.post("d0", engine.url, "/", b"", {}) as answer:
            await anext(answer.chunks())
        await asyncio.sleep(0.05)
        async with client.post("d0", engine.url, "/", b"", {}) as answer:
            await anext(answer.chunks())
        assert engine.connections == 2


async def test_an_unread_body_does_not_leak_into_the_next_answer() -> None:
    """A whole answer that nobody read leaves nothing behind on its connection."""
    async with engine_socket([SIZED + b"first"], [SIZED + b"later"]) as engine, engines() as client:
        async with client.post("d0", engine.url, "/", b"", {}):
            await asyncio.sleep(0.02)
        assert await read(client, engine.url) == (200, b"later")
        assert engine.connections == 1


@pytest.mark.parametrize("extra", [[SIZED + b"later"], [PAUSE, SIZED + b"later"], [PAUSE, b"garbage"]])
async def test_an_answer_that_nobody_asked_for_is_never_given_to_anybody(extra: Sequence[bytes]) -> None:
    """An engine that says more than it was asked loses the connection; the next exchange gets its own answer."""
    async with engine_socket([*HELLO, *extra], HELLO) as engine, engines() as client:
        assert await read(client, engine.url) == (200, b"hello")
        await asyncio.sleep(0.05)
        assert await read(client, engine.url) == (200, b"hello")
        assert engine.connections == 2


@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_a_kept_connection_that_dies_under_a_request_is_replaced_once(end: bytes) -> None:
    """Not a byte came back, so the engine had not read it: the same request goes out again, on a fresh connection."""
    async with engine_socket(HELLO, [end], HELLO) as engine, engines() as client:
        await read(client, engine.url)
        assert await read(client, engine.url) == (200, b"hello")
        assert (engine.connections, len(engine.requests)) == (2, 3)
        assert engine.requests[1] == engine.requests[2]


async def test_it_is_replaced_only_once() -> None:
    """A fresh connection that dies too is the worker's failure."""
    async with engine_socket(HELLO, [CLOSE]) as engine, engines() as client:
        await read(client, engine.url)
        assert await lost(client, engine.url) == "head"
        assert len(engine.requests) == 3


async def test_a_fresh_connection_is_not_replaced() -> None:
    """Here the engine may have read the request, so it is not sent twice."""
    async with engine_socket([CLOSE]) as engine, engines() as client:
        assert await lost(client, engine.url) == "head"
        assert len(engine.requests) == 1


async def test_after_a_byte_of_answer_nothing_is_sent_twice() -> None:
    """The engine has begun to answer, so it has the request."""
    async with engine_socket(HELLO, [b"H", PAUSE, CLOSE]) as engine, engines() as client:
        await read(client, engine.url)
        assert await lost(client, engine.url) == "head"
        assert len(engine.requests) == 2


async def test_kept_connections_are_dropped_before_engines_drop_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection is closed after the keep-alive time, and not used after it either."""
    monkeypatch.setattr(upstream, "KEEP_ALIVE_S", 0.1)
    async with engine_socket(HELLO) as engine, engines() as client:
        await read(client, engine.url)
        await asyncio.sleep(0.25)
        assert engine.open == set()
        await read(client, engine.url)
        assert engine.connections == 2


async def test_one_worker_that_hangs_leaves_the_others_alone() -> None:
    """A hundred exchanges that wait for one worker do not delay another's."""
    async with engine_socket([PAUSE] * 200) as hung, engine_socket(HELLO) as good, engines() as client:
        waiting = [asyncio.create_task(read(client, hung.url)) for _ in range(100)]
        await asyncio.sleep(0.1)
        begin_s = asyncio.get_running_loop().time()
        for _ in range(20):
            await read(client, good.url)
        assert asyncio.get_running_loop().time() - begin_s < 0.5
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_slow_reader_slows_the_engine_down() -> None:
    """What is not read yet is held only up to a bound; then the engine has to wait, and all of it arrives in the end."""
    size = 32 << 20
    whole = [HEAD + f"content-length: {size}\r\n\r\n".encode(), b"x" * size]
    async with engine_socket(whole) as engine, engines() as client, client.post("d0", engine.url, "/", b"", {}) as answer:
        await asyncio.sleep(0.2)
        assert 0 < client.buffered_bytes <= 64 << 10
        assert sum([len(chunk) async for chunk in answer.chunks()]) == size


async def test_a_large_body_is_written_whole() -> None:
    """Megabytes go out as they are."""
    async with engine_socket(HELLO) as engine, engines() as client:
        body = bytes(range(256)) * 40_000
        await read(client, engine.url, body)
        assert engine.requests[0].endswith(body)


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.001, 0.005, 0.02])
async def test_cancelling_at_any_moment_leaves_no_connection(delay_s: float) -> None:
    """In connecting, waiting for a head, or reading."""
    async with engine_socket([PAUSE, CHUNKED, PAUSE, b"1\r\na\r\n", *[PAUSE] * 200]) as engine, engines() as client:
        tasks = [asyncio.create_task(read(client, engine.url)) for _ in range(20)]
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert client.busy == 0
