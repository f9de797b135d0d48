"""A clock that stands still until a test moves it."""


class ManualClock:
    """Implements `clock.Clock`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward; `seconds` is not negative."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now_s += seconds
