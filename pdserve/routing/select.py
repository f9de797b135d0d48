"""The one decision: which way is this request served, and by which workers. Filter → score → pick, over a view it only reads.

    filter   not avoided, breakers allow it, a lease and KV room are left
    score    prefill: tokens it would have to compute before this prompt's first token; decode: its share of leases or KV in use, less a bonus for
             holding the prompt's prefix or being the session's home
    pick     the best decode with the best prefill that may be paired with it; equals take turns

Knows no queue, no lease and no time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Literal, Protocol, TypeVar

import xxhash

from pdserve.errors import NoReadyWorker
from pdserve.routing.breakers import Incarnation
from pdserve.routing.prefixes import CHUNK_BYTES, Holdings, Prefix
from pdserve.routing.reasons import PathReason
from pdserve.routing.verdict import Verdict
from pdserve.types import Role, ServePath, WorkerSnapshot

Disaggregation = Literal["auto", "always", "never"]
"""`auto` serves locally, with a reason, when that is better or all that can be done; `always` refuses what it could only serve locally for
want of a prefill worker, and disaggregates everything else that can be"""
AFFINITY = 0.25
"""how much fuller a decode worker may be that holds the whole prompt or the session"""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the same names in `config.RouterConfig`."""

    disaggregation: Disaggregation = "auto"
    local_below_tokens: int = 0
    local_prefix_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the pool."""

    model: str
    prompt_tokens: int
    """estimate, at least 1"""
    local_reason: PathReason | None = None
    """set when this request cannot be disaggregated, whatever the fleet looks like"""
    avoid: frozenset[str] = frozenset()
    """workers that failed an earlier attempt"""
    output_tokens: int = 0
    """KV room to keep for the answer on decode"""
    tenant: str = ""
    """whose share of the queue it takes; empty for none"""
    priority: int = 0
    """within the tenant's own requests: lower goes first"""
    deadline_s: float = inf
    """on the pool's clock"""
    prefix: Prefix = ()
    """of its canonical text under its salt"""
    prompt_bytes: int = 0
    """of the text that `prefix` was made of"""
    session: int | None = None
    """hash of what names the conversation, if something does"""

    @property
    def kv_tokens(self) -> int:
        """Tokens it needs on decode."""
        return self.prompt_tokens + self.output_tokens

    def reuse_tokens(self, chunks: int) -> int:
        """Return how many prompt tokens a worker needs not compute that holds this many chunks of the prefix."""
        if not chunks:
            return 0
        return min(self.prompt_tokens, self.prompt_tokens * chunks * CHUNK_BYTES // max(1, self.prompt_bytes))


class Candidate(Protocol):
    """A worker as the decision sees it; see `slots.Slot`."""

    @property
    def snapshot(self) -> WorkerSnapshot: ...

    @property
    def key(self) -> Incarnation: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def kv_tokens(self) -> int: ...

    @property
    def outstanding_tokens(self) -> int: ...

    @property
    def holdings(self) -> Holdings: ...

    @property
    def last_grant(self) -> int:
        """Grows with each grant of the pool; 0 if it never got one."""
        ...


CandidateT = TypeVar("CandidateT", bound=Candidate)
Refuses = Callable[[Incarnation | None, Incarnation | None], bool]
"""see `Breakers.refuses`"""


@dataclass(frozen=True, slots=True)
class Pick(Generic[CandidateT]):
    """The decision. `prefill` is None on the local path."""

    path: ServePath
    reason: PathReason
    prefill: CandidateT | None
    decode: CandidateT
    reuse_tokens: tuple[int, int] = (0, 0)
    """prompt tokens that prefill and decode are expected to hold"""


@dataclass(frozen=True, slots=True)
class View(Generic[CandidateT]):
    """The ready workers of one model by role, and what stands against using them."""

    prefills: Sequence[CandidateT]
    decodes: Sequence[CandidateT]
    refuses: Refuses = lambda _prefill, _decode: False
    verdict: Verdict = Verdict.COLD


def choose(demand: Demand, view: View[CandidateT], policy: Policy) -> Pick[CandidateT] | None:
    """Choose the path and the pair, or return None when the request must wait for room.

    A worker to avoid is taken again only as decode and only when there is no other: a lone decode worker that dropped a connection is a better bet
    than an error. The same goes for one whose breaker is open.

    Raises:
        NoReadyWorker: no worker of a needed role is ready, so waiting is no use.
    """
    decodes = [d for d in view.decodes if d.snapshot.worker_id not in demand.avoid] or view.decodes
    if not decodes:
        raise NoReadyWorker(Role.DECODE.value)
    decodes = [d for d in decodes if not view.refuses(None, d.key)] or decodes
    prefills = [p for p in view.prefills if p.snapshot.worker_id not in demand.avoid]
    usable = [p for p in prefills if not view.refuses(p.key, None)]
    reason = _local_reason(demand, policy, view.verdict, has_prefill=bool(prefills), has_usable=bool(usable))
    ranked = _ranked_decodes(demand, decodes)
    if reason is not None:
        return _local(demand, reason, ranked)
    if policy.disaggregation == "auto" and (held := _holder(demand, ranked, policy.local_prefix_share)) is not None:
        return _local(demand, PathReason.PREFIX_ON_DECODE, (held,))
    free = _ranked_prefills(demand, usable or prefills)
    for decode in ranked:
        for prefill in free:
            if not view.refuses(prefill.key, decode.key):
                return _disaggregated(demand, prefill, decode)
    if any(not view.refuses(p.key, d.key) for p in usable for d in decodes):
        return None
    if policy.disaggregation == "auto":
        return _local(demand, PathReason.BREAKER_OPEN, ranked)
    return _disaggregated(demand, free[0], ranked[0]) if free and ranked else None


def has_room(candidate: Candidate, kv_tokens: int = 0, beside: Demand | None = None) -> bool:
    """Say whether one more lease of so many KV tokens fits under the worker's limits; an idle worker takes a prompt of any length.

    Args:
        beside: a request that is to have its lease on this worker first.
    """
    leases, reserved = candidate.in_flight, candidate.kv_tokens
    if beside is not None:
        leases, reserved = leases + 1, reserved + beside.kv_tokens
    if leases >= candidate.snapshot.max_running:
        return False
    capacity = candidate.snapshot.kv_capacity_tokens
    return not reserved or not capacity or reserved + kv_tokens <= capacity


def home_of(session: int, candidates: Iterable[CandidateT]) -> CandidateT:
    """Return the worker a session belongs to: the same one as long as it is there, whoever else comes and goes."""
    return max(candidates, key=lambda c: xxhash.xxh3_64_intdigest(c.snapshot.worker_id.encode(), session))


def _local_reason(demand: Demand, policy: Policy, verdict: Verdict, *, has_prefill: bool, has_usable: bool) -> PathReason | None:
    """Return why this request goes to decode alone, whichever decode it will be."""
    if policy.disaggregation == "never":
        return PathReason.CONFIGURED_NEVER
    if demand.local_reason is not None:
        return demand.local_reason
    if policy.disaggregation == "always":
        if not has_prefill:
            raise NoReadyWorker(Role.PREFILL.value)
        return None
    if not has_prefill:
        return PathReason.NO_READY_PREFILL
    if not has_usable:
        return PathReason.BREAKER_OPEN
    if demand.prompt_tokens < policy.local_below_tokens:
        return PathReason.SHORT_PROMPT
    return PathReason.COSTS_MORE if verdict is Verdict.COSTS else None


def _ranked_decodes(demand: Demand, decodes: Sequence[CandidateT]) -> list[CandidateT]:
    """Return the decode workers with room, best first."""
    free = [d for d in decodes if has_room(d, demand.kv_tokens)]
    if len(free) < 2:
        return free
    home = None if demand.session is None else home_of(demand.session, decodes)

    def score(decode: CandidateT) -> tuple[float, int]:
        snapshot = decode.snapshot
        kv_share = decode.kv_tokens / snapshot.kv_capacity_tokens if snapshot.kv_capacity_tokens else 0.0
        share = max(decode.in_flight / snapshot.max_running, kv_share)
        affinity = max(_held(demand, decode) / demand.prompt_tokens, float(decode is home))
        return (share - AFFINITY * affinity, decode.last_grant)

    return sorted(free, key=score)


def _ranked_prefills(demand: Demand, prefills: Sequence[CandidateT]) -> list[CandidateT]:
    """Return the prefill workers with room, best first."""
    free = [p for p in prefills if has_room(p, demand.prompt_tokens)]
    if len(free) < 2:
        return free
    home = None if demand.session is None else home_of(demand.session, prefills)

    def score(prefill: CandidateT) -> tuple[int, float, bool, int]:
        to_compute = prefill.outstanding_tokens + demand.prompt_tokens - _held(demand, prefill)
        return (to_compute, prefill.in_flight / prefill.snapshot.max_running, prefill is not home, prefill.last_grant)

    return sorted(free, key=score)


def _holder(demand: Demand, decodes: Sequence[CandidateT], share: float) -> CandidateT | None:
    """Return the decode worker with room that holds most of the prompt, if it is at least this share of it."""
    if not demand.prefix or not decodes:
        return None
    best = max(decodes, key=lambda decode: _held(demand, decode))
    return best if _held(demand, best) >= max(1.0, share * demand.prompt_tokens) else None


def _local(demand: Demand, reason: PathReason, decodes: Sequence[CandidateT]) -> Pick[CandidateT] | None:
    if not decodes:
        return None
    return Pick(ServePath.LOCAL, reason, None, decodes[0], (0, _held(demand, decodes[0])))


def _disaggregated(demand: Demand, prefill: CandidateT, decode: CandidateT) -> Pick[CandidateT]:
    return Pick(ServePath.DISAGGREGATED, PathReason.DEFAULT, prefill, decode, (_held(demand, prefill), _held(demand, decode)))


def _held(demand: Demand, candidate: Candidate) -> int:
    return demand.reuse_tokens(candidate.holdings.depth(demand.prefix))
