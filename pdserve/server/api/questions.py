"""Questions: requests that any healthy worker answers at once, without generating. They carry no ticket and hold no lease."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import RequestError
from pdserve.server.api.dialect import Dialect
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.fields import ARRAY, BOOL, OBJECT, STR, Rule, check_types, load
from pdserve.server.api.messages import read_conversation
from pdserve.server.api.request import Limits, Route, served_model

LARGEST_ID = 2**31 - 1
"""tokenizers take token ids as 32-bit integers"""
_MESSAGES = DIALECTS[Route.MESSAGES]


@dataclass(frozen=True, slots=True)
class Question:
    """One such route."""

    path: str
    dialect: Dialect
    """says how an error looks"""
    rules: Mapping[str, Rule]
    required: Mapping[str, Mapping[str, Any]]
    """as in `Dialect`"""
    check: Callable[[Mapping[str, Any]], None]
    """raises `RequestError` for what types cannot say"""

    def parse(self, raw: bytes, limits: Limits) -> tuple[Mapping[str, Any], str]:
        """Check a body; returns it and the model it is about. Raises `RequestError`."""
        body = load(raw)
        check_types(body, self.rules)
        model = served_model(body, limits)
        self.check(body)
        return body, model


def _check_tokenize(body: Mapping[str, Any]) -> None:
    if body.get("prompt") is None and not body.get("messages"):
        raise RequestError(400, "prompt or messages must be given", "prompt", "invalid_value")


def _check_detokenize(body: Mapping[str, Any]) -> None:
    tokens = body.get("tokens")
    if tokens is None:
        raise RequestError(400, "tokens must be an array of token ids", "tokens", "invalid_value")
    if not all(_is_integer(token) and 0 <= token <= LARGEST_ID for token in tokens):
        raise RequestError(400, f"tokens must be an array of integers between 0 and {LARGEST_ID}", "tokens", "invalid_type")


def _is_integer(value: object) -> bool:
    """Say whether an engine reads this as an integer: 5.0 is one."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _check_count(body: Mapping[str, Any]) -> None:
    if body.get("model") is None:
        raise RequestError(400, "model is required", "model", "invalid_value")
    read_conversation(body)


_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
QUESTIONS = (
    Question(
        "/tokenize",
        DIALECTS[Route.COMPLETIONS],
        {"model": STR, "prompt": STR, "messages": ARRAY, "add_special_tokens": BOOL, "chat_template_kwargs": OBJECT, "tools": ARRAY},
        {},
        _check_tokenize,
    ),
    Question(
        "/detokenize",
        DIALECTS[Route.COMPLETIONS],
        {"model": STR, "tokens": ARRAY},
        {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": LARGEST_ID}}},
        _check_detokenize,
    ),
    Question(
        "/v1/messages/count_tokens",
        _MESSAGES,
        {name: _MESSAGES.rules[name] for name in _COUNTED},
        {name: _MESSAGES.required[name] for name in ("model", "messages")},
        _check_count,
    ),
)
