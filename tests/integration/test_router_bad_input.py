"""Bodies that cannot be served: OpenAI's error shape, the right status before the first byte, streamed or not, and no engine hears of them."""

import asyncio
import json
from typing import Any

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, Rig, filled, rig

LIMIT_BYTES = 64 << 10

# path, body or what differs from a good one, status, param, code
CASES: list[tuple[str, Any, int, str | None, str | None]] = [
    (CHAT, b"", 400, None, "invalid_json"),
    (CHAT, b"{", 400, None, "invalid_json"),
    (CHAT, b"[]", 400, None, "invalid_json"),
    (CHAT, b'"text"', 400, None, "invalid_json"),
    (CHAT, b'{"model":"fake","messages":[{"role":"user","content":"\xff"}]}', 400, None, "invalid_json"),
    (COMPLETIONS, b'{"model":"fake","prompt":"x","temperature":NaN}', 400, None, "invalid_json"),
    (COMPLETIONS, b'{"model":"fake","prompt":"x","temperature":1e999}', 400, None, "invalid_json"),
    (COMPLETIONS, b'{"model":"fake","prompt":"x","metadata":' + b"[" * 2000 + b"]" * 2000 + b"}", 400, None, "invalid_json"),
    (COMPLETIONS, b'{"model":"fake","prompt":"x","metadata":' + b"[" * 300 + b"]" * 300 + b"}", 400, None, "invalid_json"),
    (CHAT, {"model": "nope"}, 404, "model", "model_not_found"),
    (CHAT, {"model": 7}, 400, "model", "invalid_type"),
    (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": None}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": "hello"}, 400, "messages", "invalid_type"),
    (CHAT, {"messages": ["hello"]}, 400, "messages[0]", "invalid_type"),
    (CHAT, {"messages": [{"content": "hello"}]}, 400, "messages[0].role", "invalid_type"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "invalid_type"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": 5}, 400, "prompt", "invalid_type"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "invalid_type"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt", "invalid_type"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, 400, "prompt", "invalid_type"),
    (CHAT, {"n": 10**9}, 400, "n", "invalid_value"),
    (CHAT, {"n": 0}, 400, "n", "invalid_value"),
    (CHAT, {"n": "2"}, 400, "n", "invalid_type"),
    (CHAT, {"n": True}, 400, "n", "invalid_type"),
    (COMPLETIONS, {"n": 10**9}, 400, "n", "invalid_value"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": "5"}, 400, "max_tokens", "invalid_type"),
    (CHAT, {"max_tokens": 1.5}, 400, "max_tokens", "invalid_type"),
    (CHAT, {"max_tokens": 10**30}, 400, "max_tokens", "invalid_type"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 4097}, 400, "max_tokens", "context_length_exceeded"),
    (CHAT, {"max_completion_tokens": 4097}, 400, "max_completion_tokens", "context_length_exceeded"),
    (COMPLETIONS, {"max_tokens": 4097}, 400, "max_tokens", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": [5] * 4096}, 400, "prompt", "context_length_exceeded"),
    (CHAT, {"min_tokens": -1}, 400, "min_tokens", "invalid_value"),
    (CHAT, {"min_tokens": "1"}, 400, "min_tokens", "invalid_type"),
    (CHAT, {"stop": 5}, 400, "stop", "invalid_type"),
    (CHAT, {"stop": [5]}, 400, "stop", "invalid_type"),
    (CHAT, {"logprobs": 5}, 400, "logprobs", "invalid_type"),
    (COMPLETIONS, {"logprobs": True}, 400, "logprobs", "invalid_type"),
    (CHAT, {"temperature": "hot"}, 400, "temperature", "invalid_type"),
    (CHAT, {"cache_salt": 5}, 400, "cache_salt", "invalid_type"),
    (CHAT, {"tools": {}}, 400, "tools", "invalid_type"),
    (CHAT, {"kv_transfer_params": {"transfer_id": "x"}}, 400, "kv_transfer_params", "unknown_parameter"),
    (CHAT, {"kv_transfer_params": None}, 400, "kv_transfer_params", "unknown_parameter"),
    (CHAT, {"ec_transfer_params": {}}, 400, "ec_transfer_params", "unknown_parameter"),
    (COMPLETIONS, {"bootstrap_host": "10.0.0.1"}, 400, "bootstrap_host", "unknown_parameter"),
    (CHAT, {"vllm_xargs": {"kv_transfer_params": "x"}}, 400, "vllm_xargs.kv_transfer_params", "unknown_parameter"),
]


def body_of(path: str, case: Any, *, stream: bool) -> bytes:
    """Return the bytes to post; a dict is completed and, if asked, streamed."""
    return case if isinstance(case, bytes) else json.dumps(filled(path, {**case, "stream": stream})).encode()


