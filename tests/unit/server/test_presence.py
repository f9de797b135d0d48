"""The scope that lasts as long as the client is there, and what the client is sent."""

import asyncio
from typing import Any

import pytest

from pdserve.errors import RequestError
from pdserve.server import reply as reply_module
from pdserve.server.frames import DONE_EVENT
from pdserve.server.reply import ClientGone, Departures, Reply, Stopped


class Client:
    """Both ends of an ASGI connection: leaves when told, keeps what it is sent."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self.is_stalled = False
        self.reply = Reply(self.receive, self.send, "r-1")

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.is_stalled:
            await asyncio.Event().wait()
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            # As uvicorn does: a finished response looks like a disconnect.
            self.gone.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def no_task_left() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_leaving_ends_whatever_is_awaited() -> None:
    """A wait inside the block ends with `ClientGone`, and the task goes on uncancelled."""
    client = Client()
    asyncio.get_running_loop().call_later(0.01, client.gone.set)
    with pytest.raises(ClientGone):
        async with client.reply.presence():
            await asyncio.sleep(10)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)
    await no_task_left()


async def test_a_block_that_ends_first_is_left_alone() -> None:
    """Without a departure nothing is raised, and nothing watches afterwards."""
    client = Client()
    async with client.reply.presence():
        await asyncio.sleep(0)
    client.gone.set()
    await no_task_left()


async def test_the_end_of_the_response_is_no_departure() -> None:
    """After the last byte the server reports a disconnect; what is still done in the block is not cut off."""
    client = Client()
    async with client.reply.presence():
        await client.reply.whole(200, (), b"x")
        await asyncio.sleep(0.01)
    assert client.body == b"x"


async def test_an_error_of_the_block_passes() -> None:
    """Errors that come without a departure are nobody else's."""
    client = Client()
    with pytest.raises(RequestError):
        async with client.reply.presence():
            raise RequestError(400, "x")
    await no_task_left()


async def test_a_departure_outweighs_the_errors_it_causes() -> None:
    """What fails while a client leaves is not told to nobody."""
    client = Client()
    asyncio.get_running_loop().call_later(0.01, client.gone.set)
    with pytest.raises(ClientGone):
        async with client.reply.presence():
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError as error:
                raise RequestError(400, "x") from error


async def test_a_bug_is_never_taken_for_a_departure() -> None:
    """An unforeseen error stays itself, also when the client leaves at that moment."""
    client = Client()
    asyncio.get_running_loop().call_later(0.01, client.gone.set)
    with pytest.raises(ZeroDivisionError):
        async with client.reply.presence():
            try:
                await asyncio.sleep(10)
            finally:
                _ = 1 // 0


async def test_cancellation_from_outside_stays_cancellation() -> None:
    """Only the client's departure becomes `ClientGone`."""
    client = Client()

    async def block() -> None:
        async with client.reply.presence():
            await asyncio.sleep(10)

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await no_task_left()


async def test_a_departure_during_cancellation_stays_cancellation() -> None:
    """Who cancels from outside must be told so, even if the client left as well."""
    client = Client()

    async def block() -> None:
        async with client.reply.presence():
            await asyncio.sleep(10)

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    client.gone.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_inside_a_deadline_each_keeps_its_meaning() -> None:
    """A deadline in the block is a `TimeoutError`, a departure in it is `ClientGone`."""
    client = Client()
    with pytest.raises(TimeoutError):
        async with client.reply.presence(), asyncio.timeout(0.01):
            await asyncio.sleep(10)
    asyncio.get_running_loop().call_later(0.01, client.gone.set)
    with pytest.raises(ClientGone):
        async with client.reply.presence(), asyncio.timeout(10):
            await asyncio.sleep(10)


async def test_stopping_is_told_apart_from_leaving() -> None:
    """`stop` ends the block with `Stopped`; once ended it does nothing more."""
    client = Client()
    presence = client.reply.presence()
    asyncio.get_running_loop().call_later(0.01, presence.stop)
    with pytest.raises(Stopped):
        async with presence:
            await asyncio.sleep(10)
    presence.stop()
    await asyncio.sleep(0)


async def test_the_first_events_commit_to_200() -> None:
    """Status and headers go out with the first events, once."""
    client = Client()
    await client.reply.events(b"data: a\n\n")
    await client.reply.events(b"data: b\n\n")
    await client.reply.end_events(DONE_EVENT)
    assert [message["type"] for message in client.sent] == ["http.response.start", *["http.response.body"] * 3]
    assert client.sent[0]["status"] == 200
    assert (b"x-request-id", b"r-1") in client.sent[0]["headers"]
    assert client.body == b"data: a\n\ndata: b\n\n" + DONE_EVENT
    assert client.reply.is_ended


async def test_a_stalled_client_does_not_hold_up_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event that ends a failed stream waits for the client only so long."""
    monkeypatch.setattr(reply_module, "LAST_WORD_S", 0.01)
    client = Client()
    await client.reply.events(b"data: a\n\n")
    client.is_stalled = True
    await client.reply.fail_events(b"data: error\n\n")
    assert client.reply.is_ended
    assert client.body == b"data: a\n\n"


async def test_a_connection_that_tells_of_its_end_needs_no_task() -> None:
    """Whoever is there is told at once, and nothing is left with the connection afterwards."""
    departures = Departures()
    client = Client()
    client.reply = Reply(client.receive, client.send, "r-1", departures)
    asyncio.get_running_loop().call_later(0.01, departures.tell)
    with pytest.raises(ClientGone):
        async with client.reply.presence():
            assert asyncio.all_tasks() == {asyncio.current_task()}
            await asyncio.sleep(10)
    assert departures.callbacks == set()


async def test_a_connection_that_ended_before_is_noticed_on_entering() -> None:
    """Its body was read from what had arrived by then."""
    departures = Departures()
    departures.tell()
    client = Client()
    client.reply = Reply(client.receive, client.send, "r-1", departures)
    with pytest.raises(ClientGone):
        async with client.reply.presence():
            await asyncio.sleep(10)


async def test_a_finished_answer_is_no_departure() -> None:
    """Its connection may end with it."""
    departures = Departures()
    client = Client()
    client.reply = Reply(client.receive, client.send, "r-1", departures)
    async with client.reply.presence():
        await client.reply.whole(200, (), b"{}")
        departures.tell()
        await asyncio.sleep(0)
