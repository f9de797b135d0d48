"""Prefill and decode workers over the product's own ledgers, slots and pages, a network between them, and one choice at a time of what happens next.

Every operation takes a number that picks among what is possible now and returns whether it did anything, so that hypothesis and a seeded driver can
steer the same machine. What must hold is asserted where it could break: bytes and ownership in the engine models, the rest here and in `faults`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import xxhash
from decode_model import ConsumerRank, DecodeEngine, DecodeRequest
from deployment import Setup
from network import Lane, Link
from prefill_model import PrefillEngine, PrefillRequest, PrefillState, ProducerRank
from shapes import M3_SMALL, Model, Prompt, RankMemory

from pdserve.kv.actions import Action, Actions, PeerRank, PostParcel, ReportReceived, ReportSent, Scatter, SendFrame
from pdserve.kv.plan import PairPlan
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Parcel
from pdserve.types import CloseReason, TransferSide

T = TypeVar("T")

PROMPT_TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 21, 24)


class Rig:
    """A deployment under test."""

    def __init__(self, setup: Setup, model: Model = M3_SMALL) -> None:
        self.setup = setup
        self.model = model
        self.now_s = 0.0
        self.plan: PairPlan = model.plan(setup.prefill_ranks, setup.decode_ranks)
        self.links: dict[tuple[PeerRank, PeerRank], Link] = {}
        self.producers: dict[PeerRank, ProducerRank] = {}
        self.consumers: dict[PeerRank, ConsumerRank] = {}
        self.prefills: dict[str, PrefillEngine] = {}
        self.decodes: dict[str, DecodeEngine] = {}
        self.starts: Counter[str] = Counter()
        self.landed: set[tuple[TransferKey, PeerRank]] = set()
        self.retryable: deque[tuple[TransferKey, Prompt]] = deque(maxlen=8)
        self.num_transfers = 0
        self.outcomes: Counter[tuple[TransferSide, CloseReason]] = Counter()
        """of one rank and side each"""
        self.num_loads = 0
        """decode requests that landed on all their ranks"""
        for number in range(setup.prefill_workers):
            self.start_prefill(f"prefill-{number}")
        for number in range(setup.decode_workers):
            self.start_decode(f"decode-{number}")
        for link in list(self.links.values()):
            self.bring_up(link)

    @property
    def prefill_now_s(self) -> float:
        return self.now_s + self.setup.skew_s

    # ---- workers --------------------------------------------------------------------------------------------------------------------

    def start_prefill(self, worker: str) -> None:
        """Start a prefill worker's next incarnation; its links are made, not up."""
        setup, incarnation = self.setup, self._next_incarnation(worker)
        ranks = []
        for number in range(setup.prefill_ranks):
            me = PeerRank(worker, incarnation, number)
            memory = RankMemory(self.model, self.model.geometry(setup.prefill_ranks, number), setup.num_blocks)
            lookups = (partial(self._sending_plan, me), partial(self._connected, me))
            rank = ProducerRank(me, memory, *lookups, slot_bytes=setup.slot_bytes, lease_s=setup.lease_s, parking_s=setup.timeout_s)
            ranks.append(rank)
            self.producers[me] = rank
        self.prefills[worker] = PrefillEngine(self.model, ranks, setup.num_blocks, lambda: self.prefill_now_s)
        for engine in self.decodes.values():
            self._make_links(ranks, engine.ranks)

    def start_decode(self, worker: str) -> None:
        """Start a decode worker's next incarnation; its links are made, not up."""
        setup, incarnation = self.setup, self._next_incarnation(worker)
        ranks = []
        for number in range(setup.decode_ranks):
            me = PeerRank(worker, incarnation, number)
            memory = RankMemory(self.model, self.model.geometry(setup.decode_ranks, number, padding=setup.padding), setup.num_blocks)
            lookups = (partial(self._receiving_plan, me), partial(self._connected, me))
            rank = ConsumerRank(
                me,
                memory,
                *lookups,
                num_slots=setup.num_slots,
                slot_bytes=setup.slot_bytes,
                renew_s=setup.lease_s / 3,
                parking_s=setup.timeout_s,
            )
            ranks.append(rank)
            self.consumers[me] = rank
        self.decodes[worker] = DecodeEngine(self.model, self.plan, ranks, setup.num_blocks, lambda: self.now_s)
        for engine in self.prefills.values():
            self._make_links(engine.ranks, ranks)

    def _next_incarnation(self, worker: str) -> str:
        self.starts[worker] += 1
        return f"{worker}-start-{self.starts[worker]}"

    def _make_links(self, producers: Sequence[ProducerRank], consumers: Sequence[ConsumerRank]) -> None:
        for producer, consumer in self.plan.slices:
            ends = (producers[producer].me, consumers[consumer].me)
            self.links[ends] = Link(*ends)

    def bring_up(self, link: Link) -> None:
        """Connect two ranks."""
        link.is_up = True
        consumer = self.consumers[link.ends[1]]
        self.execute(consumer, consumer.ledger.connected(link.ends[0]))

    def incarnation(self, worker: str) -> str:
        """Return the present incarnation of a worker."""
        return f"{worker}-start-{self.starts[worker]}"

    def _connected(self, me: PeerRank, worker: str, incarnation: str) -> list[PeerRank]:
        """Return the ranks of a worker that a rank takes for connected."""
        peers = [link.other(me) for link in self.links.values() if me in link.ends and link.believes(me)]
        return sorted(peer for peer in peers if (peer.worker, peer.incarnation) == (worker, incarnation))

    def _sending_plan(self, me: PeerRank, worker: str, incarnation: str) -> PairPlan | CloseReason:
        return self._plan_if(self.plan.consumers_of(me.rank), self._connected(me, worker, incarnation))

    def _receiving_plan(self, me: PeerRank, worker: str, incarnation: str) -> PairPlan | CloseReason:
        return self._plan_if(self.plan.producers_of(me.rank), self._connected(me, worker, incarnation))

    def _plan_if(self, needed: Sequence[int], connected: Sequence[PeerRank]) -> PairPlan | CloseReason:
        return self.plan if {*needed} <= {peer.rank for peer in connected} else CloseReason.PEER_UNKNOWN

    # ---- requests -------------------------------------------------------------------------------------------------------------------

    def submit(self, pick: int, *, mismatch: bool = False) -> bool:
        """Send both legs of a new request, or of one that failed again."""
        if sum(len(engine.requests) for engine in self.decodes.values()) >= self.setup.max_requests:
            return False
        if sum(len(engine.requests) for engine in self.prefills.values()) >= self.setup.max_requests + 2:
            return False
        pick, prefill = self._choose(pick, sorted(self.prefills))
        pick, decode = self._choose(pick, sorted(self.decodes))
        if self.retryable and pick % 4 == 0:
            key, prompt = self.retryable.popleft()
            key = TransferKey(key.transfer_id, key.attempt + 1)
        else:
            self.num_transfers += 1
            key = TransferKey(f"{self.num_transfers:032x}", 1)
            pick, tokens = self._choose(pick, PROMPT_TOKENS)
            prompt = Prompt(self.model, self.num_transfers, tokens)
        first_token = pick // 4 % 3 * self.model.largest_block_tokens
        other = Prompt(self.model, -prompt.seed, prompt.tokens + pick % 2) if mismatch else prompt
        timeout_s = self.setup.timeout_s
        self.prefills[prefill].admit(PrefillRequest(key, prompt, (decode, self.incarnation(decode)), timeout_s))
        self.decodes[decode].admit(
            DecodeRequest(
                key,
                other,
                (prefill, self.incarnation(prefill)),
                timeout_s,
                first_token=first_token if first_token < other.tokens else 0,
                lookahead=pick % 2,
            )
        )
        return True

    def prefill(self, pick: int, *, hooks: bool = True) -> bool:
        """Run a chunk of some prefill request, or finish one that is sealed."""
        requests = [
            r for e in self.prefills.values() for r in e.requests.values() if r.state is not PrefillState.DONE and self._may_begin(r)
        ]
        if not requests:
            return False
        pick, request = self._choose(pick, requests)
        engine = self._prefill_of(request)
        if request.state is PrefillState.SEALED:
            engine.finish(request, aborted=False)
            return True
        pick, tokens = self._choose(pick, (3, 5, 8, 64))
        pick, cached = self._choose(pick, (0, 0, 0, 1, 2))
        cached *= self.model.largest_block_tokens
        layers = range(len(self.model.shapes)) if hooks else ()
        fired = [layer for layer in layers if pick >> layer & 1]
        return engine.run_chunk(request, tokens, cached if cached < request.prompt.tokens else 0, fired)

    def _may_begin(self, request: PrefillRequest) -> bool:
        decode = self.decodes[request.peer[0]].requests.get(request.key)
        return not self.setup.decode_first or request.is_ordered or decode is None or decode.block_ids is not None

    def reserve(self, pick: int) -> bool:
        """Give some decode request its blocks."""
        waiting = [(e, r) for e in self.decodes.values() for r in e.requests.values() if r.block_ids is None]
        if not waiting:
            return False
        _, (engine, request) = self._choose(pick, waiting)
        return engine.reserve(request)

    def preempt(self, pick: int) -> bool:
        """Take the blocks of a prefill request that has some."""
        states = (PrefillState.RUNNING, PrefillState.SEALED)
        requests = [r for e in self.prefills.values() for r in e.requests.values() if r.state in states]
        if not requests:
            return False
        _, request = self._choose(pick, requests)
        self._prefill_of(request).preempt(request)
        return True

    def abort_prefill(self, pick: int) -> bool:
        requests = [r for e in self.prefills.values() for r in e.requests.values() if r.state is not PrefillState.DONE]
        if not requests:
            return False
        _, request = self._choose(pick, requests)
        self._prefill_of(request).finish(request, aborted=True)
        return True

    def abort_decode(self, pick: int) -> bool:
        """Abort a decode request in whatever state, also twice; one without blocks may also find that it needs nothing."""
        requests = [(e, r) for e in self.decodes.values() for r in e.requests.values()]
        if not requests:
            return False
        pick, (engine, request) = self._choose(pick, requests)
        is_spared = request.block_ids is None and pick % 2
        engine.end(request, CloseReason.NOTHING_TO_MOVE if is_spared else CloseReason.ABORTED)
        return True

    def _prefill_of(self, request: PrefillRequest) -> PrefillEngine:
        return next(engine for engine in self.prefills.values() if engine.requests.get(request.key) is request)

    # ---- ranks and links ------------------------------------------------------------------------------------------------------------

    def call(self, pick: int) -> bool:
        """Let some rank hear the next thing that its engine decided."""
        ranks = [rank for rank in (*self.producers.values(), *self.consumers.values()) if rank.can_run_call]
        if not ranks:
            return False
        _, rank = self._choose(pick, ranks)
        self.execute(rank, rank.run_call())
        return True

    def write(self, pick: int) -> bool:
        """Let some lane come to its next parcel, or end the one that it is reading."""
        links = [link for link in self.links.values() if link.lanes[0].can_write]
        if not links:
            return False
        _, link = self._choose(pick, links)
        lane = link.lanes[0]
        rank = self.producers[lane.source]
        if lane.gathering is None:
            post = lane.outbox.popleft()
            assert isinstance(post, PostParcel)
            if rank.ledger.begin_gather(post):
                lane.gathering = post
                rank.gathering.append(post.key)
            else:
                self.execute(rank, rank.ledger.pump(post.key, self.prefill_now_s))
        else:
            self.end_gather(rank, link, lane.gathering)
        lane.flush()
        return True

    def end_gather(self, rank: ProducerRank, link: Link, post: PostParcel) -> None:
        """Read a parcel's pages, and send them or its notice where the link still stands."""
        rank.check_gather(post)
        lane = link.lanes[0]
        consumer = self.consumers[lane.target]
        if self.setup.is_direct:
            assert consumer.slots.may_fill(post.slot, post.key, lane.source), f"{lane.source} writes slot {post.slot}, which is not its own"
            self._check_unread(consumer, post.slot)
            pages = consumer.arena[post.slot][: post.num_bytes]
        else:
            pages = consumer.arena[0][: post.num_bytes].copy()
        rank.memory.pages.gather(post.items, post.slices, post.block_ids, pages)
        self.release_gather(rank, lane)
        checksum = xxhash.xxh3_64_intdigest(pages.data)
        parcel = Parcel(*post.key, post.pass_number, post.slot, post.num_bytes, checksum, post.items)
        if link.is_up:
            lane.send(parcel, None if self.setup.is_direct else pages)

    def release_gather(self, rank: ProducerRank, lane: Lane) -> None:
        """A lane reads blocks no more."""
        post, lane.gathering = lane.gathering, None
        assert post is not None
        rank.gathering.remove(post.key)
        self.execute(rank, rank.ledger.gathered(post))

    @staticmethod
    def _check_unread(consumer: ConsumerRank, slot: int) -> None:
        assert all(scatter.parcel.slot != slot for scatter in consumer.scatters), f"{consumer.me}: slot {slot} is filled while it is read"

    def deliver(self, pick: int) -> bool:
        """Let the next message of some lane arrive."""
        lanes = [lane for link in self.links.values() for lane in link.lanes if lane.wire]
        if not lanes:
            return False
        _, lane = self._choose(pick, lanes)
        delivery = lane.wire.popleft()
        if lane.target in self.producers:
            producer = self.producers[lane.target]
            self.execute(producer, producer.hear(lane.source, delivery.message, self.prefill_now_s))
            return True
        consumer, message = self.consumers[lane.target], delivery.message
        if isinstance(message, Parcel) and delivery.pages is not None and consumer.ledger.may_fill(lane.source, message):
            consumer.arena[message.slot][: message.num_bytes] = delivery.pages
        self.execute(consumer, consumer.hear(lane.source, message, self.now_s))
        return True

    def scatter(self, pick: int) -> bool:
        """Let some decode rank copy the next parcel that has arrived."""
        ranks = [rank for rank in self.consumers.values() if rank.scatters]
        if not ranks:
            return False
        _, rank = self._choose(pick, ranks)
        self.execute(rank, rank.carry_out(rank.scatters.popleft(), self.now_s))
        return True

    def tick(self, elapsed_s: float) -> bool:
        """Let time pass and every rank look at its clock."""
        self.now_s += elapsed_s
        for producer in list(self.producers.values()):
            self.execute(producer, producer.ledger.tick(self.prefill_now_s))
        for consumer in list(self.consumers.values()):
            self.execute(consumer, consumer.ledger.tick(self.now_s))
        return True

    # ---- what ledgers ask for -------------------------------------------------------------------------------------------------------

    def execute(self, rank: ProducerRank | ConsumerRank, actions: Actions) -> None:
        """Carry out what a rank's ledger asks for."""
        work: deque[Action] = deque(actions)
        while work:
            action = work.popleft()
            match action:
                case SendFrame(peer, message):
                    self._put(rank.me, peer, message)
                case PostParcel():
                    self._put(rank.me, action.peer, action)
                case Scatter():
                    assert isinstance(rank, ConsumerRank)
                    rank.scatters.append(action)
                case ReportSent():
                    assert isinstance(rank, ProducerRank)
                    self._on_sent(rank, action)
                case ReportReceived():
                    assert isinstance(rank, ConsumerRank)
                    self._on_received(rank, action)

    def _put(self, source: PeerRank, target: PeerRank, entry: object) -> None:
        link = self.links.get((source, target)) or self.links.get((target, source))
        if link is not None and link.is_up:
            link.lane_from(source).put(entry)  # type: ignore[arg-type]

    def _on_sent(self, rank: ProducerRank, report: ReportSent) -> None:
        record = report.record
        self.outcomes[TransferSide.SEND, record.outcome] += 1
        key = TransferKey(record.transfer_id, record.attempt)
        engine = self.prefills[rank.me.worker]
        if record.outcome is CloseReason.RELEASED:
            peer = engine.requests[key].peer
            missing = [c for c in self.plan.consumers_of(rank.me.rank) if (key, PeerRank(*peer, c)) not in self.landed]
            assert not missing, f"{rank.me} released {key}, decode ranks {missing} have not landed"
        engine.on_report(rank, report)

    def _on_received(self, rank: ConsumerRank, report: ReportReceived) -> None:
        record = report.record
        self.outcomes[TransferSide.RECEIVE, record.outcome] += 1
        assert report.landed == (record.outcome is CloseReason.LANDED)
        key = TransferKey(record.transfer_id, record.attempt)
        request = self.decodes[rank.me.worker].on_report(rank, report)
        if report.landed:
            self.landed.add((key, rank.me))
        if request is not None:
            self.num_loads += len(request.landed) == self.setup.decode_ranks
            if len(request.landed) < self.setup.decode_ranks:
                self.retryable.append((key, request.prompt))

    @staticmethod
    def _choose(pick: int, among: Sequence[T]) -> tuple[int, T]:
        """Return what is left of a number after it chose, and the choice."""
        return pick // len(among), among[pick % len(among)]
