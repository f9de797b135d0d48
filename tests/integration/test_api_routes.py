"""Responses and messages through two legs: the engine's own words, prefill's cache hits, one end, and errors that their clients understand."""

from collections import deque
from typing import Any

import orjson
import pytest
from router_rig import MESSAGES, RESPONSES, Rig, filled, rig, until

from pdserve.testing.fake_worker import Fault, Leg, Phase, Script, fleet
from pdserve.testing.forms import FORMS
from pdserve.types import Role, TransferSide, WorkerState

PATHS = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
TOKENS = ("Hel", "lo", " wor", "ld")


def expected(path: str, leg: Leg, *, tokens: tuple[str, ...] = TOKENS, finish: str = "stop", cached: int = 0) -> bytes:
    """Return the stream that one engine alone would have sent."""
    form = FORMS[path]
    counts = form.usage(9, len(tokens), cached)
    parts = (*form.preamble(leg.request_id), *form.events(leg.request_id, tokens=tokens, finish_reason=finish, counts=counts), form.END)
    return b"".join(parts)


def error_in(path: str, body: bytes) -> dict[str, Any]:
    """Return the object of the last event, which must be the API's error event."""
    *_, last = [event for event in body.split(b"\n\n") if event]
    name, data = last.split(b"\n", 1)
    assert name == b"event: error"
    payload: dict[str, Any] = orjson.loads(data.removeprefix(b"data: "))
    assert payload["type"] == "error"
    assert b"[DONE]" not in body
    return payload["error"]


@PATHS
@pytest.mark.parametrize("cut_bytes", [None, 1, 7])
async def test_stream_is_the_engines_own(path: str, cut_bytes: int | None) -> None:
    """Byte for byte, wherever the network cuts it, but for the cache hits, which are prefill's; no `[DONE]` is added."""
    async with rig() as r:
        r.prefills[0].script, r.decodes[0].script = Script(cached_tokens=4), Script(cut_bytes=cut_bytes)
        status, body = await r.stream(path)
        (decode,) = r.decodes[0].legs
        assert status == 200
        assert body == expected(path, decode, cached=4)


@PATHS
async def test_whole_answer_reports_the_cache_hits_of_prefill(path: str) -> None:
    """And nothing else of it is changed."""
    async with rig() as r:
        r.prefills[0].script = Script(cached_tokens=4)
        status, answer = await r.post(path)
        (decode,) = r.decodes[0].legs
        counts = FORMS[path].usage(9, 4, 4)
        assert status == 200
        assert answer == FORMS[path].whole(decode.request_id, text="Hello world", finish_reason="stop", counts=counts)


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_are_of_one_ticket_and_one_id(path: str, stream: bool) -> None:
    """The agents are told to abort by the same id that both engines know the attempt by."""
    async with rig() as r:
        await r.stream(path) if stream else await r.post(path)
        (prefill,), (decode,) = r.prefills[0].legs, r.decodes[0].legs
        assert (prefill.side, decode.side) == (TransferSide.SEND, TransferSide.RECEIVE)
        assert prefill.body["kv_transfer_params"]["transfer_id"] == decode.body["kv_transfer_params"]["transfer_id"]
        assert prefill.request_id == decode.request_id
        (receipt,) = await r.receipts(1)
        assert (receipt.path, receipt.route, receipt.executed["disaggregation"]) == ("disaggregated", path, "yes")
        assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (9, 4, 0)


@PATHS
async def test_an_answer_without_a_token_is_an_answer(path: str) -> None:
    """The end of sequence as first token: no delta, but a finish and its usage."""
    async with rig() as r:
        r.decodes[0].script = Script(tokens=())
        _, body = await r.stream(path)
        assert body == expected(path, r.decodes[0].legs[0], tokens=())
        (receipt,) = await r.receipts(1)
        assert (receipt.outcome, receipt.completion_tokens) == ("finished", 0)
        assert receipt.ttft_s is not None


@PATHS
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.ERROR, Fault.END])
async def test_failure_before_the_first_data_is_retried_without_a_trace(path: str, fault: Fault) -> None:
    """Also where the failed engine has already said that it has the request: the client sees one stream, of one response."""
    async with rig(decodes=2) as r:
        r.decodes[0].scripts = r.decodes[1].scripts = deque([Script(fault=fault, phase=Phase.AFTER_TOKENS, fault_after=0)])
        status, body = await r.stream(path)
        failed, served = sorted((leg for worker in r.decodes for leg in worker.legs), key=lambda leg: leg.ended == "answered")
        assert status == 200
        assert body == expected(path, served)
        assert failed.ended != "answered"


