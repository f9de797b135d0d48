"""`AgentControl` over HTTP, for the controller. Knows the agent's routes; judges nothing."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx
import msgspec

from pdserve.errors import WorkerLost
from pdserve.ports import AgentStatus, PeerEntry

TIMEOUT_S = 3.0
"""an agent answers between two engine steps; a step is kept within 0.5 s"""


class HttpAgents:
    """Talks to the agents of all workers.

    Args:
        secret: what agents demand in `x-pdserve-secret`.
        transport: replaces the network in tests.
    """

    def __init__(self, secret: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = httpx.AsyncClient(headers={"x-pdserve-secret": secret}, timeout=TIMEOUT_S, trust_env=False, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def status(self, url: str) -> AgentStatus:
        """Return the engine's state. Raises `WorkerLost`, also for an answer that is not one of an agent."""
        content = await self._call("GET", f"{url}/pdserve/v1/status")
        try:
            return msgspec.json.decode(content, type=AgentStatus)
        except msgspec.DecodeError as error:
            raise WorkerLost(url, "body", str(error)) from error

    async def put_peers(self, url: str, version: int, peers: Sequence[PeerEntry]) -> None:
        """Replace the worker's peer table. Raises `WorkerLost`."""
        await self._call("PUT", f"{url}/pdserve/v1/peers", msgspec.json.encode({"version": version, "peers": peers}))

    async def _call(self, method: str, url: str, content: bytes | None = None) -> bytes:
        try:
            answer = await self._http.request(method, url, content=content, headers={"content-type": "application/json"})
        except httpx.ConnectError as error:
            raise WorkerLost(url, "connect", str(error)) from error
        except httpx.TransportError as error:
            raise WorkerLost(url, "head", f"{type(error).__name__} {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise WorkerLost(url, "head", f"status {answer.status_code}")
        return answer.content
