"""One transfer as its producer rank sees it: what was written, what each consumer asked for and got. Arithmetic, no decisions about life cycle.

`SendLedger` owns these and moves them from state to state.
"""

from collections import Counter, deque
from enum import Enum, auto
from typing import NamedTuple

from pdserve.kv.actions import PeerRank, PostParcel, SendOrder
from pdserve.kv.geometry import Geometry
from pdserve.kv.plan import HeadSlice, PairPlan
from pdserve.kv.wire import Item, Offer
from pdserve.types import CloseReason, TransferRecord, TransferSide


class SendState(Enum):
    OPEN = auto()
    WRITING = auto()
    SEALED = auto()
    ACKED = auto()
    CLOSED = auto()


class Load(NamedTuple):
    """What would go into one parcel."""

    items: tuple[Item, ...]
    slices: tuple[HeadSlice, ...]
    """one per item"""
    next_block: list[int]
    """per slice of the consumer: first block after this load"""
    num_bytes: int


class ConsumerEntry:
    """What one consumer rank asked for and got, in the current pass."""

    def __init__(self, peer: PeerRank, slices: tuple[HeadSlice, ...]) -> None:
        self.peer = peer
        self.slices = slices
        self.offer: Offer | None = None
        self.slots: deque[int] = deque()
        self.has_asked = False
        """it knows that a parcel waits here for a slot, and none has come since"""
        self.is_pressed = False
        """what lies in `slots` is filled as soon as may be, or returned: it was asked for, or its pass is dead"""
        self.next_block: list[int] = []
        """per slice: first block not yet posted"""
        self.seal_sent = False
        self.acked = False
        """it has landed, in this pass or an earlier one: nothing more is sent to it, and its slots are not ours any more"""
        self.heard_s = 0.0

    def take_slot(self, slot: int) -> None:
        """A slot came that was asked for, or one came back unfilled."""
        self.slots.append(slot)
        self.has_asked = False
        self.is_pressed = True

    def begin_pass(self, geometry: Geometry) -> None:
        self.seal_sent = False
        if self.offer is not None:
            first_token = self.offer.first_token
            self.next_block = [first_token // geometry.layers[s.layer].block_tokens for s in self.slices]


class SendTransfer:
    """One transfer of this rank."""

    def __init__(self, order: SendOrder, plan: PairPlan, geometry: Geometry, now_s: float) -> None:
        self._geometry = geometry
        self.order = order
        self.state = SendState.OPEN
        self.deadline_s = now_s + order.timeout_s
        self.opened_s = now_s
        self.first_parcel_s: float | None = None
        self.ended_s: float | None = None
        self.pass_number = 1
        self.written_tokens = [0] * len(geometry.layers)
        self.block_ids: tuple[tuple[int, ...], ...] = ()
        self.cached_tokens = 0
        self.consumers = {
            rank: ConsumerEntry(PeerRank(order.peer_worker, order.peer_incarnation, rank), plan.slices[(geometry.rank, rank)])
            for rank in plan.consumers_of(geometry.rank)
        }
        self.gathering = 0
        self.finished = False
        self.outcome: CloseReason | None = None
        self.parcels = 0
        self.num_bytes = 0
        self.gathered_bytes = 0
        """of the posted ones, those that are not read from this rank's blocks any more"""
        self.bytes_before_forward_end = 0
        self.dropped: Counter[str] = Counter()

    def ready_blocks(self, layer: int) -> int:
        """Blocks of one layer that may be posted: whole ones, and the last one once the prompt ends in it."""
        written, size = self.written_tokens[layer], self._geometry.layers[layer].block_tokens
        return -(-written // size) if written >= self.order.prompt_tokens else written // size

    def scheduled(self, consumer: ConsumerEntry) -> set[tuple[int, int]]:
        """The set of (layer, block) writes for one consumer that has offered: below the marks, inside its offer."""
        assert consumer.offer is not None
        first_token = consumer.offer.first_token
        return {
            (slice_.layer, block)
            for slice_ in consumer.slices
            for block in range(first_token // self._geometry.layers[slice_.layer].block_tokens, self.ready_blocks(slice_.layer))
        }

    def load(self, consumer: ConsumerEntry, slot_bytes: int, least_bytes: int) -> Load | None:
        """Pack what is ready for one consumer until a slot is full; None if fewer than `least_bytes` come together. Changes nothing."""
        items: list[Item] = []
        slices: list[HeadSlice] = []
        room, cursor = slot_bytes, list(consumer.next_block)
        for position, slice_ in enumerate(consumer.slices):
            block_bytes = slice_.num_heads * self._geometry.layers[slice_.layer].run_bytes
            count = min(self.ready_blocks(slice_.layer) - cursor[position], room // block_bytes)
            if count <= 0:
                continue
            items.append(Item(slice_.layer, cursor[position], cursor[position] + count))
            slices.append(slice_)
            cursor[position] += count
            room -= count * block_bytes
        used = slot_bytes - room
        return Load(tuple(items), tuple(slices), cursor, used) if items and used >= least_bytes else None

    def post(self, consumer: ConsumerEntry, load: Load, now_s: float) -> PostParcel:
        """Commit a load to one of the consumer's slots."""
        consumer.next_block = load.next_block
        if self.first_parcel_s is None:
            self.first_parcel_s = now_s
        self.parcels += 1
        self.num_bytes += load.num_bytes
        slot = consumer.slots.popleft()
        return PostParcel(consumer.peer, self.order.key, self.pass_number, slot, load.items, load.slices, self.block_ids, load.num_bytes)

    def record(self, worker: str, incarnation: str) -> TransferRecord:
        """Return what happened, for one rank."""
        offers = [consumer.offer for consumer in self.consumers.values() if consumer.offer is not None]
        released = self.outcome is CloseReason.RELEASED
        first_s, end_s = self.first_parcel_s, self.ended_s
        return TransferRecord(
            transfer_id=self.order.key.transfer_id,
            attempt=self.order.key.attempt,
            side=TransferSide.SEND,
            worker=worker,
            incarnation=incarnation,
            outcome=self.outcome or CloseReason.ABORTED,
            request_id=self.order.request_id,
            prompt_tokens=self.order.prompt_tokens,
            tokens_moved=self.order.prompt_tokens - offers[0].first_token if offers and released else 0,
            tokens_reused=self.cached_tokens,
            bytes_moved=self.num_bytes,
            parcels=self.parcels,
            layers_sealed=len(self._geometry.layers) if any(entry.seal_sent for entry in self.consumers.values()) else 0,
            layers_expected=len(self._geometry.layers),
            acks=sum(entry.acked for entry in self.consumers.values()),
            acks_expected=len(self.consumers),
            passes=self.pass_number,
            bytes_before_forward_end=self.bytes_before_forward_end,
            wait_s=first_s - self.opened_s if first_s is not None else 0.0,
            transfer_s=end_s - first_s if first_s is not None and end_s is not None else 0.0,
            dropped=dict(self.dropped),
        )