async def refused(r: Rig, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Post bytes; returns the status and the error object, whose shape is checked."""
    async with r.client.post(r.url + path, data=body, headers={"content-type": "application/json", **(headers or {})}) as answer:
        assert answer.headers["content-type"] == "application/json"
        parsed = await answer.json()
        assert set(parsed) == {"error"}
        assert set(parsed["error"]) == {"message", "type", "param", "code"}
        assert parsed["error"]["message"]
        return answer.status, parsed["error"]


async def test_every_bad_body_is_refused_with_its_field_and_no_engine_hears_of_it() -> None:
    """The whole table, streamed and not: status, param and code as listed."""
    async with rig() as r:
        for path, case, status, param, code in CASES:
            for stream in (False, True):
                got = await refused(r, path, body_of(path, case, stream=stream))
                assert (got[0], got[1]["param"], got[1]["code"]) == (status, param, code), (case, got)
        assert r.legs == []
        receipts = await r.admin("receipts?limit=1000")
        assert {receipt["outcome"] for receipt in receipts["receipts"]} == {"client_error"}
        assert len(receipts["receipts"]) == 2 * len(CASES)


@pytest.mark.parametrize("options", [5, {"include_usage": "yes"}])
async def test_stream_options_of_the_wrong_type_are_refused(options: Any) -> None:
    """The one nested field the router reads is checked too."""
    async with rig() as r:
        status, error = await refused(r, CHAT, orjson.dumps(filled(CHAT, {"stream": True, "stream_options": options})))
        assert status == 400
        assert error["param"].startswith("stream_options")


async def test_stream_options_without_stream_are_refused_once() -> None:
    """What would fail on prefill's leg only is told at the edge."""
    async with rig() as r:
        status, error = await refused(r, CHAT, orjson.dumps(filled(CHAT, {"stream_options": {"include_usage": True}})))
        assert (status, error["param"]) == (400, "stream_options")


async def test_body_over_the_limit_is_refused_by_its_announced_size() -> None:
    """413 comes without waiting for the body, on any route."""
    async with rig(max_body_bytes=LIMIT_BYTES) as r:
        status, error = await refused(r, CHAT, b" " * (LIMIT_BYTES + 1))
        assert (status, error["code"]) == (413, "body_too_large")
        assert r.legs == []


async def test_body_over_the_limit_is_refused_while_it_is_read() -> None:
    """A chunked body says nothing of its size; it is cut off at the limit."""
    async with rig(max_body_bytes=LIMIT_BYTES) as r:

        async def chunks() -> Any:
            for _ in range(64):
                yield b" " * 4096

        async with r.client.post(r.url + CHAT, data=chunks(), headers={"content-type": "application/json"}) as answer:
            assert answer.status == 413


@pytest.mark.parametrize(
    ("headers", "code"),
    [({"content-type": "text/plain"}, "unsupported_media_type"), ({"content-encoding": "gzip"}, "unsupported_encoding")],
)
async def test_only_plain_json_is_taken(headers: dict[str, str], code: str) -> None:
    """Other media types and compressed bodies are 415."""
    async with rig() as r:
        status, error = await refused(r, CHAT, orjson.dumps(filled(CHAT, {})), headers)
        assert (status, error["code"]) == (415, code)


async def test_unknown_paths_and_methods_have_the_same_shape() -> None:
    """404 and 405 are OpenAI errors too; engine routes that the router does not serve do not exist."""
    async with rig() as r:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("POST", "/v1/embeddings", 404),
            ("POST", "/abort_requests", 404),
            ("POST", "/pdserve/v1/abort", 404),
            ("GET", "/admin/v1/status", 404),
            ("GET", "/docs", 404),
            ("GET", CHAT, 405),
            ("PUT", COMPLETIONS, 405),
            ("GET", "/v1/models/nope", 404),
        ):
            async with r.client.request(method, r.url + path) as answer:
                parsed = await answer.json()
                assert answer.status == status, path
                assert set(parsed["error"]) == {"message", "type", "param", "code"}


async def test_everything_the_router_does_not_read_reaches_decode_untouched() -> None:
    """Engine extras and unknown fields pass, whatever their value."""
    extras = {
        "top_k": 5,
        "guided_choice": ["a"],
        "unknown": {"a": [1, None, {"b": 2.5}]},
        "logit_bias": {"5": -1},
        "user": "ü",
        "seed": 2**62,
    }
    async with rig() as r:
        await r.post(**extras)
        body = r.decodes[0].legs[0].body
        assert {name: body[name] for name in extras} == extras


async def test_the_engines_internal_headers_cannot_be_sent_by_clients() -> None:
    """No header of the client reaches an engine: neither rank nor priority nor another's secret nor a request id."""
    sent = {"X-data-parallel-rank": "3", "X-Vllm-Priority": "-5", "X-Session-ID": "s", "X-Request-Id": "mine", "Authorization": "Bearer k"}
    async with rig() as r:
        async with r.client.post(r.url + CHAT, json=filled(CHAT, {"request_id": "body-id"}), headers=sent) as answer:
            assert answer.headers["x-request-id"] == "mine"
        for leg in r.legs:
            assert {name.lower() for name in leg.headers} == {"host", "x-pdserve-secret", "content-type", "content-length", "x-request-id"}
            assert "mine" not in leg.request_id
            assert "request_id" not in leg.body


@pytest.mark.parametrize("client_id", ["", "a" * 129, "a b", "a/b", "ü", "a\tb"])
async def test_unfit_request_ids_are_replaced(client_id: str) -> None:
    """An id that is no plain word of at most 128 characters is not echoed."""
    async with rig() as r, r.client.post(r.url + CHAT, json=filled(CHAT, {}), headers={"X-Request-Id": client_id}) as answer:
        assert answer.headers["x-request-id"] != client_id
        assert len(answer.headers["x-request-id"]) == 32


async def test_one_request_id_used_many_times_at_once_harms_nobody() -> None:
    """Fifty requests under one id are fifty requests: all answered, all with ids of their own towards the engines."""
    async with rig() as r:
        await r.put_fleet(max_running=64)

        async def one() -> int:
            async with r.client.post(r.url + CHAT, json=filled(CHAT, {}), headers={"X-Request-Id": "same"}) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == "Hello world"
                return answer.status

        assert set(await asyncio.gather(*(one() for _ in range(50)))) == {200}
        assert len({leg.request_id for leg in r.decodes[0].legs}) == 50
        assert len({leg.body["kv_transfer_params"]["transfer_id"] for leg in r.decodes[0].legs}) == 50
