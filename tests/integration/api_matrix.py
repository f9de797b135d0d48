"""Requests whose answers must not depend on how many engines made them: every field that tokens, their end or their count depend on."""

from typing import Any, NamedTuple

from api_answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from engine_requests import MODEL

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather of a city", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION, "strict": False}]
BLOCK_TOOLS = [{"name": "get_weather", "description": "Tells the weather of a city", "input_schema": PARAMETERS}]
QUESTION = [{"role": "user", "content": "What is the weather in Paris like today, and what is it like in Rome? Answer in one sentence."}]
PROMPT = "The three largest cities of France are, in order of their number of inhabitants, Paris,"
SCHEMA = {"name": "answer", "schema": PARAMETERS}
EOS = 2
"""`<|im_end|>` of the default model"""
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "temperature": 0, "max_tokens": 6},
    COMPLETIONS: {"prompt": PROMPT, "temperature": 0, "max_tokens": 6},
    RESPONSES: {"input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 6},
    MESSAGES: {"messages": QUESTION, "temperature": 0, "max_tokens": 6},
}


class Case(NamedTuple):
    """One request."""

    name: str
    path: str
    fields: dict[str, Any]
    reason: str | None = None
    """why it is served by one engine alone, if it is"""

    def body(self, salt: str, *, stream: bool) -> dict[str, Any]:
        """Return the body; `None` takes a base field away, and a case that names `stream` has it its way."""
        stream = self.fields.get("stream", stream)
        asked = {"model": MODEL, **BASE[self.path], **self.fields, "cache_salt": salt, "stream": stream}
        if stream and self.path in (CHAT, COMPLETIONS):
            asked["stream_options"] = {"include_usage": True, **(self.fields.get("stream_options") or {})}
        else:
            asked.pop("stream_options", None)
        return {name: value for name, value in asked.items() if value is not None}


def _both(name: str, fields: dict[str, Any]) -> list[Case]:
    return [Case(name, CHAT, fields), Case(name, COMPLETIONS, fields)]


