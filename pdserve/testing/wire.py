"""How a vLLM server answers completions, as bytes: bodies, events, usage, errors. What `fake_worker` sends and tests compare with."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

MODEL = "fake"
DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Return an engine's usage object; no `cached_tokens`, no details, as without `--enable-prompt-tokens-details`."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


def event(payload: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def error_object(status: int, message: str, kind: str = "BadRequestError") -> dict[str, Any]:
    """Return an engine's error body; its `code` is the status."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def whole(request_id: str, *, is_chat: bool, text: str, finish_reason: str, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete answer."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {
        "id": _answer_id(request_id, is_chat=is_chat),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": dict(counts),
        "kv_transfer_params": None,
    }


def events(
    request_id: str, *, is_chat: bool, tokens: Sequence[str], finish_reason: str | None, counts: Mapping[str, Any] | None
) -> list[bytes]:
    """Return a stream's events without `[DONE]`: the role (chat only), one event per token, the usage if `counts` is given."""
    head = {
        "id": _answer_id(request_id, is_chat=is_chat),
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1,
        "model": MODEL,
    }
    sent: list[bytes] = []
    if is_chat:
        sent.append(event({**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}))
    for index, token in enumerate(tokens):
        reason = finish_reason if index == len(tokens) - 1 else None
        content: dict[str, Any] = {"delta": {"content": token}} if is_chat else {"text": token}
        sent.append(event({**head, "choices": [{"index": 0, **content, "finish_reason": reason}]}))
    if counts is not None:
        sent.append(event({**head, "choices": [], "usage": dict(counts)}))
    return sent


def with_token_ids(events: Sequence[bytes], prompt_ids: Sequence[int], first: int) -> list[bytes]:
    """Return a stream's events as an engine sends them that was asked for token ids.

    Args:
        events: the role (chat only), one event per token, the usage if any.
        prompt_ids: of the prompt; they come with the first event.
        first: which token of the whole answer the first one is; its id is `token_id(first)`.
    """
    told: list[bytes] = []
    for number, raw in enumerate(events):
        payload = orjson.loads(raw.removeprefix(b"data: "))
        for choice in payload["choices"]:
            is_role = "role" in choice.get("delta", ())
            if not is_role:
                choice["token_ids"] = [token_id(first)]
                first += 1
            place = payload if "delta" in choice else choice
            place["prompt_token_ids"] = None if number else list(prompt_ids)
        told.append(event(payload))
    return told


def given_tokens(body: Mapping[str, Any], prompt_tokens: int) -> int:
    """Return how much of an answer a leg's prompt of token ids holds. Raises AssertionError if they are not those that an earlier leg was told."""
    prompt_ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
    if not body.get("return_token_ids") or not isinstance(prompt_ids, list):
        return 0
    given = len(prompt_ids) - prompt_tokens
    assert prompt_ids == [*range(prompt_tokens), *map(token_id, range(given))], prompt_ids
    return given


def token_id(index: int) -> int:
    """Return the id of an answer's token."""
    return 1000 + index


def _answer_id(request_id: str, *, is_chat: bool) -> str:
    return f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
