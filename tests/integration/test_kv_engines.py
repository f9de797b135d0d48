"""Two real engines, real KV: what decode answers from moved blocks is what it answers by itself, and nothing is left behind.

One pair of engines serves the file. Each arm of a comparison has a cache salt of its own, and counts only if the transfer's record shows that
the prompt's tokens moved: otherwise it would compare the cache with itself.
"""

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from engine_requests import BLOCK, MODEL, TEMPLATE, body_of, complete, computed, text_of, through_both, tokens
from engines import Engine, Pair, legs

from pdserve.server.api.chat import Chat
from pdserve.types import CloseReason, Ticket, TransferSide

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("clean")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1500])
def test_moved_prompts_answer_like_computed_ones(pair: Pair, length: int, stream: bool) -> None:
    """Greedy output from moved KV equals the same engine's own, and decode computes no prompt token."""
    prompt, salt = tokens(length, seed=length + stream), secrets.token_hex(8)
    before = computed(pair.decode)
    answer, sent, received = through_both(pair, "/v1/completions", body_of(prompt, stream=stream, salt=salt))
    external, local = (after - start for after, start in zip(computed(pair.decode), before, strict=True))
    assert received.outcome is CloseReason.LANDED
    assert sent.outcome is CloseReason.RELEASED
    assert received.tokens_moved == sent.tokens_moved == length
    assert received.layers_sealed == received.layers_expected == 30
    assert sent.acks == sent.acks_expected == 1
    assert received.bytes_moved == sent.bytes_moved == -(-length // BLOCK) * BLOCK * 30 * 3 * 64 * 2 * 4
    # vLLM looks a one-token prompt up again after it has landed and counts it as computed: there is nothing before its last token.
    assert (external, local) == ((length, 0) if length > 1 else (0, 1))
    alone = complete(pair.decode, "/v1/completions", body_of(prompt, stream=stream, salt=salt + "-alone"))
    assert text_of(answer) == text_of(alone)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_answers_like_the_aggregated_engine(pair: Pair, stream: bool) -> None:
    """The template is rendered on both legs, and their prompts are the same."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three rivers of Europe, and one thing about each." * 4}],
        "max_tokens": 16,
        "temperature": 0,
        "stream": stream,
        "cache_salt": secrets.token_hex(8),
    }
    answer, _, received = through_both(pair, "/v1/chat/completions", body)
    alone = complete(pair.decode, "/v1/chat/completions", body | {"cache_salt": secrets.token_hex(8)})
    assert received.outcome is CloseReason.LANDED
    assert received.tokens_moved == received.prompt_tokens > BLOCK
    assert text_of(answer) == text_of(alone)


def test_sixteen_at_once_all_land(pair: Pair) -> None:
    """Transfers of many requests share slots and do not mix."""
    bodies = [body_of(tokens(40 + 17 * n, seed=900 + n), stream=bool(n % 2), salt=f"many-{n}", max_tokens=6) for n in range(16)]
    with ThreadPoolExecutor(16) as executor:
        moved = list(executor.map(lambda body: through_both(pair, "/v1/completions", body), bodies))
    alone = [complete(pair.decode, "/v1/completions", body | {"cache_salt": body["cache_salt"] + "-alone"}) for body in bodies]
    assert [record.outcome for _, _, record in moved] == [CloseReason.LANDED] * 16
    assert [record.tokens_moved for _, _, record in moved] == [len(body["prompt"]) for body in bodies]
    assert [text_of(answer) for answer, _, _ in moved] == [text_of(answer) for answer in alone]


def test_only_blocks_that_decode_lacks_are_moved(pair: Pair) -> None:
    """A prefix that decode holds from an earlier transfer stays there; a prefix that prefill holds is sent from its cache."""
    salt, first = secrets.token_hex(8), tokens(4 * BLOCK + 5, seed=77)
    longer = first + tokens(50, seed=78)
    through_both(pair, "/v1/completions", body_of(first, stream=False, salt=salt))
    answer, sent, received = through_both(pair, "/v1/completions", body_of(longer, stream=False, salt=salt))
    assert received.outcome is CloseReason.LANDED
    assert (received.tokens_reused, received.tokens_moved) == (4 * BLOCK, len(longer) - 4 * BLOCK)
    assert sent.tokens_reused == 4 * BLOCK
    alone = complete(pair.decode, "/v1/completions", body_of(longer, stream=False, salt=salt + "-alone"))
    assert text_of(answer) == text_of(alone)


def test_prompt_that_decode_holds_whole_moves_at_most_its_tail(pair: Pair) -> None:
    """A repeated prompt of whole blocks moves its last block only, since vLLM always runs one token again."""
    salt, prompt = secrets.token_hex(8), tokens(3 * BLOCK, seed=91)
    first, _, _ = through_both(pair, "/v1/completions", body_of(prompt, stream=False, salt=salt))
    again, sent, received = through_both(pair, "/v1/completions", body_of(prompt, stream=False, salt=salt))
    assert received.outcome in (CloseReason.LANDED, CloseReason.NOTHING_TO_MOVE)
    assert received.tokens_moved <= BLOCK
    assert sent.outcome in (CloseReason.RELEASED, CloseReason.NOTHING_TO_MOVE)
    assert text_of(first) == text_of(again)


def test_failed_loads_are_computed_and_show_in_the_record_not_in_prefix_hits(pair: Pair) -> None:
    """vLLM counts prefix hits when it admits, also for a load that fails; the record and the source counters tell the truth."""
    prompt, salt = tokens(3 * BLOCK, seed=55), secrets.token_hex(8)
    ticket = pair.ticket()
    stale = Ticket(**{**{name: getattr(ticket, name) for name in Ticket.__slots__}, "prefill_incarnation": "0" * 16})
    hits, before = pair.decode.metric("vllm:external_prefix_cache_hits_total"), computed(pair.decode)
    body = body_of(prompt, stream=False, salt=salt) | {"kv_transfer_params": stale.params(TransferSide.RECEIVE)}
    answer = complete(pair.decode, "/v1/completions", body)
    external, local = (after - start for after, start in zip(computed(pair.decode), before, strict=True))
    assert pair.decode.record(ticket.transfer_id).outcome is CloseReason.PEER_UNKNOWN
    assert (external, local) == (0, len(prompt))
    assert pair.decode.metric("vllm:external_prefix_cache_hits_total") - hits == len(prompt)
    alone = complete(pair.decode, "/v1/completions", body_of(prompt, stream=False, salt=salt + "-alone"))
    assert text_of(answer) == text_of(alone)


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}}}
EVERY_FIELD: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "What is the weather in Oslo, and what in Rome? " * 4},
        {"role": "assistant", "content": "It is"},
    ],
    "tools": [TOOL],
    "tool_choice": "none",
    "documents": [{"title": "a", "text": "b"}],
    "reasoning_effort": "low",
    "chat_template_kwargs": {"flavour": "salt"},
    "chat_template": "OTHER " + TEMPLATE,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": False,
    "truncate_prompt_tokens": 2000,
    "cache_salt": "a-salt",
}
NOT_RENDERED = frozenset({"model", "mm_processor_kwargs", "media_io_kwargs", "response_format", "tool_choice", "add_special_tokens"})
"""fields of the allow-list that change nothing for this model's text prompts"""


@pytest.mark.parametrize("field", sorted(Chat.prefill_fields - NOT_RENDERED))
def test_a_template_field_missing_on_one_leg_is_a_mismatch_and_never_a_wrong_answer(pair: Pair, field: str) -> None:
    """The two legs render apart; if one lacks a field, the prompts differ, the transfer is refused by name and decode computes."""
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6, **EVERY_FIELD}
    if field == "add_generation_prompt":
        body |= {"add_generation_prompt": False, "continue_final_message": False}
    elif field in ("truncate_prompt_tokens", "truncation_side"):
        body |= {"truncate_prompt_tokens": 60, "truncation_side": "right"}
    ticket = pair.ticket()
    prefill_leg, decode_leg = legs(body, ticket)
    prefill_leg = {name: value for name, value in prefill_leg.items() if name != field}
    if field == "messages":
        prefill_leg["messages"] = [*body["messages"][:1], {"role": "assistant", "content": "It was"}]
    elif field == "continue_final_message":
        prefill_leg["add_generation_prompt"] = True
    with ThreadPoolExecutor(1) as executor:
        prefill = executor.submit(complete, pair.prefill, "/v1/chat/completions", prefill_leg)
        answer = complete(pair.decode, "/v1/chat/completions", decode_leg)
        prefill.result()
    assert pair.decode.record(ticket.transfer_id).outcome is CloseReason.PROMPT_MISMATCH
    assert pair.prefill.record(ticket.transfer_id).outcome is CloseReason.PROMPT_MISMATCH
    alone = complete(pair.decode, "/v1/chat/completions", body | {"cache_salt": secrets.token_hex(8)})
    assert text_of(answer) == text_of(alone)


