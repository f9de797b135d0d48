"""How answers of the APIs that are not completions speak: what each event means, whose cache hits are told, and how an error looks."""

from typing import Any

import orjson
import pytest

from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.request import Route
from pdserve.server.frames import Frame, FrameKind, FrameSplitter
from pdserve.testing import wire, wire_messages, wire_responses
from pdserve.testing.forms import FORMS

RESPONSES, MESSAGES = DIALECTS[Route.RESPONSES], DIALECTS[Route.MESSAGES]


def event(name: str | None, **fields: Any) -> bytes:
    """Return an event under a name, or under none."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + orjson.dumps(fields) + b"\n\n"


def read(route: Route, *chunks: bytes) -> list[Frame]:
    splitter = FrameSplitter(DIALECTS[route])
    return [frame for chunk in chunks for frame in splitter.feed(chunk)]


DONE_RESPONSE = {"status": "completed", "output": [], "usage": {"input_tokens": 1}}
MEANINGS: list[tuple[Route, bytes, list[FrameKind]]] = [
    (Route.RESPONSES, event("response.created", response={}), [FrameKind.PREAMBLE]),
    (Route.RESPONSES, event("response.queued", response={}), [FrameKind.PREAMBLE]),
    (Route.RESPONSES, event(None, type="response.in_progress", response={}), [FrameKind.PREAMBLE]),
    (Route.RESPONSES, event("response.output_text.delta", delta="response.completed"), [FrameKind.DATA]),
    (Route.RESPONSES, event("response.output_text.delta", delta='"error": {}'), [FrameKind.DATA]),
    (Route.RESPONSES, event("response.mcp_call.in_progress"), [FrameKind.DATA]),
    (Route.RESPONSES, event("response.mcp_call.completed"), [FrameKind.DATA]),
    (Route.RESPONSES, event("response.completed", response=DONE_RESPONSE), [FrameKind.USAGE, FrameKind.DONE]),
    (Route.RESPONSES, event(None, type="response.completed", response=DONE_RESPONSE), [FrameKind.USAGE, FrameKind.DONE]),
    (Route.RESPONSES, event("response.incomplete", response={"status": "incomplete"}), [FrameKind.USAGE, FrameKind.DONE]),
    (Route.RESPONSES, event("response.completed", response={"status": "cancelled"}), [FrameKind.ABORTED]),
    (Route.RESPONSES, event("response.completed", response={"status": "failed"}), [FrameKind.ERROR]),
    (Route.RESPONSES, event("response.failed", response={"status": "failed", "error": {"message": "m"}}), [FrameKind.ERROR]),
    (Route.RESPONSES, event("error", message="m", code="500"), [FrameKind.ERROR]),
    (Route.RESPONSES, event(None, error={"message": "m", "code": 503}), [FrameKind.ERROR]),
    (Route.RESPONSES, b"data: [DONE]\n\n", [FrameKind.DONE]),
    (Route.RESPONSES, b": keep-alive\n\n", [FrameKind.OTHER]),
    (Route.MESSAGES, event("message_start", type="message_start", message={"stop_reason": None}), [FrameKind.DATA]),
    (Route.MESSAGES, event("content_block_delta", delta={"text": "event: message_stop\n"}), [FrameKind.DATA]),
    (Route.MESSAGES, event("message_delta", delta={"stop_reason": "end_turn"}, usage={}), [FrameKind.USAGE]),
    (Route.MESSAGES, event(None, type="message_delta", delta={"stop_reason": "tool_use"}, usage={}), [FrameKind.USAGE]),
    (Route.MESSAGES, event("message_delta", delta={"stop_reason": None}, usage={}), [FrameKind.ABORTED]),
    (Route.MESSAGES, event("message_delta", usage={}), [FrameKind.ABORTED]),
    (Route.MESSAGES, event("message_stop", type="message_stop"), [FrameKind.DONE]),
    (Route.MESSAGES, event("ping", type="ping"), [FrameKind.OTHER]),
    (Route.MESSAGES, event("error", type="error", error={"type": "internal_error", "message": "m"}), [FrameKind.ERROR]),
    (Route.MESSAGES, event(None, error={"message": "m"}), [FrameKind.ERROR]),
    (Route.MESSAGES, b": keep-alive\n\n", [FrameKind.OTHER]),
]


@pytest.mark.parametrize(("route", "raw", "kinds"), MEANINGS)
def test_an_event_means_what_its_name_and_data_say(route: Route, raw: bytes, kinds: list[FrameKind]) -> None:
    """The name decides, or the type in the data where there is none; alone, in pieces, and behind token data in one read."""
    assert [frame.kind for frame in read(route, raw)] == kinds
    assert [frame.kind for frame in read(route, raw[:8], raw[8:])] == kinds
    token = FORMS[route.value].events("r", tokens=("x", "y"), finish_reason=None, counts={})[2]
    together = read(route, token + raw)
    assert b"".join(frame.raw for frame in together).startswith(token)
    told = [kind for frame in together if (kind := frame.kind) is not FrameKind.DATA]
    assert told == [kind for kind in kinds if kind is not FrameKind.DATA]


@pytest.mark.parametrize("route", [Route.RESPONSES, Route.MESSAGES])
@pytest.mark.parametrize("finish", ["stop", "length", None])
def test_a_stream_is_finished_by_a_reason_only(route: Route, finish: str | None) -> None:
    """Without one its last event proves nothing."""
    form = FORMS[route.value]
    splitter = FrameSplitter(DIALECTS[route])
    splitter.feed(b"".join((*form.events("r", tokens=("x",), finish_reason=finish, counts=form.usage(5, 1, 0)), form.END)))
    assert splitter.has_finish is (finish is not None)


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("cached", [0, 4, 9])
def test_prefills_cache_hits_are_told_and_the_prompts_length_stays(route: Route, cached: int) -> None:
    """Decode's usage, mended, is what prefill's engine would have said of the same answer."""
    form, dialect = FORMS[route.value], DIALECTS[route]
    usage = form.usage(9, 3, 9)
    assert dialect.mend(usage, {"prompt_tokens": 9, "cached_tokens": cached, "written_tokens": 0}) is (cached != 9)
    assert usage == form.usage(9, 3, cached)
    written = {"written_tokens": 0} if route is Route.RESPONSES else {}
    assert dialect.counts(usage) == {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": cached, **written}


def test_hits_that_prefill_does_not_tell_are_never_decodes() -> None:
    """They become unknown, or none where clients read a number."""
    responses, messages = wire_responses.usage(9, 3, 9), wire_messages.usage(9, 3, 9)
    assert RESPONSES.mend(responses, {})
    assert responses == wire_responses.usage(9, 3, 0)
    assert MESSAGES.mend(messages, {})
    assert messages == {"output_tokens": 3, "cache_read_input_tokens": None, "input_tokens": 9}


def test_tokens_written_to_the_cache_are_counted_once() -> None:
    """Anthropic's three kinds of input tokens sum up to the prompt, before and after."""
    usage = {"input_tokens": 3, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 0, "output_tokens": 1}
    assert MESSAGES.mend(usage, {"cached_tokens": 3, "written_tokens": 2})
    assert usage == {"input_tokens": 4, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 2, "output_tokens": 1}
    assert MESSAGES.counts(usage) == {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 3, "written_tokens": 2}


