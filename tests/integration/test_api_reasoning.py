"""Engines that tell reasoning from answer: through two of them it is the same reasoning, cut at the same token, as from one."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from api_answers import CHAT, MESSAGES, RESPONSES, ask
from api_matrix import PARAMETERS, TOOLS, Case
from api_parity import all_equal
from engine_requests import MODEL, TEMPLATE
from engines import Pair, running_engines
from serving import Router, running_router

from pdserve.config import load_config
from pdserve.fleet.engine_command import ServedModel
from pdserve.models.catalog import resolve

pytestmark = [pytest.mark.engine, pytest.mark.long]
PARSER = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


@ReasoningParserManager.register_module("first_sentence")
class FirstSentence(DeepSeekR1ReasoningParser):
    start_token = "<issue_start>"
    end_token = "."
"""
"""the tests' model knows no token of its own that ends reasoning: its first sentence is taken for it"""
QUESTION = "Tell me about the weather in Paris and in Rome"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": QUESTION}]},
    RESPONSES: {"input": QUESTION},
    MESSAGES: {"messages": [{"role": "user", "content": QUESTION}]},
}
SHAPE = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}
CASES = [
    *(Case("reasoning and answer", path, fields) for path, fields in ASKED.items()),
    *(Case(f"cut after {count}", CHAT, {"max_tokens": count}) for count in (1, 2, 3)),
    Case("cut after 1", RESPONSES, {"max_output_tokens": 1}),
    Case("cut after 1", MESSAGES, {"max_tokens": 1}),
    Case("reasoning left out", CHAT, {"include_reasoning": False}),
    Case("stop in the reasoning", CHAT, {"stop": ["a"]}),
    Case("logprobs", CHAT, {"logprobs": True, "top_logprobs": 1}),
    Case("grammar of the answer", CHAT, {"response_format": SHAPE}),
    Case("tools", CHAT, {"tools": TOOLS, "tool_choice": "auto"}),
    Case("effort", RESPONSES, {"reasoning": {"effort": "low"}}),
]


@pytest.fixture(scope="module")
def reasoners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill and a decode engine; at the end all blocks must be free on both."""
    folder = tmp_path_factory.mktemp("engines")
    template, parser = folder / "template.jinja", folder / "first_sentence.py"
    template.write_text(TEMPLATE)
    parser.write_text(PARSER)
    extra = ("--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    extra += ("--reasoning-parser-plugin", str(parser), "--reasoning-parser", "first_sentence")
    config = load_config(overrides={"engine.extra_args": extra, "kv.lease_s": 5})
    model = resolve(config.model)
    with running_engines(config, ServedModel(Path(model.path), MODEL), folder) as (prefill, decode):
        free = [engine.status().blocks_free for engine in (prefill, decode)]
        yield Pair(prefill, decode)
        for engine, blocks in zip((prefill, decode), free, strict=True):
            engine.wait_blocks(blocks)


@pytest.fixture(scope="module")
def router(reasoners: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    config = load_config(overrides={"router.port": 0, "served_model_name": MODEL, "router.disaggregation": "always"})
    with running_router(reasoners, config, tmp_path_factory.mktemp("router")) as running:
        yield running


def test_reasoning_equals_the_aggregated_engines(reasoners: Pair, router: Router) -> None:
    """Text, counts and ends, whole and streamed."""
    limits: dict[str, dict[str, Any]] = {CHAT: {"max_tokens": 48}, RESPONSES: {"max_output_tokens": 48}, MESSAGES: {"max_tokens": 48}}
    cases = [case._replace(fields={**ASKED[case.path], **limits[case.path], **case.fields}) for case in CASES]
    all_equal(reasoners, router, product(cases, (False, True)))


def test_there_is_reasoning_and_there_is_an_answer(router: Router) -> None:
    """Else the test above compares nothing."""
    body = Case("both", CHAT, {**ASKED[CHAT], "max_tokens": 48}).body("salt", stream=False)
    message = ask(router.public, CHAT, body)["choices"][0]["message"]
    assert message["reasoning"]
    assert message["content"]
