"""The controller's side: fleets, canaries, receipts and status, behind the secret."""

import asyncio

import pytest
from router_rig import COMPLETIONS, Rig, rig

from pdserve.testing.fake_worker import Fault, Script, fleet
from pdserve.types import CloseReason, Role, WorkerState

PATHS = [("PUT", "fleet"), ("POST", "canary"), ("GET", "receipts"), ("GET", "status"), ("GET", "nope")]


async def canary(r: Rig, prefill: str = "prefill-0", decode: str = "decode-0") -> tuple[int, dict[str, object]]:
    """Ask for one token through a pair."""
    async with r.client.post(f"{r.admin_url}/admin/v1/canary", json={"prefill_worker": prefill, "decode_worker": decode}) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("secret", ["", "wrong", "5ec7e", "5ec7e77"])
async def test_nothing_is_told_without_the_secret(method: str, path: str, secret: str) -> None:
    """Every path, known or not, is 401 in OpenAI's shape to whoever does not know the secret."""
    async with rig() as r, r.client.request(method, f"{r.admin_url}/admin/v1/{path}", headers={"x-pdserve-secret": secret}) as answer:
        assert answer.status == 401
        assert (await answer.json())["error"]["code"] == "unauthorized"


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"version":"x","workers":[]}', b'{"version":1,"workers":[{}]}'])
async def test_a_fleet_that_makes_no_sense_is_refused_and_changes_nothing(body: bytes) -> None:
    """400 that says what is wrong; the fleet in use stays."""
    async with rig() as r:
        async with r.client.put(f"{r.admin_url}/admin/v1/fleet", data=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "invalid_body"
        assert (await r.admin("status"))["fleet_version"] == 1


async def test_a_stale_fleet_is_ignored() -> None:
    """A version that is not newer changes nothing."""
    async with rig() as r:
        await r.put_workers(fleet(1, r.decodes[0].snapshot(Role.DECODE)))
        await r.put_workers(fleet(0))
        status = await r.admin("status")
        assert (status["fleet_version"], len(status["workers"])) == (1, 2)


async def test_workers_are_counted_by_role_and_state() -> None:
    """`pdserve_workers` shows the fleet as it is, zeros included."""
    async with rig(prefills=2) as r:
        await r.put_fleet(prefill_1=WorkerState.DRAINING)
        metrics = await r.metrics()
        assert metrics['pdserve_workers{role="prefill",state="ready"}'] == 1
        assert metrics['pdserve_workers{role="prefill",state="draining"}'] == 1
        assert metrics['pdserve_workers{role="decode",state="failed"}'] == 0


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.READY])
async def test_only_ready_workers_serve_clients(state: WorkerState) -> None:
    """A worker in any other state gets no request."""
    async with rig(prefills=2, decodes=2) as r:
        await r.put_fleet(prefill_0=state, decode_0=state)
        for _ in range(4):
            assert (await r.post())[0] == 200
        assert [len(worker.legs) for worker in r.workers] == [0, 4, 0, 4]


async def test_a_canary_goes_through_a_warming_pair_and_returns_its_receipt() -> None:
    """One real token by way of both workers, before any client may use them; kept out of clients' latencies."""
    async with rig() as r:
        await r.put_fleet(prefill_0=WorkerState.WARMING, decode_0=WorkerState.WARMING)
        status, receipt = await canary(r)
        assert status == 200
        assert (receipt["route"], receipt["outcome"], receipt["path"], receipt["reason"]) == (
            "canary",
            "finished",
            "disaggregated",
            "pinned",
        )
        assert receipt["executed"]["disaggregation"] == "yes"  # type: ignore[index]
        body = r.prefills[0].legs[0].body
        assert r.prefills[0].legs[0].path == COMPLETIONS
        assert (len(body["prompt"]), body["max_tokens"]) == (33, 1)
        assert body["cache_salt"]
        metrics = await r.metrics()
        assert not any(name.startswith("pdserve_time_to_first_token_seconds_count") for name in metrics)
        assert not any(name.startswith("pdserve_request_duration_seconds_count") for name in metrics)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script(status=500), "no token came"),
        (Script(fault=Fault.RESET), "no token came"),
        (Script(outcome=CloseReason.PEER_UNKNOWN), "peer_unknown"),
    ],
)
async def test_a_canary_that_proves_nothing_is_an_error_with_the_reason(script: Script, says: str) -> None:
    """No token, or a token that decode computed alone, is no proof that the pair works; it is tried once."""
    async with rig() as r:
        r.decodes[0].script = script
        status, error = await canary(r)
        assert status == 502
        assert says in error["error"]["message"]  # type: ignore[index]
        assert len(r.decodes[0].legs) == 1


@pytest.mark.parametrize("pair", [("nobody", "decode-0"), ("prefill-0", "nobody")])
async def test_a_canary_through_an_unknown_worker_is_an_error(pair: tuple[str, str]) -> None:
    """The pair must be in the fleet."""
    async with rig() as r:
        status, _ = await canary(r, *pair)
        assert status in (502, 503)
        assert r.legs == []


async def test_a_canary_does_not_wait_behind_clients() -> None:
    """With the queue full of clients, a canary through another pair passes."""
    async with rig(prefills=2, decodes=2) as r:
        await r.put_fleet(max_running=1, prefill_1=WorkerState.WARMING, decode_1=WorkerState.WARMING)
        r.decodes[0].script = Script(fault=Fault.HANG)
        clients = [asyncio.create_task(r.stream()) for _ in range(3)]
        await asyncio.sleep(0.1)
        status, _ = await canary(r, "prefill-1", "decode-1")
        assert status == 200
        for client in clients:
            client.cancel()


async def test_receipts_are_listed_newest_first_up_to_the_limit() -> None:
    """`limit` bounds the answer."""
    async with rig() as r:
        for index in range(3):
            async with r.client.post(r.url + COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": f"r{index}"}) as answer:
                assert answer.status == 200
        await r.receipts(3)
        listed = (await r.admin("receipts?limit=2"))["receipts"]
        assert len(listed) == 2
        assert (await r.admin("receipts?limit=0"))["receipts"] == []
