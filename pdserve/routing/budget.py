"""How many requests may be tried again at once: a share of those that live, so that a failing fleet is not asked for more than it was before."""

from types import TracebackType

LIVE_SHARE = 0.2
FLOOR = 3
"""so many may always be under way: with few requests the share is less than one"""


class RetryBudget:
    """Counts requests that are in a second or third attempt; one per router."""

    def __init__(self) -> None:
        self.in_use = 0

    @staticmethod
    def limit(live: int) -> int:
        """Return how many may be in use with `live` requests under way."""
        return max(FLOOR, int(live * LIVE_SHARE))

    def claim(self) -> "RetryClaim":
        """Return the scope of one request, which may or may not come to be tried again."""
        return RetryClaim(self)


class RetryClaim:
    """One request's place in the budget, from its second attempt to its end."""

    __slots__ = ("_budget", "_is_taken")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._is_taken = False

    def __enter__(self) -> "RetryClaim":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._budget.in_use -= self._is_taken
        self._is_taken = False

    def try_take(self, live: int) -> bool:
        """Take a place if one is free with `live` requests under way; one that is held stays."""
        if not self._is_taken and self._budget.in_use < self._budget.limit(live):
            self._is_taken = True
            self._budget.in_use += 1
        return self._is_taken
