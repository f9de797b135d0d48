"""Limits of a key, caps on a body, salts of a tenant: all that a request passes at the edge, without a server."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import RateLimited, RequestError
from pdserve.server.caps import Caps, check_caps, is_deeper, with_output_limit
from pdserve.server.rate_limit import RateLimits, duration
from pdserve.server.salts import TenantSalts
from pdserve.testing.clock import ManualClock

CAPS = Caps(max_output_tokens=None, max_json_depth=16, max_messages=4, max_tools=3, max_stop_strings=2, allow_remote_media=False)


class Tenant:
    """One name under limits, on a clock that stands still."""

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        self.clock = ManualClock()
        self.limits = RateLimits(self.clock)
        self.per_minute = (requests, tokens)

    def ask(self, tokens: int = 0, used: int | None = None) -> float | None:
        """Send one request; returns None if it was served, else when to come back."""
        meter = self.limits.meter("a", *self.per_minute)
        try:
            self.limits.enter(meter)
            self.limits.reserve(meter, tokens)
        except RateLimited as error:
            self.limits.settle(meter, 0)
            return error.retry_after_s
        self.limits.settle(meter, tokens if used is None else used)
        return None

    @property
    def told(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.limits.headers(self.limits.meter("a", *self.per_minute))}


def test_a_minutes_worth_may_be_used_at_once_and_comes_back_evenly() -> None:
    """Sixty a minute are one a second."""
    tenant = Tenant(60, None)
    assert [tenant.ask() for _ in range(60)] == [None] * 60
    assert tenant.ask() == pytest.approx(1)
    tenant.clock.advance(1)
    assert tenant.ask() is None
    assert tenant.ask() is not None
    tenant.clock.advance(3600)
    assert [tenant.ask() for _ in range(61)].count(None) == 60


def test_what_a_request_did_not_use_is_given_back_and_what_it_used_beyond_is_owed() -> None:
    """The estimate only holds the place."""
    tenant = Tenant(None, 600)
    assert tenant.ask(600, used=0) is None
    assert tenant.ask(600, used=900) is None
    assert tenant.told["x-ratelimit-remaining-tokens"] == "0"
    assert tenant.ask(10) == pytest.approx(31)
    tenant.clock.advance(31)
    assert tenant.ask(10) is None


def test_a_request_larger_than_the_limit_is_let_in_when_nothing_else_was() -> None:
    """Estimates err, and a limit that refuses for ever is none; what it used is paid by those after it."""
    tenant = Tenant(None, 100)
    assert tenant.ask(1000) is None
    assert tenant.ask(1) == 120
    tenant.clock.advance(600 + 0.6)
    assert tenant.ask(1) is None


def test_a_request_beyond_the_token_limit_counts_as_a_request() -> None:
    """As OpenAI's do; one beyond the request limit does not."""
    tenant = Tenant(2, 100)
    assert tenant.ask(100) is None
    assert tenant.ask(50) == pytest.approx(30)
    assert tenant.told["x-ratelimit-remaining-requests"] == "0"
    tenant.clock.advance(30)
    assert tenant.ask(50) is None


def test_a_request_is_settled_once() -> None:
    """Whoever says so again changes nothing."""
    tenant = Tenant(None, 100)
    meter = tenant.limits.meter("a", None, 100)
    tenant.limits.reserve(meter, 60)
    for used in (10, 0, 90):
        tenant.limits.settle(meter, used)
    assert tenant.told["x-ratelimit-remaining-tokens"] == "90"


def test_names_do_not_share_and_keys_of_one_name_do() -> None:
    """The bucket belongs to the name."""
    limits = RateLimits(ManualClock())
    for name in ("a", "b"):
        limits.enter(limits.meter(name, 1, None))
    with pytest.raises(RateLimited):
        limits.enter(limits.meter("a", 1, None))


