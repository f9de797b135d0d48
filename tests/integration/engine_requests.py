"""Requests to real engines, as tests send them."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engines import Engine, Pair, legs

from pdserve.types import Ticket, TransferRecord

BLOCK = 32
MODEL = "m"
TEMPLATE = """{%- if tools %}TOOLS {{ tools | length }} {{ tools[0].function.name }}
{% endif -%}
{%- if documents %}DOCS {{ documents | length }}
{% endif -%}
{%- if reasoning_effort %}EFFORT {{ reasoning_effort }}
{% endif -%}
{%- if flavour %}FLAVOUR {{ flavour }}
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
"""renders every field that may reach a template, so that each one missing from a leg changes its tokens"""


def tokens(count: int, seed: int) -> list[int]:
    """Prompt tokens that no other test uses."""
    return [1 + (seed * 7919 + position * 104729) % 40000 for position in range(count)]


def complete(engine: Engine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one request; streams are put together again."""
    if not body.get("stream"):
        answer = engine.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())
    text, last = "", {}
    with engine.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                last = json.loads(line[6:])
                for choice in last["choices"]:
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return {"choices": [{"text": text, "message": {"content": text}}], "usage": last.get("usage")}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice.get("text") or choice.get("message", {}).get("content"))


def through_both(
    pair: Pair, path: str, body: dict[str, Any], ticket: Ticket | None = None
) -> tuple[dict[str, Any], TransferRecord, TransferRecord]:
    """Send both legs at once; return decode's answer and both sides' records."""
    ticket = ticket or pair.ticket()
    prefill_leg, decode_leg = legs(body, ticket)
    with ThreadPoolExecutor(1) as executor:
        prefill = executor.submit(complete, pair.prefill, path, prefill_leg)
        answer = complete(pair.decode, path, decode_leg)
        prefill.result()
    return answer, pair.prefill.record(ticket.transfer_id), pair.decode.record(ticket.transfer_id)


def body_of(prompt: list[int], *, stream: bool, salt: str, max_tokens: int = 12) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream, "cache_salt": salt}


def computed(engine: Engine) -> tuple[float, float]:
    """Prompt tokens that decode took from a transfer, and that it computed itself."""
    name = "vllm:prompt_tokens_by_source_total"
    return engine.metric(name, source="external_kv_transfer"), engine.metric(name, source="local_compute")
