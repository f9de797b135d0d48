"""Takes a stream up again on other workers after its decode worker died, so that the client sees one stream.

    resume_hindrance   whether the rest of an answer depends on the tokens so far alone: greedy, one choice, nothing that looks back at its own output
    Resumption         one such stream: the tokens that the client has, what to ask for the rest, and the rest made to look like the beginning

Engines are asked for token ids; clients never see them. The rest is asked for like any request, with prompt and tokens so far as its prompt, so it
goes through prefill again. Sans I/O; knows how completions and chat completions speak, nothing of workers.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdserve.server.api.request import ClientRequest, Route
from pdserve.server.frames import data_event, event_payload

DEFAULT_MAX_TOKENS = 16
"""of a completion whose body names none, as in the API's reference"""
_LIMITS = ("max_tokens", "max_completion_tokens")
_SAME_FOR_THE_REST = frozenset(
    {
        *("model", "stream", "messages", "prompt", "cache_salt", "add_special_tokens"),
        *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
        *("max_tokens", "max_completion_tokens", "min_tokens"),
        *("seed", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"),
        *("ignore_eos", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("user", "session_id", "prompt_cache_key", "safety_identifier", "metadata", "store", "service_tier", "priority", "request_id"),
    }
)
"""fields that say nothing about output already given, or are reduced by it"""
_NEUTRAL: Mapping[str, Sequence[object]] = {
    "temperature": (0,),
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
    "stop": ([], ""),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
}
"""fields that are as good as absent with these values"""
_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\s*\[([\d,\s]*)\]')
_OUTPUT_IDS = re.compile(rb'"token_ids":\s*\[([\d,\s]*)\]')
_ANY_IDS = re.compile(rb'("(?:prompt_)?token_ids":)\s*\[[\d,\s]*\]')
"""inside a JSON string every quote is escaped, so these are found as fields only"""
_NO_TEXT = re.compile(rb'"(?:text|content)":\s*""|"delta":\s*\{\}')
_NOTHING = re.compile(rb'"delta":\s*\{\}[^}]*"finish_reason":\s*null')


def resumable_routes(*, has_reasoning_parser: bool) -> frozenset[Route]:
    """Return the routes whose streams may be resumed: a reasoning parser looks back at the answer's beginning, and so do the other APIs' events."""
    return frozenset({Route.COMPLETIONS} if has_reasoning_parser else {Route.COMPLETIONS, Route.CHAT})


def resume_hindrance(request: ClientRequest, routes: Collection[Route]) -> str | None:
    """Return what keeps a broken stream of this request from being resumed, None if nothing does.

    Args:
        routes: see `resumable_routes`.
    """
    if request.route not in routes:
        return "route"
    if not request.stream:
        return "not_streamed"
    if request.local_reason is not None:
        return request.local_reason.value
    body = request.body
    if body.get("temperature") is None:
        return "temperature"
    return next((field for field, value in body.items() if value is not None and not _allows(field, value)), None)


def _allows(field: str, value: object) -> bool:
    if field in _SAME_FOR_THE_REST:
        return True
    # `0` is one log probability, `False` is none.
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL.get(field, ()))


class Resumption:
    """One stream over all its attempts.

    Args:
        request: the client's; nothing hinders it.
    """

    def __init__(self, request: ClientRequest) -> None:
        self._client = request
        self._prompt_ids = b""
        """as the engine listed them, a fifth of what they would take as integers"""
        self._output_ids: list[int] = []
        """tokens whose text the client has"""
        self._textless: list[int] = []
        """tokens after those; they may be a part of a character, so the rest begins with them"""
        self._head: dict[str, Any] | None = None
        """`id` and `created` of the stream as it began"""
        self._is_sound = True
        self._given: int | None = None
        """tokens that the client had when the stream was taken up last; None while it is as it began"""
        self._prompt_counts: Mapping[str, int] = {}
        """what prefill said of the client's prompt, see `Dialect.counts`"""

    @property
    def output_tokens(self) -> int:
        """Tokens whose text the client has."""
        return len(self._output_ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt for the rest."""
        return self._client_prompt_tokens + len(self._output_ids)

    @property
    def _client_prompt_tokens(self) -> int:
        return self._prompt_ids.count(b",") + 1

    @property
    def is_possible(self) -> bool:
        """Whether the stream, of which the client has something, could be taken up now."""
        return self._is_sound and bool(self._prompt_ids) and self._head is not None

    def resume(self) -> None:
        """The stream broke and is taken up: from here on comes the rest."""
        self._given = len(self._output_ids)
        self._textless.clear()

    @property
    def request(self) -> ClientRequest:
        """What the next attempt is asked: the client's request, or its rest."""
        body = {**self._client.body, "return_token_ids": True}
        given = self._given
        if given is None:
            return replace(self._client, body=body)
        if self._client.route is Route.COMPLETIONS:
            body.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        for field in _LIMITS:
            if body.get(field) is not None:
                body[field] = max(1, body[field] - given)
        if body.get("min_tokens") is not None:
            body["min_tokens"] = max(0, body["min_tokens"] - given)
        prompt_ids = (*_integers(self._prompt_ids), *self._output_ids)
        if self._client.route is Route.COMPLETIONS:
            return replace(self._client, body={**body, "prompt": prompt_ids}, prompt_tokens=len(prompt_ids))
        return replace(self._client, body=body, prompt_tokens=len(prompt_ids), prompt_ids=prompt_ids)

    # ---- what comes from engines ----------------------------------------------------------------------------------------------------

    def take(self, events: bytes) -> bytes:
        """Note the tokens in events that go to the client, and return them as it gets them; empty if it gets none of them."""
        if self._given is not None:
            return b"".join(self._rest(events))
        for event in events.split(b"\n\n"):
            self._note(event)
        if b'"delta":{}' in events:
            events = b"".join(event + b"\n\n" for event in events.split(b"\n\n") if event and not _NOTHING.search(event))
        return _ANY_IDS.sub(rb"\1null", events)

    def prefilled(self, prompt_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Take what an attempt's prefill leg said of its prompt; returns what is true of the client's, for the first attempt's was that."""
        if self._given is None:
            self._prompt_counts = prompt_counts
        elif not self._prompt_counts:
            self._prompt_counts = {name: min(count, self._client_prompt_tokens) for name, count in prompt_counts.items()}
        return self._prompt_counts

    def mend(self, usage: dict[str, Any]) -> bool:
        """Have the last engine's usage object count the whole stream; returns whether it changed."""
        if self._given is None:
            return False
        usage["prompt_tokens"] = self._client_prompt_tokens
        usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + self._given
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return True

    def usage(self) -> dict[str, Any]:
        """Return the usage of an answer that the client has whole, where its last engine died before it could say so."""
        prompt_tokens, output_tokens = self._client_prompt_tokens, len(self._output_ids) + len(self._textless)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
        }
        if (cached_tokens := self._prompt_counts.get("cached_tokens")) is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage

    def usage_event(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event that reports it."""
        return data_event({**(self._head or {}), "choices": [], "usage": usage})

    def _note(self, event: bytes) -> None:
        """Take the tokens of one event as the engine sent it."""
        if not event.startswith(b"data: {"):
            return
        if self._head is None:
            self._note_first(event)
        output = _OUTPUT_IDS.search(event)
        if output is None:
            # The event that names the role has no token of its own, and neither has the one that reports usage.
            self._is_sound = self._is_sound and (b'"role":' in event or b'"choices":[]' in event)
            return
        self._textless += _integers(output[1])
        if _NO_TEXT.search(event) is None:
            self._output_ids += self._textless
            self._textless.clear()

    def _note_first(self, event: bytes) -> None:
        prompt = _PROMPT_IDS.search(event)
        if prompt is not None:
            self._prompt_ids = prompt[1]
            event = event[: prompt.start(1)] + event[prompt.end(1) :]
        payload = event_payload(event) or {}
        self._head = {name: payload.get(name) for name in ("id", "object", "created", "model")}

    def _rest(self, events: bytes) -> Iterator[bytes]:
        """Yield the events of a later attempt as the first one would have sent them."""
        assert self._head is not None
        for event in events.split(b"\n\n"):
            self._note(event)
            payload = event_payload(event)
            if payload is None:
                if event:
                    yield event + b"\n\n"
                continue
            payload |= {name: self._head[name] for name in ("id", "created")}
            choices = payload.get("choices") or ()
            if any("role" in choice.get("delta", ()) for choice in choices) or _NOTHING.search(event) is not None:
                continue
            for choice in choices:
                choice |= {name: None for name in ("token_ids", "prompt_token_ids") if name in choice}
            yield data_event(payload)


def _integers(listed: bytes) -> list[int]:
    return [int(number) for number in listed.split(b",") if number.strip()]
