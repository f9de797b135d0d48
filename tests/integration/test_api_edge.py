"""One edge in front of every path that takes a body, those that generate and those that only ask: keys, limits, caps, ids, receipts."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Rig, rig

from pdserve.server.api.endpoints import ENDPOINTS
from pdserve.server.keys import Scope, new_key

TOKENIZE, DETOKENIZE, COUNT = "/tokenize", "/detokenize", "/v1/messages/count_tokens"
MESSAGE = {"role": "user", "content": "Hello?"}
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [MESSAGE]},
    COMPLETIONS: {"prompt": "Hello"},
    RESPONSES: {"input": [MESSAGE]},
    MESSAGES: {"messages": [MESSAGE], "max_tokens": 8},
    TOKENIZE: {"messages": [MESSAGE]},
    DETOKENIZE: {"tokens": [1, 2]},
    COUNT: {"messages": [MESSAGE]},
}
PATHS = pytest.mark.parametrize("path", ENDPOINTS)
ANTHROPIC = frozenset({MESSAGES, COUNT})
IMAGE = "https://example.com/cat.png"
REMOTE: Mapping[str, dict[str, Any]] = {
    "messages": {"type": "image_url", "image_url": {"url": IMAGE}},
    "input": {"type": "input_image", "image_url": IMAGE},
}
REQUESTS_PER_MINUTE = 2


class Keys(NamedTuple):
    """A keys file and two keys in it."""

    file: str
    user: str
    """for few requests"""
    scraper: str


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    user, line = new_key("user", requests_per_minute=REQUESTS_PER_MINUTE, tokens_per_minute=60_000)
    scraper, other = new_key("scraper", (Scope.METRICS,))
    file = tmp_path / "keys.yaml"
    file.write_text(f"{line}\n{other}\n")
    return Keys(str(file), user, scraper)


async def ask(
    r: Rig, path: str, key: str | None = None, fields: Mapping[str, Any] | None = None, **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    """Post a request; returns status, parsed body and headers."""
    body = orjson.dumps({"model": "fake", **BODIES[path], **(fields or {})})
    sent = {"content-type": "application/json", **({} if key is None else {"x-api-key": key}), **headers}
    async with r.client.post(r.url + path, data=body, headers=sent) as answer:
        return answer.status, await answer.json(), answer.headers


def test_every_path_is_tried_here() -> None:
    """None is added without its body."""
    assert BODIES.keys() == ENDPOINTS.keys()


@PATHS
async def test_a_key_of_the_right_scope_opens_it(path: str, keys: Keys) -> None:
    """Without one no engine hears of it; with one no engine sees it."""
    async with rig(keys_file=keys.file) as r:
        for key, status in ((None, 401), ("nope", 401), (keys.scraper, 403)):
            got, body, _ = await ask(r, path, key)
            assert (got, set(body)) == (status, {"type", "error"} if path in ANTHROPIC else {"error"})
        assert r.legs == []
        assert (await ask(r, path, keys.user))[0] == 200
        assert all(keys.user not in str(leg.headers) for leg in r.legs)


@PATHS
async def test_a_keys_limit_counts_it(path: str, keys: Keys) -> None:
    """The clients of each API are told by the names that they know: how much there is, how much is left, when all of it is back."""
    async with rig(keys_file=keys.file) as r:
        answers = [await ask(r, path, keys.user) for _ in range(REQUESTS_PER_MINUTE + 1)]
        now = datetime.now(UTC)
        assert [status for status, _, _ in answers] == [200, 200, 429]
        for left, (_, _, headers) in zip((1, 0, 0), answers, strict=True):
            assert headers["x-ratelimit-remaining-requests"] == str(left)
            assert headers["x-ratelimit-limit-tokens"] == "60000"
            told = {name.lower(): value for name, value in headers.items() if name.lower().startswith("anthropic-ratelimit-")}
            assert bool(told) is (path in ANTHROPIC)
            if told:
                assert len(told) == 6
                assert told["anthropic-ratelimit-requests-limit"] == str(REQUESTS_PER_MINUTE)
                assert told["anthropic-ratelimit-requests-remaining"] == str(left)
                back = datetime.fromisoformat(told["anthropic-ratelimit-requests-reset"])
                assert 0 < (back - now).total_seconds() <= 62
        _, body, headers = answers[-1]
        assert body["error"]["type"] == ("rate_limit_error" if path in ANTHROPIC else "RateLimitError")
        assert 1 <= int(headers["retry-after"]) <= 30


@PATHS
async def test_an_answer_has_the_clients_id_and_a_receipt(path: str, keys: Keys) -> None:
    """Also one that refuses; engines know it by another id."""
    async with rig(keys_file=keys.file) as r:
        for index, fields in enumerate(({}, {"model": "nope"})):
            _, _, headers = await ask(r, path, keys.user, fields, **{"x-request-id": f"mine-{index}"})
            assert headers["x-request-id"] == f"mine-{index}"
        assert all("mine" not in leg.request_id for leg in r.legs)
        served, refused = sorted(await r.receipts(2), key=lambda receipt: receipt.status)
        assert [(receipt.client_request_id, receipt.route) for receipt in (served, refused)] == [("mine-0", path), ("mine-1", path)]
        assert [(receipt.status, receipt.outcome) for receipt in (served, refused)] == [(200, "finished"), (404, "client_error")]


def _too_much(path: str) -> list[tuple[dict[str, Any], str | None, str]]:
    """Return fields that go too far, with the field and the code of the refusal."""
    deep: Any = "x"
    for _ in range(8):
        deep = [deep]
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({"extra": deep}, None, "invalid_json"),
        ({"kv_transfer_params": {}}, "kv_transfer_params", "unknown_parameter"),
    ]
    for field, part in REMOTE.items():
        if field in BODIES[path]:
            cases += [
                ({field: [MESSAGE] * 4}, field, "invalid_value"),
                ({field: [{"role": "user", "content": [part]}]}, f"{field}[0].content[0]", "remote_media_not_allowed"),
            ]
    return cases


@PATHS
async def test_what_goes_too_far_is_refused_and_no_engine_hears_of_it(path: str) -> None:
    """Depth, counts, addresses to fetch from, fields of routers, size, and what is not JSON."""
    async with rig(limits={"max_messages": 3, "max_json_depth": 8}, max_body_bytes=10_000) as r:
        for fields, place, code in _too_much(path):
            status, body, _ = await ask(r, path, None, fields)
            assert status == 400, fields
            assert place is None or place in body["error"]["message"]
            assert path in ANTHROPIC or body["error"]["code"] == code
        assert (await ask(r, path, None, {"extra": "x" * 10_000}))[0] == 413
        assert (await ask(r, path, None, None, **{"content-type": "text/plain"}))[0] == 415
        assert (await ask(r, path, None, None, **{"content-encoding": "gzip"}))[0] == 415
        assert r.legs == []


@pytest.mark.parametrize(("path", "field"), [(CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")])
@pytest.mark.parametrize(("most", "told"), [(8, 8), (5000, 4096)])
async def test_a_request_without_an_output_limit_gets_the_largest_that_is_valid(path: str, field: str, most: int, told: int) -> None:
    """The deployment's, or the model's length where that is less: an engine refuses more."""
    async with rig(limits={"max_output_tokens": most}) as r:
        assert (await ask(r, path))[0] == 200
        assert r.decodes[0].legs[0].body[field] == told
