"""Anthropic's messages.

The prefill leg streams: an engine parses the arguments of a forced tool call before it sends a whole answer, and one token is no JSON.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.dialect import Dialect, integers, replace_known
from pdserve.server.api.fields import (
    ARRAY,
    BOOL,
    INT,
    NUMBER,
    OBJECT,
    STR,
    STRINGS,
    TEXT_OR_ARRAY,
    check_range,
    utf8_bytes,
    wrong_type,
)
from pdserve.server.api.request import Limits, Prompt, Route
from pdserve.server.frames import Frame, FrameKind, FrameSplitter, event_data, event_name, event_payload

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MEDIA = frozenset({"image", "document"})
_TOLD = re.compile(rb"event:[ ]?(?:message_delta|message_stop|error|ping)[\r\n]")


class Messages(Dialect):
    """`/v1/messages`; streams of named events that end with `message_stop`."""

    route = Route.MESSAGES
    rules: ClassVar = {
        "model": STR,
        "messages": ARRAY,
        "max_tokens": INT,
        "system": TEXT_OR_ARRAY,
        "stream": BOOL,
        "stop_sequences": STRINGS,
        "temperature": NUMBER,
        "top_k": INT,
        "top_p": NUMBER,
        "tools": ARRAY,
        "tool_choice": OBJECT,
        "thinking": OBJECT,
        "output_config": OBJECT,
        "metadata": OBJECT,
        "cache_salt": STR,
        "vllm_xargs": OBJECT,
    }
    required: ClassVar = {
        "model": {"type": "string"},
        "max_tokens": {"type": "integer"},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array"]}},
            },
        },
    }
    prefill_fields = frozenset(
        {
            *("model", "cache_salt"),  # part of a block's identity
            *("messages", "system"),
            *("tools", "tool_choice"),  # rendered by the template
            "output_config",  # its effort is given to the template, its format too where that renders it
            "chat_template_kwargs",
        }
    )
    one_token: ClassVar = {"max_tokens": 1, "stream": True, "temperature": 0}

    def ranges(self, limits: Limits) -> Mapping[str, tuple[int, int]]:
        return {"max_tokens": (1, max(limits.models.values()))}

    def read(self, body: Mapping[str, Any], limits: Limits, max_model_len: int) -> Prompt:
        for field in ("model", "max_tokens"):
            if body.get(field) is None:
                raise RequestError(400, f"{field} is required", field, "invalid_value")
        check_range(body, "max_tokens", 1, max_model_len, "context_length_exceeded")
        return read_conversation(body)

    def local_reason(self, body: Mapping[str, Any], prompt: Prompt, max_model_len: int) -> PathReason | None:
        return PathReason.MEDIA if prompt.has_media else None

    def prefill(self, body: Mapping[str, Any], leg_id: str) -> dict[str, Any]:
        """Return the prompt and one token; a budget for thinking is no part of the prompt, and must be less than the tokens asked for."""
        fields = super().prefill(body, leg_id)
        thinking = body.get("thinking")
        if thinking is not None and thinking.get("type") != "enabled":
            fields["thinking"] = thinking
        return fields

    def is_plain(self, chunk: bytes) -> bool:
        return (
            chunk.startswith(b"event: ")
            and chunk.endswith(b"\n\n")
            and _TOLD.search(chunk) is None
            and b"\n\ndata:" not in chunk
            and b"\n\n:" not in chunk
        )

    def classify(self, raw: bytes) -> Sequence[Frame]:
        if event_data(raw) is None:
            return (Frame(FrameKind.OTHER, raw),)
        payload = event_payload(raw) or {}
        match event_name(raw) or payload.get("type"):
            case "message_stop":
                return (Frame(FrameKind.DONE, raw),)
            case "ping":
                return (Frame(FrameKind.OTHER, raw),)
            case "error":
                return (Frame(FrameKind.ERROR, raw, {"error": payload.get("error")}),)
            case "message_delta" if (payload.get("delta") or {}).get("stop_reason") is None:
                return (Frame(FrameKind.ABORTED, raw),)
            case "message_delta":
                return (Frame(FrameKind.USAGE, raw, payload, is_finish=True),)
            case _ if payload.get("error") is not None:
                return (Frame(FrameKind.ERROR, raw, payload),)
            case _:
                return (Frame(FrameKind.DATA, raw),)

    def is_aborted(self, payload: Mapping[str, Any]) -> bool:
        _ = payload["content"]
        return payload.get("stop_reason") is None

    def counts(self, usage: Mapping[str, Any]) -> Mapping[str, int]:
        return integers(
            prompt_tokens=_prompt_tokens(usage),
            completion_tokens=usage.get("output_tokens"),
            cached_tokens=usage.get("cache_read_input_tokens"),
            written_tokens=usage.get("cache_creation_input_tokens"),
        )

    def mend(self, usage: dict[str, Any], prefill: Mapping[str, int]) -> bool:
        """Divide the prompt anew into tokens read from the cache, written to it, and `input_tokens`, which are the rest."""
        prompt_tokens = _prompt_tokens(usage)
        told = {"cache_read_input_tokens": prefill.get("cached_tokens"), "cache_creation_input_tokens": prefill.get("written_tokens")}
        if not replace_known(usage, told):
            return False
        usage["input_tokens"] = max(0, prompt_tokens - sum(usage.get(name) or 0 for name in told))
        return True

    def prompt_counts(self, content: bytes) -> Mapping[str, int]:
        """Return the counts in a prefill leg's stream. Raises `ValueError` if it says that the leg failed."""
        counts: Mapping[str, int] = {}
        for frame in FrameSplitter(self).feed(content):
            if frame.kind in (FrameKind.ERROR, FrameKind.ABORTED):
                raise ValueError("the stream of the prefill leg ended in an error")
            if frame.payload is not None and isinstance(frame.payload.get("usage"), dict):
                counts = self.counts(frame.payload["usage"])
        return counts

    def error_body(self, status: int, body: bytes) -> bytes:
        """Return the API's own error; an engine's is one already, unless its framework refused the body."""
        told = orjson.loads(body)
        if told.get("type") == "error":
            return body
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        message = told["error"].get("message") if isinstance(told.get("error"), dict) else told.get("error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": str(message)}})

    def error_event(self, status: int, body: bytes) -> bytes:
        return b"event: error\ndata: " + self.error_body(status, body) + b"\n\n"


def read_conversation(body: Mapping[str, Any]) -> Prompt:
    """Check and measure `system` and `messages`. Raises `RequestError`."""
    messages = body.get("messages")
    if not messages:
        raise RequestError(400, "messages must be a non-empty array", "messages", "invalid_value")
    prompt = _read_blocks(body.get("system"))
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong_type(place, "an object")
        if not isinstance(message.get("role"), str):
            raise wrong_type(f"{place}.role", "a string")
        if not isinstance(message.get("content"), str | list):
            raise wrong_type(f"{place}.content", "a string or an array of blocks")
        prompt += _read_blocks(message["content"])
    return prompt


def _read_blocks(content: object) -> Prompt:
    if isinstance(content, str):
        return Prompt(utf8_bytes(content))
    prompt = Prompt()
    for block in content if isinstance(content, list) else ():
        if not isinstance(block, dict):
            continue
        if block.get("type") in _MEDIA:
            prompt += Prompt(has_media=True)
        for name in ("text", "thinking", "content"):
            prompt += _read_blocks(block.get(name))
    return prompt


def _prompt_tokens(usage: Mapping[str, Any]) -> int:
    return sum(usage.get(name) or 0 for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
