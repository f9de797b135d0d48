"""Completions: a prompt as text or token ids, one or several."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.fields import INT, STR, utf8_bytes, wrong_type
from pdserve.server.api.openai import (
    COMMON_RULES,
    PROMPT_FIELDS,
    OpenAiCompletions,
    check_lengths,
    check_options,
    common_reasons,
    first_reason,
)
from pdserve.server.api.request import Limits, Prompt, Route

_PROMPT_TYPES = "a string, an array of strings, an array of token ids, or an array of those"
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer"}}


class Completions(OpenAiCompletions):
    """`/v1/completions`."""

    route = Route.COMPLETIONS
    rules: ClassVar = {**COMMON_RULES, "logprobs": INT, "suffix": STR}
    required: ClassVar = {
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                _IDS,
                {"type": "array", "minItems": 1, "items": _IDS},
            ]
        }
    }
    prefill_fields = PROMPT_FIELDS | {
        "prompt",
        "suffix",  # fill-in-the-middle models render prompt and suffix together
    }
    one_token: ClassVar = {"max_tokens": 1, "n": 1, "stream": False, "temperature": 0}

    def ranges(self, limits: Limits) -> Mapping[str, tuple[int, int]]:
        # None at all may be asked for with `echo`.
        return {**super().ranges(limits), "max_tokens": (0, max(limits.models.values()))}

    def read(self, body: Mapping[str, Any], limits: Limits, max_model_len: int) -> Prompt:
        check_options(body, limits)
        prompt = _read_prompt(body)
        check_lengths(body, max_model_len, least=0 if body.get("echo") else 1)
        longest = max_model_len if body.get("max_tokens") == 0 else max_model_len - 1
        if prompt.tokens is not None and prompt.tokens > longest and body.get("truncate_prompt_tokens") is None:
            message = (
                f"the prompt has {prompt.tokens} tokens, which leaves no room for an answer in the model's length of {max_model_len} tokens"
            )
            raise RequestError(400, message, "prompt", "context_length_exceeded")
        return prompt

    def local_reason(self, body: Mapping[str, Any], prompt: Prompt, max_model_len: int) -> PathReason | None:
        reasons = (
            *common_reasons(body, prompt, max_model_len),
            (body.get("echo") and body.get("logprobs") is not None, PathReason.PROMPT_LOGPROBS),
            (body.get("max_tokens") == 0, PathReason.NO_OUTPUT),
        )
        return first_reason(reasons)


def _read_prompt(body: Mapping[str, Any]) -> Prompt:
    prompt = body.get("prompt")
    has_embeds = body.get("prompt_embeds") is not None
    if isinstance(prompt, str) and prompt:
        return Prompt(utf8_bytes(prompt))
    if prompt in (None, "", []):
        if has_embeds:
            return Prompt()
        raise RequestError(400, "prompt must not be empty", "prompt", "invalid_value")
    if not isinstance(prompt, list):
        raise wrong_type("prompt", _PROMPT_TYPES)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return Prompt(tokens=len(prompt))
    if kinds == {str}:
        return Prompt(sum(map(utf8_bytes, prompt)), is_several=len(prompt) > 1)
    if kinds == {list} and all(set(map(type, ids)) == {int} for ids in prompt):
        return Prompt(tokens=max(map(len, prompt)), is_several=len(prompt) > 1)
    raise wrong_type("prompt", _PROMPT_TYPES)
