"""What the router must know of an API. One subclass per route; nothing else in the router asks which API a request came by.

Three parts: what a body means, what the two legs are sent, and how answers speak. Bodies and answers are plain JSON values; an answer's bytes are
changed only where `mend` or an error says so.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from pdserve.routing.reasons import PathReason
from pdserve.server.api.fields import Rule
from pdserve.server.api.request import ClientRequest, Limits, Prompt, Route
from pdserve.server.frames import Frame

NEVER_FORWARDED = frozenset({"request_id", "priority"})
"""fields a client may send that are the router's to say; the router names the request to the engine, and its queue has put it in its place"""


class Dialect(ABC):
    """One API."""

    route: ClassVar[Route]
    rules: ClassVar[Mapping[str, Rule]]
    """types of the fields that the router reads; all others go to decode unread"""
    required: ClassVar[Mapping[str, Mapping[str, Any]]]
    """fields without which a body is refused, with what their schema says beyond the rule"""
    refused: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """fields that are not refused only if they say nothing, with the schema of that"""
    prefill_fields: ClassVar[frozenset[str]]
    """what the prefill leg takes over from the client: all that decides which tokens the prompt becomes and which cache entries it may share"""
    one_token: ClassVar[Mapping[str, object]]
    """what the prefill leg is told instead of the client's wishes"""
    has_preamble: ClassVar[bool] = False
    """a stream begins before the engine has computed anything"""
    stream_end: ClassVar[bytes] = b""
    """what comes after the last event of a stream, also of one that failed"""

    @abstractmethod
    def read(self, body: Mapping[str, Any], limits: Limits, max_model_len: int) -> Prompt:
        """Check what types cannot say, and measure the prompt. Raises `RequestError`."""

    @abstractmethod
    def local_reason(self, body: Mapping[str, Any], prompt: Prompt, max_model_len: int) -> PathReason | None:
        """Return why two legs cannot serve this body as one engine would, or None."""

    def ranges(self, limits: Limits) -> Mapping[str, tuple[int, int]]:
        """Return integer fields with the least and the most that they may be, whatever the model."""
        return {}

    def includes_usage(self, body: Mapping[str, Any]) -> bool:
        """Say whether the client gets the event that reports its stream's usage."""
        return True

    # ---- legs -----------------------------------------------------------------------------------------------------------------------

    def prefill(self, body: Mapping[str, Any], leg_id: str) -> dict[str, Any]:
        """Return the prefill leg's body without its ticket: this prompt, one token."""
        return {**{name: value for name, value in body.items() if name in self.prefill_fields}, **self.one_token}

    def decode(self, request: ClientRequest, leg_id: str) -> dict[str, Any]:
        """Return the decode leg's body without its ticket: the client's own."""
        return {name: value for name, value in request.body.items() if name not in NEVER_FORWARDED}

    # ---- answers --------------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_plain(self, chunk: bytes) -> bool:
        """Say whether these bytes are whole events, and token data all of them. Cheap; may say no to what is."""

    @abstractmethod
    def classify(self, raw: bytes) -> Sequence[Frame]:
        """Return what one event means; more than one frame if it means several things."""

    def ends(self, chunk: bytes) -> bool:
        """Say whether a choice ends in this plain data."""
        return False

    @abstractmethod
    def is_aborted(self, payload: Mapping[str, Any]) -> bool:
        """Say whether a whole answer is one of a request that the engine dropped.

        Raises:
            KeyError: this is no answer at all. So do TypeError and AttributeError.
        """

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the object in a whole answer, or in the event that reports usage, which holds `usage` and the engine's transfer parameters."""
        return payload

    @abstractmethod
    def counts(self, usage: Mapping[str, Any]) -> Mapping[str, int]:
        """Return those counts of a usage object that are known: `prompt_tokens`, `completion_tokens`, `cached_tokens` (of the prompt, found in the
        prefix cache) and `written_tokens` (of the prompt, written to it)."""

    @abstractmethod
    def mend(self, usage: dict[str, Any], prefill: Mapping[str, int]) -> bool:
        """Report the prefix cache of the engine that computed the prompt: on decode all of it looks cached.

        Args:
            usage: decode's, changed in place.
            prefill: prefill's counts, those that it tells.

        Returns:
            Whether anything changed.
        """

    def prompt_counts(self, content: bytes) -> Mapping[str, int]:
        """Return the counts in a prefill leg's answer; empty if it says nothing."""
        try:
            usage = orjson.loads(content)["usage"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return {}
        return self.counts(usage) if isinstance(usage, dict) else {}

    def error_body(self, status: int, body: bytes) -> bytes:
        """Return an error as this API's clients expect it.

        Args:
            status: HTTP status.
            body: the error in OpenAI's shape, or an engine's own.
        """
        return body

    def error_event(self, status: int, body: bytes) -> bytes:
        """Return the same as the last event of a stream."""
        return b"data: " + body + b"\n\n"


def replace_known(details: dict[str, Any], told: Mapping[str, object]) -> bool:
    """Replace the values of those fields that `details` has; returns whether any changed."""
    changed = {name: value for name, value in told.items() if name in details and details[name] != value}
    details.update(changed)
    return bool(changed)


def integers(**counts: object) -> dict[str, int]:
    """Return those counts that are integers."""
    return {name: count for name, count in counts.items() if isinstance(count, int)}
