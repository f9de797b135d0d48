"""Engines that fail: one outcome for every request, retried elsewhere before the first data, told as an event after it, never silent."""

import asyncio
import time

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, PATIENCE_S, Rig, rig, until

from pdserve.routing.breakers import FAILURES, FIRST_COOL_DOWN_S
from pdserve.testing import wire
from pdserve.testing.fake_worker import Fault, Phase, Script
from pdserve.types import CloseReason

REFUSALS = [400, 404, 409, 413, 422, 429]


def events_of(body: bytes) -> list[bytes]:
    """Return the data of each event."""
    return [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", REFUSALS)
async def test_decodes_refusal_is_the_clients_once_and_verbatim(status: int, stream: bool) -> None:
    """A 4xx of decode passes as it is, with one attempt; prefill, still at work, is ended and aborted."""
    async with rig(decodes=2) as r:
        r.prefills[0].script = Script(fault=Fault.HANG)
        body = orjson.dumps({"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": status}})
        for worker in r.decodes:
            worker.script = Script(status=status, body=body)
        begin = time.monotonic()
        async with r.client.post(
            r.url + CHAT, json={"model": "fake", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        ) as answer:
            assert answer.status == status
            assert answer.content_type == "application/json"
            assert await answer.read() == body
        assert time.monotonic() - begin < PATIENCE_S
        assert sum(len(worker.legs) for worker in r.decodes) == 1
        await until(lambda: r.prefills[0].aborts == [r.prefills[0].legs[0].request_id])
        await until(lambda: r.prefills[0].legs[0].ended == "disconnected")


async def test_prefills_refusal_is_the_clients_when_decode_says_nothing() -> None:
    """A 4xx of prefill ends decode, which waits for KV that will not come."""
    async with rig() as r:
        r.prefills[0].script = Script(status=400)
        begin = time.monotonic()
        status, error = await r.post()
        assert (status, error["error"]["message"]) == (400, "scripted 400")
        assert time.monotonic() - begin < PATIENCE_S
        await until(lambda: r.decodes[0].legs[0].ended == "disconnected")
        await until(lambda: len(r.aborts) == 2)


async def test_when_both_legs_refuse_the_client_hears_decode() -> None:
    """Decode's message names the limits the client sent, prefill's those of a one-token leg."""
    async with rig() as r:
        r.prefills[0].script = Script(status=400, body=orjson.dumps(wire.error_object(400, "prefill's words")))
        r.decodes[0].script = Script(status=400, body=orjson.dumps(wire.error_object(400, "decode's words")), head_delay_s=0.03)
        status, error = await r.post()
        assert (status, error["error"]["message"]) == (400, "decode's words")


async def test_an_engines_text_error_is_put_into_openai_shape() -> None:
    """A 500 whose body is no error object becomes one; what the engine said stays inside."""
    async with rig() as r:
        r.decodes[0].script = Script(status=500, body=b"Traceback: /opt/secret/path.py")
        status, error = await r.post()
        assert status == 500
        assert "secret" not in error["error"]["message"]


async def test_an_engine_that_does_not_know_the_router_is_no_fault_of_the_client() -> None:
    """401 of an engine is a 502: the client's key is not what was wrong."""
    async with rig() as r:
        r.decodes[0].script = Script(status=401)
        status, error = await r.post()
        assert (status, error["error"]["code"]) == (502, "engine_refused")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_prefill_worker_costs_nothing(stream: bool) -> None:
    """The request goes to the other prefill worker with a new attempt and a new transfer; the client sees a whole answer."""
    async with rig(prefills=2) as r:
        for worker in r.prefills:
            worker.scripts.append(Script(fault=Fault.RESET))
        r.prefills[1].scripts.clear()
        status, body = await (r.stream() if stream else r.post())
        assert status == 200
        assert b"[DONE]" in body if stream else body["choices"][0]["message"]["content"] == "Hello world"
        assert [leg.body["kv_transfer_params"]["attempt"] for leg in r.decodes[0].legs] == [1, 2]
        assert len({leg.body["kv_transfer_params"]["transfer_id"] for leg in r.decodes[0].legs}) == 2
        assert [len(worker.legs) for worker in r.prefills] == [1, 1]
        (receipt,) = await r.receipts(1)
        assert (receipt.attempts, receipt.prefill_worker, receipt.outcome) == (2, "prefill-1", "finished")
        retries = {name: value for name, value in (await r.metrics()).items() if name.startswith("pdserve_retries_total")}
        assert sum(retries.values()) == 1
        assert all("prefill_" in name for name in retries)


async def test_a_prefill_worker_lost_after_its_kv_is_out_harms_nobody() -> None:
    """Once the client has data, what prefill's answer would have said is not needed; only its cache hits stay unknown."""
    async with rig() as r:
        r.prefills[0].script = Script(fault=Fault.RESET, phase=Phase.AFTER_HEAD, cached_tokens=4)
        r.decodes[0].script = Script(token_delay_s=0.05)
        status, body = await r.stream(stream_options={"include_usage": True})
        assert status == 200
        assert orjson.loads(events_of(body)[-2])["usage"]["prompt_tokens_details"] == {"cached_tokens": None}
        assert len(r.legs) == 2


@pytest.mark.parametrize(
    "script",
    [
        Script(fault=Fault.RESET, phase=Phase.BEFORE_HEAD),
        Script(fault=Fault.RESET, phase=Phase.AFTER_HEAD),
        Script(fault=Fault.END, phase=Phase.AFTER_HEAD),
        Script(fault=Fault.ERROR, phase=Phase.AFTER_HEAD),
        Script(status=500),
        Script(status=503),
        Script(body=b"data: [DONE]\n\n"),
        Script(body=b""),
        Script(tokens=("x",), finish_reason="abort"),
        Script(body=b'{"not":"events"}'),
    ],
    ids=["reset_before_head", "reset_after_head", "empty_end", "error_first", "500", "503", "done_only", "nothing", "aborted", "no_events"],
)
async def test_a_stream_that_failed_before_its_first_data_is_tried_elsewhere(script: Script) -> None:
    """Whatever way decode fails before it has said anything, the other decode worker answers and the client never knows."""
    async with rig(decodes=2) as r:
        for worker in r.decodes:
            worker.scripts.append(script)
        r.decodes[1].scripts.clear()
        status, body = await r.stream(COMPLETIONS)
        assert status == 200
        assert body.endswith(wire.DONE)
        assert body.count(b"[DONE]") == 1
        assert b"error" not in body
        assert len(r.decodes[1].legs) == 1


@pytest.mark.parametrize("phase", [Phase.BEFORE_HEAD, Phase.AFTER_HEAD, Phase.AFTER_TOKENS])
async def test_an_answer_that_broke_off_is_tried_elsewhere(phase: Phase) -> None:
    """An answer that is not streamed reaches the client whole or not at all, so it can be retried wherever it broke."""
    async with rig(decodes=2) as r:
        r.decodes[0].scripts.append(Script(fault=Fault.RESET, phase=phase))
        status, body = await r.post()
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "Hello world"


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.END, Fault.ERROR])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_that_fails_later_ends_with_an_error_event(path: str, fault: Fault) -> None:
    """After data there is no retry: what came stays, then one error event, then `[DONE]`; the stock client raises on it."""
    async with rig(decodes=2) as r:
        for worker in r.decodes:
            worker.script = Script(fault=fault, phase=Phase.AFTER_TOKENS, fault_after=2)
        status, body = await r.stream(path)
        events = events_of(body)
        assert status == 200
        assert events[-1] == b"[DONE]"
        assert set(orjson.loads(events[-2])["error"]) == {"message", "type", "param", "code"}
        assert sum(b'"error"' in event for event in events) == 1
        assert len(events) == 4
        assert sum(len(worker.legs) for worker in r.decodes) == 1
        (receipt,) = await r.receipts(1)
        assert (receipt.status, receipt.outcome) == (200, "upstream_error" if fault is Fault.ERROR else "failed")
        await until(lambda: len(r.aborts) == 2)


