"""Whether disaggregation pays, by the measured times of both paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.routing.verdict import FADE_S, MARGIN, MIN_SAMPLES, PathComparison, PathTimes, Verdict, judge

MANY = int(MIN_SAMPLES) + 5
TIMES = st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 1000)), min_size=1, max_size=40)


def times(first_data_s: float, count: int = MANY, tokens: int = 1000) -> PathTimes:
    """Return a path on which every prompt of this length took this long."""
    sums = PathTimes()
    for _ in range(count):
        sums = sums.plus(tokens, first_data_s)
    return sums


@pytest.mark.parametrize(("disaggregated", "local"), [(0, 0), (MANY, 0), (0, MANY), (MANY, int(MIN_SAMPLES) - 1)])
def test_too_few_samples_of_either_path_are_cold(disaggregated: int, local: int) -> None:
    """Whatever the last verdict was."""
    for before in Verdict:
        assert judge(before, times(9.0, disaggregated), times(1.0, local), 0.0) is Verdict.COLD


@pytest.mark.parametrize(
    ("disaggregated_s", "streams", "verdict"),
    [
        (0.5, 0.0, Verdict.GIVES),
        (1.0, 0.0, Verdict.GIVES),
        (1.1, 0.0, Verdict.COSTS),
        (1.1, 1.0, Verdict.GIVES),
        (2.5, 1.0, Verdict.COSTS),
        (2.5, 4.0, Verdict.GIVES),
    ],
)
def test_what_it_costs_is_weighed_against_what_it_spares_decodes_streams(disaggregated_s: float, streams: float, verdict: Verdict) -> None:
    """A prompt that takes decode one second stops each of its streams for one second."""
    assert judge(Verdict.COLD, times(disaggregated_s), times(1.0), streams) is verdict


def test_between_the_limits_the_verdict_stays() -> None:
    """So that it does not go to and fro with the noise."""
    between = 1.0 + (1 + MARGIN) / 2
    assert judge(Verdict.COSTS, times(between), times(1.0), 1.0) is Verdict.COSTS
    assert judge(Verdict.GIVES, times(between), times(1.0), 1.0) is Verdict.GIVES
    assert judge(Verdict.COLD, times(between), times(1.0), 1.0) is Verdict.GIVES


def test_paths_with_prompts_of_different_length_are_compared_at_the_same_one() -> None:
    """Long prompts went one way and short ones the other; per token both take the same, so disaggregation costs nothing."""
    disaggregated, local = PathTimes(), PathTimes()
    for n in range(MANY):
        disaggregated = disaggregated.plus(1000 + 10 * n, (1000 + 10 * n) / 1000)
        local = local.plus(100 + n, (100 + n) / 1000)
    assert judge(Verdict.COLD, disaggregated, local, 0.1) is Verdict.GIVES


@given(TIMES, st.floats(1, 100_000))
def test_an_expected_time_is_never_negative_nor_shorter_for_a_longer_prompt(samples: list[tuple[int, float]], tokens: float) -> None:
    """Whatever was measured."""
    sums = PathTimes()
    for length, seconds in samples:
        sums = sums.plus(length, seconds)
    assert 0 <= sums.at(tokens) <= sums.at(2 * tokens) + 1e-6 * (1 + sums.at(2 * tokens))


def test_samples_fade_until_it_is_cold_again() -> None:
    """A path that is not taken any more gets another chance."""
    comparison = PathComparison()
    for _ in range(MANY):
        for is_local, seconds in ((True, 1.0), (False, 9.0)):
            comparison.add(100.0, is_local=is_local, tokens=50, first_data_s=seconds, decode_streams=1.0)
    assert comparison.verdict(100.0) is Verdict.COSTS
    assert comparison.verdict(100.0 + FADE_S) is Verdict.COLD
    comparison.add(100.0 + 5 * FADE_S, is_local=True, tokens=50, first_data_s=1.0, decode_streams=1.0)
    assert comparison.verdict(100.0 + 5 * FADE_S) is Verdict.COLD
