"""How a vLLM server answers `/v1/responses`, as bytes. What `fake_worker` sends and tests compare with."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pdserve.testing import wire

END = b""
_STATUS = {"length": "incomplete", "abort": "cancelled", "error": "failed"}
"""by finish reason; any other completes"""
_PLACE = {"item_id": "msg_1", "output_index": 0}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Return an engine's usage object."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached_tokens or 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
        "total_tokens": prompt_tokens + completion_tokens,
    }


def whole(leg_id: str, *, text: str, finish_reason: str, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete answer."""
    return {**_response(leg_id, _STATUS.get(finish_reason, "completed")), "output": [_item(text)] if text else [], "usage": dict(counts)}


def preamble(leg_id: str) -> list[bytes]:
    """Return what is sent before the engine has computed anything."""
    response = _response(leg_id, "in_progress")
    return [
        _event(name, sequence_number=number, response=response) for number, name in enumerate(("response.created", "response.in_progress"))
    ]


def events(leg_id: str, *, tokens: Sequence[str], finish_reason: str | None, counts: Mapping[str, Any]) -> list[bytes]:
    """Return the rest of a stream, one delta per token; no last event without a finish."""
    text = "".join(tokens)
    opening = [("response.output_item.added", {"output_index": 0, "item": {**_item(""), "status": "in_progress"}})]
    deltas = [("response.output_text.delta", {**_PLACE, "content_index": 0, "delta": token, "logprobs": []}) for token in tokens]
    closing = [
        ("response.output_text.done", {**_PLACE, "content_index": 0, "text": text, "logprobs": []}),
        ("response.output_item.done", {"output_index": 0, "item": _item(text)}),
    ]
    told: list[tuple[str, dict[str, Any]]] = [*opening, *deltas, *closing] if tokens else []
    if finish_reason is not None:
        told.append(("response.completed", {"response": whole(leg_id, text=text, finish_reason=finish_reason, counts=counts)}))
    return [_event(name, sequence_number=number, **fields) for number, (name, fields) in enumerate(told, start=2)]


def error(status: int, message: str) -> dict[str, Any]:
    """Return an engine's error body."""
    return wire.error_object(status, message)


def error_event(status: int, message: str) -> bytes:
    """Return an engine's error in a stream."""
    return _event("error", code=str(status), message=message, param=None)


def _response(leg_id: str, status: str) -> dict[str, Any]:
    return {
        "id": leg_id,
        "created_at": 1,
        "model": wire.MODEL,
        "object": "response",
        "output": [],
        "status": status,
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "usage": None,
        "kv_transfer_params": None,
    }


def _item(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}] if text else []
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({**fields, "type": name}) + b"\n\n"
