"""What a worker has been given, and what one request owns of it. The only place where load is counted; the pool calls it."""

from pdserve.routing.breakers import Incarnation, Pairing
from pdserve.routing.prefixes import Holdings
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Pick
from pdserve.types import Role, ServePath, WorkerSnapshot


class Slot:
    """One incarnation of one worker, with its leases and what its cache holds."""

    __slots__ = ("_by_role", "_kv_tokens", "holdings", "in_flight", "key", "kv_tokens", "last_grant", "snapshot")

    def __init__(self, snapshot: WorkerSnapshot) -> None:
        self.snapshot = snapshot
        self.key: Incarnation = (snapshot.worker_id, snapshot.incarnation)
        self.in_flight = 0
        """leases it holds in all roles"""
        self.kv_tokens = 0
        """KV tokens reserved on it in all roles"""
        self.holdings = Holdings()
        """as prefill: prompts it was given; as decode: prompts that landed or that it computed"""
        self.last_grant = 0
        self._by_role = dict.fromkeys(Role, 0)
        self._kv_tokens = dict.fromkeys(Role, 0)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens of the leases it holds as prefill."""
        return self._kv_tokens[Role.PREFILL]

    def in_role(self, role: Role) -> int:
        """Return the leases it holds in one role."""
        return self._by_role[role]

    def reserved_in(self, role: Role) -> int:
        """Return the KV tokens reserved on it in one role."""
        return self._kv_tokens[role]

    def take(self, role: Role, kv_tokens: int, grant: int) -> None:
        self._by_role[role] += 1
        self.in_flight += 1
        self.correct(role, kv_tokens)
        self.last_grant = grant

    def give_back(self, role: Role, kv_tokens: int) -> None:
        self._by_role[role] -= 1
        self.in_flight -= 1
        self.correct(role, -kv_tokens)

    def correct(self, role: Role, by_tokens: int) -> None:
        self._kv_tokens[role] += by_tokens
        self.kv_tokens += by_tokens


class Lease:
    """The pair that one request owns. Made and ended by the pool only; ending twice is harmless.

    Attributes:
        reuse_tokens: prompt tokens that each role's worker was expected to hold when it was picked.
        kv_tokens: reserved on decode, 0 once it was given back.
    """

    __slots__ = ("_decode", "_prefill", "decode", "demand", "kv_tokens", "path", "prefill", "probed", "reason", "reuse_tokens")

    def __init__(self, demand: Demand, pick: Pick[Slot]) -> None:
        self.demand = demand
        self.path: ServePath = pick.path
        self.reason: PathReason = pick.reason
        self.prefill: WorkerSnapshot | None = None if pick.prefill is None else pick.prefill.snapshot
        self.decode: WorkerSnapshot = pick.decode.snapshot
        self.reuse_tokens = pick.reuse_tokens
        self.kv_tokens = demand.kv_tokens
        self.probed: tuple[Pairing, ...] = ()
        self._prefill = pick.prefill
        self._decode: Slot | None = pick.decode

    @property
    def prefill_key(self) -> Incarnation | None:
        """None on the local path."""
        return None if self.prefill is None else (self.prefill.worker_id, self.prefill.incarnation)

    @property
    def decode_key(self) -> Incarnation:
        return (self.decode.worker_id, self.decode.incarnation)

    @property
    def decode_slot(self) -> Slot | None:
        """The decode half, None once it was given back."""
        return self._decode

    def end_prefill(self) -> Slot | None:
        """Detach and return the prefill slot, None if it was given back already."""
        slot, self._prefill = self._prefill, None
        return slot

    def end_decode(self) -> Slot | None:
        """Detach and return the decode slot, None if it was given back already."""
        slot, self._decode = self._decode, None
        return slot