ENDS = [
    *(
        Case(f"max_tokens {count}", path, {field: count})
        for count in (1, 2, 3)
        for path, field in ((CHAT, "max_tokens"), (COMPLETIONS, "max_tokens"), (RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens"))
    ),
    Case("max_completion_tokens", CHAT, {"max_tokens": None, "max_completion_tokens": 2}),
    *_both("end of sequence first", {"logit_bias": {str(EOS): 100}}),
    Case("end of sequence first", RESPONSES, {"logit_bias": {str(EOS): 100}}),
    *_both("end of sequence ignored", {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "max_tokens": 3}),
    *_both("min_tokens before an end of sequence", {"logit_bias": {str(EOS): 100}, "min_tokens": 2}),
    Case("stop token first", COMPLETIONS, {"logit_bias": {"100": 100}, "stop_token_ids": [100]}),
    Case("stop string first", COMPLETIONS, {"stop": [" "]}),
    Case("stop string first", CHAT, {"stop": ["T", "A", "P", " "]}),
    Case("stop string first", MESSAGES, {"stop_sequences": ["T", "A", "P", " "]}),
    Case("stop string first", RESPONSES, {"stop": ["T", "A", "P", " "]}),
    Case("stop string kept", COMPLETIONS, {"stop": [","], "include_stop_str_in_output": True}),
]
SAMPLING = [
    *_both("seeded", {"temperature": 0.9, "seed": 7}),
    *_both("top_k, top_p, min_p", {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.02}),
    *_both("penalties", {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "max_tokens": 12}),
    *_both("logit_bias", {"logit_bias": {"100": 5, "42": 5}}),
    *_both("bad_words, allowed tokens", {"bad_words": ["Paris", " Lyon"], "skip_special_tokens": False}),
    Case("logprobs", CHAT, {"logprobs": True, "top_logprobs": 3, "max_tokens": 4}),
    Case("logprobs", COMPLETIONS, {"logprobs": 2, "max_tokens": 4}),
    Case("logprobs", RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}),
    Case("echo", COMPLETIONS, {"echo": True, "max_tokens": 3}),
    Case("token ids", COMPLETIONS, {"return_token_ids": True, "max_tokens": 3}),
    Case("seeded", RESPONSES, {"temperature": 0.9, "seed": 7}),
    Case("top_k", MESSAGES, {"temperature": 1.0, "top_k": 1}),
    Case("continuous usage", CHAT, {"stream_options": {"continuous_usage_stats": True}}),
]
PROMPTS = [
    Case("documents, effort", CHAT, {"documents": [{"title": "t", "text": "x"}], "reasoning_effort": "low"}),
    Case("template arguments", CHAT, {"chat_template_kwargs": {"flavour": "mint"}}),
    Case("template", CHAT, {"chat_template": "{{ messages[0].content }} Sure:"}),
    Case(
        "continued",
        CHAT,
        {
            "messages": [*QUESTION, {"role": "assistant", "content": "The weather"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    Case(
        "parts",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Count to"}, {"type": "text", "text": "five."}]}]},
    ),
    Case("truncated", CHAT, {"truncate_prompt_tokens": 11}),
    Case("truncated", COMPLETIONS, {"truncate_prompt_tokens": 7}),
    Case("token ids in", COMPLETIONS, {"prompt": list(range(300, 365))}),
    Case("one token", COMPLETIONS, {"prompt": [300]}),
    Case("instructions", RESPONSES, {"instructions": "Answer like a pirate.", "reasoning": {"effort": "low"}}),
    Case(
        "items",
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Weather in Rome?"}]},
                {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            ],
            "tools": FLAT_TOOLS,
        },
    ),
    Case("system", MESSAGES, {"system": [{"type": "text", "text": "Answer like a pirate."}]}),
    Case(
        "tool result",
        MESSAGES,
        {
            "messages": [
                *QUESTION,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
            ],
            "tools": BLOCK_TOOLS,
        },
    ),
    Case("thinking off", MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}),
]
SHAPES = [
    *(Case(f"tools {choice}", CHAT, {"tools": TOOLS, "tool_choice": choice, "max_tokens": 20}) for choice in ("auto", "none", "required")),
    Case("tools named", CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "max_tokens": 20}),
    Case("tools required, one token", CHAT, {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1}),
    Case(
        "tools named", RESPONSES, {"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 20}
    ),
    Case("tools required", RESPONSES, {"tools": FLAT_TOOLS, "tool_choice": "required", "max_output_tokens": 20}),
    Case("tools auto", RESPONSES, {"tools": FLAT_TOOLS}),
    Case("tools auto", MESSAGES, {"tools": BLOCK_TOOLS}),
    Case("tools any", MESSAGES, {"tools": BLOCK_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 20}),
    Case("tools named", MESSAGES, {"tools": BLOCK_TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 20}),
    Case("json schema", CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMA}, "max_tokens": 20}),
    Case("json object", CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 12}),
    *_both("regex", {"structured_outputs": {"regex": "(red|green) [0-9]{2}"}}),
    *_both("choice", {"structured_outputs": {"choice": ["yes", "no"]}}),
    Case(
        "json schema", RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}}, "max_output_tokens": 20}
    ),
    Case("json schema", MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}, "max_tokens": 20}),
]
LOCAL = [
    Case("n", CHAT, {"n": 2, "temperature": 0.9, "seed": 5}, "n_above_one"),
    Case("several prompts", COMPLETIONS, {"prompt": [PROMPT, "One, two,"]}, "several_prompts"),
    Case("prompt_logprobs", COMPLETIONS, {"prompt_logprobs": 1, "max_tokens": 2, "stream": False}, "prompt_logprobs"),
    Case("echo with logprobs", COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 2}, "prompt_logprobs"),
    Case("truncation", RESPONSES, {"truncation": "auto"}, "truncation"),
]
REFUSED = [
    Case("unknown role", MESSAGES, {"messages": [{"role": "nobody", "content": "x"}]}),
    Case("bad schema", CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}),
    Case("unsupported item", RESPONSES, {"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]}, "media"),
]
REFUSED_BY_DECODE = [
    Case("top_logprobs alone", CHAT, {"top_logprobs": 3}),
    Case("too many stop strings", RESPONSES, {"stop": ["a", "b", "c", "d", "e"]}),
    Case("bad temperature", COMPLETIONS, {"temperature": -1}),
    Case("budget over the limit", MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 5}),
]
"""prefill is not told what is wrong with these, and computes their prompt"""
MATRIX = [*ENDS, *SAMPLING, *PROMPTS, *SHAPES, *LOCAL, *REFUSED]
BRIEF = [*ENDS, *MATRIX[len(ENDS) :: 4]]
"""what there is time for on every change: all ends, and every fourth of the rest"""
