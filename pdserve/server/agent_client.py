"""The router's calls to a worker's agent, over aiohttp. Knows paths and JSON, not what the answers are for."""

from collections.abc import Sequence

import aiohttp
import msgspec

from pdserve.errors import WorkerLost
from pdserve.ports import AbortReport
from pdserve.server.upstream import KEEP_ALIVE_S, SECRET_HEADER
from pdserve.types import TransferRecord

TIMEOUT_S = 5.0
"""of one call; an agent answers after one engine step"""


class _Records(msgspec.Struct):
    next: int
    records: list[TransferRecord]


_decode_records = msgspec.json.Decoder(_Records).decode
_decode_abort = msgspec.json.Decoder(AbortReport).decode


class AiohttpAgentClient:
    """Implements `ports.AgentRecords`. Make it inside the event loop; `close` it there.

    Args:
        max_connections: to all agents together; a call waits for one of them within its own time.
    """

    def __init__(self, secret: str, connect_timeout_s: float, max_connections: int) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=KEEP_ALIVE_S),
            headers={SECRET_HEADER: secret, "Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=connect_timeout_s)

    async def close(self) -> None:
        """Drop all connections."""
        await self._session.close()

    async def records(self, url: str, after: int) -> tuple[int, Sequence[TransferRecord]]:
        """See `ports.AgentRecords.records`."""
        body = await self._call("GET", f"{url}/pdserve/v1/records?after={after}", None)
        try:
            answer = _decode_records(body)
        except msgspec.DecodeError as error:
            raise WorkerLost(url, "body", f"records: {error}") from error
        return answer.next, answer.records

    async def abort(self, url: str, request_ids: Sequence[str]) -> AbortReport:
        """See `ports.AgentRecords.abort`."""
        body = await self._call("POST", f"{url}/pdserve/v1/abort", msgspec.json.encode({"request_ids": list(request_ids)}))
        try:
            return _decode_abort(body)
        except msgspec.DecodeError as error:
            raise WorkerLost(url, "body", f"abort: {error}") from error

    async def _call(self, method: str, url: str, body: bytes | None) -> bytes:
        try:
            async with self._session.request(method, url, data=body, timeout=self._timeout) as response:
                answer = await response.read()
                if response.status != 200:
                    raise WorkerLost(url, "head", f"the agent answered {response.status}")
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerLost(url, "head", f"{type(error).__name__}: {error}") from error
