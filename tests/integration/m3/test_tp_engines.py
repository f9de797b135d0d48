"""Real engines of unequal tensor-parallel sizes: heads are cut and joined, the index is repeated, and decode answers as it does by itself."""

import dataclasses
import secrets
from collections.abc import Sequence

import pytest
from engine_requests import body_of, complete, computed, text_of, through_both

from pdserve.models.m3_tiny import BLOCK_TOKENS, TEXT_CONFIG
from pdserve.observe.evidence import compare_layers
from pdserve.types import CloseReason

from .caches import INDEX_LAYERS, LAYERS, MAIN_LAYERS, block_bytes, letters
from .conftest import Engines, Trace, Verify
from .kv_plugin import Event

pytestmark = pytest.mark.engine

long = pytest.mark.long
PAIRS = [(1, 2), (2, 1), (2, 4), (4, 2)]
FAR_PAIRS = [(1, 4), (4, 1)]
TOPK_TOKENS = TEXT_CONFIG["sparse_attention_config"]["sparse_topk_blocks"] * BLOCK_TOKENS
LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, TOPK_TOKENS - 1, TOPK_TOKENS, TOPK_TOKENS + 1, 1500)
ATTEMPTS = 4
"""prompts that may be sent until one leaves early: on a busy machine a rank's I/O thread may get no turn before the forward ends"""
FEW_LENGTHS = (1, BLOCK_TOKENS, BLOCK_TOKENS + 1, TOPK_TOKENS, TOPK_TOKENS + 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "lengths"),
    [*((*pair, FEW_LENGTHS) for pair in PAIRS), *(pytest.param(*pair, LENGTHS, marks=long) for pair in (*PAIRS, *FAR_PAIRS))],
)
def test_verify_finds_every_pair_equal(
    m3_engines: Engines, verify_pair: Verify, prefill: int, decode: int, lengths: tuple[int, ...]
) -> None:
    """Tokens, every run on every rank, all tokens moved and all acknowledgements in, around block and top-k boundaries."""
    pair = m3_engines.pair(prefill, decode)
    answer = verify_pair(pair, *lengths)
    assert (answer.code, answer.errors, answer.verdict["ok"]) == (0, "", True), answer
    cases = answer.verdict["cases"]
    assert [case["prompt_tokens"] for case in cases] == list(lengths)
    assert {(case["tokens_equal"], case["layers_equal"], case["layers_total"], case["path"]) for case in cases} == {
        (True, LAYERS, LAYERS, "disaggregated")
    }
    blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths)
    assert answer.verdict["transfer"] == {
        "sealed": LAYERS * len(lengths),
        "acks": max(prefill, decode) * len(lengths),
        "bytes": blocks * block_bytes(decode),
    }


@pytest.mark.long
def test_default_lengths_lie_around_the_boundaries(m3_engines: Engines, verify_pair: Verify) -> None:
    """Without `--lengths`: one block, and the blocks that the small model chooses."""
    answer = verify_pair(m3_engines.pair(2, 1))
    lengths = {case["prompt_tokens"] for case in answer.verdict["cases"]}
    assert answer.code == 0
    assert lengths >= {1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, TOPK_TOKENS, TOPK_TOKENS + 1}


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("cached_by", [pytest.param("prefill", marks=long), pytest.param("decode", marks=long), "both"])
def test_prefix_hits_on_either_side_move_what_decode_lacks(m3_engines: Engines, prefill: int, decode: int, cached_by: str) -> None:
    """Blocks that prefill has cached are sent from its cache, blocks that decode has cached stay; the answer is decode's own."""
    pair, salt = m3_engines.pair(prefill, decode), secrets.token_hex(8)
    seed = 1000 * prefill + 10 * decode + len(cached_by)
    first = letters(TOPK_TOKENS + BLOCK_TOKENS + 5, seed)
    longer = first + letters(70, seed + 1)
    shared = len(first) // BLOCK_TOKENS * BLOCK_TOKENS
    for side, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        if cached_by in (side, "both"):
            complete(engine, "/v1/completions", body_of(first, stream=False, salt=salt, max_tokens=1))
    before = computed(pair.decode)
    ticket = dataclasses.replace(pair.ticket(), proof=True)
    answer, sent, received = through_both(pair, "/v1/completions", body_of(longer, stream=False, salt=salt), ticket)
    external, local = (after - start for after, start in zip(computed(pair.decode), before, strict=True))
    kept = shared if cached_by in ("decode", "both") else 0
    assert (sent.outcome, received.outcome) == (CloseReason.RELEASED, CloseReason.LANDED)
    assert (sent.tokens_reused, received.tokens_reused) == (shared if cached_by in ("prefill", "both") else 0, kept)
    assert sent.tokens_moved == received.tokens_moved == len(longer) - kept
    assert (external, local) == (len(longer) - kept, 0)
    assert sent.acks == sent.acks_expected
    evidence = compare_layers(sent, received)
    assert (evidence.layers_equal, evidence.layers_total) == (LAYERS, LAYERS)
    alone = complete(pair.decode, "/v1/completions", body_of(longer, stream=False, salt=salt + "-alone"))
    assert text_of(answer) == text_of(alone)


def sent_early(events: Sequence[Event]) -> dict[int, set[str]]:
    """Return for each rank's process the layers of which something left before its last step ended."""
    early: dict[int, set[str]] = {}
    for pid in {event.rank_pid for event in events}:
        of_rank = [event for event in events if event.rank_pid == pid]
        last_end = max(number for number, event in enumerate(of_rank) if not event.layers)
        early[pid] = {layer for event in of_rank[:last_end] for layer in event.layers}
    return early


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (4, 2), pytest.param(1, 2, marks=long), pytest.param(2, 4, marks=long)])
def test_every_rank_sends_while_the_prompt_is_computed(m3_engines: Engines, trace: Trace, prefill: int, decode: int) -> None:
    """Heads that are cut or joined leave as early as whole ones, and the index from those ranks that somebody reads it from."""
    pair = m3_engines.pair(prefill, decode)
    for attempt in range(ATTEMPTS):
        seen = len(trace())
        prompt = letters(6 * BLOCK_TOKENS, seed=77 * prefill + decode + 1000 * attempt)
        body = body_of(prompt, stream=False, salt=secrets.token_hex(8), max_tokens=2)
        _, sent, _ = through_both(pair, "/v1/completions", body)
        early = sent_early(trace()[seen:])
        senders_of_index = sum(layers >= {*INDEX_LAYERS} for layers in early.values())
        if all(layers >= {*MAIN_LAYERS} for layers in early.values()) and senders_of_index == min(prefill, decode):
            break
    assert len(early) == prefill
    assert all(layers >= {*MAIN_LAYERS} for layers in early.values()), early
    assert senders_of_index == min(prefill, decode)
    assert 0 < sent.bytes_before_forward_end <= sent.bytes_moved
