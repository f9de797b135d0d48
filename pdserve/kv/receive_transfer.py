"""One transfer as its consumer rank sees it: what each producer owes, has sealed and has delivered. Arithmetic, no decisions about life cycle.

`ReceiveLedger` owns these and moves them from state to state.
"""

from collections import Counter
from enum import Enum, auto

from pdserve.kv.actions import PeerRank, ReceiveOrder
from pdserve.kv.geometry import Geometry
from pdserve.kv.plan import HeadSlice, PairPlan
from pdserve.kv.wire import Parcel, Seal, set_digest
from pdserve.types import CloseReason, TransferRecord, TransferSide


class ReceiveState(Enum):
    OFFERED = auto()
    RECEIVING = auto()
    CLOSED = auto()
    """over, but a scatter is still writing this rank's blocks; reported when it is done"""


class ProducerEntry:
    """What one producer rank owes and has delivered, in its current pass."""

    def __init__(self, peer: PeerRank, slices: tuple[HeadSlice, ...], geometry: Geometry, first_token: int, end_token: int) -> None:
        self.peer = peer
        self.slices = {slice_.layer: slice_ for slice_ in slices}
        self.expected: set[tuple[int, int]] = set()
        self.num_bytes = 0
        """of everything it owes"""
        for layer, slice_ in self.slices.items():
            size = geometry.layers[layer].block_tokens
            blocks = range(first_token // size, -(-end_token // size))
            self.expected.update((layer, block) for block in blocks)
            self.num_bytes += len(blocks) * slice_.num_heads * geometry.layers[layer].run_bytes
        self.pass_number = 0
        self.scattered: set[tuple[int, int]] = set()
        self.seal: Seal | None = None

    def begin_pass(self, number: int) -> None:
        self.pass_number = number
        self.scattered = set()
        self.seal = None

    def owes(self) -> bool:
        """Whether parcels of this pass may still come."""
        return self.seal is None or len(self.scattered) < len(self.expected)

    def is_complete(self) -> bool:
        """Whether scattered, sealed and planned are the same set."""
        seal = self.seal
        return (
            seal is not None
            and seal.num_writes == len(self.scattered)
            and self.scattered == self.expected
            and seal.digest == set_digest(self.scattered)
        )

    def contradicts(self) -> bool:
        """Whether the seal can no longer be met: it names another set than the plan, whatever may still arrive."""
        seal = self.seal
        return seal is not None and (seal.num_writes != len(self.expected) or seal.digest != set_digest(self.expected))


class ReceiveTransfer:
    """One transfer of this rank."""

    def __init__(self, order: ReceiveOrder, plan: PairPlan, geometry: Geometry, now_s: float) -> None:
        self._geometry = geometry
        self.order = order
        self.state = ReceiveState.OFFERED
        self.deadline_s = now_s + order.timeout_s
        self.opened_s = now_s
        self.first_parcel_s: float | None = None
        self.producers = {
            rank: ProducerEntry(
                PeerRank(order.peer_worker, order.peer_incarnation, rank),
                plan.slices[(rank, geometry.rank)],
                geometry,
                order.first_token,
                order.prompt_tokens,
            )
            for rank in plan.producers_of(geometry.rank)
        }
        self.scattering = 0
        self.outcome: CloseReason | None = None
        self.parcels = 0
        self.num_bytes = 0
        self.dropped: Counter[str] = Counter()

    def producer(self, peer: PeerRank) -> ProducerEntry | None:
        """Return what a rank owes, None if it is not a producer of this transfer."""
        producer = self.producers.get(peer.rank)
        return producer if producer is not None and producer.peer == peer else None

    def fits(self, producer: ProducerEntry, parcel: Parcel, slot_bytes: int) -> bool:
        """Whether a parcel holds only what this producer owes, as many bytes as that is, and no more than a slot."""
        num_bytes = 0
        for item in parcel.items:
            slice_ = producer.slices.get(item.layer)
            if slice_ is None or not 0 <= item.first_block < item.end_block:
                return False
            if (item.layer, item.first_block) not in producer.expected or (item.layer, item.end_block - 1) not in producer.expected:
                return False
            num_bytes += (item.end_block - item.first_block) * slice_.num_heads * self._geometry.layers[item.layer].run_bytes
        return num_bytes == parcel.num_bytes <= slot_bytes

    def record(self, worker: str, incarnation: str, now_s: float) -> TransferRecord:
        """Return what happened, for one rank."""
        landed = self.outcome is CloseReason.LANDED
        order, first_s = self.order, self.first_parcel_s
        seals = [producer.seal for producer in self.producers.values() if producer.seal is not None]
        layers = {layer for producer in self.producers.values() for layer in producer.slices}
        missing = {layer for producer in self.producers.values() for layer, _ in producer.expected - producer.scattered}
        return TransferRecord(
            transfer_id=order.key.transfer_id,
            attempt=order.key.attempt,
            side=TransferSide.RECEIVE,
            worker=worker,
            incarnation=incarnation,
            outcome=self.outcome or CloseReason.ABORTED,
            request_id=order.request_id,
            prompt_tokens=order.prompt_tokens,
            tokens_moved=order.prompt_tokens - order.first_token if landed else 0,
            tokens_reused=order.first_token,
            bytes_moved=self.num_bytes,
            parcels=self.parcels,
            layers_sealed=len(layers - missing) if len(seals) == len(self.producers) else 0,
            layers_expected=len(layers) if layers else len(self._geometry.layers),
            acks=len(self.producers) if landed else 0,
            acks_expected=len(self.producers),
            passes=max((producer.pass_number for producer in self.producers.values()), default=1),
            wait_s=(first_s if first_s is not None else now_s) - self.opened_s,
            transfer_s=now_s - first_s if first_s is not None else 0.0,
            dropped=dict(self.dropped),
        )
