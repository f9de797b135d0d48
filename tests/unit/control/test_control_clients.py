"""The controller's two HTTP clients, against answers of every kind."""

from collections.abc import Callable

import httpx
import msgspec
import pytest

from pdserve.control.agent_client import HttpAgents
from pdserve.control.router_client import HttpRouter
from pdserve.errors import FleetError, WorkerLost
from pdserve.ports import AgentStatus, PeerEntry, PeerHandshake
from pdserve.types import FleetSnapshot, RankAddress, Receipt, Role, ServePath, WorkerSnapshot, WorkerState

URL = "http://127.0.0.1:9"
STATUS = AgentStatus(
    *("decode-0", "ab", "m", 2048, 16, 100, 90, 1, 2, 3, 1),
    ranks=(RankAddress(0, "127.0.0.1", 4000),),
    handshakes=(PeerHandshake("prefill-0", "cd", 0, 0, "refused", "dtype differs: ours 'f32', peer's 'bf16'"),),
)
RECEIPT = Receipt(
    *("r", None, "canary", "m", False, 200, "finished", ServePath.DISAGGREGATED, "canary", "prefill-0", "decode-0", "t", 1),
    *(0.0, 0.1, 0.2, 4, 1, 0),
)
SNAPSHOT = FleetSnapshot(4, (WorkerSnapshot("decode-0", "ab", Role.DECODE, WorkerState.READY, URL, "m", 2048, 4, 1600, pid=7),))
Answer = Callable[[httpx.Request], httpx.Response]


def answer(status: int, value: object = None) -> Answer:
    return lambda request: httpx.Response(status, content=msgspec.json.encode(value))


def broken(error: type[httpx.TransportError]) -> Answer:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error("no route")

    return fail


async def test_agent_status_is_decoded_and_the_secret_sent() -> None:
    """What the agent encodes is what the controller sees."""
    seen: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=msgspec.json.encode(msgspec.to_builtins(STATUS)))

    async with HttpAgents("s3cret", httpx.MockTransport(serve)) as agents:
        assert await agents.status(URL) == STATUS
    assert (str(seen[0].url), seen[0].headers["x-pdserve-secret"]) == (f"{URL}/pdserve/v1/status", "s3cret")


async def test_peer_table_is_sent_whole() -> None:
    """Version and every row, in the agreed form."""
    bodies: list[object] = []

    def serve(request: httpx.Request) -> httpx.Response:
        bodies.append(msgspec.json.decode(request.content))
        return httpx.Response(200, content=b"{}")

    async with HttpAgents("s", httpx.MockTransport(serve)) as agents:
        await agents.put_peers(URL, 3, (PeerEntry("prefill-0", "cd", 1, (RankAddress(0, "127.0.0.1", 4000),)),))
    row = {
        "worker_id": "prefill-0",
        "incarnation": "cd",
        "tensor_parallel_size": 1,
        "ranks": [{"rank": 0, "host": "127.0.0.1", "port": 4000}],
    }
    assert bodies == [{"version": 3, "peers": [row]}]


@pytest.mark.parametrize(
    ("serve", "phase"),
    [
        (broken(httpx.ConnectError), "connect"),
        (broken(httpx.ReadTimeout), "head"),
        (broken(httpx.RemoteProtocolError), "head"),
        (answer(401), "head"),
        (answer(404), "head"),
        (answer(500), "head"),
        (answer(200, {"worker_id": 4}), "body"),
        (lambda request: httpx.Response(200, content=b"<html>"), "body"),
    ],
)
async def test_agent_that_does_not_answer_as_one_is_lost(serve: Answer, phase: str) -> None:
    """Whatever else listens at the address, or nothing, is no worker."""
    async with HttpAgents("s", httpx.MockTransport(serve)) as agents:
        with pytest.raises(WorkerLost) as lost:
            await agents.status(URL)
    assert lost.value.phase == phase


async def test_router_is_given_fleet_and_canary() -> None:
    """Both calls go to the admin port with the secret; the receipt comes back."""
    seen: list[tuple[str, str, object]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        assert request.headers["x-pdserve-secret"] == "s"
        seen.append((request.method, request.url.path, msgspec.json.decode(request.content)))
        return httpx.Response(200, content=msgspec.json.encode(RECEIPT if request.method == "POST" else {}))

    async with HttpRouter(lambda: URL, "s", httpx.MockTransport(serve)) as router:
        await router.put_fleet(SNAPSHOT)
        assert await router.canary("prefill-0", "decode-0") == RECEIPT
    assert seen == [
        ("PUT", "/admin/v1/fleet", msgspec.json.decode(msgspec.json.encode(SNAPSHOT))),
        ("POST", "/admin/v1/canary", {"prefill_worker": "prefill-0", "decode_worker": "decode-0"}),
    ]


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (answer(502, {"error": {"message": "decode-0 gave no token", "type": "x", "param": None, "code": None}}), "decode-0 gave no token"),
        (answer(503, {"detail": "?"}), "answered 503"),
        (answer(200, {"nothing": 1}), "answered the canary with no receipt"),
        (broken(httpx.ConnectError), "is away (ConnectError no route)"),
    ],
)
async def test_failed_canary_says_why(serve: Answer, reason: str) -> None:
    """The router's own message where there is one, else what happened to the call."""
    async with HttpRouter(lambda: URL, "s", httpx.MockTransport(serve)) as router:
        with pytest.raises(FleetError) as failed:
            await router.canary("prefill-0", "decode-0")
    assert failed.value.reason.startswith(reason)


async def test_router_without_an_address_is_away() -> None:
    """Before the router has bound its ports no call is made."""
    async with HttpRouter(lambda: None, "s", httpx.MockTransport(broken(httpx.ConnectError))) as router:
        with pytest.raises(FleetError, match="is away"):
            await router.put_fleet(SNAPSHOT)