def test_what_prefill_wrote_to_its_cache_is_told_as_an_engine_alone_would() -> None:
    """Decode writes nothing while it receives."""
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9, "created_cache_tokens": 0, "multimodal_tokens": None}}
    assert DIALECTS[Route.CHAT].mend(usage, {"prompt_tokens": 9, "cached_tokens": 0, "written_tokens": 8})
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "created_cache_tokens": 8, "multimodal_tokens": None}
    responses = wire_responses.usage(9, 3, 9)
    assert RESPONSES.mend(responses, {"cached_tokens": 0, "written_tokens": 8})
    assert responses["input_tokens_details"]["cache_write_tokens"] == 8


def test_the_hits_of_a_single_turn_are_mended_with_the_total() -> None:
    """Of several turns nobody knows which one the hits belong to."""
    usage = wire_responses.usage(9, 3, 9)
    usage["input_tokens_details"]["cached_tokens_per_turn"] = [9]
    assert RESPONSES.mend(usage, {"cached_tokens": 2})
    assert usage["input_tokens_details"]["cached_tokens_per_turn"] == [2]


@pytest.mark.parametrize("route", Route)
def test_a_prefill_legs_answer_tells_its_prompt(route: Route) -> None:
    """As a stream for messages, whole for all others; what says nothing, or is no answer, tells nothing."""
    form, dialect = FORMS[route.value], DIALECTS[route]
    counts = form.usage(9, 1, 4)
    if dialect.one_token["stream"]:
        content = b"".join((*form.events("r", tokens=("x",), finish_reason="length", counts=counts), form.END))
    else:
        content = orjson.dumps(form.whole("r", text="x", finish_reason="length", counts=counts))
    told = dialect.prompt_counts(content)
    assert told.items() >= {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 4}.items()
    for nothing in (b"", b"{}", b"[]", b"null", b"<html>"):
        assert dialect.prompt_counts(nothing) == {}


@pytest.mark.parametrize("end", [wire_messages.error_event(500, "m"), event("message_delta", delta={"stop_reason": None}, usage={})])
def test_a_prefill_leg_that_failed_in_its_stream_is_seen(end: bytes) -> None:
    """A status of 200 proves nothing of a stream."""
    start = wire_messages.events("r", tokens=(), finish_reason=None, counts={})[0]
    with pytest.raises(ValueError, match="prefill"):
        MESSAGES.prompt_counts(start + end)


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@pytest.mark.parametrize(("status", "kind"), ANTHROPIC_TYPES.items())
def test_an_error_speaks_to_an_anthropic_client_in_its_own_terms(status: int, kind: str) -> None:
    """Body and event are one object, with the type that clients know for the status."""
    told = orjson.dumps(wire.error_object(status, "what was wrong"))
    expected = {"type": "error", "error": {"type": kind, "message": "what was wrong"}}
    assert orjson.loads(MESSAGES.error_body(status, told)) == expected
    assert MESSAGES.error_event(status, told) == b"event: error\ndata: " + orjson.dumps(expected) + b"\n\n"


def test_an_engines_own_anthropic_error_passes_as_it_is() -> None:
    """Nothing is lost of what an engine said."""
    told = orjson.dumps(wire_messages.error(400, "m"))
    assert MESSAGES.error_body(400, told) == told


def test_an_error_in_a_stream_of_responses_is_one_that_clients_raise_on() -> None:
    """The API's event, with the object under `error` that stock clients look for."""
    told = orjson.dumps(wire.error_object(503, "m"))
    name, data = RESPONSES.error_event(503, told).strip().split(b"\n")
    assert name == b"event: error"
    assert orjson.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "code": 503,
        "message": "m",
        "param": None,
        "error": wire.error_object(503, "m")["error"],
    }
    assert RESPONSES.error_body(503, told) == told
