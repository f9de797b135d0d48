"""Which workers serve a request: an even spread, the same ones for what belongs together, decode alone where that is better, and why."""

import asyncio

import pytest
from router_rig import CHAT, COMPLETIONS, rig, until

from pdserve.testing.fake_worker import Fault, Script
from pdserve.types import CloseReason

LONG = "These are the rules of the house. " * 200


def turns(count: int) -> list[dict[str, str]]:
    """Return a conversation of so many messages."""
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n}. {LONG}"} for n in range(count)]


async def test_256_requests_at_once_are_64_for_each_of_four_idle_workers() -> None:
    """While all of them are parked, so nothing but the router's own count can tell; pick and reserve is one step."""
    async with rig(prefills=4) as r:
        for worker in r.prefills:
            worker.script = Script(fault=Fault.HANG)
        await r.put_fleet(max_running=400)
        tasks = [asyncio.create_task(r.post(max_tokens=1)) for _ in range(256)]
        await until(lambda: sum(len(worker.legs) for worker in r.prefills) == 256, timeout_s=30)
        assert all(63 <= len(worker.legs) <= 65 for worker in r.prefills)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await r.at_rest()


async def test_after_a_thousand_cancels_a_restarted_worker_gets_its_share_and_no_more() -> None:
    """No count is left on the others, so the new one is not the only one that looks idle."""
    async with rig(prefills=2) as r:
        await r.put_fleet(max_running=200)
        for worker in r.workers:
            worker.script = Script(fault=Fault.HANG)
        for _ in range(10):
            tasks = [asyncio.create_task(r.post()) for _ in range(100)]
            await asyncio.sleep(0.03)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await r.at_rest()
        for worker in r.workers:
            worker.script = Script()
            worker.legs.clear()
        r.prefills[0].incarnation = "prefill-0-2"
        await r.put_fleet(max_running=200)
        await asyncio.gather(*(r.post() for _ in range(40)))
        assert [len(worker.legs) for worker in r.prefills] == [20, 20]


async def test_the_turns_of_a_conversation_meet_the_same_prefill_worker() -> None:
    """It holds the turns before; other conversations go elsewhere, and the tokens it need not compute are counted."""
    async with rig(prefills=3, disaggregation="always") as r:
        for worker in r.workers:
            worker.script = Script(prompt_tokens=5000)
        for count in range(1, 6):
            for name, messages in (("turn", turns(count)), ("other", [{"role": "user", "content": f"{count}! {LONG}"}])):
                body = {"model": "fake", "messages": messages}
                async with r.client.post(r.url + CHAT, json=body, headers={"x-request-id": f"{name}-{count}"}) as answer:
                    assert answer.status == 200
        workers: dict[str, set[str | None]] = {"turn": set(), "other": set()}
        for receipt in await r.receipts(10):
            assert receipt.client_request_id is not None
            workers[receipt.client_request_id.partition("-")[0]].add(receipt.prefill_worker)
        assert (len(workers["turn"]), len(workers["other"]) > 1) == (1, True)
        assert (await r.metrics())['pdserve_expected_reuse_tokens_total{role="prefill"}'] > 10_000


async def test_a_restarted_prefill_worker_holds_nothing() -> None:
    """Its predecessor's prompts are no reason to prefer it."""
    async with rig(prefills=2, disaggregation="always") as r:
        assert (await r.stream(messages=turns(3)))[0] == 200
        (receipt,) = await r.receipts(1)
        for worker in r.prefills:
            if worker.worker_id == receipt.prefill_worker:
                worker.incarnation += "b"
        await r.put_fleet()
        assert (await r.stream(messages=turns(3)))[0] == 200
        assert 'pdserve_expected_reuse_tokens_total{role="prefill"}' not in await r.metrics()


