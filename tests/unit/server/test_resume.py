"""What of a stream can be gone on with, and how its tokens are taken from the events that bring them."""

from typing import Any

import orjson
import pytest

from pdserve.routing.reasons import PathReason
from pdserve.server.api.request import ClientRequest, Route
from pdserve.server.resume import Resumption, resumable_routes, resume_hindrance

ROUTES = resumable_routes(has_reasoning_parser=False)


def request(route: Route = Route.COMPLETIONS, *, stream: bool = True, local_reason: PathReason | None = None, **body: Any) -> ClientRequest:
    return ClientRequest(
        route=route,
        body={"temperature": 0, "stream": stream, **body},
        model="m",
        max_model_len=4096,
        stream=stream,
        include_usage=False,
        prompt_bytes=9,
        prompt_tokens=None,
        local_reason=local_reason,
    )


def event(text: str = "x", ids: Any = (7,), prompt: Any = None, **more: Any) -> bytes:
    """Return a completion's event as vLLM 0.32 writes it when asked for token ids: without spaces, null where there are none."""
    choice = {"index": 0, "text": text, "finish_reason": None, "prompt_token_ids": prompt, "token_ids": ids, **more}
    return (
        b"data: " + orjson.dumps({"id": "cmpl-a", "object": "text_completion", "created": 5, "model": "m", "choices": [choice]}) + b"\n\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 0.0, "n": 1, "frequency_penalty": 0.0, "logprobs": None, "tools": [], "stop": [], "stream_options": None},
        {"logprobs": False, "seed": 3, "logit_bias": {"5": 1}, "ignore_eos": True, "max_tokens": 5, "user": "u"},
        {"stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "repetition_penalty": 1.0},
    ],
)
def test_greedy_streams_can_be_resumed(body: dict[str, Any]) -> None:
    """Fields that say nothing about output already given, and others with the values that they have when absent."""
    assert resume_hindrance(request(**body), ROUTES) is None


@pytest.mark.parametrize(
    ("body", "hindrance"),
    [
        ({"temperature": None}, "temperature"),
        ({"temperature": 1}, "temperature"),
        ({"n": 2}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"stop": ["a"]}, "stop"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "stream_options"),
        ({"suffix": "a"}, "suffix"),
    ],
)
def test_others_cannot_and_the_field_is_named(body: dict[str, Any], hindrance: str) -> None:
    """An unknown field is taken for one that matters."""
    assert resume_hindrance(request(**body), ROUTES) == hindrance


def test_what_is_no_stream_of_text_cannot_be_resumed() -> None:
    """Answers in one piece are retried as ever; media are not in the tokens; a reasoning parser reads chat from its beginning."""
    assert resume_hindrance(request(stream=False), ROUTES) == "not_streamed"
    assert resume_hindrance(request(local_reason=PathReason.MEDIA), ROUTES) == "media"
    assert resume_hindrance(request(Route.MESSAGES), ROUTES) == "route"
    assert resume_hindrance(request(Route.CHAT), resumable_routes(has_reasoning_parser=True)) == "route"
    assert resume_hindrance(request(), resumable_routes(has_reasoning_parser=True)) is None


def test_ids_become_null_and_everything_else_keeps_its_bytes() -> None:
    """As the engine would have sent it to one who asked for no ids; a text that looks like the field is a text."""
    stream = Resumption(request())
    text = ',"token_ids":[1,2]'
    sent = event(text, [3, 4], [1, 2]) + event("", [5]) + event("é", [6])
    assert stream.take(sent) == event(text, None, None) + event("", None) + event("é", None)
    assert (stream.is_possible, stream.output_tokens) == (True, 4)


def test_nothing_is_resumed_without_the_tokens() -> None:
    """An engine that tells no ids, or not all, leaves nothing to go on with."""
    for events in (event("a", None, [1]) + event("b", None), event("a", [3], [1]) + event("b", None), event("a", [3])):
        stream = Resumption(request())
        stream.take(events)
        assert not stream.is_possible or events == event("a", None, [1])


def test_the_rest_follows_what_the_client_has() -> None:
    """Limits shrink, a completion without one has the API's own; tokens without text are asked for again."""
    stream = Resumption(request(prompt="p", min_tokens=1, max_tokens=None))
    assert stream.request.body == {**request(prompt="p", min_tokens=1, max_tokens=None).body, "return_token_ids": True}
    stream.take(event("a", [3, 4], [1, 2]) + event("", [5]))
    stream.resume()
    rest = stream.request
    assert (list(rest.body["prompt"]), rest.body["min_tokens"], rest.body["max_tokens"], rest.prompt_tokens) == ([1, 2, 3, 4], 0, None, 4)
    unlimited = Resumption(request(prompt="p"))
    unlimited.take(event("a", [3, 4], [1, 2]))
    unlimited.resume()
    assert unlimited.request.body["max_tokens"] == 14


def test_chat_keeps_its_messages_and_names_the_tokens() -> None:
    """The engine takes them in place of what the messages render to."""
    stream = Resumption(request(Route.CHAT, messages=[{"role": "user", "content": "p"}], max_completion_tokens=10))
    role = {"id": "c", "created": 1, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}
    stream.take(b"data: " + orjson.dumps(role) + b"\n\n")
    stream.resume()
    assert (list(stream.request.prompt_ids or ()), stream.request.body["max_completion_tokens"]) == ([1, 2], 10)
    assert stream.take(b"data: " + orjson.dumps({**role, "id": "d"}) + b"\n\n") == b""


def test_the_rest_looks_like_the_beginning() -> None:
    """Id and time are the first attempt's; usage counts the whole, over any number of attempts."""
    stream = Resumption(request())
    stream.take(event("a", [3], [1, 2]))
    stream.prefilled({"prompt_tokens": 2, "cached_tokens": 1})
    for token in (4, 5):
        stream.resume()
        other = event("b", [token], [1, 2, 3]).replace(b"cmpl-a", b"cmpl-b").replace(b'"created":5', b'"created":6')
        assert stream.take(other) == event("b", None, None)
    assert stream.prefilled({"prompt_tokens": 4, "cached_tokens": 4}) == {"prompt_tokens": 2, "cached_tokens": 1}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    assert stream.mend(usage)
    assert usage == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert stream.usage() == {**usage, "prompt_tokens_details": {"cached_tokens": 1}}


def test_events_that_would_not_have_come_are_left_out() -> None:
    """With ids asked for, an engine with a tool parser also sends tokens that it would have kept to itself."""
    stream = Resumption(request(Route.CHAT))
    choice = {"index": 0, "delta": {}, "finish_reason": None, "token_ids": [4]}
    silent = b"data: " + orjson.dumps({"id": "c", "created": 1, "choices": [choice]}) + b"\n\n"
    last = silent.replace(b"null", b'"stop"')
    assert stream.take(silent) == b""
    assert stream.take(silent + last) == last.replace(b"[4]", b"null")
