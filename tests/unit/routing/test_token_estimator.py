"""Prompt length from bytes, and answer length, learned from what engines report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.routing.tokens import (
    LEARNING_RATE,
    MAX_TOKENS_PER_BYTE,
    MIN_TOKENS_PER_BYTE,
    PRIOR_OUTPUT_TOKENS,
    PRIOR_TOKENS_PER_BYTE,
    OutputEstimator,
    TokenEstimator,
)

REPORTS = st.lists(st.tuples(st.integers(-1, 10**7), st.integers(-1, 10**7)), max_size=30)


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(0, 1), (1, 1), (400, 100), (4000, 1000)])
def test_an_unknown_model_has_four_bytes_in_a_token(prompt_bytes: int, tokens: int) -> None:
    """And no prompt is shorter than one token."""
    assert TokenEstimator().estimate_tokens("m", prompt_bytes) == tokens


def test_the_first_report_replaces_the_prior() -> None:
    """One measurement is worth more than a guess."""
    estimator = TokenEstimator()
    estimator.learn("m", 1000, 500)
    assert estimator.estimate_tokens("m", 300) == 150


def test_later_reports_move_the_ratio_a_little() -> None:
    """A long prompt weighs as much as a short one."""
    for scale in (1, 1000):
        estimator = TokenEstimator()
        estimator.learn("m", 1000, 500)
        estimator.learn("m", 1000 * scale, 1000 * scale)
        assert estimator.tokens_per_byte("m") == pytest.approx(0.5 + LEARNING_RATE * 0.5)


def test_the_ratio_arrives_at_what_is_reported() -> None:
    """A change of language is learned within a hundred requests."""
    estimator = TokenEstimator()
    estimator.learn("m", 1000, 250)
    for _ in range(100):
        estimator.learn("m", 1000, 800)
    assert estimator.tokens_per_byte("m") == pytest.approx(0.8, rel=0.01)


def test_models_learn_apart() -> None:
    """What one model reports says nothing of another."""
    estimator = TokenEstimator()
    estimator.learn("m", 1000, 900)
    assert estimator.tokens_per_byte("other") == PRIOR_TOKENS_PER_BYTE


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(0, 10), (-1, 10), (10, 0), (10, -1)])
def test_a_report_that_says_nothing_is_ignored(prompt_bytes: int, tokens: int) -> None:
    """No text or no tokens leave the ratio as it is."""
    estimator = TokenEstimator()
    estimator.learn("m", prompt_bytes, tokens)
    assert estimator.tokens_per_byte("m") == PRIOR_TOKENS_PER_BYTE


@given(REPORTS)
def test_the_ratio_stays_within_its_bounds(reports: list[tuple[int, int]]) -> None:
    """No engine can make every prompt free, or every prompt too long for the queue."""
    estimator = TokenEstimator()
    for prompt_bytes, tokens in reports:
        estimator.learn("m", prompt_bytes, tokens)
    assert MIN_TOKENS_PER_BYTE <= estimator.tokens_per_byte("m") <= MAX_TOKENS_PER_BYTE


def test_room_for_an_answer_is_what_answers_take_and_never_more_than_its_own_limit() -> None:
    """Mean and mean deviation of what was seen; a prior before that; at least one token."""
    outputs = OutputEstimator()
    assert [outputs.expected_tokens("m", limit) for limit in (None, 10, 10**6, 0)] == [PRIOR_OUTPUT_TOKENS, 10, PRIOR_OUTPUT_TOKENS, 1]
    for _ in range(200):
        outputs.learn("m", 40)
    assert outputs.expected_tokens("m") == pytest.approx(40, abs=2)
    for _ in range(200):
        for tokens in (10, 70):
            outputs.learn("m", tokens)
    assert outputs.expected_tokens("m") == pytest.approx(70, rel=0.1)
    assert outputs.expected_tokens("other") == PRIOR_OUTPUT_TOKENS


@given(st.lists(st.integers(-5, 10**6), max_size=30))
def test_an_expected_answer_is_at_least_one_token(lengths: list[int]) -> None:
    """Whatever engines report."""
    outputs = OutputEstimator()
    for tokens in lengths:
        outputs.learn("m", tokens)
    assert 1 <= outputs.expected_tokens("m") <= max(PRIOR_OUTPUT_TOKENS, 3 * max(lengths, default=0))
