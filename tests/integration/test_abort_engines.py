"""Real engines and the real router: a client that leaves in any phase has both engines rid of it in time, and a stream whose engine is lost goes on.

Decode is reached through a proxy that holds requests back, or drops one connection, where a test wants it.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from cutting_proxy import CuttingProxy, cutting_proxy
from engine_requests import MODEL, body_of, tokens
from engines import Engine, Pair
from serving import Router, running_router

from pdserve.config import load_config
from pdserve.types import CloseReason, TransferSide

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("clean")]

STEP_S = 0.5
ACKNOWLEDGED_S = STEP_S + 1.0
FREE_S = 1.0
"""after the acknowledgement"""
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def proxied(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, CuttingProxy]]:
    """A router that resumes streams and reaches decode through a proxy."""
    secret = {"x-pdserve-secret": pair.decode.secret}
    with ExitStack() as stack:
        proxy = stack.enter_context(cutting_proxy(pair.decode.client.base_url.port or 0))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{proxy.port}", headers=secret, trust_env=False))
        config = load_config(overrides={"router.port": 0, "served_model_name": MODEL, "router.resume": True})
        behind = Pair(pair.prefill, replace(pair.decode, client=client))
        yield stack.enter_context(running_router(behind, config, tmp_path_factory.mktemp("router"))), proxy


@contextmanager
def request(router: Router, body: dict[str, Any], request_id: str) -> Iterator[socket.socket]:
    """Send a completion over a socket of its own; leaving the scope resets it."""
    content = json.dumps(body).encode()
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: {request_id}\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        raw.sendall(head.encode() + content)
        raw.settimeout(PATIENCE_S)
        yield raw
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def prefill_runs(pair: Pair, proxy: CuttingProxy, client: socket.socket) -> None:
    until(lambda: pair.prefill.status().running == 1)


def decode_waits(pair: Pair, proxy: CuttingProxy, client: socket.socket) -> None:
    until(lambda: pair.decode.status().transfers_open == 1)


def decode_is_not_reached(pair: Pair, proxy: CuttingProxy, client: socket.socket) -> None:
    """Prefill has answered and keeps the prompt's blocks, and decode has not heard of the request."""
    until(lambda: proxy.held == 1)
    until(lambda: (status := pair.prefill.status()).transfers_open == 1 and not status.running)
    assert pair.decode.status().transfers_open == 0


def tokens_come(pair: Pair, proxy: CuttingProxy, client: socket.socket) -> None:
    seen = b""
    while seen.count(b"data: ") < 3:
        seen += client.recv(65536)


@pytest.mark.parametrize("run", [0, *(pytest.param(run, marks=pytest.mark.long) for run in range(1, 5))])
@pytest.mark.parametrize("phase", [prefill_runs, decode_waits, decode_is_not_reached, tokens_come])
def test_leaving_rids_both_engines_in_time(
    pair: Pair,
    proxied: tuple[Router, CuttingProxy],
    phase: Callable[[Pair, CuttingProxy, socket.socket], None],
    run: int,
    record_property: Callable[[str, object], None],
) -> None:
    """Acknowledged within a step and a second, blocks free within another second: the receipt says so, and the engines do."""
    router, proxy = proxied
    is_held_back = phase is decode_is_not_reached
    length = 100 if phase in (decode_is_not_reached, tokens_come) else 3000
    request_id = f"leaver-{secrets.token_hex(4)}"
    body = body_of(tokens(length, seed=hash(request_id) % 1000), stream=True, salt=request_id, max_tokens=900) | {"ignore_eos": True}
    free = [engine.status().blocks_free for engine in (pair.prefill, pair.decode)]
    proxy.held = 0
    if is_held_back:
        proxy.may_pass.clear()
    try:
        with request(router, body, request_id) as client:
            phase(pair, proxy, client)
        left_s = time.monotonic()
        for engine, blocks in zip((pair.prefill, pair.decode), free, strict=True):
            engine.wait_blocks(blocks, timeout_s=PATIENCE_S)
        free_s = time.monotonic() - left_s
    finally:
        proxy.may_pass.set()
    router.at_rest()
    receipt = router.receipt(request_id)
    assert receipt.outcome == "cancelled"
    assert {abort.worker for abort in receipt.aborts} == {pair.prefill.worker_id, pair.decode.worker_id}
    record_property("blocks_free_s", free_s)
    for abort in receipt.aborts:
        record_property(abort.worker, (abort.acknowledged_s, abort.blocks_free_s))
        assert abort.acknowledged_s is not None and abort.acknowledged_s < ACKNOWLEDGED_S
        assert abort.blocks_free_s is not None and abort.blocks_free_s < abort.acknowledged_s + FREE_S
    assert free_s < ACKNOWLEDGED_S + FREE_S + 0.5


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Flags and faces: 🇩🇪 🇫🇷 😀 😃 😄 日本語 日本語"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Repeat: 😀 日本語 😀 日本語 😀"}]},
}
LENGTH = 24


