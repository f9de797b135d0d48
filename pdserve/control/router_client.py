"""`RouterControl` over HTTP: the router's admin port."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import quote

import httpx
import msgspec

from pdserve.errors import FleetError
from pdserve.types import FleetSnapshot, Receipt

TIMEOUT_S = 5.0
CANARY_TIMEOUT_S = 60.0
"""the first token of a cold engine compiles; a canary that takes longer than this has failed"""


class HttpRouter:
    """Talks to the one router of a deployment.

    Args:
        admin_url: returns where the admin port is now, None while the router is away.
        secret: what it demands in `x-pdserve-secret`.
        transport: replaces the network in tests.
    """

    def __init__(self, admin_url: Callable[[], str | None], secret: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._admin_url = admin_url
        self._http = httpx.AsyncClient(headers={"x-pdserve-secret": secret}, timeout=TIMEOUT_S, trust_env=False, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def put_fleet(self, snapshot: FleetSnapshot) -> None:
        """Replace the router's view of the fleet. Raises `FleetError`."""
        await self._call("PUT", "/admin/v1/fleet", snapshot, TIMEOUT_S)

    async def canary(self, prefill_worker: str, decode_worker: str) -> Receipt:
        """Serve one token through a pair. Raises `FleetError` with the router's message."""
        pair = {"prefill_worker": prefill_worker, "decode_worker": decode_worker}
        content = await self._call("POST", "/admin/v1/canary", pair, CANARY_TIMEOUT_S)
        try:
            return msgspec.json.decode(content, type=Receipt)
        except msgspec.DecodeError as error:
            raise FleetError("router", f"answered the canary with no receipt ({error})") from error

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> bytes:
        base = self._admin_url()
        if base is None:
            raise FleetError("router", "is away")
        headers = {"content-type": "application/json"}
        try:
            answer = await self._http.request(method, base + path, content=msgspec.json.encode(body), headers=headers, timeout=timeout_s)
        except httpx.TransportError as error:
            raise FleetError("router", f"is away ({type(error).__name__} {error})") from error
        if answer.status_code != httpx.codes.OK:
            raise FleetError("router", _message(answer))
        return answer.content


class ReceiptReader:
    """Reads the receipts of one deployment's router, for the command line.

    Args:
        admin_url: where the admin port is now.
        secret: what it demands in `x-pdserve-secret`.
        transport: replaces the network in tests.
    """

    def __init__(self, admin_url: str, secret: str, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(
            base_url=admin_url, headers={"x-pdserve-secret": secret}, timeout=TIMEOUT_S, trust_env=False, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def last(self, limit: int, filters: Mapping[str, str]) -> tuple[Receipt, ...]:
        """Return the newest receipts that match, newest first. Raises `FleetError` with the router's message."""
        return msgspec.json.decode(self._get("/admin/v1/receipts", {"limit": str(limit), **filters}).content, type=_Receipts).receipts

    def find(self, known_as: str) -> Receipt | None:
        """Return one receipt by any of its ids, None if the router has none of that id. Raises `FleetError`."""
        answer = self._get(f"/admin/v1/receipts/{quote(known_as, safe='')}", {})
        return None if answer.status_code == httpx.codes.NOT_FOUND else msgspec.json.decode(answer.content, type=Receipt)

    def _get(self, path: str, query: Mapping[str, str]) -> httpx.Response:
        try:
            answer = self._http.get(path, params=query)
        except httpx.TransportError as error:
            raise FleetError("router", f"is away ({type(error).__name__} {error})") from error
        if answer.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            raise FleetError("router", _message(answer))
        return answer


class _Receipts(msgspec.Struct):
    receipts: tuple[Receipt, ...]


class _ErrorBody(msgspec.Struct):
    message: str


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


def _message(answer: httpx.Response) -> str:
    try:
        return msgspec.json.decode(answer.content, type=_ErrorAnswer).error.message
    except msgspec.DecodeError:
        return f"answered {answer.status_code}"
