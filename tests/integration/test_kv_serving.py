"""The router over two real engines, as its users meet it: stock clients, parity, bad input, and clients that leave."""

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from engine_requests import BLOCK, MODEL, body_of, complete, text_of, tokens
from engines import Pair
from serving import Router, running_router

from pdserve.config import load_config
from pdserve.types import CloseReason, ServePath

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("clean")]


@pytest.fixture(scope="module")
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """One router for the file; its counters are at zero after every test."""
    config = load_config(overrides={"router.port": 0, "served_model_name": MODEL, "router.max_body_bytes": 1 << 20})
    with running_router(pair, config, tmp_path_factory.mktemp("router")) as running:
        yield running


@pytest.fixture(autouse=True)
def quiet(router: Router) -> Iterator[None]:
    yield
    router.at_rest()


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as stock:
        yield stock


def test_stock_client_chats_streams_completes_and_lists_models(client: openai.OpenAI) -> None:
    """What people type against any OpenAI endpoint works, and both forms of one answer are the same."""
    assert [model.id for model in client.models.list()] == [MODEL]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)  # type: ignore[call-overload]
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == whole.choices[0].message.content
    assert "Paris" in whole.choices[0].message.content
    assert [event.usage for event in events if event.usage][-1].completion_tokens == whole.usage.completion_tokens
    completion = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4)
    assert completion.choices[0].text.strip()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [1, BLOCK, 5 * BLOCK + 1])