def test_a_changed_limit_keeps_what_was_used() -> None:
    """More comes at once, less takes effect at once, none and back again starts anew; a forgotten name does too."""
    clock = ManualClock()
    limits = RateLimits(clock)

    def left(per_minute: int) -> int:
        headers = dict(limits.headers(limits.meter("a", per_minute, None)))
        return int(headers[b"x-ratelimit-remaining-requests"])

    for _ in range(6):
        limits.enter(limits.meter("a", 10, None))
    assert [left(10), left(20), left(10), left(5)] == [4, 14, 4, 0]
    limits.keep(["a"])
    assert left(5) == 0
    limits.keep(["b"])
    assert left(5) == 5
    limits.enter(limits.meter("a", 5, None))
    limits.meter("a", None, None)
    assert left(5) == 5


def test_headers_tell_what_is_limited_and_nothing_else() -> None:
    """OpenAI's names and spelling."""
    tenant = Tenant(60, 6000)
    tenant.ask(100)
    assert tenant.told == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5900",
        "x-ratelimit-reset-tokens": "1s",
    }
    assert Tenant(None, None).told == {}
    assert set(Tenant(5, None).told) == {f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")}


def test_anthropics_clients_are_told_by_its_names_too() -> None:
    """When all is there again is a time of day, never before it is true."""
    limits = RateLimits(ManualClock(), unix_s=lambda: 1_798_761_600.25)
    meter = limits.meter("a", 60, 6000, speaks_anthropic=True)
    limits.enter(meter)
    limits.reserve(meter, 100)
    told = {name.decode(): value.decode() for name, value in limits.headers(meter)}
    assert {name: value for name, value in told.items() if not name.startswith("x-")} == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2027-01-01T00:00:02Z",
        "anthropic-ratelimit-tokens-limit": "6000",
        "anthropic-ratelimit-tokens-remaining": "5900",
        "anthropic-ratelimit-tokens-reset": "2027-01-01T00:00:02Z",
    }
    assert told["x-ratelimit-reset-requests"] == "1s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.12, "120ms"), (0.9999, "1s"), (1.5, "1.5s"), (59.9, "59.9s"), (360, "6m0s"), (61.25, "1m1.25s")]
)
def test_a_span_is_written_as_openai_writes_it(seconds: float, text: str) -> None:
    """Milliseconds, seconds, minutes and seconds."""
    assert duration(seconds) == text


@settings(deadline=None)
@given(
    st.integers(1, 1000),
    st.integers(1, 100_000),
    st.lists(st.tuples(st.floats(0, 90), st.integers(0, 150_000), st.floats(0, 3)), max_size=40),
)
def test_no_sequence_gets_more_than_its_limit(requests: int, tokens: int, asked: list[tuple[float, int, float]]) -> None:
    """What was served before any request is at most a bucket and what flowed in since; who waits as told is served in the end, unless a debt of more
    than two minutes cut that short."""
    tenant = Tenant(requests, tokens)
    begin_s = tenant.clock.now_s()
    served = used = 0
    for pause_s, estimate, error in asked:
        tenant.clock.advance(pause_s)
        retry_after_s: float | None = 0.0
        for _ in range(4):
            retry_after_s = tenant.ask(estimate, used=int(estimate * error))
            if retry_after_s is None or retry_after_s == 120:
                break
            assert 0 < retry_after_s < 120
            tenant.clock.advance(retry_after_s)
        if retry_after_s is not None:
            assert retry_after_s == 120
            continue
        minutes = (tenant.clock.now_s() - begin_s) / 60
        assert used <= tokens * (1 + minutes) * (1 + 1e-9) + 1
        served, used = served + 1, used + int(estimate * error)
        assert served <= requests * (1 + minutes) * (1 + 1e-9) + 1e-3
        assert 0 <= int(tenant.told["x-ratelimit-remaining-requests"]) <= requests
        assert 0 <= int(tenant.told["x-ratelimit-remaining-tokens"]) <= tokens


