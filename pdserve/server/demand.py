"""What a request asks of the pool, read from its body: how long, whose, how urgent, and what it shares with others.

Owns what is learned of lengths. A prompt's canonical text is only ever hashed, under a salt of model, tenant and the client's own `cache_salt`, so
that nobody can tell what another's prompts begin with. Knows no worker.

Room on decode is kept for the prompt and the answer: the prompt's estimated tokens, corrected once prefill has told their number, and for each choice
the lesser of the client's own limit and what answers of this model usually take (`OutputEstimator`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson
import xxhash

from pdserve.errors import RequestError
from pdserve.routing.prefixes import prefix_of
from pdserve.routing.select import Demand
from pdserve.routing.tokens import OutputEstimator, TokenEstimator
from pdserve.server.api.request import ClientRequest
from pdserve.server.draft import Draft

HIGHEST_PRIORITY, LOWEST_PRIORITY = -100, 100
"""as in engines the lower value goes first; 0 if a client says nothing"""
_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
"""what names a conversation in a body, if no header does; the first that is a string counts"""
_LEADING_FIELDS = ("tools", "system", "instructions")
"""what templates render ahead of the conversation"""
_CONVERSATION_FIELDS = ("messages", "input", "prompt")
_UNIT, _RECORD = b"\x1f", b"\x1e"
"""between the parts of a message, and after each message"""


class Demands:
    """Makes the demand of each request; one per router.

    Args:
        request_timeout_s: time from a request's start to its deadline.
        may_set_priority: whether clients may.
    """

    def __init__(self, request_timeout_s: float, *, may_set_priority: bool) -> None:
        self._request_timeout_s = request_timeout_s
        self._may_set_priority = may_set_priority
        self._prompts = TokenEstimator()
        self._outputs = OutputEstimator()

    def of(self, request: ClientRequest, draft: Draft) -> Demand:
        """Return what this request asks. Raises `RequestError` for a priority that is none, or not the client's to set."""
        body = request.body
        text = canonical_text(body)
        prompt_tokens, output_tokens = self.tokens(request)
        return Demand(
            model=request.model,
            prompt_tokens=prompt_tokens,
            local_reason=request.local_reason,
            output_tokens=output_tokens,
            tenant=draft.tenant,
            priority=self._priority(body),
            deadline_s=draft.started_s + self._request_timeout_s,
            prefix=prefix_of(text, request.model, draft.tenant, str(body.get("cache_salt") or "")),
            prompt_bytes=len(text),
            session=_session(draft, body),
        )

    def tokens(self, request: ClientRequest) -> tuple[int, int]:
        """Return how many tokens its prompt and its answers are expected to have."""
        body = request.body
        limit = next((body[field] for field in _LIMIT_FIELDS if isinstance(body.get(field), int)), None)
        prompt_tokens = request.prompt_tokens or self._prompts.estimate_tokens(request.model, request.prompt_bytes)
        return prompt_tokens, self._outputs.expected_tokens(request.model, limit) * (body.get("n") or 1)

    def learn(self, request: ClientRequest, usage: Mapping[str, Any]) -> None:
        """Take what an engine reported of a finished request into account."""
        prompt_tokens, completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt_tokens, int):
            self._prompts.learn(request.model, request.prompt_bytes, prompt_tokens)
        if isinstance(completion_tokens, int):
            self._outputs.learn(request.model, completion_tokens // (request.body.get("n") or 1))

    def _priority(self, body: Mapping[str, Any]) -> int:
        priority = body.get("priority") or 0
        if type(priority) is not int:
            raise RequestError(400, "priority must be an integer", "priority", "invalid_type")
        if priority and not self._may_set_priority:
            raise RequestError(400, "priority is not a field clients may set here", "priority", "unknown_parameter")
        if not HIGHEST_PRIORITY <= priority <= LOWEST_PRIORITY:
            message = f"priority must be between {HIGHEST_PRIORITY} and {LOWEST_PRIORITY}"
            raise RequestError(400, message, "priority", "invalid_value")
        return priority


def canonical_text(body: Mapping[str, Any]) -> bytes:
    """Return a prompt's text in the order in which templates render it. A conversation that goes on begins with what it was."""
    parts: list[bytes] = []
    for field in _LEADING_FIELDS:
        if body.get(field):
            parts += (orjson.dumps(body[field]), _RECORD)
    for field in _CONVERSATION_FIELDS:
        value = body.get(field)
        if isinstance(value, str):
            parts.append(value.encode())
        elif isinstance(value, list):
            for item in value:
                parts += _item(item)
    return b"".join(parts)


def _item(item: object) -> Iterator[bytes]:
    """Yield one message, or one element of a prompt that is a list."""
    if not isinstance(item, dict):
        yield orjson.dumps(item)
    else:
        yield str(item.get("role")).encode()
        yield _UNIT
        content = item.get("content")
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            yield text.encode() if isinstance(text, str) else orjson.dumps(part)
        if len(item) > 2:
            yield orjson.dumps({name: value for name, value in item.items() if name not in ("role", "content")})
    yield _RECORD


def _session(draft: Draft, body: Mapping[str, Any]) -> int | None:
    named = draft.session or next((body[field] for field in _SESSION_FIELDS if isinstance(body.get(field), str) and body[field]), None)
    return None if named is None else xxhash.xxh3_64_intdigest(f"{draft.tenant}\0{named}".encode())
