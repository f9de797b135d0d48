"""The allow-lists against vLLM's own request models: whatever a client sends, both legs render the same prompt, or decode alone renders it.

Runs no engine: vLLM's protocol classes say which fields reach its renderer.
"""

import inspect
from typing import Any

import orjson
import pytest

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.dialects import DIALECTS, parse
from pdserve.server.api.request import ClientRequest, Limits, Route
from pdserve.server.legs import decode_body, prefill_body
from pdserve.types import Ticket, TransferSide

pytestmark = pytest.mark.filterwarnings("ignore")

TICKET = Ticket("0" * 32, 1, "p", "p-1", "d", "d-1", 60.0)
LEG = "leg-1"
MAX_MODEL_LEN = 4096
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT_PROMPT_FIELDS: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "part"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "documents": [{"title": "t", "text": "x"}],
    "reasoning_effort": "low",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"style": "brief"},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "truncate_prompt_tokens": 7,
    "truncation_side": "left",
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {"b": 2}},
    "cache_salt": "salt",
}
COMPLETION_PROMPT_FIELDS: dict[str, Any] = {
    "model": "m",
    "prompt": "hi",
    "suffix": "end",
    "add_special_tokens": False,
    "truncate_prompt_tokens": 7,
    "truncation_side": "left",
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {"b": 2}},
    "cache_salt": "salt",
}


RESPONSES_PROMPT_FIELDS: dict[str, Any] = {
    "model": "m",
    "input": [{"role": "user", "content": "hi"}, {"type": "function_call_output", "call_id": "c", "output": "out"}],
    "instructions": "be brief",
    "previous_input_messages": [{"role": "user", "content": "before"}],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
    "tool_choice": "required",
    "reasoning": {"effort": "low"},
    "chat_template_kwargs": {"style": "brief"},
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {"b": 2}},
    "cache_salt": "salt",
}
MESSAGES_PROMPT_FIELDS: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2000,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "part"}],
    "system": [{"type": "text", "text": "be brief"}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "chat_template_kwargs": {"style": "brief"},
    "cache_salt": "salt",
}
PROMPT_FIELDS = {
    Route.CHAT: CHAT_PROMPT_FIELDS,
    Route.COMPLETIONS: COMPLETION_PROMPT_FIELDS,
    Route.RESPONSES: RESPONSES_PROMPT_FIELDS,
    Route.MESSAGES: MESSAGES_PROMPT_FIELDS,
}
BASE: dict[Route, dict[str, Any]] = {
    Route.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Route.COMPLETIONS: {"prompt": "hi"},
    Route.RESPONSES: {"input": "hi"},
    Route.MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000},
}


class ModelLength:
    """All that tokenizing asks of an engine's model config."""

    max_model_len = MAX_MODEL_LEN


def client(route: Route, **fields: Any) -> ClientRequest:
    return parse(route, orjson.dumps({**BASE[route], **fields}), Limits({"m": MAX_MODEL_LEN}, 16))


def engine_request(route: Route, body: bytes) -> Any:
    """Parse a leg as the engine does; messages become the chat completion that the engine makes of them."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    if route is Route.MESSAGES:
        return AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest.model_validate_json(body))
    models = {Route.CHAT: ChatCompletionRequest, Route.COMPLETIONS: CompletionRequest, Route.RESPONSES: ResponsesRequest}
    return models[route].model_validate_json(body)


def rendered(route: Route, request: Any) -> tuple[object, ...]:
    """Return everything an engine's renderer takes from a request, except the output limit."""
    tokens = request.build_tok_params(ModelLength)
    prompt: tuple[object, ...] = (
        *(request.model, request.cache_salt),
        *(getattr(request, "mm_processor_kwargs", None), getattr(request, "media_io_kwargs", None)),
        *(tokens.truncate_prompt_tokens, tokens.truncation_side, tokens.add_special_tokens),
    )
    if route is Route.RESPONSES:
        conversation = (request.input, request.instructions, request.previous_input_messages)
        return (*prompt, *conversation, request.tools, request.tool_choice, request.build_chat_params(None, "auto"))
    if route is not Route.COMPLETIONS:
        return (*prompt, request.messages, request.tools, request.build_chat_params(None, "auto"))
    return (*prompt, request.prompt, request.suffix, request.prompt_embeds)


@pytest.mark.parametrize("route", Route)
def test_both_legs_render_the_same_prompt(route: Route) -> None:
    """With every field that matters set to something of its own, prefill's engine sees what decode's sees."""
    request = client(route, **PROMPT_FIELDS[route])
    prefill = engine_request(route, prefill_body(request, TICKET, LEG))
    decode = engine_request(route, decode_body(request, TICKET, LEG))
    assert rendered(route, prefill) == rendered(route, decode)


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
def test_thinking_leaves_the_prompt_the_same_on_both_legs(thinking: dict[str, Any]) -> None:
    """What switches thinking off reaches the template on both; a budget for it is no part of the prompt."""
    request = client(Route.MESSAGES, thinking=thinking)
    prefill = engine_request(Route.MESSAGES, prefill_body(request, TICKET, LEG))
    decode = engine_request(Route.MESSAGES, decode_body(request, TICKET, LEG))
    assert rendered(Route.MESSAGES, prefill) == rendered(Route.MESSAGES, decode)


