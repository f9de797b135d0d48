"""Starting and ending the process: ports, signals, requests that are under way."""

import asyncio
import os
import signal
import socket

import orjson
import pytest
from router_rig import CHAT, SECRET, filled, rig, until

from pdserve.clock import MonotonicClock
from pdserve.config import Config
from pdserve.errors import ConfigError
from pdserve.server import serve as serve_module
from pdserve.server.serve import serve
from pdserve.testing import wire
from pdserve.testing.fake_worker import Fault, Phase, Script


def terminate() -> None:
    """Send this process the signal a router is stopped with."""
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_request_under_way_is_finished_after_the_signal() -> None:
    """A stream goes on to its end; new requests are refused meanwhile, and `/readyz` says why."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=tuple("abcdefghij"), token_delay_s=0.05)
        stream = asyncio.create_task(r.stream())
        await until(lambda: r.decodes[0].legs != [])
        terminate()
        await asyncio.sleep(0.05)
        async with r.client.post(r.url + CHAT, json=filled(CHAT, {})) as answer:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert (await answer.json())["error"]["code"] == "stopping"
        async with r.client.get(r.url + "/readyz") as answer:
            assert "shutting down" in (await answer.json())["reasons"]
        status, body = await stream
        assert status == 200
        assert body.endswith(wire.DONE)
        assert b"error" not in body
        await asyncio.wait_for(r.served, 2)


async def test_what_does_not_finish_in_time_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """When patience ends, a started stream gets an error event and `[DONE]`, a request without data a 503; engines are told."""
    monkeypatch.setattr(serve_module, "DRAIN_S", 0.2)
    async with rig() as r:
        r.decodes[0].scripts.extend([Script(fault=Fault.HANG, phase=Phase.AFTER_TOKENS), Script(fault=Fault.HANG)])
        started = asyncio.create_task(r.stream())
        await until(lambda: len(r.decodes[0].legs) == 1)
        await asyncio.sleep(0.1)
        silent = asyncio.create_task(r.stream())
        await until(lambda: len(r.decodes[0].legs) == 2)
        terminate()
        status, body = await started
        assert status == 200
        events = [event for event in body.split(b"\n\n") if event]
        assert events[-1] == b"data: [DONE]"
        assert orjson.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "stopping"
        assert (await silent)[0] == 503
        await asyncio.wait_for(r.served, 3)
        assert sorted(set(r.aborts)) == sorted({leg.request_id for leg in r.legs})


async def test_ending_the_task_ends_the_router_at_once() -> None:
    """Cancellation needs no signal and leaves neither port open."""
    async with rig() as r:
        port = int(r.url.rpartition(":")[2])
        r.served.cancel()
        await asyncio.gather(r.served, return_exceptions=True)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_a_busy_port_is_the_operators_to_change() -> None:
    """The error names the field, the value and the fix."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            await serve(Config.model_validate({"router": {"port": port}}), SECRET, clock=MonotonicClock(), on_bound=lambda *_: None)
    assert (raised.value.field, raised.value.value) == ("router.port", port)
    assert "free" in raised.value.fix


async def test_an_address_of_another_host_is_the_operators_to_change() -> None:
    """So is a host that is not ours."""
    with pytest.raises(ConfigError) as raised:
        await serve(
            Config.model_validate({"router": {"host": "192.0.2.77", "port": 0}}), SECRET, clock=MonotonicClock(), on_bound=lambda *_: None
        )
    assert raised.value.field == "router.host"


async def test_the_admin_port_is_this_hosts_own_unless_set() -> None:
    """Loopback and any free port by default; a chosen one that is taken is the operator's to change."""
    router = Config().router
    assert (router.admin_host, router.admin_port) == ("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            config = Config.model_validate({"router": {"port": 0, "admin_port": port}})
            await serve(config, SECRET, clock=MonotonicClock(), on_bound=lambda *_: None)
    assert (raised.value.field, raised.value.value) == ("router.admin_port", port)
    async with rig(admin_port=port) as r:
        assert r.admin_url.endswith(f":{port}")
        assert (await r.post())[0] == 200
