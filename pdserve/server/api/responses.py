"""Responses, without state: nothing is kept between two requests, so whatever refers to an earlier response is refused by name.

`store` defaults to true for stock clients, most of which never ask for a stored response; engines are always told false, as a vLLM server without
a store treats it itself. The engine names such a request by its body's `request_id`, not by a header.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.chat import read_parts
from pdserve.server.api.dialect import Dialect, integers, replace_known
from pdserve.server.api.fields import ARRAY, BOOL, INT, NUMBER, OBJECT, STOP, STR, TEXT_OR_ARRAY, check_range, utf8_bytes, wrong_type
from pdserve.server.api.openai import first_reason
from pdserve.server.api.request import ClientRequest, Limits, Prompt, Route
from pdserve.server.frames import Frame, FrameKind, data_event, event_data, event_name, event_payload

NOT_STORED = "this deployment keeps no responses: send the whole conversation as input"
CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})
"""tools that the client runs; with any other an engine may answer its own calls, each time with a longer prompt"""
_STATEFUL = ("previous_response_id", "conversation")
_NEVER_NULL = frozenset({"background", "truncation"})
"""null stands for the default of every field, but an engine that is given it for one of these breaks its answer off"""
_PREAMBLE = frozenset({"response.created", "response.in_progress", "response.queued"})
_LAST = frozenset({"response.completed", "response.incomplete"})
_FAILED = frozenset({"response.failed", "error"})
_TOLD = re.compile(rf"event:[ ]?(?:{'|'.join(map(re.escape, sorted(_PREAMBLE | _LAST | _FAILED)))})[\r\n]".encode())


class Responses(Dialect):
    """`/v1/responses`; streams of named events that end with the whole response."""

    route = Route.RESPONSES
    rules: ClassVar = {
        "model": STR,
        "input": TEXT_OR_ARRAY,
        "instructions": STR,
        "max_output_tokens": INT,
        "stream": BOOL,
        "stream_options": OBJECT,
        "store": BOOL,
        "background": BOOL,
        "previous_response_id": STR,
        "temperature": NUMBER,
        "top_p": NUMBER,
        "top_logprobs": INT,
        "seed": INT,
        "stop": STOP,
        "tools": ARRAY,
        "reasoning": OBJECT,
        "text": OBJECT,
        "truncation": STR,
        "cache_salt": STR,
        "vllm_xargs": OBJECT,
    }
    required: ClassVar = {"input": {"type": ["string", "array"], "items": {"type": "object"}}}
    refused: ClassVar = {
        **{field: {"type": "null"} for field in (*_STATEFUL, "prompt")},
        "background": {"enum": [False, None]},
    }
    prefill_fields = frozenset(
        {
            *("model", "cache_salt"),  # part of a block's identity
            *("input", "instructions", "previous_input_messages"),
            *("tools", "tool_choice"),  # rendered by the template
            "reasoning",  # its effort is given to the template
            "chat_template_kwargs",
            *("mm_processor_kwargs", "media_io_kwargs"),
        }
    )
    has_preamble = True
    one_token: ClassVar = {"max_output_tokens": 1, "stream": False, "temperature": 0, "store": False}

    def ranges(self, limits: Limits) -> Mapping[str, tuple[int, int]]:
        return {"max_output_tokens": (1, max(limits.models.values()))}

    def read(self, body: Mapping[str, Any], limits: Limits, max_model_len: int) -> Prompt:
        for field in _STATEFUL:
            if body.get(field) is not None:
                raise RequestError(400, f"{field} is not supported: {NOT_STORED}", field, "unsupported_parameter")
        if body.get("background"):
            raise RequestError(400, f"background is not supported: {NOT_STORED}", "background", "unsupported_parameter")
        if body.get("prompt") is not None:
            raise RequestError(400, "prompt templates are not supported", "prompt", "unsupported_parameter")
        check_range(body, "max_output_tokens", 1, max_model_len, "context_length_exceeded")
        conversation = body.get("input")
        if conversation is None:
            raise RequestError(400, "input must be a string or an array of items", "input", "invalid_value")
        prompt = Prompt(utf8_bytes(body.get("instructions") or ""))
        if isinstance(conversation, str):
            return prompt + Prompt(utf8_bytes(conversation))
        for index, item in enumerate(conversation):
            prompt += _read_item(item, f"input[{index}]")
        return prompt

    def local_reason(self, body: Mapping[str, Any], prompt: Prompt, max_model_len: int) -> PathReason | None:
        tools = body.get("tools") or ()
        reasons = (
            (prompt.has_media, PathReason.MEDIA),
            (any(isinstance(tool, dict) and tool.get("type") not in CLIENT_TOOLS for tool in tools), PathReason.ENGINE_TOOLS),
            ((body.get("truncation") or "disabled") != "disabled", PathReason.TRUNCATION),
        )
        return first_reason(reasons)

    def prefill(self, body: Mapping[str, Any], leg_id: str) -> dict[str, Any]:
        return {**super().prefill(body, leg_id), "request_id": engine_id(leg_id)}

    def decode(self, request: ClientRequest, leg_id: str) -> dict[str, Any]:
        fields = {name: value for name, value in super().decode(request, leg_id).items() if value is not None or name not in _NEVER_NULL}
        return {**fields, "store": False, "request_id": engine_id(leg_id)}

    def is_plain(self, chunk: bytes) -> bool:
        return (
            chunk.startswith(b"event: response.")
            and chunk.endswith(b"\n\n")
            and _TOLD.search(chunk) is None
            and b"\n\ndata:" not in chunk
            and b"\n\n:" not in chunk
        )

    def classify(self, raw: bytes) -> Sequence[Frame]:
        data = event_data(raw)
        if data is None:
            return (Frame(FrameKind.OTHER, raw),)
        if data.strip() == b"[DONE]":
            return (Frame(FrameKind.DONE, b""),)
        name = event_name(raw)
        payload = None if name is not None and name not in _LAST | _FAILED else event_payload(raw)
        name = name or str((payload or {}).get("type"))
        if name in _PREAMBLE:
            return (Frame(FrameKind.PREAMBLE, raw),)
        if payload is None:
            return (Frame(FrameKind.DATA, raw),)
        response = payload.get("response")
        status = response.get("status") if isinstance(response, dict) else None
        if name in _FAILED or status == "failed" or payload.get("error") is not None:
            return (Frame(FrameKind.ERROR, raw, {"error": _error_in(payload)}),)
        if status == "cancelled":
            return (Frame(FrameKind.ABORTED, raw),)
        if name in _LAST and isinstance(response, dict):
            return Frame(FrameKind.USAGE, raw, payload, is_finish=True), Frame(FrameKind.DONE, b"")
        return (Frame(FrameKind.DATA, raw),)

    def is_aborted(self, payload: Mapping[str, Any]) -> bool:
        _ = payload["output"]
        return bool(payload["status"] in ("cancelled", "failed"))

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        response = payload.get("response")
        return response if isinstance(response, dict) else payload

    def counts(self, usage: Mapping[str, Any]) -> Mapping[str, int]:
        details = usage.get("input_tokens_details") or {}
        return integers(
            prompt_tokens=usage.get("input_tokens"),
            completion_tokens=usage.get("output_tokens"),
            cached_tokens=details.get("cached_tokens"),
            written_tokens=details.get("cache_write_tokens"),
        )

    def mend(self, usage: dict[str, Any], prefill: Mapping[str, int]) -> bool:
        details = usage.get("input_tokens_details")
        if not isinstance(details, dict):
            return False
        # Clients read integers here, so what prefill does not say is none.
        cached_tokens = prefill.get("cached_tokens", 0)
        told: dict[str, object] = {"cached_tokens": cached_tokens, "cache_write_tokens": prefill.get("written_tokens", 0)}
        if len(details.get("cached_tokens_per_turn") or ()) == 1:
            told["cached_tokens_per_turn"] = [cached_tokens]
        return replace_known(details, told)

    def error_event(self, status: int, body: bytes) -> bytes:
        """Return the API's own error event; stock clients raise on its `error`."""
        error = orjson.loads(body)["error"]
        told = {name: error.get(name) for name in ("code", "message", "param")}
        return data_event({"type": "error", **told, "error": error}, "error")