def test_client_leaving_decode_in_mid_stream_frees_both_engines(pair: Pair) -> None:
    """Closing decode's stream returns its blocks; prefill's were free since the acknowledgement."""
    free = pair.decode.status().blocks_free
    ticket = pair.ticket()
    prefill_leg, decode_leg = legs(
        body_of(tokens(100, seed=12), stream=True, salt="leaver", max_tokens=2000) | {"ignore_eos": True}, ticket
    )
    with ThreadPoolExecutor(1) as executor:
        prefill = executor.submit(complete, pair.prefill, "/v1/completions", prefill_leg)
        with pair.decode.client.stream("POST", "/v1/completions", json=decode_leg) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert pair.decode.status().blocks_free < free
        prefill.result()
    pair.decode.wait_blocks(free)
    started = time.monotonic()
    complete(pair.decode, "/v1/completions", body_of(tokens(5, seed=13), stream=False, salt="next", max_tokens=1))
    assert time.monotonic() - started < 10


def test_decode_aborted_while_it_waits_for_kv_ends_the_transfer_on_both_sides(pair: Pair) -> None:
    """The agent's abort is acknowledged after a barrier through the engine loop, and prefill hears of it."""
    ticket = pair.ticket()
    prefill_leg, decode_leg = legs(body_of(tokens(3000, seed=31), stream=True, salt="abort", max_tokens=4), ticket)
    gone = threading.Thread(target=lambda: _ignore(pair.decode, decode_leg, "leg-abort"))
    gone.start()
    with ThreadPoolExecutor(1) as executor:
        prefill = executor.submit(complete, pair.prefill, "/v1/completions", prefill_leg)
        while pair.decode.status().transfers_open == 0:
            time.sleep(0.02)
        report = pair.decode.client.post("/pdserve/v1/abort", json={"request_ids": ["leg-abort"]}).json()
        assert report["aborted"] == 1
        gone.join(timeout=20)
        assert not gone.is_alive()
        prefill.result()
    assert pair.decode.record(ticket.transfer_id).outcome is CloseReason.ABORTED
    assert pair.prefill.record(ticket.transfer_id).outcome is CloseReason.PEER_CLOSED


