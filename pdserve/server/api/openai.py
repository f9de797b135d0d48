"""What chat completions and completions share: sampling fields, limits, and how their answers and streams speak."""

import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.dialect import Dialect, integers, replace_known
from pdserve.server.api.fields import BOOL, INT, MAX_INT, NUMBER, OBJECT, STOP, STR, Rule, check_range, wrong_type
from pdserve.server.api.request import ClientRequest, Limits, Prompt
from pdserve.server.frames import DONE_EVENT, Frame, FrameKind, event_data, json_object

COMMON_RULES: Mapping[str, Rule] = {
    "model": STR,
    "max_tokens": INT,
    "min_tokens": INT,
    "n": INT,
    "stream": BOOL,
    "stream_options": OBJECT,
    "stop": STOP,
    "seed": INT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "echo": BOOL,
    "use_beam_search": BOOL,
    "prompt_logprobs": INT,
    "truncate_prompt_tokens": INT,
    "cache_salt": STR,
    "vllm_xargs": OBJECT,
}
PROMPT_FIELDS = frozenset(
    {
        "model",  # names the weights or the LoRA adapter; an adapter is part of a block's identity
        "cache_salt",  # part of a block's identity
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "mm_processor_kwargs",  # also read for text-only prompts, where the engine hands it to the renderer
        "media_io_kwargs",
    }
)
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"(\w+)')


class OpenAiCompletions(Dialect):
    """Either of the two; streams of `data: {…}` that end in `[DONE]`."""

    stream_end = DONE_EVENT

    def ranges(self, limits: Limits) -> Mapping[str, tuple[int, int]]:
        output = (1, max(limits.models.values()))
        fields = {"n": (1, limits.max_n), "min_tokens": (0, MAX_INT), "max_tokens": output, "max_completion_tokens": output}
        return {name: bounds for name, bounds in fields.items() if name in self.rules}

    def includes_usage(self, body: Mapping[str, Any]) -> bool:
        return bool((body.get("stream_options") or {}).get("include_usage"))

    def decode(self, request: ClientRequest, leg_id: str) -> dict[str, Any]:
        """Return the client's body, with `usage` asked for in a stream."""
        fields = super().decode(request, leg_id)
        if request.stream:
            options = dict(request.body.get("stream_options") or {})
            if not request.include_usage:
                # These work with `include_usage` only, so a client that asked for no usage must not get them either.
                options.pop("continuous_usage_stats", None)
            fields["stream_options"] = {**options, "include_usage": True}
        return fields

    def is_plain(self, chunk: bytes) -> bool:
        return (
            chunk.startswith(b"data: {")
            and chunk.endswith(b"\n\n")
            and b'"usage"' not in chunk
            and b'"error"' not in chunk
            and b'"abort"' not in chunk
            and b"[DONE]" not in chunk
        )

    def ends(self, chunk: bytes) -> bool:
        return _FINISH.search(chunk) is not None

    def classify(self, raw: bytes) -> Sequence[Frame]:
        if raw.startswith(b"data: [DONE]"):
            return (Frame(FrameKind.DONE, raw),)
        finish = _FINISH.search(raw)
        if raw.startswith(b"data: {") and b'"usage"' not in raw and b'"error"' not in raw and (finish is None or finish[1] != b"abort"):
            return (Frame(FrameKind.DATA, raw, None, finish is not None),)
        return (_classify_parsed(raw, finish is not None),)

    def is_aborted(self, payload: Mapping[str, Any]) -> bool:
        return any(choice["finish_reason"] == "abort" for choice in payload["choices"])

    def counts(self, usage: Mapping[str, Any]) -> Mapping[str, int]:
        details = usage.get("prompt_tokens_details") or {}
        return integers(
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens"),
            written_tokens=details.get("created_cache_tokens"),
        )

    def mend(self, usage: dict[str, Any], prefill: Mapping[str, int]) -> bool:
        details = usage.get("prompt_tokens_details")
        if not isinstance(details, dict):
            return False
        told = {"cached_tokens": prefill.get("cached_tokens"), "created_cache_tokens": prefill.get("written_tokens")}
        return replace_known(details, told)


def _classify_parsed(raw: bytes, is_finish: bool) -> Frame:
    data = event_data(raw)
    if data is None:
        return Frame(FrameKind.OTHER, raw)
    if data.strip() == b"[DONE]":
        return Frame(FrameKind.DONE, raw)
    payload = json_object(data)
    if payload is None:
        return Frame(FrameKind.DATA, raw, None, is_finish)
    if payload.get("error") is not None:
        return Frame(FrameKind.ERROR, raw, payload)
    choices = payload.get("choices")
    if isinstance(payload.get("usage"), dict) and not choices:
        return Frame(FrameKind.USAGE, raw, payload)
    if isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") == "abort" for c in choices):
        return Frame(FrameKind.ABORTED, raw)
    return Frame(FrameKind.DATA, raw, None, is_finish)


def check_options(body: Mapping[str, Any], limits: Limits) -> None:
    """Check what both routes ask for alike. Raises `RequestError`."""
    options = body.get("stream_options") or {}
    if options and not body.get("stream"):
        raise RequestError(400, "stream_options is only allowed when stream is true", "stream_options", "invalid_value")
    if type(options.get("include_usage")) not in (bool, NoneType):
        raise wrong_type("stream_options.include_usage", "a boolean")
    check_range(body, "n", 1, limits.max_n)


def check_lengths(body: Mapping[str, Any], max_model_len: int, *, least: int = 1) -> None:
    """Refuse what no engine can serve: its own rules, applied where the numbers are known without a tokenizer. Raises `RequestError`.

    Args:
        least: tokens that must be asked for if any number is named.
    """
    for field in ("max_tokens", "max_completion_tokens"):
        check_range(body, field, least, max_model_len, "context_length_exceeded")
    check_range(body, "min_tokens", 0, MAX_INT)


def common_reasons(body: Mapping[str, Any], prompt: Prompt, max_model_len: int) -> Sequence[tuple[object, PathReason]]:
    """Return conditions and what each of them is the reason for, in order."""
    truncate = body.get("truncate_prompt_tokens")
    return (
        ((body.get("n") or 1) > 1, PathReason.N_ABOVE_ONE),
        (prompt.is_several, PathReason.SEVERAL_PROMPTS),
        (body.get("use_beam_search"), PathReason.BEAM_SEARCH),
        (body.get("prompt_embeds") is not None, PathReason.PROMPT_EMBEDS),
        (body.get("prompt_logprobs") is not None, PathReason.PROMPT_LOGPROBS),
        (prompt.has_media, PathReason.MEDIA),
        (truncate is not None and not 0 <= truncate < max_model_len, PathReason.TRUNCATION),
    )


def first_reason(reasons: Sequence[tuple[object, PathReason]]) -> PathReason | None:
    """Return the reason of the first condition that holds."""
    return next((reason for applies, reason in reasons if applies), None)
