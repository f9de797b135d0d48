"""What a body of responses, messages or a question says about its request, and which wrong ones are the client's to mend."""

from typing import Any

import orjson
import pytest

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.dialects import parse
from pdserve.server.api.questions import QUESTIONS
from pdserve.server.api.request import ClientRequest, Limits, Route

LIMITS = Limits({"m": 4096}, max_n=16)
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
TOOL = {"type": "function", "name": "f", "parameters": {}}
USER = {"role": "user", "content": "hi"}
BASE: dict[Route, dict[str, Any]] = {
    Route.RESPONSES: {"model": "m", "input": "hi"},
    Route.MESSAGES: {"model": "m", "messages": [USER], "max_tokens": 5},
}
R, M = Route.RESPONSES, Route.MESSAGES


def asked(route: Route, fields: dict[str, Any]) -> ClientRequest:
    return parse(route, orjson.dumps({**BASE[route], **fields}), LIMITS)


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


@pytest.mark.parametrize(
    ("route", "fields", "reason"),
    [
        (R, {}, None),
        (R, {"tools": [TOOL, {"type": "custom", "name": "g"}, {"type": "namespace", "name": "n", "tools": [TOOL]}]}, None),
        (R, {"tools": [{"type": "web_search_preview"}]}, PathReason.ENGINE_TOOLS),
        (R, {"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, PathReason.ENGINE_TOOLS),
        (R, {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, PathReason.ENGINE_TOOLS),
        (R, {"tools": [{}]}, PathReason.ENGINE_TOOLS),
        (R, {"truncation": "disabled"}, None),
        (R, {"truncation": "auto"}, PathReason.TRUNCATION),
        (R, {"truncation": None}, None),
        (R, {"input": [message({"type": "input_text", "text": "a"}, IMAGE)]}, PathReason.MEDIA),
        (R, {"input": [message({"type": "input_file", "file_id": "f"})]}, PathReason.MEDIA),
        (R, {"input": [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]}, PathReason.MEDIA),
        (R, {"input": [{"type": "computer_call_output"}]}, PathReason.MEDIA),
        (
            R,
            {"input": [message({"type": "input_text", "text": "a"}), message({"type": "output_text", "text": "b"}, role="assistant")]},
            None,
        ),
        (R, {"input": [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}, USER]}, None),
        (R, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, None),
        (R, {"store": True}, None),
        (M, {}, None),
        (M, {"system": [{"type": "text", "text": "a"}]}, None),
        (M, {"messages": [message({"type": "text", "text": "a"}, BLOCK)]}, PathReason.MEDIA),
        (M, {"messages": [message({"type": "document", "source": {}})]}, PathReason.MEDIA),
        (M, {"messages": [message({"type": "tool_result", "tool_use_id": "t", "content": [BLOCK]})]}, PathReason.MEDIA),
        (M, {"messages": [message({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]})]}, None),
        (M, {"messages": [message({"type": "tool_use", "id": "t", "name": "f", "input": {"type": "image"}}, role="assistant")]}, None),
        (M, {"messages": [message({"type": "thinking", "thinking": "t", "signature": "s"}, role="assistant"), USER]}, None),
    ],
)
def test_what_two_legs_cannot_serve_is_local_with_its_reason(route: Route, fields: dict[str, Any], reason: PathReason | None) -> None:
    """Media, tools that an engine runs, and cuts that depend on the answer stay on one engine; nothing else does."""
    assert asked(route, fields).local_reason is reason


@pytest.mark.parametrize(
    ("route", "fields", "prompt_bytes"),
    [
        (R, {"input": "日本", "instructions": "abc"}, 9),
        (R, {"input": [message({"type": "input_text", "text": "日"}, {"type": "input_text", "text": "ab"}), USER]}, 7),
        (R, {"input": [{"type": "function_call_output", "call_id": "c", "output": "four"}]}, 4),
        (R, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, 2),
        (R, {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "abc"}]}]}, 3),
        (R, {"input": []}, 0),
        (M, {"system": "abc"}, 5),
        (M, {"system": [{"type": "text", "text": "日"}]}, 5),
        (
            M,
            {"messages": [message({"type": "tool_result", "content": [{"type": "text", "text": "four"}]}, {"type": "text", "text": "x"})]},
            5,
        ),
        (M, {"messages": [message({"type": "thinking", "thinking": "abc"}, role="assistant")]}, 3),
    ],
)
def test_a_prompt_is_measured_in_bytes(route: Route, fields: dict[str, Any], prompt_bytes: int) -> None:
    """All text that templates render, as UTF-8."""
    assert asked(route, fields).prompt_bytes == prompt_bytes


