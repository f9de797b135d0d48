"""An engine that prefills: chunks, prefix hits, preemption at any moment, aborts in any state. Its ranks drive the real `SendLedger`.

Blocks are given to others as soon as vLLM would: at a preemption at once, else once every rank has reported. A rank spoils them at the moment
from which its KV layer must not read them any more.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from engine_model import Call, FreeBlocks, Rank, joined
from shapes import BlockIds, Model, Prompt, RankMemory

from pdserve.kv.actions import Actions, PeerRank, PlanLookup, PostParcel, RankLookup, ReportSent, SendOrder
from pdserve.kv.send_ledger import SendLedger
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Ack, Close, Grant, Message, Offer, Renew
from pdserve.types import CloseReason


class PrefillState(Enum):
    WAITING = auto()
    """no blocks: not scheduled yet, or preempted"""
    RUNNING = auto()
    SEALED = auto()
    """its last chunk is scheduled"""
    DONE = auto()
    """the engine waits for the ranks' reports"""


class PrefillRequest:
    """A prefill leg."""

    def __init__(self, key: TransferKey, prompt: Prompt, peer: tuple[str, str], timeout_s: float) -> None:
        self.key = key
        self.prompt = prompt
        self.peer = peer
        self.timeout_s = timeout_s
        self.state = PrefillState.WAITING
        self.is_ordered = False
        self.pass_number = 1
        self.computed = 0
        self.cached = 0
        self.block_ids: BlockIds = ()
        self.waiting_for: set[int] = set()

    @property
    def request_id(self) -> str:
        return f"prefill-{self.key.transfer_id}-{self.key.attempt}"


class ProducerRank(Rank):
    """One rank of a prefill engine."""

    def __init__(
        self,
        me: PeerRank,
        memory: RankMemory,
        plans: PlanLookup,
        ranks: RankLookup,
        *,
        slot_bytes: int,
        lease_s: float,
        parking_s: float,
    ) -> None:
        super().__init__(me)
        self.memory = memory
        self.ledger = SendLedger(
            memory.geometry,
            plans,
            ranks,
            worker=me.worker,
            incarnation=me.incarnation,
            slot_bytes=slot_bytes,
            lease_s=lease_s,
            parking_s=parking_s,
        )
        self.readable: dict[TransferKey, BlockIds] = {}
        """blocks that the KV layer may read now"""
        self.gathering: list[TransferKey] = []

    def hear(self, source: PeerRank, message: Message, now_s: float) -> Actions:
        """Take a message, as the rank's I/O thread does."""
        match message:
            case Offer() | Grant() | Ack() | Close(side="receive"):
                return self.ledger.on_message(source, message, now_s)
            case Renew():
                self.ledger.on_renew(source, message, now_s)
                return ()
            case _:
                raise AssertionError(f"{message} for a producer")

    def check_gather(self, post: PostParcel) -> None:
        """A parcel reads only blocks that its request owns on this rank now."""
        owned = self.readable.get(post.key)
        assert owned is not None, f"{self.me} reads blocks of {post.key}, which has none"
        for item in post.items:
            group = self.memory.geometry.layers[item.layer].group
            wanted = post.block_ids[group][item.first_block : item.end_block]
            assert wanted == owned[group][item.first_block : item.end_block], f"{self.me} reads blocks that {post.key} has lost"
            assert len(wanted) == item.end_block - item.first_block


