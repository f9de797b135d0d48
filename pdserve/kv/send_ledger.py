"""The producer's side of all transfers of one rank: a state machine per (transfer, attempt), sans I/O.

    OPEN ──wrote──► WRITING ──seal──► SEALED ──last ack──► ACKED ──request finished──► RELEASED
      └──────────────┴─────────────────┴── close(reason) ──► CLOSED (reported once nothing is being gathered and the request finished)

Each consumer rank of the plan has an entry of its own: its offer, its slots, how far each layer was sent to it, whether it acknowledged. What
was written is a high-water mark per layer and pass; what is scheduled for a consumer is the set of (layer, block) below the marks and inside
its offer; sealing freezes that set. A preempted prefill starts a new pass: marks, sets and seals begin again, and the pass number travels in
every parcel and seal, so bytes of a dead pass can never complete a live one.

A consumer whose slots are all under way is told once that a parcel waits (`Want`). A slot that was asked for, or is left over from a dead pass, is
filled at once or returned, for others may wait for it.

Knows nothing of links, sockets, tensors or vLLM. Time is passed in.
"""

from collections import Counter

from pdserve.kv.actions import Action, Actions, PeerRank, PlanLookup, PostParcel, RankLookup, ReportSent, SendFrame, SendOrder
from pdserve.kv.closing import closes, reason_of
from pdserve.kv.geometry import Geometry
from pdserve.kv.parking import Parking, Tombstones
from pdserve.kv.plan import NO_PLAN, PairPlan
from pdserve.kv.send_transfer import ConsumerEntry, SendState, SendTransfer
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import EARLY_PARTS, Ack, Close, Grant, Offer, Renew, Return, Seal, Want, set_digest
from pdserve.types import CloseReason, TransferSide

FROM_CONSUMER = Offer | Grant | Ack | Close


