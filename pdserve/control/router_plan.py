"""When the router process is started again. Pure; knows nothing of workers."""

from dataclasses import dataclass, replace

from pdserve.control.observation import RouterSeen

STABLE_S = 30.0
"""a router that served this long has its failures forgotten"""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""wait before a restart, by failures in a row; the last one goes on"""


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """What is remembered of the router process between ticks."""

    exits: int = 0
    """starts whose end was noticed"""
    failures: int = 0
    """ends in a row"""
    retry_at_s: float = 0.0
    bound_at_s: float | None = None
    """since when the present start accepts connections"""
    fleet_start: int = 0
    """the start that took `fleet_version`"""
    fleet_version: int = 0

    def has_fleet(self, seen: RouterSeen, version: int) -> bool:
        """Return whether the router that runs now took fleet `version`."""
        return seen.url is not None and (self.fleet_start, self.fleet_version) == (seen.starts, version)


def follow(router: RouterPlan, seen: RouterSeen, now_s: float) -> RouterPlan:
    """Return what is remembered after seeing the process."""
    if seen.running:
        bound_at_s = None if seen.url is None else now_s if router.bound_at_s is None else router.bound_at_s
        stable = bound_at_s is not None and now_s - bound_at_s >= STABLE_S
        return replace(router, bound_at_s=bound_at_s, failures=0 if stable else router.failures)
    if seen.starts == router.exits:
        return router
    failures = router.failures + 1
    wait_s = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
    return replace(router, exits=seen.starts, failures=failures, retry_at_s=now_s + wait_s, bound_at_s=None)


def must_start(router: RouterPlan, seen: RouterSeen, now_s: float) -> bool:
    """Return whether the process is to be started now."""
    return not seen.running and now_s >= router.retry_at_s
