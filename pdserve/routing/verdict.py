"""Whether disaggregation pays now: what it costs the request beside what it spares the streams that decode is serving.

The request's cost is how much later its first data comes than it would have come locally. What it gives is the time decode does not spend on
computing the prompt, once for each stream that would have stood still. Both come from measured times of both paths; with too few of either the
verdict is `cold` and stands against nothing. Samples fade with time, so a path that is no longer taken is cold again after a while and gets
another chance. Knows no worker and no request.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import exp

MIN_SAMPLES = 20.0
"""faded samples that each path needs"""
FADE_S = 60.0
"""time over which a sample fades to 1/e"""
FADE_STEP_S = 0.25
"""samples within so short a time count the same"""
MARGIN = 1.25
"""disaggregation is given up when it costs so many times what it gives, and taken up again when it costs no more than it gives"""


class Verdict(StrEnum):
    """What the measured rates say."""

    COLD = "cold"
    """too few samples"""
    GIVES = "gives"
    COSTS = "costs"


@dataclass(frozen=True, slots=True)
class PathTimes:
    """Faded sums over the requests of one path: prompt length x in tokens, time from lease to first data y in seconds."""

    count: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def faded(self, elapsed_s: float) -> "PathTimes":
        """Return the sums as they are `elapsed_s` later."""
        fade = exp(-elapsed_s / FADE_S)
        return PathTimes(self.count * fade, self.sum_x * fade, self.sum_y * fade, self.sum_xx * fade, self.sum_xy * fade)

    def plus(self, tokens: int, first_data_s: float) -> "PathTimes":
        """Return the sums with one more request."""
        return PathTimes(
            self.count + 1,
            self.sum_x + tokens,
            self.sum_y + first_data_s,
            self.sum_xx + tokens * tokens,
            self.sum_xy + tokens * first_data_s,
        )

    def at(self, tokens: float) -> float:
        """Return the expected time of a prompt of this length: the fitted line, its slope not below zero; not for zero samples."""
        mean_x, mean_y = self.sum_x / self.count, self.sum_y / self.count
        spread = self.sum_xx / self.count - mean_x * mean_x
        if spread <= 1e-9 * mean_x * mean_x:
            return mean_y
        slope = max(0.0, (self.sum_xy / self.count - mean_x * mean_y) / spread)
        return max(0.0, mean_y + slope * (tokens - mean_x))


def judge(before: Verdict, disaggregated: PathTimes, local: PathTimes, decode_streams: float) -> Verdict:
    """Return the verdict on the typical prompt of both paths.

    Args:
        before: the last verdict; between the two limits it stays.
        decode_streams: requests that one decode worker serves at once.
    """
    if min(disaggregated.count, local.count) < MIN_SAMPLES:
        return Verdict.COLD
    tokens = (disaggregated.sum_x + local.sum_x) / (disaggregated.count + local.count)
    local_s = local.at(tokens)
    cost_s = disaggregated.at(tokens) - local_s
    gives_s = local_s * decode_streams
    if cost_s > MARGIN * gives_s:
        return Verdict.COSTS
    return before if cost_s > gives_s and before is not Verdict.COLD else Verdict.GIVES


class PathComparison:
    """Keeps both paths' sums and the last verdict; one per model. All times are points on the pool's clock, in seconds."""

    def __init__(self) -> None:
        self._disaggregated = PathTimes()
        self._local = PathTimes()
        self._at_s = 0.0
        self._verdict = Verdict.COLD

    def add(self, now_s: float, *, is_local: bool, tokens: int, first_data_s: float, decode_streams: float) -> None:
        """Take one request that got its first data into account, and judge anew."""
        self._fade(now_s)
        if is_local:
            self._local = self._local.plus(tokens, first_data_s)
        else:
            self._disaggregated = self._disaggregated.plus(tokens, first_data_s)
        self._verdict = judge(self._verdict, self._disaggregated, self._local, decode_streams)

    def verdict(self, now_s: float) -> Verdict:
        """Return the verdict; `cold` again once the samples have faded."""
        fewest = min(self._disaggregated.count, self._local.count)
        if fewest < MIN_SAMPLES or fewest * exp(-max(0.0, now_s - self._at_s) / FADE_S) < MIN_SAMPLES:
            return Verdict.COLD
        return self._verdict

    def _fade(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self._at_s)
        if elapsed_s < FADE_STEP_S:
            return
        self._at_s = now_s
        self._disaggregated, self._local = self._disaggregated.faded(elapsed_s), self._local.faded(elapsed_s)
