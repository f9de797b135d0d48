"""What a request asks of the pool, as read from its body."""

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError
from pdserve.routing.prefixes import CHUNK_BYTES
from pdserve.routing.select import Demand
from pdserve.routing.tokens import PRIOR_OUTPUT_TOKENS
from pdserve.server.api.dialects import parse
from pdserve.server.api.request import Limits, Route
from pdserve.server.demand import Demands, canonical_text
from pdserve.server.draft import Draft

LIMITS = Limits({"m": 100_000, "other": 100_000}, max_n=8)
LONG = "word " * 400


def demands(*, may_set_priority: bool = False) -> Demands:
    return Demands(60.0, may_set_priority=may_set_priority)


def asked(of: Demands | None = None, route: Route = Route.CHAT, *, tenant: str = "", session: str = "", **body: Any) -> Demand:
    """Return the demand of one request; a chat with one message unless the body says otherwise."""
    prompt = {Route.CHAT: {"messages": [{"role": "user", "content": LONG}]}, Route.COMPLETIONS: {"prompt": LONG}}[route]
    request = parse(route, orjson.dumps({"model": "m", **prompt, **body}), LIMITS)
    draft = Draft("r", None, route.value, 10.0, {})
    draft.tenant, draft.session = tenant, session
    return (of or demands()).of(request, draft)


def test_a_request_asks_for_its_prompt_its_answer_and_its_time() -> None:
    """Estimated from bytes and a prior, until engines have reported."""
    demand = asked(max_tokens=7)
    assert (demand.model, demand.prompt_tokens, demand.output_tokens, demand.deadline_s) == ("m", len(LONG) // 4, 7, 70.0)
    assert (demand.tenant, demand.priority, demand.session, demand.local_reason) == ("", 0, None, None)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, PRIOR_OUTPUT_TOKENS),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 90_000}, PRIOR_OUTPUT_TOKENS),
    ],
)
def test_room_for_the_answer_is_bounded_by_its_limit_and_by_what_answers_take(body: dict[str, Any], tokens: int) -> None:
    """For each of its choices."""
    assert asked(**body).output_tokens == tokens


def test_lengths_are_learned_from_usage() -> None:
    """Of prompts and of answers; choices are answers of their own."""
    made = demands()
    request = parse(Route.COMPLETIONS, orjson.dumps({"model": "m", "prompt": "x" * 1000, "n": 2}), LIMITS)
    for _ in range(100):
        made.learn(request, {"prompt_tokens": 500, "completion_tokens": 60})
    assert (asked(made, Route.COMPLETIONS, prompt="x" * 300).prompt_tokens) == 150
    assert 30 <= asked(made).output_tokens <= 32
    made.learn(request, {})
    made.learn(request, {"prompt_tokens": None, "completion_tokens": "many"})


def test_token_ids_are_their_own_count() -> None:
    """No estimate is needed."""
    assert asked(route=Route.COMPLETIONS, prompt=[1, 2, 3]).prompt_tokens == 3


@pytest.mark.parametrize("priority", [-101, 101, 10**9, "1", 1.5, True, [1]])
def test_a_priority_that_is_none_is_refused_with_its_field(priority: object) -> None:
    """Out of range, or no integer."""
    with pytest.raises(RequestError) as refused:
        asked(demands(may_set_priority=True), priority=priority)
    assert (refused.value.status, refused.value.param) == (400, "priority")


def test_clients_set_priorities_only_where_they_may() -> None:
    """Elsewhere a value that would change something is refused rather than ignored."""
    assert [asked(demands(may_set_priority=True), priority=value).priority for value in (-100, 0, None, 100)] == [-100, 0, 0, 100]
    assert [asked(priority=value).priority for value in (0, None)] == [0, 0]
    with pytest.raises(RequestError) as refused:
        asked(priority=1)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "priority", "unknown_parameter")


def test_a_session_is_named_by_header_or_body_and_belongs_to_its_tenant() -> None:
    """The header counts first; without a name there is no session."""
    by_user = asked(user="u").session
    assert by_user is not None
    assert asked(session="u").session == by_user == asked(prompt_cache_key="u").session
    assert asked(session="s", user="u").session == asked(session="s").session != by_user
    assert asked(tenant="t", user="u").session != by_user
    assert asked(user="").session is None


def turns(count: int) -> list[dict[str, Any]]:
    """Return a conversation of so many messages."""
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n} " + LONG} for n in range(count)]


def test_a_conversation_begins_with_what_it_was() -> None:
    """Every turn's prefix is the beginning of the next one's."""
    prefixes = [asked(messages=turns(count)).prefix for count in range(1, 6)]
    for shorter, longer in pairwise(prefixes):
        assert len(shorter) < len(longer)
        assert longer[: len(shorter)] == shorter


def test_text_is_the_same_however_it_is_put() -> None:
    """As a string or as one part; with or without fields that render nothing different in order."""
    parts = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    assert asked(messages=parts).prefix == asked().prefix
    assert asked(messages=[{"content": LONG, "role": "user"}], temperature=0.3, max_tokens=4).prefix == asked().prefix


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "t"},
        {"model": "other"},
        {"cache_salt": "s"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"messages": [{"role": "system", "content": LONG}]},
        {"messages": [{"role": "user", "name": "n", "content": "!" + LONG}]},
    ],
)
def test_what_cannot_share_cache_entries_shares_no_prefix(other: dict[str, Any]) -> None:
    """Another tenant, model, salt, or anything that renders ahead of the text."""
    assert set(asked().prefix).isdisjoint(asked(**other).prefix)


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))


@given(JSON)
def test_any_body_has_a_text(value: Any) -> None:
    """Whatever clients put where text belongs: other APIs' shapes, media, nonsense."""
    for field in ("messages", "input", "prompt", "system", "instructions", "tools"):
        assert isinstance(canonical_text({field: value}), bytes)
        assert isinstance(canonical_text({field: [{"role": "user", "content": value}]}), bytes)


def test_reuse_is_counted_in_tokens_of_this_prompt() -> None:
    """A held chunk is worth its share of the text, and all of them no more than the prompt."""
    demand = asked(max_tokens=1)
    share = CHUNK_BYTES / demand.prompt_bytes
    assert demand.reuse_tokens(1) == pytest.approx(demand.prompt_tokens * share, abs=1)
    assert demand.reuse_tokens(10_000) == demand.prompt_tokens
    assert demand.reuse_tokens(0) == 0