@pytest.mark.parametrize("route", Route)
def test_the_ticket_reaches_the_engine(route: Route) -> None:
    """Every API's request hands its transfer parameters to the scheduler."""
    request = client(route)
    decode = engine_request(route, decode_body(request, TICKET, LEG))
    assert decode.to_sampling_params(10, {}).extra_args["kv_transfer_params"] == TICKET.params(TransferSide.RECEIVE)


@pytest.mark.parametrize(
    ("route", "field"),
    [(route, field) for route in Route for field in sorted(DIALECTS[route].prefill_fields)],
)
def test_every_listed_field_is_needed(route: Route, field: str) -> None:
    """Without any one of them the legs would render apart: none is listed for nothing, and the test above sees each."""
    from vllm.exceptions import VLLMValidationError

    fields = PROMPT_FIELDS[route]
    assert field in fields
    request = client(route, **fields)
    body = orjson.loads(prefill_body(request, TICKET, LEG))
    del body[field]
    if field == "tools":
        del body["tool_choice"]
    try:
        prefill = engine_request(route, orjson.dumps(body))
    except (ValueError, VLLMValidationError):
        return
    assert rendered(route, prefill) != rendered(route, engine_request(route, decode_body(request, TICKET, LEG)))


def test_no_field_of_the_engines_renderer_is_missing() -> None:
    """What vLLM's chat request hands to template and tokenizer is in the list, or is known not to change the prompt."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    without_effect = {
        "max_tokens",  # an output limit; `truncation` reasons keep it from deciding where a prompt is cut
        "max_completion_tokens",
        "max_output_tokens",
        "truncation",  # any but "disabled" cuts by the output limit, which is a reason to be local
        "echo",  # asks for the prompt's text next to its ids
        "return_token_ids",
        "return_token_offsets",
    }
    for model, route in ((ChatCompletionRequest, Route.CHAT), (CompletionRequest, Route.COMPLETIONS), (ResponsesRequest, Route.RESPONSES)):
        listed = DIALECTS[route].prefill_fields
        builders = [getattr(model, name) for name in ("build_chat_params", "build_tok_params") if hasattr(model, name)]
        source = "".join(inspect.getsource(builder) for builder in builders)
        read = {field for field in model.model_fields if f"self.{field}" in source}
        assert read - listed - without_effect == set()
        assert read


def test_no_null_breaks_a_response_off() -> None:
    """An engine repeats the request's fields in its response, after the stream has begun; every null that it takes, it must be able to repeat."""
    from pydantic import ValidationError
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse

    tried = 0
    for field in ResponsesRequest.model_fields:
        try:
            body = decode_body(client(Route.RESPONSES, **{field: None}), TICKET, LEG)
            decode = engine_request(Route.RESPONSES, body)
        except (RequestError, ValidationError):
            continue
        sampling = decode.to_sampling_params(10, {})
        told = {"output": [], "status": "in_progress", "usage": None}
        ResponsesResponse.from_request(decode, sampling, model_name="m", created_time=1, **told)
        tried += 1
    assert tried > 20


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 100}])
@pytest.mark.parametrize("truncate", [-1, MAX_MODEL_LEN])
def test_a_cut_that_depends_on_the_output_limit_is_not_made_on_two_engines(truncate: int, limit: dict[str, int]) -> None:
    """Cutting to what the model holds leaves room for the answer asked for, so a one-token leg would cut elsewhere: decode serves it alone."""
    assert client(Route.CHAT, truncate_prompt_tokens=truncate, **limit).local_reason is PathReason.TRUNCATION


SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [None, 1, 500],
    "max_completion_tokens": [None, 1, 500],
    "min_tokens": [None, 0, 5],
    "stream": [None, False, True],
    "n": [None, 1],
    "stop": [None, "x", ["x", "y"]],
    "ignore_eos": [None, True],
    "temperature": [None, 0, 1.5],
    "logprobs": [None, True],
    "seed": [None, 7],
    "tools": [None, [TOOL]],
    "response_format": [None, {"type": "json_object"}],
    "user": [None, "u"],
}


@pytest.mark.parametrize("first", SAMPLING)
def test_any_two_fields_together_leave_prefill_one_token_and_decode_its_own(first: str) -> None:
    """Pairwise over everything that shapes an answer: prefill's body is always valid and asks for one token, decode's is the client's."""
    fields = {**SAMPLING}
    for second in fields:
        for one in fields[first]:
            for other in fields[second]:
                chosen = {name: value for name, value in ((first, one), (second, other)) if value is not None}
                request = client(Route.CHAT, model="m", **chosen)
                prefill = engine_request(Route.CHAT, prefill_body(request, TICKET, LEG))
                sampling = prefill.to_sampling_params(prefill.max_completion_tokens, {})
                assert (sampling.max_tokens, sampling.min_tokens, sampling.n, prefill.stream) == (1, 0, 1, False)
                decode = orjson.loads(decode_body(request, TICKET, LEG))
                assert {name: decode[name] for name in chosen} == chosen