BAD: list[tuple[Route, dict[str, Any], str, str]] = [
    (R, {"background": True}, "background", "unsupported_parameter"),
    (R, {"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    (R, {"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    (R, {"conversation": {"id": "conv_1"}}, "conversation", "unsupported_parameter"),
    (R, {"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    (R, {"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1]", "unsupported_parameter"),
    (R, {"input": None}, "input", "invalid_value"),
    (R, {"input": 5}, "input", "invalid_type"),
    (R, {"input": ["hi"]}, "input[0]", "invalid_type"),
    (R, {"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    (R, {"max_output_tokens": 4097}, "max_output_tokens", "context_length_exceeded"),
    (R, {"max_output_tokens": 5.5}, "max_output_tokens", "invalid_type"),
    (R, {"max_output_tokens": 1e300}, "max_output_tokens", "invalid_type"),
    (R, {"seed": 2.0**63}, "seed", "invalid_type"),
    (R, {"store": "yes"}, "store", "invalid_type"),
    (R, {"tools": {}}, "tools", "invalid_type"),
    (R, {"stop": [5]}, "stop", "invalid_type"),
    (R, {"kv_transfer_params": {}}, "kv_transfer_params", "unknown_parameter"),
    (R, {"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params", "unknown_parameter"),
    (M, {"model": None}, "model", "invalid_value"),
    (M, {"max_tokens": None}, "max_tokens", "invalid_value"),
    (M, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (M, {"max_tokens": 4097}, "max_tokens", "context_length_exceeded"),
    (M, {"messages": []}, "messages", "invalid_value"),
    (M, {"messages": ["hi"]}, "messages[0]", "invalid_type"),
    (M, {"messages": [{"content": "hi"}]}, "messages[0].role", "invalid_type"),
    (M, {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
    (M, {"stop_sequences": "x"}, "stop_sequences", "invalid_type"),
    (M, {"thinking": True}, "thinking", "invalid_type"),
    (M, {"system": 5}, "system", "invalid_type"),
    (M, {"kv_transfer_params": None}, "kv_transfer_params", "unknown_parameter"),
    (M, {"vllm_xargs": {"ec_transfer_params": "x"}}, "vllm_xargs.ec_transfer_params", "unknown_parameter"),
]


@pytest.mark.parametrize(("route", "fields", "param", "code"), BAD)
def test_a_bad_body_is_refused_with_its_field(route: Route, fields: dict[str, Any], param: str, code: str) -> None:
    """400, and the field by its name."""
    with pytest.raises(RequestError) as raised:
        asked(route, fields)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


@pytest.mark.parametrize(("route", "field"), [(R, "max_output_tokens"), (M, "max_tokens"), (R, "seed")])
def test_an_integer_may_be_written_with_a_fraction_of_zero(route: Route, field: str) -> None:
    """JSON knows no difference and engines make none; legs get the integer."""
    value = asked(route, {field: 7.0}).body[field]
    assert (value, type(value)) == (7, int)


@pytest.mark.parametrize("field", ["background", "previous_response_id", "conversation"])
def test_what_needs_a_memory_is_refused_with_the_reason(field: str) -> None:
    """The client learns what to do instead; the field's absent values are no reason."""
    with pytest.raises(RequestError, match="keeps no responses"):
        asked(R, {field: True if field == "background" else "x"})
    assert asked(R, {field: None}).local_reason is None


def test_a_stream_of_responses_or_messages_always_reports_usage() -> None:
    """It is part of their last event, not one that is asked for."""
    assert asked(R, {"stream": True, "stream_options": {"include_obfuscation": False}}).include_usage
    assert asked(M, {"stream": True}).include_usage


TOKENIZE, DETOKENIZE, COUNT = QUESTIONS


@pytest.mark.parametrize(
    ("question", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"messages": []}, "prompt"),
        (TOKENIZE, {"prompt": 5}, "prompt"),
        (TOKENIZE, {"prompt": "x", "model": "other"}, "model"),
        (TOKENIZE, {"prompt": "x", "kv_transfer_params": {}}, "kv_transfer_params"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens"),
        (DETOKENIZE, {"tokens": [2**31]}, "tokens"),
        (DETOKENIZE, {"tokens": [True]}, "tokens"),
        (DETOKENIZE, {"tokens": [0, 5.5]}, "tokens"),
        (DETOKENIZE, {"tokens": "x"}, "tokens"),
        (COUNT, {"messages": [USER]}, "model"),
        (COUNT, {"model": "m"}, "messages"),
        (COUNT, {"model": "m", "messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_its_field(question: Any, body: dict[str, Any], param: str) -> None:
    """Nothing goes to a worker that could only refuse it."""
    with pytest.raises(RequestError) as raised:
        question.parse(orjson.dumps(body), LIMITS)
    assert (raised.value.status, raised.value.param) == (404 if param == "model" and body.get("model") else 400, param)


@pytest.mark.parametrize(
    ("question", "body"),
    [
        (TOKENIZE, {"prompt": ""}),
        (TOKENIZE, {"messages": [USER]}),
        (DETOKENIZE, {"tokens": []}),
        (COUNT, {"model": "m", "messages": [USER]}),
    ],
)
def test_a_question_is_about_the_only_model_if_it_names_none(question: Any, body: dict[str, Any]) -> None:
    """As requests are."""
    assert question.parse(orjson.dumps(body), LIMITS) == (body, "m")