def streamed(router: Router, path: str, salt: str, request_id: str) -> tuple[str, list[str], dict[str, int]]:
    """Return a greedy stream's text, its ids and its usage; it must end in one [DONE] and show no token id."""
    body = {"model": MODEL, "temperature": 0, "stream": True, "max_tokens": LENGTH, "cache_salt": salt, "ignore_eos": True, **PROMPTS[path]}
    body["stream_options"] = {"include_usage": True}
    with router.public.stream("POST", path, json=body, headers={"x-request-id": request_id}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.count("data: [DONE]") == 1 and lines[-1] == "data: [DONE]", lines[-1]
    assert not any('token_ids":[' in line for line in lines)
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert not any("error" in event for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    counts = {name: events[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return text, sorted({event["id"] for event in events}), counts


def lose_decode_after(router: Router, proxy: CuttingProxy, path: str, cuts: range) -> None:
    salt = secrets.token_hex(8)
    text, _, counts = streamed(router, path, salt, f"whole-{salt}")
    assert counts["completion_tokens"] == LENGTH
    for cut in cuts:
        proxy.cut_after = cut
        request_id = f"cut-{salt}-{cut}"
        resumed, ids, usage = streamed(router, path, f"{salt}-{cut}", request_id)
        assert (resumed, len(ids), usage) == (text, 1, counts), cut
        assert router.receipt(request_id).attempts == 2, cut


@pytest.mark.parametrize("path", PROMPTS)
def test_a_stream_goes_on_when_decode_is_lost(proxied: tuple[Router, CuttingProxy], path: str) -> None:
    """Text, usage and the one id are the undisturbed stream's, though an engine computed prompt and tokens again."""
    lose_decode_after(*proxied, path, range(2, LENGTH, 11))


@pytest.mark.long
@pytest.mark.parametrize("path", PROMPTS)
def test_a_stream_goes_on_when_decode_is_lost_at_any_token(proxied: tuple[Router, CuttingProxy], path: str) -> None:
    """Also in the middle of a character that takes several tokens."""
    lose_decode_after(*proxied, path, range(1, LENGTH))


def test_an_engine_says_whose_blocks_it_keeps(pair: Pair) -> None:
    """A prefill that was answered keeps its blocks until the abort ends the transfer; asked again, nothing is held."""
    ticket, request_id = pair.ticket(), "kept-1"
    body = body_of(tokens(100, seed=77), stream=False, salt="kept", max_tokens=1) | {"kv_transfer_params": ticket.params(TransferSide.SEND)}
    pair.prefill.client.post("/v1/completions", json=body, headers={"X-Request-Id": request_id}).raise_for_status()
    first = abort(pair.prefill, request_id)
    assert (first["aborted"], first["held"]) == (0, [request_id])
    until(lambda: not abort(pair.prefill, request_id)["held"])
    assert pair.prefill.record(ticket.transfer_id).outcome is CloseReason.ABORTED


def abort(engine: Engine, *request_ids: str) -> dict[str, Any]:
    answer = engine.client.post("/pdserve/v1/abort", json={"request_ids": request_ids})
    return dict(answer.raise_for_status().json())