class SendLedger:
    """All transfers that this rank produces.

    Args:
        geometry: of this rank.
        plans: finds the plan with a connected peer (this side producing).
        ranks: finds the connected ranks of a peer.
        worker: this worker's id, for records.
        incarnation: this worker's incarnation, for records.
        slot_bytes: size of a peer's slot.
        lease_s: longest silence of a consumer that has offered.
        parking_s: how long early messages wait.
    """

    def __init__(
        self,
        geometry: Geometry,
        plans: PlanLookup,
        ranks: RankLookup,
        *,
        worker: str,
        incarnation: str,
        slot_bytes: int,
        lease_s: float,
        parking_s: float,
    ) -> None:
        self._geometry = geometry
        self._plans = plans
        self._ranks = ranks
        self._worker = worker
        self._incarnation = incarnation
        self._slot_bytes = slot_bytes
        self._lease_s = lease_s
        self._live: dict[TransferKey, SendTransfer] = {}
        self._by_request: dict[str, TransferKey] = {}
        self._parking_s = parking_s
        self._parking: dict[tuple[str, str], Parking[tuple[PeerRank, FROM_CONSUMER]]] = {}
        """by worker and incarnation of the consumer, so that one that floods takes no room from others"""
        self._ended: Tombstones[CloseReason] = Tombstones()
        self.dropped: Counter[str] = Counter()
        """messages that belonged to no live transfer, by reason"""

    def __len__(self) -> int:
        return len(self._live)

    def state(self, key: TransferKey) -> SendState | None:
        """Return where a live transfer stands, None when it is over or was never opened."""
        send = self._live.get(key)
        return send.state if send else None

    # ---- from the engine ------------------------------------------------------------------------------------------------------------

    def open(self, order: SendOrder, now_s: float) -> Actions:
        """Begin a transfer; replays what its consumers sent early.

        The scheduler opens a key once. One that its consumer has closed already opens closed, so that its request is reported like any other. So
        does one without a plan, and the peer's ranks that are connected hear of it.
        """
        ended = self._ended.get(order.key)
        plan = ended or self._plans(order.peer_worker, order.peer_incarnation)
        send = SendTransfer(order, plan if isinstance(plan, PairPlan) else NO_PLAN, self._geometry, now_s)
        self._live[order.key] = send
        self._by_request[order.request_id] = order.key
        actions: list[Action] = []
        if isinstance(plan, CloseReason):
            if ended is None:
                actions += closes(self._ranks(order.peer_worker, order.peer_incarnation), order.key, TransferSide.SEND, plan)
            self._close(send, plan, actions)
        parking = self._parking.get((order.peer_worker, order.peer_incarnation))
        for peer, message in parking.take(order.key) if parking else ():
            actions += self.on_message(peer, message, now_s)
        return actions

    def begin_pass(self, key: TransferKey, pass_number: int) -> None:
        """Start over after a preemption: nothing of the earlier pass counts any more. A transfer that everyone acknowledged keeps its end."""
        send = self._live.get(key)
        if send is None or send.state in (SendState.ACKED, SendState.CLOSED) or pass_number <= send.pass_number:
            return
        send.pass_number = pass_number
        send.state = SendState.OPEN
        send.written_tokens = [0] * len(self._geometry.layers)
        send.block_ids = ()
        for consumer in send.consumers.values():
            consumer.begin_pass(self._geometry)
            consumer.is_pressed = True

    def set_blocks(self, key: TransferKey, block_ids: tuple[tuple[int, ...], ...], cached_tokens: int) -> None:
        """Say where the prompt's blocks lie now (per group, by position) and how many of its tokens were cached before."""
        send = self._live.get(key)
        if send is not None:
            send.block_ids = block_ids
            send.cached_tokens = cached_tokens

    def wrote(self, key: TransferKey, pass_number: int, layers: range | list[int], end_token: int) -> None:
        """Raise the marks: these layers hold the KV of all tokens before `end_token`."""
        send = self._live.get(key)
        if send is None or pass_number != send.pass_number or send.state not in (SendState.OPEN, SendState.WRITING):
            return
        send.state = SendState.WRITING
        for layer in layers:
            send.written_tokens[layer] = max(send.written_tokens[layer], min(end_token, send.order.prompt_tokens))

    def seal(self, key: TransferKey, pass_number: int, now_s: float) -> Actions:
        """Freeze the set of writes after the last forward pass."""
        send = self._live.get(key)
        if send is None or pass_number != send.pass_number or send.state not in (SendState.OPEN, SendState.WRITING):
            return ()
        send.state = SendState.SEALED
        send.bytes_before_forward_end = send.gathered_bytes
        actions: list[Action] = []
        self._after_seal(send, actions, now_s)
        actions += self.pump(key, now_s, flush=True)
        return actions

    def finished(self, request_id: str) -> Actions:
        """The engine is done with the request and waits for our report before it frees the blocks."""
        key = self._by_request.get(request_id)
        if key is None:
            return ()
        send = self._live[key]
        send.finished = True
        actions: list[Action] = []
        self._maybe_report(send, actions)
        return actions

    def cancel(self, key: TransferKey, reason: CloseReason) -> Actions:
        """Close a transfer from this side, live or not yet opened; consumers are told, also those whose offer is parked. Idempotent."""
        send = self._live.get(key)
        if send is None:
            return self._end_unopened(key, reason) if self._ended.get(key) is None else ()
        actions: list[Action] = []
        self._close(send, reason, actions)
        return actions

    # ---- from consumers -------------------------------------------------------------------------------------------------------------

    def on_message(self, peer: PeerRank, message: FROM_CONSUMER, now_s: float) -> Actions:
        """Take one message; early ones are parked, late ones answered or counted, strangers' counted."""
        key = TransferKey(message.transfer_id, message.attempt)
        send = self._live.get(key)
        if send is None:
            return self._without_transfer(peer, key, message, now_s)
        consumer = send.consumers.get(peer.rank)
        if consumer is None or consumer.peer != peer:
            send.dropped["not_a_consumer"] += 1
            return self._answer_late(peer, key, message, send.outcome)
        consumer.heard_s = now_s
        if send.state is SendState.CLOSED:
            send.dropped["late"] += 1
            return self._answer_late(peer, key, message, send.outcome)
        match message:
            case Offer():
                return self._on_offer(send, consumer, message, now_s)
            case Grant():
                return self._on_grant(send, consumer, message.slot, now_s)
            case Ack():
                return self._on_ack(send, consumer, message, now_s)
            case Close():
                consumer.slots.clear()
                actions = closes([peer], key, TransferSide.SEND, CloseReason.PEER_CLOSED)
                self._close(send, reason_of(message), actions, but=peer)
                return actions

    def on_renew(self, peer: PeerRank, renew: Renew, now_s: float) -> None:
        """Note that a consumer is alive and still wants these transfers."""
        for key in renew.transfers:
            send = self._live.get(key)
            consumer = send.consumers.get(peer.rank) if send else None
            if consumer is not None and consumer.peer == peer:
                consumer.heard_s = now_s

    def peer_lost(self, worker: str, incarnation: str) -> Actions:
        """A link to a peer is gone: close what it was to receive, and what it offered early, since its slots may serve others by now."""
        actions: list[Action] = []
        for send in list(self._live.values()):
            if (send.order.peer_worker, send.order.peer_incarnation) == (worker, incarnation):
                self._close(send, CloseReason.PEER_LOST, actions)
        for key in self._parking.get((worker, incarnation), ()):
            actions += self._end_unopened(key, CloseReason.PEER_LOST)
        self._parking.pop((worker, incarnation), None)
        return actions

    def tick(self, now_s: float) -> Actions:
        """Close what is past its deadline or whose consumer fell silent; return what a preempted prefill holds; drop what was parked too long."""
        actions: list[Action] = []
        for send in list(self._live.values()):
            silent = any(
                consumer.offer is not None and not consumer.acked and now_s - consumer.heard_s > self._lease_s
                for consumer in send.consumers.values()
            )
            if send.state is not SendState.ACKED and (silent or now_s > send.deadline_s):
                self._close(send, CloseReason.EXPIRED, actions)
            elif send.state is SendState.OPEN:
                actions += self.pump(send.order.key, now_s)
        if expired := sum(parking.expire(now_s) for parking in self._parking.values()):
            self.dropped["parked_too_long"] += expired
        return actions

    # ---- moving ---------------------------------------------------------------------------------------------------------------------

    def pump(self, key: TransferKey, now_s: float, *, flush: bool = False) -> Actions:
        """Post what is written and has a slot; ask for a slot where there is none.

        Args:
            flush: also post parcels that fill less than an early one must; otherwise they wait for more layers.
        """
        send = self._live.get(key)
        if send is None or send.state in (SendState.CLOSED, SendState.ACKED):
            return ()
        least_bytes = 1 if flush or send.state is SendState.SEALED else self._slot_bytes // EARLY_PARTS
        return [action for consumer in send.consumers.values() for action in self._pump_one(send, consumer, least_bytes, now_s)]

    def _pump_one(self, send: SendTransfer, consumer: ConsumerEntry, least_bytes: int, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if consumer.offer is None or consumer.acked:
            return actions
        self._fill(send, consumer, least_bytes, actions, now_s)
        if consumer.is_pressed:
            consumer.is_pressed = False
            if consumer.slots:
                self._fill(send, consumer, 1, actions, now_s)
            if consumer.slots:
                actions.append(SendFrame(consumer.peer, Return(*send.order.key, tuple(consumer.slots))))
                consumer.slots.clear()
        return actions

    def _fill(self, send: SendTransfer, consumer: ConsumerEntry, least_bytes: int, actions: list[Action], now_s: float) -> None:
        """Post parcels while there are slots; the first that has none is asked for, once."""
        while consumer.slots or not consumer.has_asked:
            load = send.load(consumer, self._slot_bytes, least_bytes)
            if load is None:
                return
            if consumer.slots:
                actions.append(send.post(consumer, load, now_s))
            else:
                consumer.has_asked = True
                actions.append(SendFrame(consumer.peer, Want(*send.order.key)))

    def begin_gather(self, post: PostParcel) -> bool:
        """Ask, just before its pages are read, whether a posted parcel is still wanted; `gathered` must follow a yes.

        A no means that its blocks may belong to somebody else by now; `pump` must follow it, since the slot of a parcel of a dead pass serves the
        next one or goes back.
        """
        send = self._live.get(post.key)
        if send is None or send.state is SendState.CLOSED or send.consumers[post.peer.rank].acked:
            return False
        if post.pass_number != send.pass_number:
            send.consumers[post.peer.rank].take_slot(post.slot)
            return False
        send.gathering += 1
        return True

    def gathered(self, post: PostParcel) -> Actions:
        """A posted parcel no longer reads this rank's blocks."""
        send = self._live[post.key]
        send.gathering -= 1
        send.gathered_bytes += post.num_bytes
        actions: list[Action] = []
        self._maybe_report(send, actions)
        return actions

    # ---- inside ---------------------------------------------------------------------------------------------------------------------

    def _on_offer(self, send: SendTransfer, consumer: ConsumerEntry, offer: Offer, now_s: float) -> Actions:
        actions: list[Action] = []
        if consumer.offer is not None:
            send.dropped["duplicate_offer"] += 1
        elif offer.prompt != send.order.prompt or not 0 <= offer.first_token < offer.end_token == send.order.prompt_tokens:
            self._close(send, CloseReason.PROMPT_MISMATCH, actions)
        else:
            consumer.offer = offer
            consumer.slots.extend(offer.slots)
            consumer.begin_pass(self._geometry)
            self._after_seal(send, actions, now_s)
            actions += self.pump(send.order.key, now_s)
        return actions

    def _on_grant(self, send: SendTransfer, consumer: ConsumerEntry, slot: int, now_s: float) -> Actions:
        """Take a slot. One that comes ahead of need is kept for what will be written, one that was asked for is used now or not at all."""
        if consumer.acked:
            return ()
        if consumer.has_asked:
            consumer.take_slot(slot)
        else:
            consumer.slots.append(slot)
        return self.pump(send.order.key, now_s)

    def _on_ack(self, send: SendTransfer, consumer: ConsumerEntry, ack: Ack, now_s: float) -> Actions:
        if ack.pass_number != send.pass_number or not consumer.seal_sent:
            send.dropped["stale_ack"] += 1
            return ()
        if consumer.acked:
            send.dropped["duplicate_ack"] += 1
        consumer.acked = True
        consumer.slots.clear()
        actions = closes([consumer.peer], send.order.key, TransferSide.SEND, CloseReason.RELEASED)
        self._maybe_acked(send, actions, now_s)
        return actions

    def _after_seal(self, send: SendTransfer, actions: list[Action], now_s: float) -> None:
        """Tell every consumer that has offered what was sealed; a rank that nobody reads is acknowledged by nobody at once."""
        if send.state is not SendState.SEALED:
            return
        for consumer in send.consumers.values():
            if consumer.offer is None or consumer.seal_sent or consumer.acked:
                continue
            writes = send.scheduled(consumer)
            consumer.seal_sent = True
            actions.append(
                SendFrame(
                    consumer.peer,
                    Seal(*send.order.key, send.pass_number, len(writes), set_digest(writes), send.cached_tokens),
                )
            )
        self._maybe_acked(send, actions, now_s)

    def _maybe_acked(self, send: SendTransfer, actions: list[Action], now_s: float) -> None:
        if send.state is SendState.SEALED and all(consumer.acked for consumer in send.consumers.values()):
            send.state = SendState.ACKED
            send.outcome = CloseReason.RELEASED
            send.ended_s = now_s
            self._maybe_report(send, actions)

    def _close(self, send: SendTransfer, reason: CloseReason, actions: list[Action], *, but: PeerRank | None = None) -> None:
        if send.state in (SendState.ACKED, SendState.CLOSED):
            return
        send.state = SendState.CLOSED
        send.outcome = reason
        consumers = [consumer.peer for consumer in send.consumers.values() if consumer.peer != but]
        actions += closes(consumers, send.order.key, TransferSide.SEND, reason)
        self._maybe_report(send, actions)

    def _without_transfer(self, peer: PeerRank, key: TransferKey, message: FROM_CONSUMER, now_s: float) -> Actions:
        ended = self._ended.get(key)
        if ended is not None:
            self.dropped["late"] += 1
            return self._answer_late(peer, key, message, ended)
        if isinstance(message, Close):
            return self._end_unopened(key, reason_of(message), peer)
        parking = self._parking.setdefault((peer.worker, peer.incarnation), Parking(self._parking_s))
        if parking.park(key, (peer, message), now_s):
            return ()
        self.dropped["parking_full"] += 1
        return self._answer_late(peer, key, message, CloseReason.OVERFLOW)

    def _end_unopened(self, key: TransferKey, reason: CloseReason, *peers: PeerRank) -> Actions:
        """End a transfer before it was opened; tell `peers` and all whose messages are parked, so that their slots are their own again."""
        self._ended.add(key, reason)
        parked = {peer for parking in self._parking.values() for peer, _ in parking.take(key)}
        return closes(sorted({*peers, *parked}), key, TransferSide.SEND, reason)

    def _answer_late(self, peer: PeerRank, key: TransferKey, message: FROM_CONSUMER, outcome: CloseReason | None) -> Actions:
        """Whoever still offers, acknowledges or closes hears that nothing more comes, so that its slots are its own again."""
        if isinstance(message, Grant):
            return ()
        return closes([peer], key, TransferSide.SEND, outcome or CloseReason.ABORTED)

    def _maybe_report(self, send: SendTransfer, actions: list[Action]) -> None:
        """Report once: ended, finished by the engine, nothing being gathered."""
        key = send.order.key
        if send.outcome is None or not send.finished or send.gathering or key not in self._live:
            return
        del self._live[key]
        del self._by_request[send.order.request_id]
        self._ended.add(key, send.outcome)
        actions.append(ReportSent(send.order.request_id, send.record(self._worker, self._incarnation)))
