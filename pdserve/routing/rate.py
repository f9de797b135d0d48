"""How fast something works off prompts: tokens per second of time in which it had work.

Owns two sums. Idle time counts for nothing, so what is idle keeps its last known rate; what never worked has none.
"""

from math import exp

WINDOW_BUSY_S = 60.0
"""busy time over which older samples fade to 1/e"""


class BusyRate:
    """Throughput of the prefill pool or of the queue, fed by the pool. All times are points on the pool's clock, in seconds."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._running = 0
        self._since_s = 0.0

    def started(self, now_s: float) -> None:
        """One prompt is there to be worked on."""
        if self._running == 0:
            self._since_s = now_s
        self._running += 1

    def ended(self, now_s: float, computed_tokens: int) -> None:
        """One prompt is done; `computed_tokens` is 0 when it was cancelled or failed."""
        elapsed_s = max(0.0, now_s - self._since_s)
        self._since_s = now_s
        self._running -= 1
        fade = exp(-elapsed_s / WINDOW_BUSY_S)
        self._tokens = self._tokens * fade + computed_tokens
        self._busy_s = self._busy_s * fade + elapsed_s

    def tokens_per_s(self) -> float | None:
        """Return the measured rate, or None before the first prompt was computed."""
        if self._tokens <= 0 or self._busy_s <= 0:
            return None
        return self._tokens / self._busy_s