def caps_error(body: Mapping[str, Any], caps: Caps = CAPS) -> tuple[str | None, str | None] | None:
    """Check a body; returns the error's field and code, None if it may pass."""
    try:
        check_caps(orjson.dumps(body), body, caps)
    except RequestError as error:
        assert error.status == 400
        return error.param, error.code
    return None


def nested(depth: int) -> Any:
    """Return a value of that many levels."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def arrays(depth: int) -> Any:
    return [arrays(depth - 1)] if depth else "x"


def objects(depth: int) -> Any:
    return {"a": objects(depth - 1)} if depth else "x"


TEXT = {"role": "user", "content": "x"}
TOO_MANY = "invalid_value"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"messages": [TEXT] * 4, "tools": [{}] * 3, "stop": ["a"] * 2}, None),
        ({"messages": [TEXT] * 5}, ("messages", TOO_MANY)),
        ({"input": [TEXT] * 5}, ("input", TOO_MANY)),
        ({"previous_input_messages": [TEXT] * 5}, ("previous_input_messages", TOO_MANY)),
        ({"input": "x" * 1000}, None),
        ({"tools": [{}] * 4}, ("tools", TOO_MANY)),
        ({"functions": [{}] * 4}, ("functions", TOO_MANY)),
        ({"stop": ["a"] * 3}, ("stop", TOO_MANY)),
        ({"stop_sequences": ["a"] * 3}, ("stop_sequences", TOO_MANY)),
        ({"stop": "a" * 100}, None),
        ({"metadata": nested(15)}, None),
        ({"metadata": nested(16)}, (None, "invalid_json")),
        ({"metadata": [nested(2), nested(16), 5]}, (None, "invalid_json")),
        ({"prompt": "[" * 1000 + "{" * 1000}, None),
        ({"a": nested(14), "b": "[" * 50}, None),
        *(({"metadata": value}, (None, "invalid_json")) for value in (arrays(16), objects(16), [objects(8), arrays(20)])),
        *(({"metadata": value}, None) for value in (arrays(15), objects(15), [objects(14), arrays(14)] * 20)),
    ],
)
def test_what_is_too_many_or_too_deep_is_refused_with_its_field(body: Mapping[str, Any], error: tuple[str | None, str] | None) -> None:
    """Brackets in a text are no levels."""
    assert caps_error(body) == error


@given(
    st.recursive(st.none() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner))
)
def test_depth_is_what_recursion_says(value: Any) -> None:
    """Counted level by level, without recursion."""

    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    for limit in range(6):
        assert is_deeper(value, limit) == (isinstance(value, dict | list) and depth(value) > limit)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_an_output_limit_may_not_exceed_the_deployments(field: str) -> None:
    """Whatever a route calls it."""
    caps = replace(CAPS, max_output_tokens=100)
    assert caps_error({field: 100}, caps) is None
    assert caps_error({field: 101}, caps) == (field, "invalid_value")
    assert caps_error({field: 10**9}) is None


def test_a_request_without_an_output_limit_gets_the_deployments() -> None:
    """Else it would be the one way past it."""
    assert with_output_limit({"a": 1}, "max_tokens", 100) == {"a": 1, "max_tokens": 100}
    for body in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        assert with_output_limit(body, "max_tokens", 100) is body
    assert with_output_limit({"max_tokens": None}, "max_completion_tokens", 9)["max_completion_tokens"] == 9
    assert with_output_limit({}, None, 100) == {}


def media(*parts: Any, field: str = "messages") -> dict[str, Any]:
    return {field: [TEXT, {"role": "user", "content": [{"type": "text", "text": "see https://x"}, *parts]}]}


HTTP = "https://example.com/cat.png"
PLACE = "messages[1].content[1]"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (media({"type": "image_url", "image_url": {"url": HTTP}}), f"{PLACE}.image_url.url"),
        (media({"type": "image_url", "image_url": HTTP}), f"{PLACE}.image_url"),
        (media({"image_url": HTTP}), f"{PLACE}.image_url"),
        (media({"type": "video_url", "video_url": {"url": "http://10.0.0.1/"}}), f"{PLACE}.video_url.url"),
        (media({"type": "audio_url", "audio_url": {"url": HTTP}}), f"{PLACE}.audio_url.url"),
        (media({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), f"{PLACE}.image_url.url"),
        (media({"type": "image_url", "image_url": {"url": " https://x"}}), f"{PLACE}.image_url.url"),
        (media({"type": "image_url", "image_url": {"url": "HTTPS://x"}}), f"{PLACE}.image_url.url"),
        (media({"type": "input_image", "image_url": HTTP}, field="input"), "input[1].content[1].image_url"),
        (media({"type": "input_file", "file_url": HTTP}, field="input"), "input[1].content[1].file_url"),
        (media({"type": "image", "source": {"type": "url", "url": HTTP}}), f"{PLACE}.source.url"),
        (
            media({"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": HTTP}}]}),
            f"{PLACE}.content[0].source.url",
        ),
        (
            {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": HTTP}]}]},
            "input[0].output[0].image_url",
        ),
        ({"system": [{"type": "image", "source": {"url": HTTP}}]}, "system[0].source.url"),
        (media({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}), None),
        (media({"type": "tool_use", "name": "open", "input": {"image_url": HTTP, "url": HTTP}}), None),
        (media({"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "url": HTTP}]}), None),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"url":"https://x"}'}}]}]}, None),
        ({"messages": [{"role": "user", "content": HTTP}]}, None),
        ({"prompt": HTTP}, None),
        ({"tools": [{"function": {"parameters": {"url": "https://json-schema.org"}}}]}, None),
    ],
)
def test_no_engine_is_sent_to_fetch_what_a_client_names(body: Mapping[str, Any], place: str | None) -> None:
    """In whatever API's words; text and tools may speak of addresses as they like."""
    assert caps_error(body) == (None if place is None else (place, "remote_media_not_allowed"))
    assert caps_error(body, replace(CAPS, allow_remote_media=True)) is None


