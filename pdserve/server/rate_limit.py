"""How much of its limits each key has used: token buckets of requests and of tokens, both per minute. Decides without I/O; the clock is passed in.

A bucket holds a minute's worth and fills evenly. Tokens are reserved by estimate when a request comes and settled by what its usage says: an estimate
that was too low leaves a debt, which the minutes that follow pay. One that is larger than the bucket is let in when the bucket is full.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil

from pdserve.clock import Clock
from pdserve.errors import RateLimited

MINUTE_S = 60.0
LONGEST_RETRY_AFTER_S = 120.0
TOLERANCE_S = 1e-6
"""what rounding may add to a wait that is over"""
REQUESTS, TOKENS = "requests", "tokens"


class Bucket:
    """One limit.

    Args:
        per_minute: what it holds, and what flows in during a minute.
    """

    __slots__ = ("_as_of_s", "_level", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._as_of_s = now_s

    def level(self, now_s: float) -> float:
        """Return what may be taken; below 0 is a debt."""
        self._fill(now_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return how long it takes until `amount`, or all that the bucket can hold, may be taken; 0 if it may be now."""
        self._fill(now_s)
        return max(0.0, (min(amount, self.per_minute) - self._level) * MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Take, whether it is there or not; a negative amount gives back."""
        self._fill(now_s)
        self._level = min(float(self.per_minute), self._level - amount)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change the limit; what was used counts on."""
        self._fill(now_s)
        self._level = min(self._level + per_minute - self.per_minute, float(per_minute))
        self.per_minute = per_minute

    def _fill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._as_of_s) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._as_of_s = max(self._as_of_s, now_s)


@dataclass(slots=True, eq=False)
class Meter:
    """What one request took from the limits of its name. `settle` it once; later calls change nothing."""

    requests: Bucket | None
    tokens: Bucket | None
    speaks_anthropic: bool = False
    """its client reads Anthropic's headers"""
    reserved_tokens: int = 0
    is_settled: bool = False


class RateLimits:
    """The limits of all names; one per router.

    Args:
        unix_s: the time of day, for clients that are told a point in time.
    """

    def __init__(self, clock: Clock, unix_s: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._unix_s = unix_s
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def meter(self, name: str, requests_per_minute: int | None, tokens_per_minute: int | None, *, speaks_anthropic: bool = False) -> Meter:
        """Return the meter of a request that has come, under the limits that its name has now."""
        return Meter(self._bucket(name, REQUESTS, requests_per_minute), self._bucket(name, TOKENS, tokens_per_minute), speaks_anthropic)

    def enter(self, meter: Meter) -> None:
        """Count the request. Raises `RateLimited` (``requests``); one that is refused is not counted."""
        if meter.requests is not None:
            self._check(REQUESTS, meter.requests, 1)
            meter.requests.take(1, self._clock.now_s())

    def reserve(self, meter: Meter, tokens: int) -> None:
        """Take what a request is expected to use. Raises `RateLimited` (``tokens``)."""
        if meter.tokens is not None:
            self._check(TOKENS, meter.tokens, tokens)
            meter.tokens.take(tokens, self._clock.now_s())
            meter.reserved_tokens = tokens

    def settle(self, meter: Meter, used_tokens: int) -> None:
        """Replace the reservation by what was used."""
        if meter.tokens is not None and not meter.is_settled:
            meter.tokens.take(used_tokens - meter.reserved_tokens, self._clock.now_s())
        meter.is_settled = True

    def headers(self, meter: Meter) -> list[tuple[bytes, bytes]]:
        """Return headers for what is limited, by the names that the client reads: the limit, what is left, and when all of it is there again."""
        if meter.requests is None and meter.tokens is None:
            return []
        now_s = self._clock.now_s()
        told: list[tuple[str, str]] = []
        for kind, bucket in ((REQUESTS, meter.requests), (TOKENS, meter.tokens)):
            if bucket is None:
                continue
            limit, remaining = str(bucket.per_minute), str(max(0, int(bucket.level(now_s) + TOLERANCE_S)))
            full_in_s = bucket.wait_s(bucket.per_minute, now_s)
            values = {"limit": limit, "remaining": remaining, "reset": duration(full_in_s)}
            told += ((f"x-ratelimit-{what}-{kind}", value) for what, value in values.items())
            if meter.speaks_anthropic:
                values["reset"] = point_in_time(self._unix_s() + full_in_s)
                told += ((f"anthropic-ratelimit-{kind}-{what}", value) for what, value in values.items())
        return [(name.encode(), value.encode()) for name, value in told]

    def keep(self, names: Iterable[str]) -> None:
        """Forget every name but these."""
        kept = set(names)
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in kept}

    def _bucket(self, name: str, kind: str, per_minute: int | None) -> Bucket | None:
        """Return a name's bucket, as large as its limit is now."""
        key = (name, kind)
        if per_minute is None:
            self._buckets.pop(key, None)
            return None
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(per_minute, self._clock.now_s())
        elif bucket.per_minute != per_minute:
            bucket.resize(per_minute, self._clock.now_s())
        return bucket

    def _check(self, kind: str, bucket: Bucket, amount: float) -> None:
        wait_s = bucket.wait_s(amount, self._clock.now_s())
        if wait_s > TOLERANCE_S:
            raise RateLimited(kind, bucket.per_minute, min(wait_s, LONGEST_RETRY_AFTER_S))


def duration(seconds: float) -> str:
    """Return a span of time as OpenAI writes it: ``120ms``, ``1.5s``, ``6m0s``."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text


def point_in_time(unix_s: float) -> str:
    """Return a time of day as Anthropic writes it, RFC 3339 in UTC, to the next whole second: ``2027-01-01T00:00:00Z``."""
    return datetime.fromtimestamp(ceil(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
