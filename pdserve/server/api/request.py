"""A request that may be served, whatever its API. Values only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason


class Route(Enum):
    """A route that is served by two legs; the value is its path on router and engine."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a body beyond its type."""

    models: Mapping[str, int]
    """served model → its `max_model_len`, tokens"""
    max_n: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What can be told of a prompt without a tokenizer."""

    text_bytes: int = 0
    """UTF-8 bytes of its text"""
    tokens: int | None = None
    """known only when it came as token ids"""
    is_several: bool = False
    has_media: bool = False

    def __add__(self, other: "Prompt") -> "Prompt":
        """Return both, one after the other; of text only."""
        return Prompt(self.text_bytes + other.text_bytes, has_media=self.has_media or other.has_media)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A body that may be served."""

    route: Route
    body: Mapping[str, Any]
    model: str
    max_model_len: int
    """of the model, tokens"""
    stream: bool
    include_usage: bool
    """the client gets the event that reports its stream's usage"""
    prompt_bytes: int
    prompt_tokens: int | None
    """see `Prompt`"""
    local_reason: PathReason | None
    """why this body cannot be served by two legs, if so"""
    prompt_ids: Sequence[int] | None = None
    """tokens that engines take for the prompt instead of rendering the conversation"""


def served_model(body: Mapping[str, Any], limits: Limits) -> str:
    """Return the model; an absent name is taken for the only one there is. Raises `RequestError` 404."""
    model = body.get("model")
    if model is None and len(limits.models) == 1:
        return next(iter(limits.models))
    if model not in limits.models:
        raise RequestError(404, f"the model {str(model)[:128]!r} does not exist", "model", "model_not_found")
    return str(model)
