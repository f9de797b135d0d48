"""Which wire form a path is answered in. The forms themselves are `wire` and its neighbours."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pdserve.testing import wire, wire_messages, wire_responses


class Form(Protocol):
    """How answers of one API look."""

    @property
    def END(self) -> bytes:  # noqa: N802
        """The last bytes of a stream."""
        ...

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]: ...

    def whole(self, leg_id: str, *, text: str, finish_reason: str, counts: Mapping[str, Any]) -> dict[str, Any]: ...

    def preamble(self, leg_id: str) -> list[bytes]: ...

    def events(self, leg_id: str, *, tokens: Sequence[str], finish_reason: str | None, counts: Mapping[str, Any]) -> list[bytes]: ...

    def error(self, status: int, message: str) -> dict[str, Any]: ...

    def error_event(self, status: int, message: str) -> bytes: ...


class _Completions:
    """Chat completions or completions."""

    END = wire.DONE

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
        return wire.usage(prompt_tokens, completion_tokens, cached_tokens)

    def whole(self, leg_id: str, *, text: str, finish_reason: str, counts: Mapping[str, Any]) -> dict[str, Any]:
        return wire.whole(leg_id, is_chat=self._is_chat, text=text, finish_reason=finish_reason, counts=counts)

    def preamble(self, leg_id: str) -> list[bytes]:
        return []

    def events(self, leg_id: str, *, tokens: Sequence[str], finish_reason: str | None, counts: Mapping[str, Any]) -> list[bytes]:
        return wire.events(leg_id, is_chat=self._is_chat, tokens=tokens, finish_reason=finish_reason, counts=counts or None)

    def error(self, status: int, message: str) -> dict[str, Any]:
        return wire.error_object(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        return wire.event(wire.error_object(status, message, "InternalServerError"))


class _Count(_Completions):
    """An endpoint that answers without generating."""

    def __init__(self, **answer: Any) -> None:
        super().__init__(is_chat=False)
        self._answer = answer

    def whole(self, leg_id: str, *, text: str, finish_reason: str, counts: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer


FORMS: Mapping[str, Form] = {
    "/v1/chat/completions": _Completions(is_chat=True),
    "/v1/completions": _Completions(is_chat=False),
    "/v1/responses": wire_responses,
    "/v1/messages": wire_messages,
    "/v1/messages/count_tokens": _Count(input_tokens=9, context_management={"original_input_tokens": 9}),
    "/tokenize": _Count(count=3, max_model_len=4096, tokens=[1, 2, 3], token_strs=None),
    "/detokenize": _Count(prompt="text"),
}
"""path → its form"""
