"""A request's body, read once and bounded in size. Its time is bounded by `http_protocol`. Knows ASGI messages, nothing of JSON or OpenAI."""

from collections.abc import Iterable

from starlette.types import Receive

from pdserve.errors import RequestError
from pdserve.server.reply import ClientGone


async def read_body(headers: Iterable[tuple[bytes, bytes]], receive: Receive, max_bytes: int) -> bytes:
    """Read the whole body.

    Raises:
        RequestError: 413 past `max_bytes` (before reading, when the client says so itself), 415 for what is not JSON.
        ClientGone: the client left before it was whole.
    """
    _check_headers(headers, max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_headers(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> None:
    content_type = b""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(max_bytes)
        if name == b"content-encoding" and value.strip().lower() != b"identity":
            raise RequestError(415, "the body must not be compressed", None, "unsupported_encoding")
        if name == b"content-type":
            content_type = value.partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        # A browser may post text/plain to any origin unasked; JSON makes it ask first.
        raise RequestError(415, "send the body as Content-Type: application/json", None, "unsupported_media_type")


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"the body is larger than {max_bytes} bytes", None, "body_too_large")