def _ignore(engine: Engine, body: dict[str, Any], request_id: str) -> None:
    with engine.client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": request_id}) as answer:
        for _ in answer.iter_lines():
            pass


def test_prefill_aborted_before_the_seal_lets_decode_compute(pair: Pair) -> None:
    """Incomplete KV is never used: the producer's close makes decode compute the prompt, and the answer is right."""
    prompt, ticket = tokens(2000, seed=41), pair.ticket()
    prefill_leg, decode_leg = legs(body_of(prompt, stream=False, salt="half", max_tokens=4), ticket)
    with ThreadPoolExecutor(2) as executor:
        decode = executor.submit(complete, pair.decode, "/v1/completions", decode_leg)
        executor.submit(lambda: pair.prefill.client.post("/v1/completions", json=prefill_leg, headers={"X-Request-Id": "leg-half"}))
        while pair.prefill.status().running == 0:
            time.sleep(0.02)
        assert pair.prefill.client.post("/pdserve/v1/abort", json={"request_ids": ["leg-half"]}).json()["aborted"] == 1
        answer = decode.result()
    assert pair.prefill.record(ticket.transfer_id).outcome is CloseReason.ABORTED
    assert pair.decode.record(ticket.transfer_id).outcome is CloseReason.PEER_CLOSED
    alone = complete(pair.decode, "/v1/completions", body_of(prompt, stream=False, salt="half-alone", max_tokens=4))
    assert text_of(answer) == text_of(alone)


