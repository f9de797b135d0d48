"""A decode worker that dies in mid-stream, wherever that is: the client sees one stream, as if nothing had happened."""

import asyncio
import re
from typing import Any

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, MESSAGES, Rig, rig

from pdserve.testing import wire
from pdserve.testing.fake_worker import Fault, Phase, Script

PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
TOKENS = ("He", "llo", ", ", "wörld")
LEG = re.compile(rb"-[0-9a-f]{32}-\d")
GREEDY: dict[str, Any] = {"temperature": 0, "stream_options": {"include_usage": True}}


def one_after_the_other(r: Rig, *scripts: Script) -> None:
    """Have the next decode legs answered by these scripts, whichever worker gets them."""
    for worker in r.decodes:
        worker.scripts = r.decodes[0].scripts
    r.decodes[0].scripts.extend(scripts)


async def stream(r: Rig, path: str, **body: Any) -> bytes:
    """Return a stream without what names its attempt."""
    status, content = await r.stream(path, **{**GREEDY, **body})
    assert status == 200
    return LEG.sub(b"", content)


def dying(fault: Fault, events: int, tokens: tuple[str, ...] = TOKENS) -> Script:
    return Script(tokens=tokens, fault=fault, phase=Phase.AFTER_TOKENS, fault_after=events)


@PATHS
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.END, Fault.ERROR])
async def test_a_death_at_any_token_leaves_no_trace(path: str, fault: Fault) -> None:
    """Before the first event, between any two, before usage and before the end: every byte is as in the undisturbed stream."""
    async with rig(decodes=3, resume=True) as r:
        for worker in r.workers:
            worker.script = Script(tokens=TOKENS, cached_tokens=4)
        undisturbed = await stream(r, path)
        assert "wörld".encode() in undisturbed and b'token_ids":[' not in undisturbed
        for events in range(len(TOKENS) + (path == CHAT) + 1):
            one_after_the_other(r, dying(fault, events))
            assert await stream(r, path) == undisturbed, events
        receipts = await r.receipts(len(TOKENS) + (path == CHAT) + 2)
        assert {receipt.outcome for receipt in receipts} == {"finished"}
        assert {receipt.completion_tokens for receipt in receipts} == {len(TOKENS)}
        assert {receipt.prompt_tokens for receipt in receipts} == {9}
        resumed = sorted(receipt.resumed_at for receipt in receipts if receipt.resumed_at)
        assert resumed == [(tokens,) for tokens in range(path == COMPLETIONS, len(TOKENS))]
        assert (await r.metrics())['pdserve_resumed_streams_total{outcome="finished"}'] == len(resumed)


@pytest.mark.parametrize(("path", "stride"), [(COMPLETIONS, 1), (CHAT, 7), pytest.param(CHAT, 1, marks=pytest.mark.long)])
async def test_a_death_at_any_byte_leaves_no_trace(path: str, stride: int) -> None:
    """Also inside an event, which the client then gets from the other worker."""
    tokens = ("a", "é")
    counts = wire.usage(9, len(tokens), 9)
    events = wire.events("0" * 32 + "-1", is_chat=path == CHAT, tokens=tokens, finish_reason="stop", counts=counts)
    whole = b"".join((*wire.with_token_ids(events, range(9), 0), wire.DONE))
    async with rig(decodes=3, resume=True) as r:
        for worker in r.workers:
            worker.script = Script(tokens=tokens)
        undisturbed = await stream(r, path)
        for size in range(0, len(whole), stride):
            one_after_the_other(r, Script(body=whole[:size] or b":"))
            assert await stream(r, path) == undisturbed, size


@PATHS
async def test_a_second_death_is_survived_and_a_third_is_told(path: str) -> None:
    """Each time the rest is asked for from where the client is; after three attempts it gets its one error event."""
    async with rig(prefills=2, decodes=3, resume=True) as r:
        for worker in r.workers:
            worker.script = Script(tokens=TOKENS)
        undisturbed = await stream(r, path)
        first = 1 + (path == CHAT)
        one_after_the_other(r, dying(Fault.RESET, first), dying(Fault.RESET, first))
        assert await stream(r, path) == undisturbed
        one_after_the_other(r, *(dying(Fault.RESET, first) for _ in range(3)))
        broken = await stream(r, path)
        assert b'"error"' in broken and broken.endswith(wire.DONE)
        lost, survived = sorted((receipt for receipt in await r.receipts(3) if receipt.resumed_at), key=lambda receipt: receipt.outcome)
        assert (lost.outcome, lost.attempts, lost.resumed_at) == ("failed", 3, (1, 2))
        assert (survived.outcome, survived.attempts, survived.resumed_at) == ("finished", 3, (1, 2))
        assert survived.executed["resume"] == "after 1, 2 tokens"
        assert survived.eligible["resume"] == "yes"


