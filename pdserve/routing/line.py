"""One model's line: its ready workers, its queue with the queue's bounds, and the rates that the bounds and Retry-After come from.

Owns the numbers of admission. Grants nothing and knows no lease; the pool does that.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from pdserve.errors import PoolSaturated
from pdserve.routing.queue import Entry, FairQueue
from pdserve.routing.rate import BusyRate
from pdserve.routing.select import Demand, Pick, has_room
from pdserve.routing.slots import Slot
from pdserve.routing.verdict import PathComparison
from pdserve.types import Role, WorkerState

FLOOR_REQUESTS = 32
"""so many requests may always wait, whatever their length"""
TENANT_FLOOR_REQUESTS = 4
"""so many requests of each tenant may wait though others have filled the queue, which grows to twice its bound at most"""
UNKNOWN_RETRY_AFTER_S = 5.0
"""Retry-After before the first prompt was measured"""
BELIEVED_SHARE = 0.25
"""an estimate of prefill's time is believed up to this share of a request's whole time: one stalled prompt ruins the rate for a while"""
MAX_RETRY_AFTER_S = 120.0
"""stock clients do not retry at all when told to wait longer"""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What bounds the pool beside its workers.

    Attributes:
        max_queued_requests: longest queue of one model; less than `FLOOR_REQUESTS` counts as that, unless `max_waiting` is less.
        ttft_objective_s: with the measured prefill rate it bounds a queue in tokens.
        max_leases: requests that may hold a pair at once, all models together; None leaves it to the workers.
        max_waiting: longest queue that the process can hold, None if it can hold any.
    """

    max_queued_requests: int
    ttft_objective_s: float
    max_leases: int | None = None
    max_waiting: int | None = None


class ModelLine:
    """See the module."""

    def __init__(self, limits: PoolLimits) -> None:
        self._max_queued_requests = max(FLOOR_REQUESTS, limits.max_queued_requests)
        if limits.max_waiting is not None:
            self._max_queued_requests = min(self._max_queued_requests, limits.max_waiting)
        self._ttft_objective_s = limits.ttft_objective_s
        self.queue = FairQueue()
        self.comparison = PathComparison()
        self.prefill_rate = BusyRate()
        """prompt tokens per second while prefill had work"""
        self.drain_rate = BusyRate()
        """prompt tokens per second that left the queue for a pair while somebody waited: slower than prefill when decode is what is full"""
        self.prefills: list[Slot] = []
        self.decodes: list[Slot] = []
        self.max_model_len = 0
        """shortest of all its workers, ready or not"""

    def set_workers(self, slots: Iterable[Slot]) -> None:
        """Replace the workers of this model."""
        every = list(slots)
        ready = [slot for slot in every if slot.snapshot.state is WorkerState.READY]
        self.prefills = [slot for slot in ready if slot.snapshot.role is Role.PREFILL]
        self.decodes = [slot for slot in ready if slot.snapshot.role is Role.DECODE]
        self.max_model_len = min((slot.snapshot.max_model_len for slot in every), default=0)

    @property
    def max_queued_tokens(self) -> int:
        """The TTFT objective in prompt tokens, at least one prompt of the model's length for each ready prefill worker."""
        rate = self.prefill_rate.tokens_per_s() or 0.0
        return max(sum(slot.snapshot.max_model_len for slot in self.prefills), int(self._ttft_objective_s * rate))

    @property
    def tokens_per_s(self) -> float | None:
        """How fast the queue gets shorter: the slower of what prefill can compute and what was seen to leave; None if nothing is known."""
        rates = [rate for rate in (self.prefill_rate.tokens_per_s(), self.drain_rate.tokens_per_s()) if rate is not None]
        return min(rates, default=None)

    def retry_after_s(self) -> float:
        """Estimate when the present queue is through, in seconds from 1 to `MAX_RETRY_AFTER_S`."""
        rate = self.tokens_per_s
        if rate is None:
            return UNKNOWN_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(1.0, self.queue.tokens / rate))

    def check_bounds(self, demand: Demand, now_s: float) -> None:
        """Raise `PoolSaturated` if one more request may not wait. It is not in the queue yet."""
        waiting = len(self.queue)
        if waiting >= self._max_queued_requests and self._is_over_share(demand):
            raise PoolSaturated("requests", self.retry_after_s())
        if waiting < FLOOR_REQUESTS:
            return
        if self.queue.tokens + demand.prompt_tokens > self.max_queued_tokens and self._is_over_share(demand):
            raise PoolSaturated("tokens", self.retry_after_s())
        rate = self.tokens_per_s
        if rate is not None and now_s + (self.queue.tokens + demand.prompt_tokens) / rate > demand.deadline_s:
            raise PoolSaturated("deadline", self.retry_after_s())

    def is_too_late(self, entry: Entry, now_s: float) -> bool:
        """Say whether an entry's time is up, or shorter than its prompt takes if all of prefill computes nothing else."""
        deadline_s, rate = entry.demand.deadline_s, self.prefill_rate.tokens_per_s()
        if deadline_s == inf or rate is None:
            return now_s > deadline_s
        least_s = min(entry.demand.prompt_tokens / rate, BELIEVED_SHARE * (deadline_s - entry.entered_s))
        return now_s + least_s > deadline_s

    def spares(self, entry: Entry, pick: Pick[Slot], due: Entry) -> bool:
        """Say whether `entry` may go by `pick` and leave `due`, which does not fit, what it waits for: true if that is prefill only."""
        if pick.prefill is not None:
            return False
        needed_tokens = due.demand.kv_tokens
        return any(has_room(decode, needed_tokens, entry.demand if decode is pick.decode else None) for decode in self.decodes)

    def _is_over_share(self, demand: Demand) -> bool:
        has_little = self.queue.waiting_of(demand.tenant) < TENANT_FLOOR_REQUESTS
        return not has_little or len(self.queue) >= 2 * self._max_queued_requests