async def test_an_engines_own_error_event_is_passed_on_once() -> None:
    """The engine's words reach the client, not the router's."""
    async with rig() as r:
        r.decodes[0].script = Script(fault=Fault.ERROR, phase=Phase.AFTER_TOKENS)
        _, body = await r.stream()
        assert body.count(b"scripted error") == 1
        assert body.count(b"[DONE]") == 1


async def test_three_attempts_and_then_the_failure_is_told() -> None:
    """A fleet that always fails costs three attempts, then a 502."""
    async with rig(prefills=4) as r:
        r.decodes[0].script = Script(fault=Fault.RESET)
        status, error = await r.post()
        assert (status, error["error"]["code"]) == (502, "engine_lost")
        assert len(r.decodes[0].legs) == 3
        (receipt,) = await r.receipts(1)
        assert (receipt.attempts, receipt.outcome, receipt.status) == (3, "failed", 502)


async def test_with_all_prefill_workers_failing_decode_serves_alone() -> None:
    """When no prefill worker is left to try, the answer comes locally, with its reason."""
    async with rig(prefills=2) as r:
        for worker in r.prefills:
            worker.script = Script(status=500)
        status, body = await r.stream()
        assert status == 200
        assert body.endswith(wire.DONE)
        (receipt,) = await r.receipts(1)
        assert (receipt.path, receipt.reason, receipt.attempts) == ("local", "no_ready_prefill", 3)


