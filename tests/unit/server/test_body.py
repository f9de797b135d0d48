"""A body is read once, up to its limit."""

from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.errors import RequestError
from pdserve.server.body import read_body
from pdserve.server.reply import ClientGone

JSON = (b"content-type", b"application/json")


def client(*chunks: bytes, leaves: bool = False) -> Any:
    """Return an ASGI `receive` that sends these chunks, then leaves or is done."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    if leaves:
        messages.append({"type": "http.disconnect"})
    elif messages:
        messages[-1]["more_body"] = False
    iterator = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(iterator)

    return receive


@pytest.mark.parametrize("chunks", [[b"{}"], [b"{", b"}"], [b"", b"{}", b""], [b"{}" * 50]])
async def test_the_chunks_are_joined(chunks: Sequence[bytes]) -> None:
    """However many there are."""
    assert await read_body([JSON], client(*chunks), 100) == b"".join(chunks)


@pytest.mark.parametrize("content_type", [b"application/json", b"application/json; charset=utf-8", b"Application/JSON"])
async def test_json_is_taken_however_it_is_spelled(content_type: bytes) -> None:
    """Parameters and case do not matter."""
    assert await read_body([(b"content-type", content_type), (b"content-encoding", b"identity")], client(b"1"), 10) == b"1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 415),
        ([(b"content-type", b"text/plain")], 415),
        ([(b"content-type", b"multipart/form-data; boundary=x")], 415),
        ([JSON, (b"content-encoding", b"gzip")], 415),
        ([JSON, (b"content-length", b"101")], 413),
        ([JSON, (b"content-length", b"9" * 30)], 413),
    ],
)
async def test_what_headers_tell_is_refused_unread(headers: list[tuple[bytes, bytes]], status: int) -> None:
    """Nothing is received from the client."""

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    with pytest.raises(RequestError) as raised:
        await read_body(headers, receive, 100)
    assert raised.value.status == status


@pytest.mark.parametrize("chunks", [[b"x" * 101], [b"x" * 60, b"x" * 60, b"x" * 60]])
async def test_a_body_past_the_limit_is_given_up(chunks: Sequence[bytes]) -> None:
    """As soon as it is too long, whatever it said of its size."""
    with pytest.raises(RequestError) as raised:
        await read_body([JSON], client(*chunks), 100)
    assert raised.value.status == 413
    assert await read_body([JSON], client(b"x" * 100), 100) == b"x" * 100


async def test_a_client_that_leaves_in_the_middle_is_gone() -> None:
    """Half a body is no body."""
    with pytest.raises(ClientGone):
        await read_body([JSON], client(b"{", leaves=True), 100)