@PATHS
async def test_the_rest_is_asked_for_through_both_legs(path: str) -> None:
    """Prompt and tokens so far make the prompt of both; limits are what is left of them."""
    async with rig(decodes=2, resume=True) as r:
        for worker in r.workers:
            worker.script = Script(tokens=TOKENS)
        one_after_the_other(r, dying(Fault.RESET, 2 + (path == CHAT)))
        content = await stream(r, path, max_tokens=3, min_tokens=3, stream_options=None)
        assert b'"length"' in content and b'"usage":{' not in content
        rest = [leg.body for leg in r.legs if leg.request_id.endswith("-2")]
        assert len(rest) == 2
        prompts = [body["prompt"] if path == COMPLETIONS else body["kv_transfer_params"]["prompt_token_ids"] for body in rest]
        assert prompts == [[*range(9), 1000, 1001]] * 2
        (decode,) = (body for body in rest if body["stream"])
        assert (decode["max_tokens"], decode["min_tokens"]) == (1, 1)


async def test_a_character_in_two_tokens_is_not_cut() -> None:
    """A token that brought no text may be half a character: the rest begins before it."""
    async with rig(decodes=2, resume=True) as r:
        tokens = ("a", "", "", "é", "b")
        for worker in r.workers:
            worker.script = Script(tokens=tokens)
        for events in (2, 3, 4):
            one_after_the_other(r, dying(Fault.RESET, events, tokens))
            content = await stream(r, COMPLETIONS)
            texts = [orjson.loads(line[6:])["choices"] for line in content.split(b"\n\n") if line.startswith(b"data: {")]
            assert "".join(choice["text"] for choices in texts for choice in choices) == "aéb"
            assert b'"completion_tokens":5' in content
        assert sorted(receipt.resumed_at for receipt in await r.receipts(3)) == [(1,), (1,), (4,)]


@pytest.mark.parametrize(
    ("body", "hindrance"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"some_extension": 1}, "some_extension"),
    ],
)
async def test_other_streams_end_with_an_error_as_ever(body: dict[str, Any], hindrance: str) -> None:
    """What could go on differently is not gone on with; the receipt says what stood against it."""
    async with rig(decodes=2, resume=True) as r:
        one_after_the_other(r, dying(Fault.RESET, 2))
        content = await stream(r, CHAT, **body)
        assert b'"error"' in content and content.endswith(wire.DONE)
        (receipt,) = await r.receipts(1)
        assert (receipt.attempts, receipt.eligible["resume"]) == (1, f"no: {hindrance}")
        assert not any("return_token_ids" in leg.body for leg in r.legs)


async def test_other_apis_are_not_touched() -> None:
    """Messages have events that say more than their tokens."""
    async with rig(decodes=2, resume=True) as r:
        one_after_the_other(r, dying(Fault.RESET, 4))
        _, content = await r.stream(MESSAGES, temperature=0)
        assert b"event: error" in content


async def test_it_is_off_by_default() -> None:
    """Then engines are asked for no token ids, and a broken stream ends with an error event."""
    async with rig(decodes=2) as r:
        one_after_the_other(r, dying(Fault.RESET, 2))
        content = await stream(r, CHAT)
        assert b'"error"' in content
        assert not any("return_token_ids" in leg.body for leg in r.legs)
        (receipt,) = await r.receipts(1)
        assert "resume" not in receipt.eligible


async def test_a_prefill_that_fails_on_the_way_back_is_retried_too() -> None:
    """The client has data, but not of this attempt: what fails before its first is as ever retried."""
    async with rig(prefills=2, decodes=2, resume=True) as r:
        for worker in r.workers:
            worker.script = Script(tokens=TOKENS)
        undisturbed = await stream(r, CHAT)
        for worker in r.prefills:
            worker.scripts = r.prefills[0].scripts
        r.prefills[0].scripts.extend((Script(), Script(status=500)))
        one_after_the_other(r, dying(Fault.RESET, 3))
        async with asyncio.timeout(5):
            assert await stream(r, CHAT) == undisturbed
