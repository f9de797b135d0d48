"""What one body may hold beyond being valid: how deep, how many, how much output, and no address that an engine would fetch from.

Knows the shape of client bodies, nothing of engines.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import RequestError

OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""what limits the answer, by the names of all routes"""
_CONVERSATION_FIELDS = ("messages", "input")
_SYSTEM_FIELDS = ("system", "instructions")
_COUNTED = (
    ("messages", "max_messages"),
    ("input", "max_messages"),
    ("previous_input_messages", "max_messages"),
    ("tools", "max_tools"),
    ("functions", "max_tools"),
)
_STOP_FIELDS = ("stop", "stop_sequences")
_NO_MEDIA_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_use", "function_call"})
"""parts that engines fetch nothing for; what a tool was called with may well look like an address"""


@dataclass(frozen=True, slots=True)
class Caps:
    """Settings of the same names."""

    max_output_tokens: int | None
    max_json_depth: int
    max_messages: int
    max_tools: int
    max_stop_strings: int
    allow_remote_media: bool


def check_caps(raw: bytes, body: Mapping[str, Any], caps: Caps) -> None:
    """Raise `RequestError` (400, naming the field) for a body that holds more than it may.

    Args:
        raw: the bytes that `body` was parsed from.
    """
    if _may_be_deeper(raw, caps.max_json_depth) and is_deeper(body, caps.max_json_depth):
        raise RequestError(400, f"the body is nested deeper than {caps.max_json_depth} levels", None, "invalid_json")
    for field, setting in _COUNTED:
        most = getattr(caps, setting)
        if isinstance(body.get(field), list) and len(body[field]) > most:
            raise RequestError(400, f"{field} must not have more than {most} elements", field, "invalid_value")
    for field in _STOP_FIELDS:
        if isinstance(body.get(field), list) and len(body[field]) > caps.max_stop_strings:
            raise RequestError(400, f"{field} must not have more than {caps.max_stop_strings} elements", field, "invalid_value")
    _check_output(body, caps.max_output_tokens)
    if not caps.allow_remote_media:
        _check_media(body)


def with_output_limit(body: Mapping[str, Any], default_field: str | None, most: int) -> Mapping[str, Any]:
    """Return the body with the largest output limit there is, if it names none.

    Args:
        default_field: what limits the answer of this route, None where engines have a small limit of their own.
    """
    if default_field is None or any(body.get(field) is not None for field in OUTPUT_FIELDS):
        return body
    return {**body, default_field: most}


def _may_be_deeper(raw: bytes, depth: int) -> bool:
    """Say whether JSON has brackets enough for more levels than `depth`: more than half as many of one kind. Cheap, for text has few."""
    for bracket in (b"[", b"{"):
        place = -1
        for _ in range(depth // 2 + 1):
            place = raw.find(bracket, place + 1)
            if place < 0:
                break
        else:
            return True
    return False


def is_deeper(value: object, depth: int) -> bool:
    """Say whether a parsed value has more levels of objects and arrays than `depth`."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        below: list[Any] = []
        for container in level:
            inner = container.values() if isinstance(container, dict) else container
            below += [each for each in inner if isinstance(each, dict | list)]
        level = below
    return bool(level)


def _check_output(body: Mapping[str, Any], most: int | None) -> None:
    for field in OUTPUT_FIELDS:
        value = body.get(field)
        if most is not None and isinstance(value, int) and value > most:
            raise RequestError(400, f"{field} must be at most {most}", field, "invalid_value")


def _check_media(body: Mapping[str, Any]) -> None:
    for field in (*_CONVERSATION_FIELDS, *_SYSTEM_FIELDS):
        value = body.get(field)
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, dict) and len(item) == 2 and "role" in item and isinstance(item.get("content"), str):
                # A role and a text, as most messages are.
                continue
            place = next(_remote(item, f"{field}[{index}]"), None)
            if place is not None:
                message = f"{place} names a remote address: send the media itself, as a data: URL"
                raise RequestError(400, message, place, "remote_media_not_allowed")


def _remote(part: object, place: str) -> Iterator[str]:
    """Yield the places in a content part, or in what holds parts, that name an address to fetch from."""
    if isinstance(part, list):
        for index, inner in enumerate(part):
            yield from _remote(inner, f"{place}[{index}]")
    elif isinstance(part, dict) and part.get("type") not in _NO_MEDIA_PARTS:
        for name, value in part.items():
            if isinstance(value, dict | list):
                yield from _remote(value, f"{place}.{name}")
            elif isinstance(value, str) and (name == "url" or name.endswith("_url")) and not value.startswith("data:"):
                yield f"{place}.{name}"
