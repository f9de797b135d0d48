"""What a body says about its request: path, lengths and usage, and which wrong ones are the client's to mend."""

from typing import Any

import orjson
import pytest

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.dialects import parse
from pdserve.server.api.request import ClientRequest, Limits, Route

LIMITS = Limits({"m": 4096}, max_n=16)
TEXT = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(**fields: Any) -> ClientRequest:
    return parse(Route.CHAT, orjson.dumps({"model": "m", "messages": TEXT, **fields}), LIMITS)


def completion(**fields: Any) -> ClientRequest:
    return parse(Route.COMPLETIONS, orjson.dumps({"model": "m", "prompt": "hi", **fields}), LIMITS)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (lambda: chat(), None),
        (lambda: chat(n=None), None),
        (lambda: chat(n=1), None),
        (lambda: chat(n=2), PathReason.N_ABOVE_ONE),
        (lambda: chat(use_beam_search=True), PathReason.BEAM_SEARCH),
        (lambda: chat(use_beam_search=False), None),
        (lambda: chat(prompt_logprobs=0), PathReason.PROMPT_LOGPROBS),
        (lambda: chat(echo=True), PathReason.PROMPT_LOGPROBS),
        (lambda: chat(logprobs=True, top_logprobs=5), None),
        (lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]), PathReason.MEDIA),
        (lambda: chat(messages=[{"role": "user", "content": [{"image_url": "x"}]}]), PathReason.MEDIA),
        (lambda: chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), PathReason.MEDIA),
        (
            lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]}]),
            None,
        ),
        (lambda: chat(messages=[*TEXT, {"role": "assistant", "tool_calls": []}, {"role": "tool", "content": None}]), None),
        (lambda: chat(truncate_prompt_tokens=-1), PathReason.TRUNCATION),
        (lambda: chat(truncate_prompt_tokens=4096), PathReason.TRUNCATION),
        (lambda: chat(truncate_prompt_tokens=4095), None),
        (lambda: completion(), None),
        (lambda: completion(n=3), PathReason.N_ABOVE_ONE),
        (lambda: completion(prompt=["a"]), None),
        (lambda: completion(prompt=["a", "b"]), PathReason.SEVERAL_PROMPTS),
        (lambda: completion(prompt=[[1, 2]]), None),
        (lambda: completion(prompt=[[1, 2], [3]]), PathReason.SEVERAL_PROMPTS),
        (lambda: completion(echo=True), None),
        (lambda: completion(echo=True, logprobs=0), PathReason.PROMPT_LOGPROBS),
        (lambda: completion(logprobs=3), None),
        (lambda: completion(echo=True, max_tokens=0), PathReason.NO_OUTPUT),
        (lambda: completion(prompt=None, prompt_embeds="AAAA"), PathReason.PROMPT_EMBEDS),
        (lambda: completion(prompt_logprobs=1), PathReason.PROMPT_LOGPROBS),
    ],
)
def test_what_two_legs_cannot_serve_is_local_with_its_reason(request_: Any, reason: PathReason | None) -> None:
    """Each field that only one engine can answer keeps the request on one engine; nothing else does."""
    assert request_().local_reason is reason


@pytest.mark.parametrize(
    ("request_", "prompt_bytes", "prompt_tokens"),
    [
        (lambda: chat(messages=[{"role": "system", "content": "abc"}, {"role": "user", "content": "déf"}]), 7, None),
        (lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "text", "text": "日"}]}]), 6, None),
        (lambda: completion(prompt="日本"), 6, None),
        (lambda: completion(prompt=["ab", "c"]), 3, None),
        (lambda: completion(prompt=[1, 2, 3]), 0, 3),
        (lambda: completion(prompt=[[1, 2, 3], [4]]), 0, 3),
    ],
)
def test_a_prompt_is_measured_in_bytes_or_known_tokens(request_: Any, prompt_bytes: int, prompt_tokens: int | None) -> None:
    """Text counts as UTF-8, token ids as themselves."""
    request = request_()
    assert (request.prompt_bytes, request.prompt_tokens) == (prompt_bytes, prompt_tokens)


def test_usage_is_included_only_if_the_client_asked() -> None:
    """The client's wish is kept apart from what the router asks of decode."""
    assert not chat(stream=True).include_usage
    assert not chat(stream=True, stream_options={"include_usage": False}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": None}).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=None).stream


def test_a_body_without_a_model_means_the_only_one() -> None:
    """With one model served its name may be left out; with two it may not."""
    body = orjson.dumps({"messages": TEXT})
    assert parse(Route.CHAT, body, LIMITS).model == "m"
    with pytest.raises(RequestError) as raised:
        parse(Route.CHAT, body, Limits({"m": 1, "n": 1}, 1))
    assert (raised.value.status, raised.value.code) == (404, "model_not_found")


def test_a_long_model_name_is_not_echoed_whole() -> None:
    """An error says little more than what was wrong."""
    with pytest.raises(RequestError) as raised:
        chat(model="x" * 100_000)
    assert len(raised.value.message) < 200


@pytest.mark.parametrize("length", [4096, 5000])
def test_token_ids_that_leave_no_room_are_refused(length: int) -> None:
    """The router knows the length of a prompt of token ids as well as an engine does."""
    with pytest.raises(RequestError) as raised:
        completion(prompt=[1] * length)
    assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
    assert completion(prompt=[1] * length, truncate_prompt_tokens=100).prompt_tokens == length


def test_the_longest_prompt_that_leaves_room_passes() -> None:
    """One token of answer is room enough, and none is needed where none is asked for."""
    assert completion(prompt=[1] * 4095).local_reason is None
    assert completion(prompt=[1] * 4096, echo=True, max_tokens=0).local_reason is PathReason.NO_OUTPUT


def test_a_doubled_internal_field_does_not_slip_through() -> None:
    """JSON allows a name twice; whichever counts, it is refused."""
    for body in (
        b'{"model":"m","prompt":"x","kv_transfer_params":{"a":1},"kv_transfer_params":null}',
        b'{"model":"m","kv_transfer_params":null,"prompt":"x","kv_transfer_params":{"a":1}}',
    ):
        with pytest.raises(RequestError) as raised:
            parse(Route.COMPLETIONS, body, LIMITS)
        assert raised.value.param == "kv_transfer_params"
