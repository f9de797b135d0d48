"""Two real engines with MiniMax-M3's layers: dense, sparse and index caches are all moved, and decode answers from them as from its own.

A case counts only if the transfer's record shows that the prompt's tokens moved.
"""

import dataclasses
import secrets
from collections import Counter

import pytest
from engine_requests import MODEL, body_of, complete, computed, text_of, through_both
from engines import Pair

from pdserve.models.m3_tiny import BLOCK_TOKENS
from pdserve.types import CloseReason

from .caches import HEADS, INDEX_LAYERS, LAYERS, MAIN_LAYERS, block_bytes, letters
from .conftest import Engines, Trace
from .kv_plugin import Event

pytestmark = pytest.mark.engine


@pytest.fixture
def m3_pair(m3_engines: Engines) -> Pair:
    """A prefill and a decode engine of one rank each."""
    return m3_engines.pair(1, 1)


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS, 1500])
def test_moved_prompts_answer_like_computed_ones(m3_pair: Pair, length: int) -> None:
    """All seven caches move, every run of them is the same on both sides, decode computes no prompt token, and the answers are equal."""
    body = body_of(letters(length, seed=length), stream=False, salt=secrets.token_hex(8), max_tokens=16)
    before = computed(m3_pair.decode)
    ticket = dataclasses.replace(m3_pair.ticket(), proof=True)
    answer, sent, received = through_both(m3_pair, "/v1/completions", body, ticket)
    external, local = (after - start for after, start in zip(computed(m3_pair.decode), before, strict=True))
    blocks = -(-length // BLOCK_TOKENS)
    assert (sent.outcome, received.outcome) == (CloseReason.RELEASED, CloseReason.LANDED)
    assert sent.tokens_moved == received.tokens_moved == length
    assert received.layers_sealed == received.layers_expected == LAYERS
    assert sent.bytes_moved == received.bytes_moved == blocks * block_bytes(1)
    assert sorted(sent.digests) == sorted(received.digests)
    runs = Counter(digest.layer for digest in received.digests)
    assert runs == dict.fromkeys(MAIN_LAYERS, HEADS * blocks) | dict.fromkeys(INDEX_LAYERS, blocks)
    # vLLM looks a one-token prompt up again after it has landed and counts it as computed.
    assert (external, local) == ((length, 0) if length > 1 else (0, 1))
    alone = complete(m3_pair.decode, "/v1/completions", body | {"cache_salt": secrets.token_hex(8)})
    assert len(text_of(alone)) == 16
    assert text_of(answer) == text_of(alone)


def test_text_and_chat_go_in_and_out(m3_pair: Pair) -> None:
    """A text prompt is its bytes, the chat template is rendered on both legs, and what streams is what is answered whole."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0, "cache_salt": secrets.token_hex(8)}
    answer, _, received = through_both(m3_pair, "/v1/completions", body)
    assert received.tokens_moved == len("hello")
    as_tokens = complete(m3_pair.decode, "/v1/completions", body | {"prompt": list(b"hello"), "cache_salt": secrets.token_hex(8)})
    assert text_of(answer) == text_of(as_tokens)
    assert len(text_of(answer)) == 8
    messages = [{"role": "user", "content": "Name three rivers, and one thing about each of them. " * 4}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    moved, _, landed = through_both(m3_pair, "/v1/chat/completions", chat | {"cache_salt": secrets.token_hex(8), "stream": True})
    alone = complete(m3_pair.decode, "/v1/chat/completions", chat | {"cache_salt": secrets.token_hex(8)})
    assert landed.tokens_moved == landed.prompt_tokens > BLOCK_TOKENS
    assert text_of(moved) == text_of(alone)


MOST_ATTEMPTS = 12
"""how often a small prompt is tried: on a busy machine the thread that sends may get its turn only after the pass"""


def gathered_before_the_last_end(events: list[Event]) -> set[str]:
    """Return the layers of which something was gathered before the last forward pass ended."""
    last_end = max(number for number, event in enumerate(events) if not event.layers)
    return {layer for event in events[:last_end] for layer in event.layers}


def test_all_layers_leave_while_a_prompt_of_several_passes_is_computed(m3_pair: Pair, trace: Trace) -> None:
    """Dense, sparse and index caches of one pass cross during the next."""
    body = body_of(letters(6 * BLOCK_TOKENS, seed=4999), stream=False, salt=secrets.token_hex(8), max_tokens=2)
    _, sent, _ = through_both(m3_pair, "/v1/completions", body)
    assert gathered_before_the_last_end(trace()) == {*MAIN_LAYERS, *INDEX_LAYERS}
    assert 0.5 < sent.bytes_before_forward_end / sent.bytes_moved <= 1


def test_sparse_and_index_layers_leave_while_a_prompt_of_one_pass_is_computed(m3_pair: Pair, trace: Trace) -> None:
    """Here only hooks can send early: what is gathered before the one pass ends includes a sparse layer's cache and its index, sooner or later."""
    wanted = {MAIN_LAYERS[0], MAIN_LAYERS[3], INDEX_LAYERS[0]}
    seen: set[str] = set()
    for attempt in range(MOST_ATTEMPTS):
        begin = len(trace())
        body = body_of(letters(2 * BLOCK_TOKENS, seed=5000 + attempt), stream=False, salt=secrets.token_hex(8), max_tokens=2)
        _, sent, _ = through_both(m3_pair, "/v1/completions", body)
        events = trace()[begin:]
        assert [event.layers for event in events].count(()) == 1
        early = gathered_before_the_last_end(events)
        assert not early or sent.bytes_before_forward_end > 0
        seen |= early
        if seen >= wanted:
            break
    assert seen >= wanted
