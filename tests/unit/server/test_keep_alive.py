"""Comments that keep a stream without data alive, and what comes of the answer around them."""

import asyncio
from typing import Any

import pytest

from pdserve.server.reply import KEEP_ALIVE, PIECE_BYTES, ClientGone, Reply

PAUSE_S = 0.01
EVENT = b"data: {}\n\n"


class Client:
    """Takes what it is sent; while `is_stalled` it takes nothing."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[Any] = []
        self.reply = Reply(self.receive, self.send, "r-1")

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            await asyncio.sleep(PAUSE_S / 4)
        self.sent.append(message)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.sent if message["type"] == "http.response.start"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def until(self, comments: int) -> None:
        """Wait until so many comments came."""
        async with asyncio.timeout(5):
            while self.body.count(KEEP_ALIVE) < comments:
                await asyncio.sleep(PAUSE_S / 4)


@pytest.fixture
async def client() -> Any:
    """At the end nothing is left to be sent."""
    before = asyncio.all_tasks()
    made = Client()
    yield made
    made.gone.set()
    made.reads.set()
    await asyncio.sleep(3 * PAUSE_S)
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}
    count = len(made.sent)
    await asyncio.sleep(3 * PAUSE_S)
    assert len(made.sent) == count


async def test_comments_come_until_there_is_data(client: Client) -> None:
    """The first commits to 200 without being an answer; the last is before the first data."""
    async with client.reply.presence():
        client.reply.keep_alive(PAUSE_S)
        client.reply.keep_alive(PAUSE_S)
        assert client.sent == []
        await client.until(3)
        assert (client.reply.is_started, client.reply.has_data) == (True, False)
        await client.reply.events(EVENT)
        assert client.reply.has_data
        count = client.body.count(KEEP_ALIVE)
        await asyncio.sleep(5 * PAUSE_S)
        await client.reply.end_events(EVENT)
    assert client.statuses == [200]
    assert client.body == KEEP_ALIVE * count + EVENT * 2


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
async def test_an_answer_in_time_has_no_comment(client: Client, pause_s: float) -> None:
    """Nor has one of a router that is set to send none."""
    async with client.reply.presence():
        client.reply.keep_alive(pause_s)
        await asyncio.sleep(2 * PAUSE_S)
        await client.reply.events(EVENT)
        await client.reply.end_events(b"")
    assert client.body == EVENT


async def test_an_error_after_a_comment_is_an_error_event(client: Client) -> None:
    """The status is said; the stream still ends in words."""
    async with client.reply.presence():
        client.reply.keep_alive(PAUSE_S)
        await client.until(1)
    count = client.body.count(KEEP_ALIVE)
    await client.reply.fail_events(b"data: error\n\n")
    assert client.body == KEEP_ALIVE * count + b"data: error\n\n"
    assert client.reply.is_ended


@pytest.mark.parametrize("status", [200, 503])
async def test_data_waits_for_a_comment_that_is_under_way(client: Client, status: int) -> None:
    """A client that takes nothing for a while gets one response, in order."""
    client.reads.clear()
    async with client.reply.presence():
        client.reply.keep_alive(PAUSE_S)
        await asyncio.sleep(3 * PAUSE_S)
        assert client.reply.is_started
        sending = asyncio.create_task(client.reply.events(EVENT) if status == 200 else client.reply.fail_events(EVENT))
        await asyncio.sleep(3 * PAUSE_S)
        assert not sending.done()
        client.reads.set()
        await sending
    assert client.statuses == [200]
    assert client.body == KEEP_ALIVE + EVENT


async def test_a_status_that_is_decided_first_stays(client: Client) -> None:
    """A comment that was about to begin when an answer in one piece goes out is not sent at all."""
    async with client.reply.presence():
        client.reply.keep_alive(PAUSE_S)
        client.reply._begin_comment()
        await client.reply.whole(503, (), b"x")
    assert client.statuses == [503]
    assert client.body == b"x"


async def test_a_client_that_leaves_gets_no_more(client: Client) -> None:
    """The fixture sees that nothing is left over."""
    with pytest.raises(ClientGone):
        async with client.reply.presence():
            client.reply.keep_alive(PAUSE_S)
            await client.until(1)
            client.gone.set()
            await asyncio.sleep(5)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])
async def test_a_large_body_goes_out_in_pieces(client: Client, size: int) -> None:
    """No piece is larger than what the connection's bound counts on; only the last one ends the response."""
    body = bytes(i % 251 for i in range(size))
    await client.reply.whole(200, (), body)
    pieces = client.sent[1:]
    assert client.body == body
    assert max(len(piece["body"]) for piece in pieces) <= PIECE_BYTES
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