@pytest.mark.parametrize("name", ["header", "user", "prompt_cache_key"])
async def test_a_session_meets_the_same_decode_worker(name: str) -> None:
    """Named by a header or in the body, whatever its prompts are."""
    async with rig(decodes=4) as r:
        headers = {"x-session-id": "s-1"} if name == "header" else {}
        extra = {} if name == "header" else {name: "s-1"}
        for number in range(8):
            body = {"model": "fake", "messages": [{"role": "user", "content": f"{number}"}], **extra}
            async with r.client.post(r.url + CHAT, json=body, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
        assert len({receipt.decode_worker for receipt in await r.receipts(8)}) == 1
        for _ in range(8):
            assert (await r.post())[0] == 200
        assert len({receipt.decode_worker for receipt in (await r.receipts(16))[:8]}) == 4


async def test_a_prompt_that_landed_is_served_by_its_decode_worker_alone() -> None:
    """Only a record of a landed transfer shows what decode holds; the reason is counted."""
    async with rig(decodes=2) as r:
        body = {"messages": turns(3)}
        r.decodes[0].script = r.decodes[1].script = Script(outcome=CloseReason.PEER_CLOSED, prompt_tokens=5000)
        for _ in range(2):
            assert (await r.stream(**body))[0] == 200
        assert {receipt.reason for receipt in await r.receipts(2)} == {"transfer_peer_closed"}
        r.decodes[0].script = r.decodes[1].script = Script(prompt_tokens=5000)
        assert (await r.stream(**body))[0] == 200
        (landed, *_) = await r.receipts(3)
        assert landed.reason == "default"
        assert (await r.stream(**body))[0] == 200
        (again, *_) = await r.receipts(4)
        assert (again.path, again.reason, again.decode_worker) == ("local", "prefix_on_decode", landed.decode_worker)
        assert again.executed["disaggregation"] == "no: prefix_on_decode"
        assert (await r.metrics())['pdserve_expected_reuse_tokens_total{role="decode"}'] > 1000


@pytest.mark.parametrize(("mode", "reason"), [("auto", "short_prompt"), ("always", "default"), ("never", "configured_never")])
async def test_short_prompts_are_served_locally_under_auto_only(mode: str, reason: str) -> None:
    """Below the setting; `always` disaggregates whatever can be, `never` nothing."""
    async with rig(disaggregation=mode, local_below_tokens=100) as r:
        assert (await r.stream(COMPLETIONS, prompt=[1] * 99))[0] == 200
        assert (await r.stream(COMPLETIONS, prompt=[1] * 100))[0] == 200
        assert [receipt.reason for receipt in await r.receipts(2)] == ["default" if mode != "never" else reason, reason]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("mode", ["auto", "always", "never"])
async def test_every_route_and_length_says_which_way_it_went(path: str, mode: str) -> None:
    """The count of each path and reason is what the workers saw: prefill calls are disaggregated requests, and nothing falls back in silence."""
    async with rig(disaggregation=mode, local_below_tokens=50) as r:
        for text in ("short", LONG):
            for stream in (False, True):
                body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
                status, _ = await (r.stream(path, **body) if stream else r.post(path, **body))
                assert status == 200
        receipts = await r.receipts(4)
        assert len(r.prefills[0].legs) == sum(receipt.path == "disaggregated" for receipt in receipts)
        counted = {name: value for name, value in (await r.metrics()).items() if name.startswith("pdserve_requests_total")}
        assert sum(value for name, value in counted.items() if 'path="disaggregated"' in name) == len(r.prefills[0].legs)
        assert not any('path="local"' in name and 'reason="default"' in name for name in counted)
        expected = {"auto": {"short_prompt", "default", "prefix_on_decode"}, "always": {"default"}, "never": {"configured_never"}}
        assert {receipt.reason for receipt in receipts} <= expected[mode]


async def test_prefill_that_refuses_everything_is_no_silent_fallback() -> None:
    """Its refusal is the client's; no request is served by decode alone because of it."""
    async with rig() as r:
        r.prefills[0].script = Script(status=400)
        r.decodes[0].script = Script(head_delay_s=0.3)
        for _ in range(3):
            assert (await r.post())[0] == 400
        assert len(r.prefills[0].legs) == len(r.decodes[0].legs) == 3
        assert all(leg.side is not None for leg in r.decodes[0].legs)


@pytest.mark.parametrize("empty", ["prefill", "decode"])
async def test_a_role_without_workers_is_not_ready(empty: str) -> None:
    """The router says which role is missing."""
    async with rig(prefills=int(empty != "prefill"), decodes=int(empty != "decode")) as r, r.client.get(r.url + "/readyz") as answer:
        assert answer.status == 503
        assert (await answer.json())["reasons"] == [f"no ready {empty} worker"]