def engine_id(leg_id: str) -> str:
    """Return what engines call a leg, and clients the response; read back by the agent."""
    return f"resp_{leg_id}"


def _error_in(payload: Mapping[str, Any]) -> object:
    response = payload.get("response")
    told = payload.get("error") or (response.get("error") if isinstance(response, dict) else None)
    return told or {"message": payload.get("message"), "code": payload.get("code")}


def _read_item(item: object, place: str) -> Prompt:
    if not isinstance(item, dict):
        raise wrong_type(place, "an object")
    kind = item.get("type", "message")
    match kind:
        case "message" | "reasoning":
            return _read_content(item.get("content"))
        case "function_call" | "custom_tool_call":
            text = item.get("arguments") or item.get("input")
            return Prompt(utf8_bytes(text)) if isinstance(text, str) else Prompt()
        case "function_call_output" | "custom_tool_call_output":
            return _read_content(item.get("output"))
        case "item_reference":
            raise RequestError(400, f"{place} refers to a stored item: {NOT_STORED}", place, "unsupported_parameter")
        case _:
            # Whatever it is, an engine that renders it, or refuses it, does so by itself.
            return Prompt(has_media=True)


def _read_content(content: object) -> Prompt:
    if isinstance(content, str):
        return Prompt(utf8_bytes(content))
    if isinstance(content, list):
        return read_parts(
            [{**part, "type": "text"} if isinstance(part, dict) and part.get("type") == "reasoning_text" else part for part in content]
        )
    return Prompt()