class PrefillEngine:
    """The scheduler and the ranks of one prefill worker.

    Args:
        model: whose KV.
        ranks: of this engine.
        num_blocks: of each group.
        now_s: reads the clock.
    """

    def __init__(self, model: Model, ranks: Sequence[ProducerRank], num_blocks: int, now_s: Callable[[], float]) -> None:
        self.model = model
        self.ranks = ranks
        self.free = FreeBlocks(len(model.block_tokens), num_blocks)
        self.requests: dict[TransferKey, PrefillRequest] = {}
        self._now_s = now_s

    def admit(self, request: PrefillRequest) -> None:
        self.requests[request.key] = request

    def run_chunk(self, request: PrefillRequest, tokens: int, cached: int, hooks: Sequence[int]) -> bool:
        """Schedule a request's next chunk; False where no blocks are free for it.

        Args:
            tokens: length of the chunk.
            cached: prefix-cache hit if this is the first chunk of a pass, a multiple of every block size below the prompt's length.
            hooks: layers whose hook fires; the sweep at the end of the step covers the others.
        """
        start = request.computed if request.block_ids else cached
        end = min(start + tokens, request.prompt.tokens)
        held = [len(ids) for ids in request.block_ids] or [0] * len(self.model.block_tokens)
        fresh = self.free.take([need - have for need, have in zip(self.model.blocks_of(end), held, strict=True)])
        if fresh is None:
            return False
        is_first = not request.block_ids
        if is_first:
            request.cached = cached
        request.block_ids = joined(request.block_ids, fresh) if request.block_ids else fresh
        is_new, request.is_ordered = not request.is_ordered, True
        request.computed = end
        request.state = PrefillState.SEALED if end == request.prompt.tokens else PrefillState.RUNNING
        for rank in self.ranks:
            self._queue_chunk(rank, request, (0 if is_first else start, start, end), hooks, is_new=is_new)
        return True

    def _queue_chunk(
        self, rank: ProducerRank, request: PrefillRequest, span: tuple[int, int, int], hooks: Sequence[int], *, is_new: bool
    ) -> None:
        key, prompt, block_ids, pass_number = request.key, request.prompt, request.block_ids, request.pass_number
        cached_from, start, end = span
        cached, is_last = request.cached, request.state is PrefillState.SEALED
        order = SendOrder(key, request.request_id, *request.peer, prompt.digest, prompt.tokens, request.timeout_s)
        rest = [layer for layer in range(len(self.model.shapes)) if layer not in hooks]
        ledger, memory = rank.ledger, rank.memory

        def begin() -> Actions:
            actions: Actions = ()
            if is_new:
                rank.opened.add(key)
                actions = ledger.open(order, self._now_s())
            ledger.set_blocks(key, block_ids, cached)
            rank.readable[key] = block_ids
            memory.write(prompt, block_ids, cached_from, start, version=pass_number)
            return actions

        def hook(layer: int) -> Actions:
            memory.write(prompt, block_ids, start, end, version=pass_number, layers=[layer])
            ledger.wrote(key, pass_number, [layer], end)
            return ledger.pump(key, self._now_s())

        def sweep() -> Actions:
            memory.write(prompt, block_ids, start, end, version=pass_number, layers=rest)
            ledger.wrote(key, pass_number, range(len(self.model.shapes)), end)
            return ledger.seal(key, pass_number, self._now_s()) if is_last else ledger.pump(key, self._now_s(), flush=True)

        rank.calls.append(Call(begin))
        rank.calls.extend(Call(lambda layer=layer: hook(layer)) for layer in hooks)  # type: ignore[misc]
        rank.calls.append(Call(sweep))

    def preempt(self, request: PrefillRequest) -> None:
        """Take a request's blocks away; it computes its prompt again in others."""
        request.pass_number += 1
        request.computed = 0
        request.state = PrefillState.WAITING
        key, block_ids, pass_number = request.key, request.block_ids, request.pass_number
        request.block_ids = ()
        self.free.give(block_ids)
        for rank in self.ranks:
            rank.calls.append(Call(self._begin_pass(rank, key, block_ids, pass_number), lambda rank=rank: key not in rank.gathering))  # type: ignore[misc]

    @staticmethod
    def _begin_pass(rank: ProducerRank, key: TransferKey, block_ids: BlockIds, pass_number: int) -> Callable[[], Actions]:
        def begin() -> Actions:
            rank.ledger.begin_pass(key, pass_number)
            rank.readable.pop(key, None)
            rank.memory.scribble(block_ids)
            return ()

        return begin

    def finish(self, request: PrefillRequest, *, aborted: bool) -> None:
        """End a request; its blocks stay until the ranks report."""
        key, is_sealed = request.key, request.state is PrefillState.SEALED
        request.state = PrefillState.DONE
        for rank in self.ranks:
            if aborted and not is_sealed:
                rank.calls.append(Call(lambda rank=rank: rank.ledger.cancel(key, CloseReason.ABORTED)))  # type: ignore[misc]
            if request.is_ordered:
                request.waiting_for.add(rank.me.rank)
                rank.calls.append(Call(lambda rank=rank: rank.ledger.finished(request.request_id)))  # type: ignore[misc]
        if not request.is_ordered:
            del self.requests[key]

    def on_report(self, rank: ProducerRank, report: ReportSent) -> None:
        """Take a rank's word that it reads no more."""
        key = TransferKey(report.record.transfer_id, report.record.attempt)
        rank.note_report(key)
        assert key not in rank.gathering, f"{rank.me} reports {key} while it reads its blocks"
        block_ids = rank.readable.pop(key, None)
        if block_ids is not None:
            rank.memory.scribble(block_ids)
        request = self.requests[key]
        rank.memory.forget(request.prompt)
        request.waiting_for.remove(rank.me.rank)
        if not request.waiting_for:
            del self.requests[key]
            if request.block_ids:
                self.free.give(request.block_ids)
