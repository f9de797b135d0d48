"""Answers of any public API, whole or streamed, brought into one comparable form: what was generated, why it ended, how it was counted.

Ids and times differ between two runs of one request and are left out. How many tokens came in one event is the network's affair, so a
stream counts as what its events add up to.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
_OWN = frozenset(
    {
        *("id", "item_id", "call_id", "tool_use_id", "signature", "system_fingerprint", "kv_transfer_params", "cache_salt"),
        *("created", "created_at", "completed_at", "sequence_number"),
    }
)


def ask(client: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Send one request; returns its answer in comparable form, a refusal as its status and message, also one that came as the only event."""
    if not body.get("stream"):
        answer = client.post(path, json=body, headers=headers)
        if answer.status_code != 200:
            return _error(answer.status_code, answer.json()["error"])
        return comparable(answer.json())
    with client.stream("POST", path, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            answer.read()
            return _error(answer.status_code, answer.json()["error"])
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = list(_events(answer.iter_lines()))
    return comparable(_put_together(path, events))


def _error(status: int, error: dict[str, Any]) -> dict[str, Any]:
    # An engine counts the fields of the body that it refuses.
    return {"refused": status, "message": re.sub(r"<dict of \d+ items>", "<dict>", error["message"])}


def same(one: Any, other: Any) -> bool:
    """Say whether two comparable values are equal; logprobs may differ in what float32 leaves to the shape of a batch."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def comparable(value: Any) -> Any:
    """Leave out what is a run's own, all the way down."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: comparable(item) for name, item in value.items() if name not in _OWN}


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any] | str]:
    for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            yield data if data == "[DONE]" else json.loads(data)


def _put_together(path: str, events: list[Any]) -> dict[str, Any]:
    if path == RESPONSES:
        return _response(events)
    if path == MESSAGES:
        return _message(events)
    assert events[-1] == "[DONE]"
    assert "[DONE]" not in events[:-1]
    answer: dict[str, Any] = {"choices": {}}
    for event in events[:-1]:
        if "error" in event:
            return _error(event["error"]["code"], event["error"])
        if event.get("usage") and not event["choices"]:
            answer["usage"] = event["usage"]
        for choice in event["choices"]:
            whole = answer["choices"].setdefault(choice["index"], {})
            _add(whole, choice)
    answer["choices"] = [answer["choices"][index] for index in sorted(answer["choices"])]
    return answer


def _add(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add what one event brings: text is appended, lists of tokens too, tool calls by their number; anything else is replaced."""
    for name, value in delta.items():
        known = whole.get(name)
        if value is None:
            whole.setdefault(name, None)
        elif name == "tool_calls":
            calls = whole.setdefault(name, {}) or {}
            for call in value:
                _add(calls.setdefault(call["index"], {}), call)
        elif (isinstance(value, str) and isinstance(known, str) and name not in ("role", "type", "finish_reason", "name")) or (
            isinstance(value, list) and isinstance(known, list)
        ):
            whole[name] = known + value
        elif isinstance(value, dict) and isinstance(known, dict):
            _add(known, value)
        else:
            whole[name] = json.loads(json.dumps(value))


def _response(events: list[Any]) -> dict[str, Any]:
    names = [event["type"] for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names.count("response.completed") == 1
    assert names[-1] == "response.completed"
    response: dict[str, Any] = events[-1]["response"]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
    assert deltas == "".join(texts)
    return response


def _message(events: list[Any]) -> dict[str, Any]:
    names = [event["type"] for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                for name, value in event["delta"].items():
                    if name != "type":
                        blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + value
    return {"content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"], "model": events[0]["message"]["model"]}