async def test_a_dead_port_is_found_at_once() -> None:
    """Connection refused is retried like any other loss, in milliseconds."""
    async with rig(decodes=2) as r:
        await r.decodes[0].stop()
        begin = time.monotonic()
        for _ in range(4):
            status, _ = await r.stream()
            assert status == 200
        assert time.monotonic() - begin < PATIENCE_S


async def test_a_silent_engine_ends_at_the_first_byte_limit() -> None:
    """A decode that hangs after its head is given up after the limit on its first data, while requests to the other worker go on."""
    async with rig(decodes=2, first_byte_timeout_s=2) as r:
        r.decodes[0].scripts.append(Script(fault=Fault.HANG, phase=Phase.AFTER_HEAD))
        slow = asyncio.create_task(r.stream())
        await until(lambda: any(worker.legs for worker in r.decodes))
        for _ in range(5):
            await r.stream()
        assert not slow.done()
        status, body = await slow
        assert status == 200
        assert body.endswith(wire.DONE)


async def test_silence_in_mid_stream_is_an_error_event() -> None:
    """The idle limit holds between events too."""
    async with rig(idle_timeout_s=0.2) as r:
        r.decodes[0].script = Script(fault=Fault.HANG, phase=Phase.AFTER_TOKENS)
        status, body = await r.stream()
        assert status == 200
        assert orjson.loads(events_of(body)[-2])["error"]["code"] == "engine_idle"
        await until(lambda: r.decodes[0].legs[0].ended == "disconnected")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_at_its_deadline(stream: bool) -> None:
    """What is not answered within the request's time is a 504, and both engines are told to stop."""
    async with rig(request_timeout_s=0.3) as r:
        r.prefills[0].script = Script(fault=Fault.HANG)
        begin = time.monotonic()
        status, _ = await (r.stream() if stream else r.post())
        assert status == 504
        assert 0.3 <= time.monotonic() - begin < PATIENCE_S
        await until(lambda: sorted(r.aborts) == sorted(leg.request_id for leg in r.legs))


async def test_the_deadline_counts_in_the_queue_too() -> None:
    """A request that finds no room in time is refused for that and leaves the queue."""
    async with rig(request_timeout_s=0.3) as r:
        await r.put_fleet(max_running=1)
        r.decodes[0].script = Script(fault=Fault.HANG, phase=Phase.BEFORE_HEAD)
        statuses = await asyncio.gather(*(r.post() for _ in range(3)))
        # One that gets its turn in the last moment is told that its time is too short for it.
        assert {status for status, _ in statuses} <= {503, 504}


async def test_a_full_queue_sheds_at_once_with_a_time_to_come_back() -> None:
    """Past the bound a request is 429 with Retry-After, decided within 50 ms, and counted."""
    async with rig(max_queued_requests=32) as r:
        await r.put_fleet(max_running=1)
        r.decodes[0].script = Script(tokens=("x",), head_delay_s=0.02)
        waiting = [asyncio.create_task(r.post()) for _ in range(33)]
        await until(lambda: r.decodes[0].legs != [])
        await until(lambda: _waiting(r, 32))
        async with r.client.post(r.url + CHAT, json={"model": "fake", "messages": [{"role": "user", "content": "x"}]}) as answer:
            assert answer.status == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 120
            assert (await answer.json())["error"]["code"] == "queue_full"
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}
        (shed,) = (receipt for receipt in await r.receipts(34) if receipt.outcome == "shed")
        assert (shed.path, shed.reason, shed.attempts) == ("none", "queue_full_requests", 0)
        assert shed.duration_s < 0.05
        assert (await r.metrics())['pdserve_shed_total{reason="queue_full_requests"}'] == 1


async def test_with_no_decode_worker_the_answer_is_503() -> None:
    """Nothing can serve, so nothing waits; `/health` says so too."""
    async with rig(decodes=0) as r:
        async with r.client.post(r.url + CHAT, json={"model": "fake", "messages": [{"role": "user", "content": "x"}]}) as answer:
            assert answer.status == 503
            assert "retry-after" in answer.headers
        async with r.client.get(r.url + "/health") as answer:
            assert (answer.status, await answer.read()) == (503, b"")


