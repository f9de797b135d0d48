"""Time as a value that is passed in.

Owns the `Clock` port and its one real implementation. Knows nothing of event loops: code that must sleep asks its runtime to.
Deadlines everywhere in pdserve are points on one process's monotonic clock; they are never compared across processes.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that never runs backwards."""

    def now_s(self) -> float:
        """Return seconds on a monotonic scale whose zero has no meaning."""
        ...


class MonotonicClock:
    """The process's monotonic clock (`time.monotonic`)."""

    now_s = staticmethod(time.monotonic)
