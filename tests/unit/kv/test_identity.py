"""The prompt's digest: equal for equal KV, different as soon as anything that determines KV differs."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv.identity import prompt_digest


@dataclass
class Feature:
    identifier: str


@dataclass
class Lora:
    lora_name: str


@dataclass
class Request:
    """The part of an engine's request that has a KV."""

    prompt_token_ids: list[int] | None = field(default_factory=lambda: [1, 2, 3])
    mm_features: list[Feature] = field(default_factory=list)
    cache_salt: str | None = None
    lora_request: Lora | None = None


BASE = Request()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [1, 2, 4]},
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": [1, 2, 3, 0]},
        {"prompt_token_ids": [3, 2, 1]},
        {"prompt_token_ids": [1, 2, 3 + (1 << 32)]},
        {"prompt_token_ids": None},
        {"mm_features": [Feature("a")]},
        {"mm_features": [Feature("")]},
        {"cache_salt": "s"},
        {"lora_request": Lora("s")},
    ],
    ids=str,
)
def test_each_field_changes_the_digest(change: dict[str, Any]) -> None:
    """Tokens, media, salt and adapter, each alone."""
    assert prompt_digest(replace(BASE, **change)) != prompt_digest(BASE)


def test_fields_do_not_run_into_each_other() -> None:
    """Where one text ends and the next begins is part of the digest."""
    variants = [
        replace(BASE, mm_features=[Feature("ab")]),
        replace(BASE, mm_features=[Feature("a"), Feature("b")]),
        replace(BASE, mm_features=[Feature("b"), Feature("a")]),
        replace(BASE, mm_features=[Feature("salt=x")]),
        replace(BASE, cache_salt="x"),
        replace(BASE, mm_features=[Feature("lora=x")]),
        replace(BASE, lora_request=Lora("x")),
        replace(BASE, lora_request=Lora("x"), cache_salt="x"),
        replace(BASE, prompt_token_ids=[], cache_salt="\x01"),
        replace(BASE, prompt_token_ids=[1]),
        replace(BASE, prompt_token_ids=[], mm_features=[Feature("abcd")]),
        replace(BASE, prompt_token_ids=[int.from_bytes(b"\x04\0\0\0abcd", "little")]),
    ]
    assert len({prompt_digest(request) for request in variants}) == len(variants)


def test_equal_requests_have_equal_digests() -> None:
    """Also where the one side says nothing and the other says so."""
    assert prompt_digest(Request()) == prompt_digest(replace(BASE, cache_salt="", lora_request=None, mm_features=[]))
    assert len(prompt_digest(BASE)) == 16


@given(st.lists(st.integers(0, 1 << 31), max_size=20), st.lists(st.integers(0, 1 << 31), max_size=20))
def test_digests_are_equal_exactly_for_equal_tokens(ours: list[int], theirs: list[int]) -> None:
    """Any two prompts."""
    same = prompt_digest(Request(ours)) == prompt_digest(Request(theirs))
    assert same == (ours == theirs)