async def test_before_the_first_fleet_everything_is_503() -> None:
    """A router that knows no worker is alive and not ready."""
    async with rig(prefills=0, decodes=0) as r:
        status, error = await r.post()
        assert (status, error["error"]["code"]) == (503, "no_ready_worker")
        async with r.client.get(r.url + "/livez") as answer:
            assert answer.status == 200


async def test_a_connection_closed_while_idle_is_replaced_in_silence() -> None:
    """An engine that drops a kept connection as the request is written answers it on a fresh one: no retry is counted."""
    async with rig() as r:
        await r.stream()
        r.decodes[0].scripts.append(Script(fault=Fault.RESET, phase=Phase.BEFORE_HEAD))
        r.prefills[0].scripts.append(Script(fault=Fault.RESET, phase=Phase.BEFORE_HEAD))
        status, body = await r.stream()
        assert status == 200
        assert body.endswith(wire.DONE)
        assert not any(name.startswith("pdserve_retries_total") for name in await r.metrics())
        assert {leg.body["kv_transfer_params"]["attempt"] for leg in r.legs} == {1}


# Limits, each with its own code.


@pytest.mark.parametrize(
    ("limits", "role", "script", "status", "code"),
    [
        ({"first_byte_timeout_s": 0.2}, "prefill", Script(fault=Fault.HANG), 504, "engine_first_byte"),
        ({"first_byte_timeout_s": 0.2}, "decode", Script(fault=Fault.HANG), 504, "engine_first_byte"),
        ({"first_byte_timeout_s": 0.2}, "decode", Script(fault=Fault.HANG, phase=Phase.AFTER_HEAD), 504, "engine_first_byte"),
        ({"request_timeout_s": 0.2}, "decode", Script(fault=Fault.HANG, phase=Phase.AFTER_HEAD), 504, "deadline_exceeded"),
        ({}, "decode", Script(fault=Fault.RESET), 502, "engine_lost"),
        ({}, "decode", None, 502, "engine_unreachable"),
        ({}, "prefill", None, 502, "engine_unreachable"),
    ],
)
async def test_each_limit_has_its_own_code(limits: dict[str, float], role: str, script: Script | None, status: int, code: str) -> None:
    """Connecting, the first data, the whole request; and a loss that no limit is to blame for. `always`, so that nothing else can serve."""
    async with rig(disaggregation="always", **limits) as r:
        worker = (r.prefills if role == "prefill" else r.decodes)[0]
        if script is None:
            await worker.stop()
        else:
            worker.script = script
        answer_status, body = await r.stream()
        assert (answer_status, orjson.loads(body)["error"]["code"]) == (status, code)


async def test_silence_before_the_first_data_may_be_longer_than_between_data() -> None:
    """A long prompt is computed in silence; once tokens come, the shorter limit holds."""
    async with rig(first_byte_timeout_s=5, idle_timeout_s=0.2) as r:
        r.prefills[0].script = Script(head_delay_s=0.5)
        status, body = await r.stream()
        assert (status, body.endswith(wire.DONE)) == (200, True)


# One leg fails while the other is at work.