def test_served_through_both_engines_and_equal_to_one(pair: Pair, router: Router, length: int, stream: bool) -> None:
    """Text and usage equal the aggregated engine's, and the receipt proves that the prompt's tokens moved."""
    prompt, salt = tokens(length, seed=5000 + length + stream), secrets.token_hex(8)
    body = body_of(prompt, stream=stream, salt=salt) | ({"stream_options": {"include_usage": True}} if stream else {})
    request_id = secrets.token_hex(6)
    answer = _through(router, body, request_id)
    alone = complete(pair.decode, "/v1/completions", body | {"cache_salt": salt + "-alone"})
    receipt = router.receipt(request_id)
    assert receipt.path is ServePath.DISAGGREGATED
    assert receipt.receive is not None
    assert receipt.receive.outcome is CloseReason.LANDED
    assert receipt.receive.tokens_moved == length
    assert text_of(answer) == text_of(alone)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {name: answer["usage"][name] for name in counts} == {name: alone["usage"][name] for name in counts}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def _through(router: Router, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Send one completion through the router; streams are put together again and must end in one [DONE]."""
    headers = {"x-request-id": request_id}
    if not body["stream"]:
        answer = router.public.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] == request_id
        return dict(answer.json())
    with router.public.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.count("data: [DONE]") == 1
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return {"choices": [{"text": text}], "usage": events[-1].get("usage")}


def test_sixteen_at_once_through_the_router(pair: Pair, router: Router) -> None:
    """Concurrency changes no answer."""
    bodies = [body_of(tokens(30 + 13 * n, seed=7000 + n), stream=bool(n % 2), salt=f"crowd-{n}", max_tokens=5) for n in range(16)]
    with ThreadPoolExecutor(16) as executor:
        answers = list(executor.map(lambda pick: _through(router, pick[1], f"crowd-{pick[0]}"), enumerate(bodies)))
    alone = [complete(pair.decode, "/v1/completions", body | {"cache_salt": body["cache_salt"] + "-alone"}) for body in bodies]
    assert [text_of(answer) for answer in answers] == [text_of(answer) for answer in alone]
    assert {router.receipt(f"crowd-{n}").path for n in range(16)} == {ServePath.DISAGGREGATED}


def test_client_killed_in_mid_stream_frees_both_engines_and_the_next_is_served(pair: Pair, router: Router) -> None:
    """A reset connection aborts both legs; blocks are back soon after, and nobody queues behind the dead request."""
    free = [engine.status().blocks_free for engine in (pair.prefill, pair.decode)]
    body = json.dumps(body_of(tokens(200, seed=31), stream=True, salt="killed", max_tokens=3000) | {"ignore_eos": True}).encode()
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        seen = b""
        while b"data: " not in seen:
            seen += raw.recv(65536)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    started = time.monotonic()
    for engine, blocks in zip((pair.prefill, pair.decode), free, strict=True):
        engine.wait_blocks(blocks, timeout_s=10)
    answer = _through(router, body_of(tokens(8, seed=32), stream=False, salt="next", max_tokens=1), "after-the-killed")
    assert answer["usage"]["completion_tokens"] == 1
    assert time.monotonic() - started < 15


def test_client_that_leaves_during_prefill_aborts_prefill_too(pair: Pair, router: Router) -> None:
    """Before the first byte there is nothing to write to the client, and its leaving must be seen all the same."""
    body = body_of(tokens(3500, seed=33), stream=False, salt="early", max_tokens=2)
    with contextlib.suppress(Exception):
        router.public.post("/v1/completions", json=body, headers={"x-request-id": "early-leaver"}, timeout=1.0)
    router.at_rest()
    deadline = time.monotonic() + 10
    while (status := pair.prefill.status()).running or status.waiting:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    assert router.receipt("early-leaver").outcome == "cancelled"


LONG = "word " * 5000
BAD: list[tuple[str, Any, int, str | None]] = [
    ("malformed", b'{"model": "m", "prompt": ', 400, None),
    ("not an object", b"[1, 2]", 400, None),
    ("unknown model", {"model": "other", "prompt": "x"}, 404, "model"),
    ("no prompt", {"model": MODEL}, 400, "prompt"),
    ("empty prompt", {"model": MODEL, "prompt": ""}, 400, "prompt"),
    ("prompt of a wrong type", {"model": MODEL, "prompt": {"a": 1}}, 400, "prompt"),
    ("max_tokens of a wrong type", {"model": MODEL, "prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    ("max_tokens of zero", {"model": MODEL, "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("n beyond reason", {"model": MODEL, "prompt": "x", "n": 10**9}, 400, "n"),
    ("longer than the model", {"model": MODEL, "prompt": LONG, "max_tokens": 5}, 400, None),
    ("prompt and output longer than the model", {"model": MODEL, "prompt": "x", "max_tokens": 5000}, 400, None),
    ("a ticket of the client's", {"model": MODEL, "prompt": "x", "kv_transfer_params": {"transfer_id": "t"}}, 400, "kv_transfer_params"),
    ("a body over the limit", {"model": MODEL, "prompt": "x" * (2 << 20)}, 413, None),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("what", "body", "status", "param"), BAD, ids=[row[0] for row in BAD])
def test_bad_input_is_one_openai_error_before_the_first_byte(
    pair: Pair, router: Router, what: str, body: Any, status: int, param: str | None, stream: bool
) -> None:
    """The right status, an error in OpenAI's form that names the field, the same for streams, and engines that go on."""
    content = body if isinstance(body, bytes) else json.dumps(body | {"stream": stream}).encode()
    answer = router.public.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param


def test_chat_without_messages_is_refused(router: Router) -> None:
    """Chat has its own required field."""
    for messages in ([], "hello", None):
        answer = router.public.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"


def test_engine_controls_are_not_reachable(router: Router) -> None:
    """What vLLM's own server has besides inference, and the agent's routes, are 404 to clients."""
    for path in ("/pdserve/v1/status", "/pdserve/v1/abort", "/invocations", "/collective_rpc", "/sleep", "/pause", "/load", "/v1/nothing"):
        for answer in (router.public.get(path), router.public.post(path, json={})):
            assert answer.status_code == 404
            assert answer.json()["error"]["message"]


def test_health_readiness_and_metrics_are_the_routers_own(router: Router) -> None:
    """A load balancer can tell that it serves, and Prometheus what."""
    assert router.public.get("/health").status_code == 200
    assert router.public.get("/readyz").status_code == 200
    text = router.public.get("/metrics").text
    assert 'pdserve_requests_total{code="200",outcome="finished",path="disaggregated"' in text
    assert "vllm:" not in text
