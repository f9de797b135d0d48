"""The whole model on real engines against its formulas in float64: what vLLM's own MiniMax-M3 and our kernels compute together is MiniMax-M3."""

import json
import secrets

import pytest
import torch
from engine_requests import body_of, complete, through_both

from pdserve.models.catalog import resolve
from pdserve.models.m3_tiny import BLOCK_TOKENS, NAME, TEXT_CONFIG
from pdserve.types import CloseReason

from .caches import letters
from .conftest import Engines
from .reference import Reference

pytestmark = pytest.mark.engine

OUTPUT_TOKENS = 6
TOLERANCE = 1e-3
BEYOND_TOPK = 7 * BLOCK_TOKENS + 9


@pytest.fixture(scope="module")
def reference() -> Reference:
    folder = resolve(NAME).path
    return Reference(folder, json.loads((folder / "config.json").read_text())["text_config"])


def assert_as_computed_by_hand(reference: Reference, prompt: list[int], answer: dict[str, object]) -> None:
    """Each token is the likeliest by the reference, to within a rounding, and has its probability."""
    [choice] = answer["choices"]  # type: ignore[attr-defined]
    output = choice["token_ids"]
    assert len(output) == OUTPUT_TOKENS
    expected = reference.logits(prompt + output)[len(prompt) - 1 : -1].log_softmax(-1)
    chosen = expected[torch.arange(OUTPUT_TOKENS), torch.tensor(output)]
    assert chosen.tolist() == pytest.approx(choice["logprobs"]["token_logprobs"], abs=TOLERANCE)
    assert float((expected.amax(-1) - chosen).max()) < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("length", [pytest.param(BLOCK_TOKENS + 1, marks=pytest.mark.long), BEYOND_TOPK])
def test_an_engine_alone(m3_engines: Engines, reference: Reference, ranks: int, length: int) -> None:
    """Dense and sparse attention, index, experts and their sums over ranks, for prompts that the index must and must not choose from."""
    assert TEXT_CONFIG["sparse_attention_config"]["sparse_topk_blocks"] * BLOCK_TOKENS < BEYOND_TOPK
    prompt = letters(length, seed=60 + ranks)
    body = body_of(prompt, stream=False, salt=secrets.token_hex(8), max_tokens=OUTPUT_TOKENS) | {"logprobs": 1, "return_token_ids": True}
    engine = m3_engines.pair(1, ranks).decode
    assert_as_computed_by_hand(reference, prompt, complete(engine, "/v1/completions", body))


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_decode_from_moved_caches(m3_engines: Engines, reference: Reference, prefill: int, decode: int) -> None:
    """What decode computes on top of caches that came from elsewhere."""
    prompt = letters(BEYOND_TOPK, seed=70 + prefill)
    body = body_of(prompt, stream=False, salt=secrets.token_hex(8), max_tokens=OUTPUT_TOKENS) | {"logprobs": 1, "return_token_ids": True}
    answer, _, received = through_both(m3_engines.pair(prefill, decode), "/v1/completions", body)
    assert (received.outcome, received.tokens_moved) == (CloseReason.LANDED, len(prompt))
    assert_as_computed_by_hand(reference, prompt, answer)
