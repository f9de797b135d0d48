"""How the speed of the prefill pool, and of the queue, is measured."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.routing.rate import WINDOW_BUSY_S, BusyRate


def prefill(rate: BusyRate, start_s: float, elapsed_s: float, tokens: int) -> None:
    """One prompt, alone."""
    rate.started(start_s)
    rate.ended(start_s + elapsed_s, tokens)


def test_an_unused_pool_has_no_rate() -> None:
    """Neither before the first prompt, nor while it runs, nor after one that was cancelled."""
    rate = BusyRate()
    assert rate.tokens_per_s() is None
    rate.started(0.0)
    assert rate.tokens_per_s() is None
    rate.ended(5.0, 0)
    assert rate.tokens_per_s() is None


def test_idle_time_counts_for_nothing() -> None:
    """An hour without work between two equal prompts changes nothing."""
    rate = BusyRate()
    prefill(rate, 0.0, 2.0, 600)
    prefill(rate, 3600.0, 2.0, 600)
    assert rate.tokens_per_s() == pytest.approx(300.0)


def test_prompts_that_overlap_share_their_time() -> None:
    """Two prompts in the same two seconds are one pool's 600 tokens per second."""
    rate = BusyRate()
    rate.started(10.0)
    rate.started(11.0)
    rate.ended(12.0, 600)
    rate.ended(12.0, 600)
    assert rate.tokens_per_s() == pytest.approx(600.0)


def test_time_of_a_cancelled_prompt_counts_as_work() -> None:
    """The pool was busy with it, so it is slower for it."""
    rate = BusyRate()
    prefill(rate, 0.0, 1.0, 300)
    prefill(rate, 1.0, 1.0, 0)
    assert rate.tokens_per_s() == pytest.approx(150.0, rel=0.02)


def test_the_rate_follows_a_change() -> None:
    """After a few windows at a new speed the old one is forgotten."""
    rate = BusyRate()
    for second in range(120):
        prefill(rate, second, 1.0, 1000)
    for second in range(120, 480):
        prefill(rate, second, 1.0, 100)
    assert rate.tokens_per_s() == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("pieces", [1, 4, 60])
def test_old_samples_fade_to_one_e_th_over_the_window(pieces: int) -> None:
    """However the busy time is cut into prompts: 1,000 tokens in one second, then a window of prompts that brought none."""
    rate = BusyRate()
    prefill(rate, 0.0, 1.0, 1000)
    for piece in range(pieces):
        prefill(rate, 1.0 + piece * WINDOW_BUSY_S / pieces, WINDOW_BUSY_S / pieces, 0)
    measured = rate.tokens_per_s()
    assert measured is not None
    left = exp(-1)
    busy_s = sum(WINDOW_BUSY_S / pieces * left ** (piece / pieces) for piece in range(pieces)) + left
    assert measured == pytest.approx(1000 * left / busy_s)


def test_a_stall_does_not_unlearn_the_rate() -> None:
    """A prompt that hung for minutes and was cancelled leaves a low rate, not an unknown one."""
    rate = BusyRate()
    prefill(rate, 0.0, 1.0, 1000)
    prefill(rate, 1.0, 5 * WINDOW_BUSY_S, 0)
    measured = rate.tokens_per_s()
    assert measured is not None and 0 < measured < 1


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500), st.integers(0, 10**6)), max_size=30))
def test_a_rate_is_unknown_or_above_zero(prompts: list[tuple[float, float, int]]) -> None:
    """Whatever the pool does."""
    rate, now_s = BusyRate(), 0.0
    for idle_s, elapsed_s, tokens in prompts:
        prefill(rate, now_s + idle_s, elapsed_s, tokens)
        now_s += idle_s + elapsed_s
        measured = rate.tokens_per_s()
        assert measured is None or measured > 0
