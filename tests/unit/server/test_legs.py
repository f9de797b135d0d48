"""The two bodies of a request: prefill's is built from a list, decode's is the client's own."""

from typing import Any

import orjson
import pytest

from pdserve.errors import RequestError
from pdserve.server.api.dialects import DIALECTS, parse
from pdserve.server.api.request import Limits, Route
from pdserve.server.legs import decode_body, prefill_body
from pdserve.types import Ticket, TransferSide

TICKET = Ticket("ab" * 16, 2, "p0", "p0-1", "d0", "d0-1", 60.0)
BASE: dict[Route, dict[str, Any]] = {
    Route.CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    Route.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Route.RESPONSES: {"model": "m", "input": "hi"},
    Route.MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
}
OPENAI: dict[str, list[Any]] = {
    "max_tokens": [1, 5, 4000],
    "min_tokens": [0, 1, 100],
    "stream": [False, True],
    "n": [1],
    "best_of": [1, 5],
    "stop": ["x", ["x", "y"]],
    "echo": [False],
    "ignore_eos": [True],
    "temperature": [0, 0.7],
    "seed": [0, 2**40],
    "user": ["u"],
    "logit_bias": [{"7": -100}],
    "structured_outputs": [{"regex": "a+"}],
}
CHAT: dict[str, list[Any]] = OPENAI | {
    "max_completion_tokens": [1, 5],
    "logprobs": [True],
    "top_logprobs": [3],
    "tool_choice": ["required"],
    "parallel_tool_calls": [False],
}
COMPLETIONS: dict[str, list[Any]] = OPENAI | {"logprobs": [0, 5], "suffix": ["s"]}
RESPONSES: dict[str, list[Any]] = {
    "max_output_tokens": [1, 5, 4000],
    "stream": [False, True],
    "stop": ["x", ["x", "y"]],
    "ignore_eos": [True],
    "temperature": [0, 0.7],
    "seed": [0],
    "include": [["message.output_text.logprobs"]],
    "text": [{"format": {"type": "json_object"}}],
    "tools": [[{"type": "function", "name": "f", "parameters": {}}]],
    "reasoning": [{"effort": "low"}],
    "instructions": ["be brief"],
    "metadata": [{"a": "b"}],
    "stream_options": [{"include_obfuscation": False}],
}
MESSAGES: dict[str, list[Any]] = {
    "max_tokens": [1, 2000],
    "stream": [False, True],
    "stop_sequences": [["x"]],
    "temperature": [0.7],
    "top_k": [5],
    "tool_choice": [{"type": "any"}, {"type": "tool", "name": "f"}],
    "tools": [[{"name": "f", "input_schema": {"type": "object"}}]],
    "output_config": [{"effort": "low"}],
    "thinking": [{"type": "disabled"}, {"type": "adaptive"}],
    "system": ["be brief"],
    "metadata": [{"user_id": "u"}],
}
FIELDS = {Route.CHAT: CHAT, Route.COMPLETIONS: COMPLETIONS, Route.RESPONSES: RESPONSES, Route.MESSAGES: MESSAGES}
LEG = "ab-1"
ONE_TOKEN: dict[Route, dict[str, Any]] = {
    Route.CHAT: {"max_completion_tokens": 1, "max_tokens": 1, "n": 1, "stream": False, "temperature": 0},
    Route.COMPLETIONS: {"max_tokens": 1, "n": 1, "stream": False, "temperature": 0},
    Route.RESPONSES: {"max_output_tokens": 1, "stream": False, "temperature": 0, "store": False, "request_id": "resp_ab-1"},
    Route.MESSAGES: {"max_tokens": 1, "stream": True, "temperature": 0},
}
PAIRS = [
    (route, {first: one, second: other})
    for route, fields in FIELDS.items()
    for first in fields
    for second in fields
    if first < second
    for one in fields[first]
    for other in fields[second]
]


def bodies(route: Route, fields: dict[str, Any], ticket: Ticket = TICKET) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return prefill's and decode's body of a client's request."""
    request = parse(route, orjson.dumps({**BASE[route], **fields}), Limits({"m": 4096}, 16))
    return orjson.loads(prefill_body(request, ticket, LEG)), orjson.loads(decode_body(request, ticket, LEG))