BROKEN = {
    "400": Script(status=400),
    "500": Script(status=500),
    "reset": Script(fault=Fault.RESET),
    "hang": Script(fault=Fault.HANG),
    "refuse": None,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_first_leg_that_fails_ends_both_with_one_error(role: str, how: str, stream: bool) -> None:
    """Whichever it is and however it fails, the other, which would wait for ever, is ended with it; the client hears of it once and at once."""
    async with rig(disaggregation="always", first_byte_timeout_s=0.3 if stream or role == "prefill" else 300, request_timeout_s=1) as r:
        broken, other = (r.prefills[0], r.decodes[0]) if role == "prefill" else (r.decodes[0], r.prefills[0])
        other.script = Script(fault=Fault.HANG)
        if (script := BROKEN[how]) is None:
            await broken.stop()
        else:
            broken.script = script
        begin = time.monotonic()
        status, body = await (r.stream() if stream else r.post())
        assert time.monotonic() - begin < PATIENCE_S
        assert status == 400 if how == "400" else status in (500, 502, 503, 504)
        error = orjson.loads(body)["error"] if stream else body["error"]
        assert set(error) >= {"message", "type", "code"}
        await until(lambda: all(leg.ended == "disconnected" for leg in other.legs))
        await until(lambda: {leg.request_id for leg in other.legs} <= set(other.aborts))


# Retries are rationed, breakers judge transport.


async def test_a_fleet_that_fails_is_not_asked_for_much_more_than_before() -> None:
    """Forty requests at once, all of which fail: a fifth of them are tried again, the others are told at once, and what was denied is counted."""
    async with rig(decodes=2) as r:
        await r.put_fleet(max_running=64)
        for worker in r.decodes:
            worker.script = Script(status=500, head_delay_s=0.3)
        answers = await asyncio.gather(*(r.post() for _ in range(40)))
        assert {status for status, _ in answers} == {500}
        legs = sum(len(worker.legs) for worker in r.decodes)
        assert 40 < legs <= 40 + 2 * 8
        metrics = await r.metrics()
        assert metrics['pdserve_retries_denied_total{reason="budget"}'] >= 40 - 8
        assert metrics["pdserve_retries_in_use"] == 0


async def test_one_request_alone_may_be_tried_again() -> None:
    """A fifth of one is nothing, so there is a floor."""
    async with rig(decodes=3) as r:
        for worker in r.decodes:
            worker.scripts.append(Script(status=500))
        r.decodes[2].scripts.clear()
        assert (await r.post())[0] == 200


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 429, 500, 503])
async def test_an_engines_answer_never_opens_a_breaker(status: int) -> None:
    """A hundred requests refused or failed by an engine that answers: it is as reachable as before."""
    async with rig(decodes=2) as r:
        for worker in r.decodes:
            worker.script = Script(status=status)
        for _ in range(10):
            answers = await asyncio.gather(*(r.post() for _ in range(10)))
            assert {answer for answer, _ in answers} == {status}
        if status < 500:
            assert sum(len(worker.legs) for worker in r.decodes) == 100
        metrics = await r.metrics()
        assert metrics["pdserve_breakers_opened_total"] == 0
        assert {metrics[f'pdserve_breakers{{state="{state}"}}'] for state in ("open", "half_open", "closed")} == {0}


async def test_a_dead_decode_worker_costs_a_few_requests_one_retry_each() -> None:
    """Then its breaker is open and nobody is sent there; when it is back, one request finds out, and it is used again."""
    async with rig(decodes=2) as r:
        dead = r.decodes[0]
        await dead.stop()
        for _ in range(12):
            assert (await r.stream())[0] == 200
        metrics = await r.metrics()
        assert metrics['pdserve_retries_total{reason="decode_connect"}'] == FAILURES
        assert (metrics['pdserve_breakers{state="open"}'], metrics["pdserve_breakers_opened_total"]) == (1, 1)
        assert (await r.admin("status"))["breakers"] == [{"prefill_worker": None, "decode_worker": "decode-0", "state": "open"}]
        async with dead:
            await asyncio.sleep(FIRST_COOL_DOWN_S)
            for _ in range(6):
                assert (await r.stream())[0] == 200
            assert len(dead.legs) >= 2
            assert (await r.metrics())['pdserve_breakers{state="open"}'] == 0


async def test_with_every_prefill_worker_out_of_reach_requests_are_served_locally_and_say_so() -> None:
    """Under `auto`; once the breakers are open nothing is lost on trying."""
    async with rig(prefills=2) as r:
        for worker in r.prefills:
            await worker.stop()
        for _ in range(10):
            assert (await r.stream())[0] == 200
        receipts = await r.receipts(10)
        assert {receipt.path for receipt in receipts} == {"local"}
        assert (receipts[0].reason, receipts[0].attempts) == ("breaker_open", 1)


async def test_a_link_that_fails_is_given_up_for_that_pair_alone() -> None:
    """Three transfers between two workers are lost; both go on working with others."""
    async with rig(prefills=1, decodes=2) as r:
        r.decodes[0].script = Script(outcome=CloseReason.PEER_LOST)
        for _ in range(12):
            assert (await r.stream())[0] == 200
            await asyncio.sleep(0.15)
        receipts = await r.receipts(12)
        failed = [receipt for receipt in receipts if receipt.reason == "transfer_peer_lost"]
        assert FAILURES <= len(failed) <= FAILURES + 2
        assert {receipt.decode_worker for receipt in receipts[:3]} == {"decode-1"}
        assert {receipt.path for receipt in receipts[:3]} == {"disaggregated"}


async def _waiting(r: Rig, count: int) -> bool:
    return bool((await r.admin("status"))["queue"]["requests"] == count)
