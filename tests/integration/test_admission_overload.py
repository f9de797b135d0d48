"""More requests than there is room for: shed at once with a time to come back, in fair order, and what was accepted is served."""

import asyncio
from collections import Counter
from typing import Any

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, Rig, filled, rig, until

from pdserve.routing.line import FLOOR_REQUESTS
from pdserve.testing.fake_worker import Fault, Phase, Script


async def answer_of(r: Rig, path: str = CHAT, **body: Any) -> tuple[int, dict[str, str], bytes]:
    async with r.client.post(r.url + path, json=filled(path, body)) as answer:
        return answer.status, dict(answer.headers), await answer.read()


async def test_at_many_times_the_capacity_each_request_is_served_or_shed_at_once() -> None:
    """Five hundred at once for eight places: those that fit are answered whole, the others get 429 with Retry-After and reach no engine."""
    async with rig(max_queued_requests=64) as r:
        await r.put_fleet(max_running=8)
        for worker in r.workers:
            worker.script = Script(head_delay_s=0.02)
        answers = await asyncio.gather(*(answer_of(r) for _ in range(500)))
        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) == {200, 429}
        assert statuses[200] >= 64 + 8
        for status, headers, body in answers:
            if status == 429:
                assert 1 <= int(headers["Retry-After"]) <= 120
                assert orjson.loads(body)["error"]["code"] == "queue_full"
        assert len(r.decodes[0].legs) == statuses[200]
        receipts = await r.receipts(500, timeout_s=20)
        shed_s = sorted(receipt.duration_s for receipt in receipts if receipt.outcome == "shed")
        assert shed_s[len(shed_s) // 2] < 0.05
        assert (await r.metrics())['pdserve_shed_total{reason="queue_full_requests"}'] == statuses[429]


async def test_retry_after_follows_the_measured_rate() -> None:
    """Prompts of 100,000 tokens that take a tenth of a second: what waits is through in seconds, and the client is told how many."""
    async with rig(max_queued_requests=1) as r:
        await r.put_fleet(max_running=1)
        r.prefills[0].script = Script(head_delay_s=0.1)
        prompt = {"prompt": [1] * 4000}
        assert (await answer_of(r, COMPLETIONS, **prompt))[0] == 200
        r.prefills[0].script = Script(fault=Fault.HANG)
        waiting = [asyncio.create_task(answer_of(r, COMPLETIONS, **prompt)) for _ in range(FLOOR_REQUESTS + 1)]
        await until(lambda: _waiting(r, FLOOR_REQUESTS))
        status, headers, _ = await answer_of(r, COMPLETIONS, prompt=[1])
        assert status == 429
        assert 2 <= int(headers["Retry-After"]) <= 60
        for task in waiting:
            task.cancel()
        await r.at_rest()


async def test_a_request_whose_time_runs_out_in_the_queue_is_counted_as_that() -> None:
    """It is a 504, never reaches an engine, and its reason is not that its client left."""
    async with rig(request_timeout_s=0.4) as r:
        await r.put_fleet(max_running=0)
        status, _, body = await answer_of(r)
        assert (status, orjson.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        (receipt,) = await r.receipts(1)
        assert (receipt.reason, receipt.attempts, receipt.path) == ("expired_in_queue", 0, "none")
        assert r.legs == []


async def test_clients_that_may_set_a_priority_are_served_in_its_order() -> None:
    """Lower first; the field stays with the router, whose queue has done what it asks."""
    async with rig(client_priority=True) as r:
        await r.put_fleet(max_running=1)
        r.decodes[0].script = Script(tokens=("x",))
        r.decodes[0].scripts.append(Script(tokens=("x",), head_delay_s=1.0))
        first = asyncio.create_task(answer_of(r, max_tokens=1))
        await until(lambda: r.decodes[0].legs != [])
        waiting = []
        for number, priority in enumerate((5, -5, 0, 100, -100)):
            waiting.append(asyncio.create_task(answer_of(r, priority=priority, max_tokens=number + 2)))
            await until(lambda number=number: _waiting(r, number + 1))  # type: ignore[misc]
        assert {status for status, _, _ in await asyncio.gather(first, *waiting)} == {200}
        assert [leg.body["max_tokens"] for leg in r.decodes[0].legs] == [1, 6, 3, 4, 2, 5]
        assert not any("priority" in leg.body for leg in r.legs)


@pytest.mark.parametrize("priority", [1, "high", 10**6])
async def test_clients_that_may_not_are_told_so(priority: object) -> None:
    """400 names the field; no engine hears of it."""
    async with rig() as r:
        status, error = await r.post(priority=priority)
        assert (status, error["error"]["param"]) == (400, "priority")
        assert r.legs == []


async def test_kv_room_on_decode_holds_back_what_leases_would_let_in() -> None:
    """Answers of 60,000 tokens for a cache of 100,000: one runs, the next waits, though sixteen leases are free."""
    async with rig() as r:
        await r.put_fleet(max_model_len=100_000)
        r.prefills[0].script = Script(prompt_tokens=60_000)
        r.decodes[0].script = Script(fault=Fault.HANG, phase=Phase.AFTER_HEAD)
        prompt = {"prompt": [1] * 60_000}
        tasks = [asyncio.create_task(r.stream(COMPLETIONS, **prompt)) for _ in range(2)]
        await until(lambda: _waiting(r, 1))
        metrics = await r.metrics()
        assert metrics['pdserve_in_flight_requests{role="decode"}'] == 1
        assert 60_000 < metrics['pdserve_kv_reserved_tokens{role="decode"}'] < 100_000
        for task in tasks:
            task.cancel()
        await r.at_rest()
        assert (await r.metrics())['pdserve_kv_reserved_tokens{role="decode"}'] == 0


async def _waiting(r: Rig, count: int) -> bool:
    return bool((await r.admin("status"))["queue"]["requests"] == count)
