"""An engine that decodes: reserves blocks, waits for every rank's report, and gives the blocks to others. Its ranks drive the real `ReceiveLedger`.

What a rank has when it reports is compared with the prompt's truth there and then; after that its KV layer must not write those blocks.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from engine_model import Call, FreeBlocks, Rank
from shapes import BlockIds, Model, Prompt, RankMemory

from pdserve.kv.actions import Actions, PeerRank, PlanLookup, RankLookup, ReceiveOrder, ReportReceived, Scatter
from pdserve.kv.pages import Bytes
from pdserve.kv.plan import HeadSlice, PairPlan
from pdserve.kv.receive_ledger import ReceiveLedger
from pdserve.kv.slots import SlotPool
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Close, Message, Parcel, Return, Seal, Want
from pdserve.types import CloseReason

MAX_PASSES = 64
"""more preemptions of one request than any run sees"""


class DecodeRequest:
    """A decode leg.

    Args:
        first_token: prompt tokens before this one are cached here; a multiple of every block size.
        lookahead: blocks of each group beyond the prompt's.
    """

    def __init__(
        self, key: TransferKey, prompt: Prompt, peer: tuple[str, str], timeout_s: float, *, first_token: int, lookahead: int
    ) -> None:
        self.key = key
        self.prompt = prompt
        self.peer = peer
        self.timeout_s = timeout_s
        self.first_token = first_token
        self.lookahead = lookahead
        self.block_ids: BlockIds | None = None
        self.waiting_for: set[int] = set()
        self.landed: set[int] = set()

    @property
    def request_id(self) -> str:
        return f"decode-{self.key.transfer_id}-{self.key.attempt}"


class ConsumerRank(Rank):
    """One rank of a decode engine, with its receive slots."""

    def __init__(
        self,
        me: PeerRank,
        memory: RankMemory,
        plans: PlanLookup,
        ranks: RankLookup,
        *,
        num_slots: int,
        slot_bytes: int,
        renew_s: float,
        parking_s: float,
    ) -> None:
        super().__init__(me)
        self.memory = memory
        self.slots = SlotPool(num_slots)
        self.arena: Bytes = np.zeros((num_slots, slot_bytes), dtype=np.uint8)
        self.ledger = ReceiveLedger(
            memory.geometry,
            plans,
            ranks,
            self.slots,
            worker=me.worker,
            incarnation=me.incarnation,
            slot_bytes=slot_bytes,
            renew_s=renew_s,
            parking_s=parking_s,
        )
        self.writable: dict[TransferKey, BlockIds] = {}
        """blocks that the KV layer may write now"""
        self.scatters: deque[Scatter] = deque()

    def hear(self, source: PeerRank, message: Message, now_s: float) -> Actions:
        """Take a message, as the rank's I/O thread does."""
        match message:
            case Parcel():
                return self.ledger.on_parcel(source, message, now_s)
            case Want():
                return self.ledger.on_want(source, message)
            case Return():
                return self.ledger.on_return(source, message)
            case Seal():
                return self.ledger.on_seal(source, message, now_s)
            case Close(side="send"):
                return self.ledger.on_close(source, message, now_s)
            case _:
                raise AssertionError(f"{message} for a consumer")

    def carry_out(self, scatter: Scatter, now_s: float) -> Actions:
        """Verify and copy one parcel, as the rank's I/O thread does."""
        parcel = scatter.parcel
        owned = self.writable.get(scatter.key)
        assert owned is not None, f"{self.me} writes blocks of {scatter.key}, which has none"
        assert scatter.block_ids == owned, f"{self.me} writes blocks that are not those of {scatter.key}"
        pages = self.arena[parcel.slot][: parcel.num_bytes]
        if xxhash.xxh3_64_intdigest(pages.data) != parcel.checksum:
            return self.ledger.corrupt(scatter, now_s)
        self.memory.pages.scatter(parcel.items, scatter.slices, scatter.block_ids, pages)
        return self.ledger.scattered(scatter, now_s)


