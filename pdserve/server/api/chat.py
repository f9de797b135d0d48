"""Chat completions."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pdserve.errors import RequestError
from pdserve.routing.reasons import PathReason
from pdserve.server.api.fields import ARRAY, BOOL, INT, utf8_bytes, wrong_type
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

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


class Chat(OpenAiCompletions):
    """`/v1/chat/completions`."""

    route = Route.CHAT
    rules: ClassVar = {
        **COMMON_RULES,
        "messages": ARRAY,
        "tools": ARRAY,
        "max_completion_tokens": INT,
        "logprobs": BOOL,
        "top_logprobs": INT,
    }
    required: ClassVar = {
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"]}},
            },
        }
    }
    prefill_fields = PROMPT_FIELDS | {
        "messages",
        "tools",  # rendered by the template
        "tool_choice",  # some templates render it; without it an engine takes `tools` for "auto"
        "response_format",  # some templates render it
        "documents",
        "reasoning_effort",  # given to the template, and switches `enable_thinking`
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
    one_token: ClassVar = {"max_completion_tokens": 1, "max_tokens": 1, "n": 1, "stream": False, "temperature": 0}

    def read(self, body: Mapping[str, Any], limits: Limits, max_model_len: int) -> Prompt:
        check_options(body, limits)
        messages = body.get("messages")
        if not messages:
            raise RequestError(400, "messages must be a non-empty array", "messages", "invalid_value")
        prompt = Prompt()
        for index, message in enumerate(messages):
            prompt += _read_message(message, f"messages[{index}]")
        check_lengths(body, max_model_len)
        return prompt

    def local_reason(self, body: Mapping[str, Any], prompt: Prompt, max_model_len: int) -> PathReason | None:
        return first_reason((*common_reasons(body, prompt, max_model_len), (body.get("echo"), PathReason.PROMPT_LOGPROBS)))


def _read_message(message: object, place: str) -> Prompt:
    if not isinstance(message, dict):
        raise wrong_type(place, "an object")
    if not isinstance(message.get("role"), str):
        raise wrong_type(f"{place}.role", "a string")
    content = message.get("content")
    if isinstance(content, str):
        return Prompt(utf8_bytes(content))
    if isinstance(content, list):
        return read_parts(content)
    if content is not None:
        raise wrong_type(f"{place}.content", "a string or an array of parts")
    return Prompt()


def read_parts(parts: list[Any]) -> Prompt:
    """Measure a content's parts; one that is not text is media, or may be."""
    texts = [_part_text(part) for part in parts]
    return Prompt(sum(utf8_bytes(text) for text in texts if text is not None), has_media=None in texts)


def _part_text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
        text = next((part[key] for key in ("text", "refusal", "thinking") if key in part), None)
        return text if isinstance(text, str) else None
    return None
