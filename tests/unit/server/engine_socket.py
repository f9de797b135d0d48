"""A server that answers exactly the bytes it is told, at the moment it is told, for tests of the HTTP client below any HTTP library."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CLOSE = b"<close>"
RESET = b"<reset>"
PAUSE = b"<pause>"
"""in an answer: end the connection, drop it, or let the reader see what came so far"""


@dataclass
class EngineSocket:
    """Answers request number n with `answers[n]`, the last one from then on."""

    answers: Sequence[Sequence[bytes]]
    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        try:
            while request := await _request(reader):
                self.requests.append(request)
                answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                for piece in answer:
                    if piece == PAUSE:
                        await writer.drain()
                        await asyncio.sleep(0.01)
                    elif piece == RESET:
                        writer.transport.abort()
                        return
                    elif piece == CLOSE:
                        return
                    else:
                        writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.open.discard(writer)


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(length)


@asynccontextmanager
async def engine_socket(*answers: Sequence[bytes]) -> AsyncIterator[EngineSocket]:
    """Listen; each positional argument is one answer."""
    engine = EngineSocket(answers)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for writer in list(engine.open):
            writer.close()
        await asyncio.sleep(0.01)
