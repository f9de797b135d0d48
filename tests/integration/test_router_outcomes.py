"""Under load with everything failing now and then: every request has exactly one outcome, told in a way that the stock client understands."""

import asyncio
import random
from collections import Counter

import openai
import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, SECRET, Rig, rig, until

from pdserve.testing import wire
from pdserve.testing.fake_worker import Fault, Phase, Script

REQUESTS = 300
AT_ONCE = 24
TOKENS = ("a", "b", "c", "d")
FAULTS = [
    Script(tokens=TOKENS, status=500),
    Script(tokens=TOKENS, status=400),
    *(Script(tokens=TOKENS, fault=Fault.RESET, phase=phase, fault_after=2) for phase in Phase),
    *(Script(tokens=TOKENS, fault=fault, phase=Phase.AFTER_TOKENS, fault_after=2) for fault in (Fault.END, Fault.ERROR)),
    Script(tokens=TOKENS, cut_bytes=3),
    Script(tokens=TOKENS, head_delay_s=0.02, token_delay_s=0.01),
]


def outcome_of(status: int, body: bytes, *, is_chat: bool, stream: bool) -> str:
    """Return how a request ended; fails on an end that a client could take for something else."""
    if status != 200:
        assert set(orjson.loads(body)["error"]) >= {"message", "type", "code"}
        return "error"
    if not stream:
        choice = orjson.loads(body)["choices"][0]
        assert (choice["message"]["content"] if is_chat else choice["text"]) == "abcd"
        return "finished"
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    assert events[-1] == b"[DONE]"
    assert events.count(b"[DONE]") == 1
    parsed = [orjson.loads(event) for event in events[:-1]]
    if "error" in parsed[-1]:
        return "event"
    assert parsed[-1]["choices"][0]["finish_reason"] == "stop"
    choices = [event["choices"][0] for event in parsed]
    assert "".join(c["delta"].get("content", "") if is_chat else c["text"] for c in choices) == "abcd"
    return "finished"


async def one(r: Rig, draw: random.Random) -> str:
    path, stream = draw.choice([CHAT, COMPLETIONS]), draw.random() < 0.6
    prompt = {"messages": [{"role": "user", "content": "x" * draw.randrange(1, 5000)}]} if path == CHAT else {"prompt": "x"}
    async with r.client.post(r.url + path, json={"model": wire.MODEL, "stream": stream, **prompt}) as answer:
        return outcome_of(answer.status, await answer.read(), is_chat=path == CHAT, stream=stream)


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_request_has_one_outcome(seed: int) -> None:
    """Three prefill and three decode workers that fail at random: no silent end, no wrong text, nothing counted twice, nothing left."""
    draw = random.Random(seed)
    async with rig(prefills=3, decodes=3) as r:
        for worker in r.workers:
            worker.script = Script(tokens=TOKENS)
            for _ in range(REQUESTS):
                worker.scripts.append(draw.choice(FAULTS) if draw.random() < 0.25 else worker.script)
        gate = asyncio.Semaphore(AT_ONCE)

        async def gated() -> str:
            async with gate:
                return await one(r, draw)

        outcomes = Counter(await asyncio.gather(*(gated() for _ in range(REQUESTS))))
        assert outcomes.total() == REQUESTS
        assert outcomes["finished"] > REQUESTS / 2
        assert outcomes["event"] > 0
        assert outcomes["error"] > 0
        await r.at_rest()

        async def all_counted() -> bool:
            counted = {name: value for name, value in (await r.metrics()).items() if name.startswith("pdserve_requests_total")}
            return sum(counted.values()) == REQUESTS

        await until(all_counted, timeout_s=15)
        receipts = (await r.admin("receipts?limit=1000"))["receipts"]
        assert len({receipt["request_id"] for receipt in receipts}) == REQUESTS
        assert Counter(receipt["outcome"] for receipt in receipts)["finished"] == outcomes["finished"]


async def test_the_stock_client_gets_answers_and_raises_on_failures() -> None:
    """OpenAI's own client: a stream to its end, an error event as an exception, an error status as the class for it."""
    async with rig() as r, openai.AsyncOpenAI(base_url=r.url + "/v1", api_key=SECRET, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [wire.MODEL]
        messages = [{"role": "user", "content": "x"}]
        stream = await client.chat.completions.create(model=wire.MODEL, messages=messages, stream=True)  # type: ignore[call-overload]
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello world"
        whole = await client.completions.create(model=wire.MODEL, prompt="x")
        assert whole.choices[0].text == "Hello world"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=wire.MODEL, prompt="")
        for fault in (Fault.RESET, Fault.END, Fault.ERROR):
            r.decodes[0].script = Script(fault=fault, phase=Phase.AFTER_TOKENS, fault_after=2)
            stream = await client.chat.completions.create(model=wire.MODEL, messages=messages, stream=True)  # type: ignore[call-overload]
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