class DecodeEngine:
    """The scheduler and the ranks of one decode worker.

    Args:
        model: whose KV.
        plan: with any prefill worker.
        ranks: of this engine.
        num_blocks: of each group.
        now_s: reads the clock.
    """

    def __init__(self, model: Model, plan: PairPlan, ranks: Sequence[ConsumerRank], num_blocks: int, now_s: Callable[[], float]) -> None:
        self.model = model
        self._plan = plan
        self.ranks = ranks
        self.free = FreeBlocks(len(model.block_tokens), num_blocks)
        self.requests: dict[TransferKey, DecodeRequest] = {}
        self._now_s = now_s

    def admit(self, request: DecodeRequest) -> None:
        self.requests[request.key] = request

    def reserve(self, request: DecodeRequest) -> bool:
        """Give a request its blocks and order the transfer; False where no blocks are free."""
        block_ids = self.free.take([count + request.lookahead for count in self.model.blocks_of(request.prompt.tokens)])
        if block_ids is None:
            return False
        request.block_ids = block_ids
        request.waiting_for = {rank.me.rank for rank in self.ranks}
        prompt, key = request.prompt, request.key
        order = ReceiveOrder(
            key, request.request_id, *request.peer, prompt.digest, prompt.tokens, request.first_token, block_ids, request.timeout_s
        )
        for rank in self.ranks:
            rank.calls.append(Call(lambda rank=rank: self._open(rank, order, prompt)))  # type: ignore[misc]
        return True

    def _open(self, rank: ConsumerRank, order: ReceiveOrder, prompt: Prompt) -> Actions:
        rank.memory.scribble(order.block_ids)
        rank.memory.write(prompt, order.block_ids, 0, order.first_token)
        rank.writable[order.key] = order.block_ids
        rank.opened.add(order.key)
        return rank.ledger.open(order, self._now_s())

    def end(self, request: DecodeRequest, reason: CloseReason) -> None:
        """Abort a request, or decline its ticket where no order was given."""
        key, peer = request.key, request.peer
        for rank in self.ranks:
            if request.block_ids is None:
                rank.calls.append(Call(lambda rank=rank: rank.ledger.decline(key, *peer, reason)))  # type: ignore[misc]
            else:
                rank.calls.append(Call(lambda rank=rank: rank.ledger.cancel(key, reason, self._now_s())))  # type: ignore[misc]
        if request.block_ids is None:
            del self.requests[key]

    def on_report(self, rank: ConsumerRank, report: ReportReceived) -> DecodeRequest | None:
        """Take a rank's report; check what it has if it says landed. Returns the request once every rank has reported."""
        key = TransferKey(report.record.transfer_id, report.record.attempt)
        rank.note_report(key)
        request = self.requests[key]
        block_ids = rank.writable.pop(key)
        assert not any(scatter.key == key for scatter in rank.scatters), f"{rank.me} reports {key} while it writes its blocks"
        assert rank.memory.holds(request.prompt, block_ids, 0, request.first_token), f"{rank.me}: {key} damaged what was cached"
        if report.landed:
            for producer in self._plan.producers_of(rank.me.rank):
                slices = self._plan.slices[producer, rank.me.rank]
                assert self._is_whole(rank, request, block_ids, slices), f"{rank.me} reports {key} landed with wrong bytes"
            request.landed.add(rank.me.rank)
        rank.memory.scribble(block_ids)
        rank.memory.forget(request.prompt)
        request.waiting_for.remove(rank.me.rank)
        if request.waiting_for:
            return None
        del self.requests[key]
        self.free.give(block_ids)
        return request

    @staticmethod
    def _is_whole(rank: ConsumerRank, request: DecodeRequest, block_ids: BlockIds, slices: Sequence[HeadSlice]) -> bool:
        """Whether what one producer rank sent is all there and all of one pass."""
        span = (request.first_token, request.prompt.tokens)
        return any(
            rank.memory.holds(request.prompt, block_ids, *span, version=version, slices=slices) for version in range(1, MAX_PASSES + 1)
        )