def test_for_any_two_fields_prefill_gets_one_token_and_decode_the_clients_body() -> None:
    """Pairwise over the fields that shape an answer: prefill's body holds nothing but the prompt and one token."""
    assert len(PAIRS) > 300
    for route, fields in PAIRS:
        prefill, decode = bodies(route, fields)
        assert prefill.pop("kv_transfer_params") == TICKET.params(TransferSide.SEND)
        allowed = DIALECTS[route].prefill_fields | {"thinking"}
        assert prefill == {**BASE[route], **{k: v for k, v in fields.items() if k in allowed}, **ONE_TOKEN[route]}
        assert decode.pop("kv_transfer_params") == TICKET.params(TransferSide.RECEIVE)
        if route in (Route.CHAT, Route.COMPLETIONS):
            asked = decode.pop("stream_options", None)
            assert asked == ({"include_usage": True} if fields.get("stream") else None)
        own = {"store": False, "request_id": "resp_ab-1"} if route is Route.RESPONSES else {}
        assert decode == {**BASE[route], **fields, **own}


def test_a_budget_for_thinking_is_decodes_alone() -> None:
    """An engine refuses a budget that is not less than the tokens asked for; prefill asks for one."""
    prefill, decode = bodies(Route.MESSAGES, {"max_tokens": 3000, "thinking": {"type": "enabled", "budget_tokens": 2000}})
    assert "thinking" not in prefill
    assert decode["thinking"] == {"type": "enabled", "budget_tokens": 2000}


@pytest.mark.parametrize("store", [None, False, True])
def test_no_engine_is_asked_to_store_a_response(store: bool | None) -> None:
    """Stock clients leave `store` out, which means true; nothing is kept whatever they say, on neither engine."""
    for body in bodies(Route.RESPONSES, {} if store is None else {"store": store}):
        assert body["store"] is False


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"include_usage": True}, {"include_usage": True}),
        ({"continuous_usage_stats": True}, {"include_usage": True}),
        ({"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True, "continuous_usage_stats": True}),
        ({"include_usage": False, "other": 1}, {"include_usage": True, "other": 1}),
    ],
)
def test_decode_is_always_asked_for_usage_in_a_stream(sent: dict[str, Any] | None, asked: dict[str, Any]) -> None:
    """The client's other options stay, but none may come alive through the router's own wish."""
    _, decode = bodies(Route.CHAT, {"stream": True, "stream_options": sent})
    assert decode["stream_options"] == asked


def test_a_local_request_has_no_ticket() -> None:
    """Decode's body without a ticket carries no transfer parameters at all."""
    request = parse(Route.CHAT, orjson.dumps(BASE[Route.CHAT]), Limits({"m": 4096}, 16))
    assert "kv_transfer_params" not in orjson.loads(decode_body(request, None, LEG))


@pytest.mark.parametrize("route", Route)
def test_the_clients_request_id_reaches_no_engine(route: Route) -> None:
    """Engines know a request by the router's id only: by a header, or for responses in the body, the same on both."""
    known = {body.get("request_id") for body in bodies(route, {"request_id": "mine", "priority": 0})}
    assert known == ({"resp_ab-1"} if route is Route.RESPONSES else {None})


@pytest.mark.parametrize("depth", [10, 200])
def test_deep_bodies_pass(depth: int) -> None:
    """Nesting that any JSON library can write is no reason to refuse."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    _, decode = bodies(Route.CHAT, {"metadata": value})
    assert decode["metadata"] == value


def test_a_body_too_deep_to_encode_is_the_clients_error() -> None:
    """The encoder's limit is a 400, not a crash."""
    raw = b'{"model":"m","prompt":"x","metadata":' + b"[" * 300 + b"]" * 300 + b"}"
    request = parse(Route.COMPLETIONS, raw, Limits({"m": 4096}, 16))
    with pytest.raises(RequestError) as raised:
        decode_body(request, TICKET, LEG)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")