@PATHS
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.ERROR, Fault.END])
async def test_failure_after_data_is_the_apis_own_error_event(path: str, fault: Fault) -> None:
    """What was sent stays, then comes one error, and nothing behind it."""
    async with rig() as r:
        r.decodes[0].script = Script(fault=fault, phase=Phase.AFTER_TOKENS, fault_after=3)
        status, body = await r.stream(path)
        assert status == 200
        assert b"Hel" in body
        assert error_in(path, body)["message"]
        (receipt,) = await r.receipts(1)
        assert receipt.outcome in ("failed", "upstream_error")


@PATHS
async def test_a_finish_that_the_engine_aborted_is_no_finish(path: str) -> None:
    """An engine that drops a request says so in its own way; the client gets an error."""
    async with rig() as r:
        r.decodes[0].script = Script(finish_reason="abort")
        _, body = await r.stream(path)
        assert error_in(path, body)["message"]
        status, answer = await r.post(path)
        assert status == 502
        assert answer["error"]["message"]


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_byte_have_the_apis_shape(path: str, stream: bool) -> None:
    """The router's own, an engine's in either shape, and overload."""
    async with rig() as r:
        cases: list[tuple[dict[str, Any], Script | None, int]] = [
            ({"model": "nope"}, None, 404),
            ({"temperature": "hot"}, None, 400),
            ({}, Script(status=400), 400),
            ({}, Script(status=422, body=b'{"error":{"message":"framework","type":"BadRequestError","param":null,"code":422}}'), 422),
            ({}, Script(status=400, body=b"<html>"), 400),
            ({}, Script(status=401), 502),
        ]
        for fields, script, status in cases:
            for worker in r.workers:
                worker.script = script or Script()
            got, answer = await r.post(path, stream=stream, **fields)
            assert got == status
            shape = {"type", "error"} if path == MESSAGES else {"error"}
            assert set(answer) == shape
            assert answer["error"]["message"]
            assert {"type", "message"} <= set(answer["error"])


@PATHS
async def test_no_ready_worker_is_told_with_when_to_come_back(path: str) -> None:
    """503 with Retry-After, in the API's shape."""
    async with rig() as r:
        await r.put_workers(await _without_decode(r))
        async with r.client.post(r.url + path, json=filled(path, {})) as answer:
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
            assert ((await answer.json())["error"]["type"] == "overloaded_error") is (path == MESSAGES)


async def _without_decode(r: Rig) -> Any:
    r.version += 1
    return fleet(r.version, r.prefills[0].snapshot(Role.PREFILL), r.decodes[0].snapshot(Role.DECODE, WorkerState.WARMING))


@PATHS
async def test_prefill_that_fails_in_its_own_stream_or_status_is_retried(path: str) -> None:
    """A prefill leg that says 200 and then fails is a failed prefill leg."""
    async with rig(prefills=2) as r:
        failing = Script(fault=Fault.ERROR, phase=Phase.AFTER_HEAD) if path == MESSAGES else Script(status=500)
        r.prefills[0].scripts = r.prefills[1].scripts = deque([failing])
        status, body = await r.stream(path)
        _, served = r.decodes[0].legs
        assert status == 200
        assert body == expected(path, served)


@PATHS
async def test_client_that_leaves_ends_both_legs(path: str) -> None:
    """The agents of both workers are told, by the id that the engines know."""
    async with rig() as r:
        r.decodes[0].script = Script(token_delay_s=5)
        answer = await r.client.post(r.url + path, json=filled(path, {"stream": True}))
        await answer.content.readany()
        answer.close()
        await until(lambda: len(r.aborts) == 2)
        known = r.decodes[0].legs[0].request_id.removeprefix("resp_")
        assert set(r.aborts) == {known}


async def test_local_reasons_of_the_new_routes_are_counted() -> None:
    """Media and an engine's own tools go to decode alone, without a ticket, and the receipt says why."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    async with rig() as r:
        await r.post(RESPONSES, tools=[{"type": "web_search_preview"}])
        await r.post(MESSAGES, messages=[{"role": "user", "content": [image]}])
        receipts = await r.receipts(2)
        assert r.prefills[0].legs == []
        assert [leg.side for leg in r.decodes[0].legs] == [None, None]
        assert [(receipt.path, receipt.reason) for receipt in receipts] == [("local", "media"), ("local", "engine_tools")]
