"""The peer table of one rank and what its handshakes came to. Decides which links should exist; opens none.

A link joins this rank with one rank of another worker. It exists if either worker, producing, would send the other anything between these two
ranks, or must hear from it. Of two workers the one whose id sorts first dials.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdserve.errors import ProtocolMismatch
from pdserve.kv.actions import PeerRank
from pdserve.kv.geometry import Geometry
from pdserve.kv.plan import PairPlan, make_plan, require_equal_layers
from pdserve.kv.wire import Hello, Identity
from pdserve.types import CloseReason


class PeerAddress(NamedTuple):
    """One rank of one worker, as the peer table names it."""

    peer: PeerRank
    host: str
    port: int
    tensor_parallel_size: int


class Handshake(NamedTuple):
    """State of one link, for the agent's status."""

    peer: PeerRank
    state: str
    """``connecting``, ``connected`` or ``refused``"""
    reason: str


class PairPlans(NamedTuple):
    """The two plans with one worker: we produce, and we consume."""

    sending: PairPlan
    receiving: PairPlan


class PeerTable:
    """Who this rank may exchange KV with.

    Args:
        worker: this worker's id.
        geometry: of this rank.
        identity: what we show to peers.
    """

    def __init__(self, worker: str, geometry: Geometry, identity: Identity) -> None:
        self._worker = worker
        self._geometry = geometry
        self._identity = identity
        self._version = -1
        self._addresses: dict[PeerRank, PeerAddress] = {}
        self._plans: dict[tuple[str, str], PairPlans] = {}
        self._states: dict[PeerRank, Handshake] = {}
        self._connected: set[PeerRank] = set()

    def replace(self, version: int, entries: Iterable[PeerAddress]) -> tuple[list[PeerAddress], list[PeerRank]]:
        """Install a newer table; an older one changes nothing.

        Returns:
            addresses to dial now, and ranks whose links must be closed.
        """
        if version <= self._version:
            return [], []
        self._version = version
        wanted: dict[PeerRank, PeerAddress] = {}
        refused: dict[PeerRank, Handshake] = {}
        for entry in entries:
            if entry.peer.worker == self._worker:
                continue
            try:
                plans = self._plan_with(entry)
            except ProtocolMismatch as error:
                refused[entry.peer] = Handshake(entry.peer, "refused", str(error))
            else:
                if self._needs(plans, entry.peer.rank):
                    wanted[entry.peer] = entry
        gone = [peer for peer in self._addresses if peer not in wanted]
        fresh = [entry for peer, entry in wanted.items() if peer not in self._addresses]
        self._states = {peer: self._states.get(peer, Handshake(peer, "connecting", "")) for peer in wanted} | refused
        self._addresses = wanted
        live = {(peer.worker, peer.incarnation) for peer in wanted}
        self._plans = {who: plans for who, plans in self._plans.items() if who in live}
        return [entry for entry in fresh if self.dials(entry.peer)], gone

    def dials(self, peer: PeerRank) -> bool:
        """Whether it is on us to open the link."""
        return self._worker < peer.worker

    def is_wanted(self, peer: PeerRank) -> bool:
        return peer in self._addresses

    def admit(self, hello: Hello) -> PeerRank:
        """Return who a peer is. Raises `ProtocolMismatch` where the table does not name it."""
        peer = PeerRank(hello.worker, hello.incarnation, hello.rank)
        if peer not in self._addresses:
            known = sorted(p.incarnation for p in self._addresses if p.worker == hello.worker)
            raise ProtocolMismatch(f"peer {hello.worker} rank {hello.rank}", f"incarnations {known}", hello.incarnation)
        return peer

    def judge(self, theirs: Identity) -> None:
        """Compare everything that shapes KV. Raises `ProtocolMismatch` naming the first difference and both values."""
        ours = self._identity
        for field in ("vllm_version", "weights_digest", "config_digest", "slot_bytes"):
            if getattr(ours, field) != getattr(theirs, field):
                raise ProtocolMismatch(field, getattr(ours, field), getattr(theirs, field))
        require_equal_layers(ours.geometry, theirs.geometry)

    def set_state(self, peer: PeerRank, state: str, reason: str = "") -> None:
        if peer in self._addresses:
            self._states[peer] = Handshake(peer, state, reason)

    def set_connected(self, peer: PeerRank, *, connected: bool) -> None:
        if connected:
            self._connected.add(peer)
            self.set_state(peer, "connected")
        else:
            self._connected.discard(peer)
            self.set_state(peer, "connecting", "link lost")

    def handshakes(self) -> Sequence[Handshake]:
        return tuple(self._states[peer] for peer in sorted(self._states))

    def sending_plan(self, worker: str, incarnation: str) -> PairPlan | CloseReason:
        """Return the plan with a worker that would receive from us, if every link that it needs is up, else why nothing can be sent."""
        plans = self._plans.get((worker, incarnation))
        if plans is None:
            return self._reason(worker, incarnation)
        return self._usable(worker, incarnation, plans.sending, plans.sending.consumers_of(self._geometry.rank))

    def receiving_plan(self, worker: str, incarnation: str) -> PairPlan | CloseReason:
        """Return the plan with a worker that would send to us, if every link that it needs is up, else why nothing can be received."""
        plans = self._plans.get((worker, incarnation))
        if plans is None:
            return self._reason(worker, incarnation)
        return self._usable(worker, incarnation, plans.receiving, plans.receiving.producers_of(self._geometry.rank))

    def connected_ranks(self, worker: str, incarnation: str) -> Sequence[PeerRank]:
        """Return the ranks of a worker that we have a link with now."""
        return sorted(peer for peer in self._connected if (peer.worker, peer.incarnation) == (worker, incarnation))

    def _usable(self, worker: str, incarnation: str, plan: PairPlan, ranks: Sequence[int]) -> PairPlan | CloseReason:
        is_whole = all(PeerRank(worker, incarnation, rank) in self._connected for rank in ranks)
        return plan if is_whole else self._reason(worker, incarnation)

    def _reason(self, worker: str, incarnation: str) -> CloseReason:
        """Tell a worker that was turned away, or turned us away, from one that is not here."""
        states = [shake.state for peer, shake in self._states.items() if (peer.worker, peer.incarnation) == (worker, incarnation)]
        return CloseReason.REFUSED if "refused" in states else CloseReason.PEER_UNKNOWN

    def _plan_with(self, entry: PeerAddress) -> PairPlans:
        who = (entry.peer.worker, entry.peer.incarnation)
        if who not in self._plans:
            layers, ours, theirs = self._geometry.layers, self._geometry.tensor_parallel_size, entry.tensor_parallel_size
            self._plans[who] = PairPlans(make_plan(layers, ours, theirs), make_plan(layers, theirs, ours))
        return self._plans[who]

    def _needs(self, plans: PairPlans, peer_rank: int) -> bool:
        mine = self._geometry.rank
        return (mine, peer_rank) in plans.sending.slices or (peer_rank, mine) in plans.receiving.slices