def test_prefill_whose_decode_never_comes_frees_its_blocks_at_the_deadline(pair: Pair) -> None:
    """The producer's own clock decides; expiry is a close with a reason."""
    ticket = pair.ticket(timeout_s=3)
    prefill_leg, _ = legs(body_of(tokens(40, seed=61), stream=False, salt="alone"), ticket)
    complete(pair.prefill, "/v1/completions", prefill_leg)
    assert pair.prefill.record(ticket.transfer_id).outcome is CloseReason.EXPIRED


def test_decode_whose_prefill_never_comes_computes_after_the_deadline(pair: Pair) -> None:
    """The consumer has a deadline too, and its answer is right."""
    ticket, prompt = pair.ticket(timeout_s=3), tokens(40, seed=62)
    _, decode_leg = legs(body_of(prompt, stream=False, salt="waits"), ticket)
    answer = complete(pair.decode, "/v1/completions", decode_leg)
    assert pair.decode.record(ticket.transfer_id).outcome is CloseReason.EXPIRED
    assert text_of(answer) == text_of(complete(pair.decode, "/v1/completions", body_of(prompt, stream=False, salt="waits-alone")))


@pytest.mark.parametrize(
    "params",
    [
        {"transfer_id": ""},
        {"transfer_id": "x" * 500, "attempt": 1, "role": "receive", "worker": "w", "incarnation": "i", "timeout_s": 5},
        {"transfer_id": "t", "attempt": -1, "role": "receive", "worker": "w", "incarnation": "i", "timeout_s": 5},
        {"transfer_id": "t", "attempt": 1, "role": "both", "worker": "w", "incarnation": "i", "timeout_s": 5},
        {"transfer_id": "t", "attempt": 1, "role": "send", "worker": "w", "incarnation": "i", "timeout_s": 1e308},
        {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1", "remote_port": 1},
        {"transfer_id": ["a"], "attempt": {"b": 1}, "role": 3},
    ],
)
def test_a_ticket_that_is_none_changes_nothing(pair: Pair, params: dict[str, Any]) -> None:
    """Whatever reaches an engine as a ticket, it answers right and goes on."""
    body = body_of(tokens(20, seed=71), stream=False, salt=secrets.token_hex(4), max_tokens=3)
    answer = pair.decode.client.post("/v1/completions", json=body | {"kv_transfer_params": params})
    assert answer.status_code == 200
    assert text_of(answer.json()) == text_of(complete(pair.decode, "/v1/completions", body | {"cache_salt": secrets.token_hex(4)}))


def test_the_same_ticket_twice_serves_both_and_moves_once(pair: Pair) -> None:
    """Two requests with one ticket (as `n` = 2 makes them): one uses it, the other computes."""
    prompt, ticket = tokens(70, seed=81), pair.ticket()
    body = body_of(prompt, stream=False, salt="twin", max_tokens=4)
    prefill_leg, decode_leg = legs(body, ticket)
    with ThreadPoolExecutor(3) as executor:
        answers = [executor.submit(complete, pair.decode, "/v1/completions", decode_leg) for _ in range(2)]
        executor.submit(complete, pair.prefill, "/v1/completions", prefill_leg).result()
        texts = {text_of(answer.result()) for answer in answers}
    assert len(texts) == 1
    pair.decode.record(ticket.transfer_id)
    outcomes = [record.outcome for record in pair.decode.records() if record.transfer_id == ticket.transfer_id]
    # One that comes after the other has landed finds the prompt in the cache and says so in a record of its own.
    assert outcomes in ([CloseReason.LANDED], [CloseReason.LANDED, CloseReason.NOTHING_TO_MOVE])


def test_every_private_path_asks_for_the_secret(pair: Pair) -> None:
    """Health, metrics, inference and agent answer 401 without it."""
    with httpx.Client(base_url=pair.decode.client.base_url, trust_env=False) as stranger:
        for path in ("/health", "/metrics", "/v1/models", "/pdserve/v1/status", "/pdserve/v1/records"):
            assert stranger.get(path).status_code == 401
            assert stranger.get(path, headers={"x-pdserve-secret": "0" * 64}).status_code == 401
        assert stranger.post("/pdserve/v1/abort", json={"request_ids": []}).status_code == 401
