"""How a vLLM server answers `/v1/messages`, as bytes. What `fake_worker` sends and tests compare with."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pdserve.testing import wire

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""by finish reason; none for any other"""


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Return an engine's usage object; no `cached_tokens`, no cache fields, as without `--enable-prompt-tokens-details`."""
    cached = {} if cached_tokens is None else {"cache_read_input_tokens": cached_tokens}
    return {"output_tokens": completion_tokens, **cached, "input_tokens": prompt_tokens - (cached_tokens or 0)}


def whole(leg_id: str, *, text: str, finish_reason: str, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete answer."""
    stop = {"stop_reason": _STOP[finish_reason]} if finish_reason in _STOP else {}
    return {**_message(leg_id), "content": [{"type": "text", "text": text}], **stop, "usage": dict(counts)}


def preamble(leg_id: str) -> list[bytes]:
    """Return what is sent before the engine has computed anything."""
    return []


def events(leg_id: str, *, tokens: Sequence[str], finish_reason: str | None, counts: Mapping[str, Any]) -> list[bytes]:
    """Return a stream without its `message_stop`, one delta per token; no `message_delta` without a finish."""
    started = {"input_tokens": sum(counts.get(name, 0) for name in ("input_tokens", "cache_read_input_tokens")), "output_tokens": 0}
    message = {**_message(leg_id), "content": [], "stop_reason": None, "stop_sequence": None, "usage": started}
    sent = [_event("message_start", message=message)]
    if tokens:
        sent.append(_event("content_block_start", index=0, content_block={"type": "text", "text": ""}))
        sent += [_event("content_block_delta", index=0, delta={"type": "text_delta", "text": token}) for token in tokens]
        sent.append(_event("content_block_stop", index=0))
    if finish_reason is not None:
        delta = {"stop_reason": _STOP.get(finish_reason), "stop_sequence": None}
        sent.append(_event("message_delta", delta=delta, usage=dict(counts)))
    return sent


def error(status: int, message: str) -> dict[str, Any]:
    """Return an engine's error body."""
    return {"type": "error", "error": {"type": "BadRequestError", "message": message}}


def error_event(status: int, message: str) -> bytes:
    """Return an engine's error in a stream."""
    return _event("error", error={"type": "internal_error", "message": message})


def _message(leg_id: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{leg_id}", "type": "message", "role": "assistant", "model": wire.MODEL}


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **fields}) + b"\n\n"


END = _event("message_stop")