def salt(tenant: str, own: str | None = None, secret: str = "s") -> str:
    body = {"prompt": "x"} if own is None else {"prompt": "x", "cache_salt": own}
    return str(TenantSalts(secret).salted(body, tenant)["cache_salt"])


def test_a_salt_is_its_tenants_its_clients_and_its_deployments() -> None:
    """Each of the three changes it, nothing else does; engines take it."""
    salts = [
        salt("a"),
        salt("b"),
        salt("a", "x"),
        salt("b", "x"),
        salt("a", "y"),
        salt("a", secret="t"),
        salt("ax"),
        salt("", "x"),
        salt(""),
    ]
    assert len(set(salts)) == len(salts)
    assert salt("a", "x") == salt("a", "x")
    assert all(len(value) == 64 and value.isalnum() for value in salts)


@given(st.text(max_size=8), st.text(min_size=1, max_size=8), st.text(max_size=8), st.text(min_size=1, max_size=8))
def test_no_client_can_write_itself_into_another_tenants_cache(tenant: str, own: str, other: str, others: str) -> None:
    """Names hold no zero byte, so where one ends and the client's part begins cannot be moved."""
    tenant, other = tenant.replace("\0", ""), other.replace("\0", "")
    assert (salt(tenant, own) == salt(other, others)) == ((tenant, own) == (other, others))
    assert salt(tenant, own) != salt(other)


def test_an_empty_salt_is_refused_as_engines_do() -> None:
    """Salting it would hide the mistake."""
    with pytest.raises(RequestError) as raised:
        salt("a", "")
    assert (raised.value.status, raised.value.param) == (400, "cache_salt")


def test_a_refusal_says_when_to_come_back() -> None:
    """Within two minutes, whatever is owed."""
    tenant = Tenant(None, 1)
    tenant.ask(1, used=10**9)
    retry_after_s = tenant.ask(1)
    assert retry_after_s is not None
    assert 0 < retry_after_s <= 120 < inf
