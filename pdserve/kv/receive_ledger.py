"""The consumer's side of all transfers of one rank: a state machine per (transfer, attempt), sans I/O.

    OFFERED ──parcel──► RECEIVING ──scattered == sealed == planned──► LANDED
       └───────────────────┴── close(reason) ──► CLOSED

Both ends report to the engine exactly once, also when the peer died: vLLM keeps a waiting request's blocks until it hears. LANDED is reached
only from sets that are equal three ways: what this rank's own plan expects, what the producer sealed, and what was verified and scattered in
the same pass. Everything else ends in CLOSED, and the engine computes the prompt itself.

An offer never waits for slots: it carries those that may be given ahead of need (`slots`), and a producer that has a parcel and none of them says
so. Wants are served in order of arrival, before anything is given ahead; so while one waits, no slot is free.

Knows nothing of links, sockets, tensors or vLLM. Time is passed in.
"""

from collections import Counter

from pdserve.kv.actions import Action, Actions, PeerRank, PlanLookup, RankLookup, ReceiveOrder, ReportReceived, Scatter, SendFrame
from pdserve.kv.closing import closes, reason_of
from pdserve.kv.geometry import Geometry
from pdserve.kv.parking import Tombstones, UntoldEnds
from pdserve.kv.plan import NO_PLAN, PairPlan
from pdserve.kv.receive_transfer import ProducerEntry, ReceiveState, ReceiveTransfer
from pdserve.kv.slots import Owner, SlotPool
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import EARLY_PARTS, Ack, Close, Grant, Offer, Parcel, Renew, Return, Seal, Want
from pdserve.types import CloseReason, TransferSide


class ReceiveLedger:
    """All transfers that this rank consumes.

    Args:
        geometry: of this rank.
        plans: finds the plan with a connected peer (the peer producing).
        ranks: finds the connected ranks of a peer.
        slots: this rank's receive slots.
        slot_bytes: size of each.
        worker: this worker's id, for records.
        incarnation: this worker's incarnation, for records.
        renew_s: how often producers hear that a transfer is still wanted; a third of the lease.
        parking_s: how long ranks that connect late are told what ended without them.
    """

    def __init__(
        self,
        geometry: Geometry,
        plans: PlanLookup,
        ranks: RankLookup,
        slots: SlotPool,
        *,
        worker: str,
        incarnation: str,
        slot_bytes: int,
        renew_s: float,
        parking_s: float,
    ) -> None:
        self._geometry = geometry
        self._plans = plans
        self._ranks = ranks
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._worker = worker
        self._incarnation = incarnation
        self._renew_s = renew_s
        self._renewed_s = float("-inf")
        self._live: dict[TransferKey, ReceiveTransfer] = {}
        self._wants: dict[Owner, None] = {}
        """producers of live transfers that have a parcel and no slot, in order"""
        self._ended: Tombstones[CloseReason] = Tombstones()
        self._untold = UntoldEnds(parking_s)
        self._now_s = 0.0
        """at the last tick"""
        self.dropped: Counter[str] = Counter()
        """messages that belonged to no live transfer, by reason"""

    def __len__(self) -> int:
        return len(self._live)

    def state(self, key: TransferKey) -> ReceiveState | None:
        """Return where a live transfer stands, None when it is over or was never opened."""
        receive = self._live.get(key)
        return receive.state if receive else None

    # ---- from the engine ------------------------------------------------------------------------------------------------------------

    def open(self, order: ReceiveOrder, now_s: float) -> Actions:
        """Begin a transfer whose destination blocks are reserved, and offer to receive it.

        The scheduler opens a key once. One that is over all the same is reported as failed at once, so that its request never waits; so is one
        without a plan, and the peer's ranks that are connected hear of it.
        """
        actions: list[Action] = []
        key = order.key
        ended = self._ended.get(key)
        plan = ended or self._plans(order.peer_worker, order.peer_incarnation)
        receive = ReceiveTransfer(order, plan if isinstance(plan, PairPlan) else NO_PLAN, self._geometry, now_s)
        self._live[key] = receive
        if ended is not None:
            self.dropped["reopened"] += 1
            receive.state = ReceiveState.CLOSED
            receive.outcome = CloseReason.PEER_CLOSED if ended is CloseReason.LANDED else ended
            self._report(receive, actions, now_s)
        elif isinstance(plan, CloseReason):
            self._close(receive, plan, actions, now_s)
        else:
            for num_left, producer in zip(range(len(receive.producers), 0, -1), receive.producers.values(), strict=True):
                count = self._slots.num_ahead(key, producer.peer, most=self._most_parcels(producer), among=num_left)
                slots = self._slots.grant(key, producer.peer, count)
                actions.append(SendFrame(producer.peer, Offer(*key, order.prompt, order.first_token, order.prompt_tokens, slots)))
        return actions

    def cancel(self, key: TransferKey, reason: CloseReason, now_s: float) -> Actions:
        """Close a live transfer from this side; the engine still gets its report. Idempotent."""
        actions: list[Action] = []
        receive = self._live.get(key)
        if receive is not None:
            self._close(receive, reason, actions, now_s)
        return actions

    def decline(self, key: TransferKey, worker: str, incarnation: str, reason: CloseReason) -> Actions:
        """Tell the producers of a transfer that was never opened here that nothing will be read. Idempotent."""
        if key in self._live or self._ended.get(key) is not None:
            return ()
        self._ended.add(key, reason)
        plan = self._plans(worker, incarnation)
        producers = plan.producers_of(self._geometry.rank) if isinstance(plan, PairPlan) else ()
        return self._tell(key, worker, incarnation, reason, producers, self._now_s)

    # ---- from producers -------------------------------------------------------------------------------------------------------------

    def may_fill(self, peer: PeerRank, parcel: Parcel) -> bool:
        """Whether a parcel's pages may be read into the slot that it names."""
        return self._slots.may_fill(parcel.slot, TransferKey(parcel.transfer_id, parcel.attempt), peer)

    def on_parcel(self, peer: PeerRank, parcel: Parcel, now_s: float) -> Actions:
        """Take a parcel whose pages lie in its slot. Its slot comes back here whatever happens to the pages."""
        key = TransferKey(parcel.transfer_id, parcel.attempt)
        receive = self._live.get(key)
        producer = receive.producer(peer) if receive else None
        if not self._slots.take(parcel.slot, key, peer):
            (receive.dropped if receive else self.dropped)["slot_not_granted"] += 1
            return ()
        actions: list[Action] = []
        if receive is None or producer is None or receive.state is ReceiveState.CLOSED:
            self.dropped["late"] += 1
            self._free(parcel.slot, actions)
            return actions
        if parcel.pass_number < producer.pass_number:
            receive.dropped["stale_pass"] += 1
            self._return_slot(receive, producer, parcel.slot, actions)
            return actions
        if parcel.pass_number > producer.pass_number:
            producer.begin_pass(parcel.pass_number)
        if not receive.fits(producer, parcel, self._slot_bytes):
            self._free(parcel.slot, actions)
            self._close(receive, CloseReason.SEAL_MISMATCH, actions, now_s)
            return actions
        if receive.first_parcel_s is None:
            receive.first_parcel_s = now_s
        receive.state = ReceiveState.RECEIVING
        receive.scattering += 1
        slices = tuple(producer.slices[item.layer] for item in parcel.items)
        return (Scatter(peer, key, parcel, slices, receive.order.block_ids),)

    def scattered(self, scatter: Scatter, now_s: float) -> Actions:
        """A parcel is verified and lies in this rank's blocks."""
        receive, actions = self._live[scatter.key], list[Action]()
        receive.scattering -= 1
        producer = receive.producers[scatter.peer.rank]
        parcel = scatter.parcel
        if receive.state is ReceiveState.CLOSED:
            self._free(parcel.slot, actions)
            self._finish_close(receive, actions, now_s)
            return actions
        receive.parcels += 1
        receive.num_bytes += parcel.num_bytes
        if parcel.pass_number == producer.pass_number:
            writes = {(item.layer, block) for item in parcel.items for block in range(item.first_block, item.end_block)}
            if writes & producer.scattered:
                receive.dropped["duplicate"] += 1
            producer.scattered |= writes
        self._maybe_land(receive, actions, now_s)
        self._return_slot(receive, producer, parcel.slot, actions)
        return actions

    def corrupt(self, scatter: Scatter, now_s: float) -> Actions:
        """A parcel's pages are not what its notice says, or could not all be scattered."""
        receive, actions = self._live[scatter.key], list[Action]()
        receive.scattering -= 1
        self._free(scatter.parcel.slot, actions)
        if receive.state is ReceiveState.CLOSED:
            self._finish_close(receive, actions, now_s)
        else:
            self._close(receive, CloseReason.DIGEST_MISMATCH, actions, now_s)
        return actions

    def on_want(self, peer: PeerRank, want: Want) -> Actions:
        """Take a producer's word that it has a parcel and no slot. One that holds some by this side's account has a grant on its way."""
        key = TransferKey(want.transfer_id, want.attempt)
        receive = self._live.get(key)
        actions: list[Action] = []
        if receive is None or receive.state is ReceiveState.CLOSED or receive.producer(peer) is None:
            self.dropped["late"] += 1
        elif not self._slots.held(key, peer):
            self._wants[key, peer] = None
            self._serve_wants(actions)
        return actions

    def on_return(self, peer: PeerRank, returned: Return) -> Actions:
        """Take slots back that a producer will not fill, whatever became of their transfer."""
        key = TransferKey(returned.transfer_id, returned.attempt)
        actions: list[Action] = []
        for slot in returned.slots:
            if self._slots.take(slot, key, peer):
                self._free(slot, actions)
            else:
                self.dropped["slot_not_granted"] += 1
        return actions

    def on_seal(self, peer: PeerRank, seal: Seal, now_s: float) -> Actions:
        """Take a producer's seal. A transfer that has landed acknowledges any later pass of the same prompt."""
        key = TransferKey(seal.transfer_id, seal.attempt)
        receive = self._live.get(key)
        producer = receive.producer(peer) if receive else None
        if receive is None or producer is None or receive.state is ReceiveState.CLOSED:
            self.dropped["late"] += 1
            if self._ended.get(key) is CloseReason.LANDED:
                return (SendFrame(peer, Ack(*key, seal.pass_number)),)
            return ()
        if seal.pass_number < producer.pass_number:
            receive.dropped["stale_pass"] += 1
            return ()
        if seal.pass_number > producer.pass_number:
            producer.begin_pass(seal.pass_number)
        producer.seal = seal
        actions: list[Action] = []
        if producer.contradicts():
            self._close(receive, CloseReason.SEAL_MISMATCH, actions, now_s)
        else:
            self._maybe_land(receive, actions, now_s)
        return actions

    def on_close(self, peer: PeerRank, close: Close, now_s: float) -> Actions:
        """A producer is through with a transfer: its slots are safe to reuse, and a live transfer ends."""
        key = TransferKey(close.transfer_id, close.attempt)
        actions: list[Action] = []
        self._slots.give_back_all(key, peer)
        receive = self._live.get(key)
        if receive is not None and receive.producer(peer) is not None:
            self._close(receive, reason_of(close), actions, now_s)
        self._serve_wants(actions)
        return actions

    def peer_lost(self, peer: PeerRank, now_s: float, *, may_still_write: bool) -> Actions:
        """A link is gone: what its worker was sending is over. Its other ranks confirm on their own links, as after any close.

        Args:
            may_still_write: the peer has this rank's slots mapped and may be alive, so they stay its own until `release_slots`.
        """
        actions: list[Action] = []
        for receive in list(self._live.values()):
            if (receive.order.peer_worker, receive.order.peer_incarnation) == (peer.worker, peer.incarnation):
                self._close(receive, CloseReason.PEER_LOST, actions, now_s)
        if not may_still_write:
            actions += self.release_slots(peer)
        return actions

    def connected(self, peer: PeerRank) -> Actions:
        """A producer rank starts over on a new link; it hears what has ended without it."""
        actions = list(self.release_slots(peer))
        for key, reason in self._untold.due(peer):
            actions += closes([peer], key, TransferSide.RECEIVE, reason)
        return actions

    def release_slots(self, peer: PeerRank) -> Actions:
        """A producer rank writes no more into what it was granted: its process is gone, or its link is new."""
        actions: list[Action] = []
        self._slots.forget_peer(peer)
        self._serve_wants(actions)
        return actions

    def tick(self, now_s: float) -> Actions:
        """Close what is past its deadline; every `renew_s`, tell the producers what is still wanted."""
        self._now_s = now_s
        self._untold.expire(now_s)
        actions: list[Action] = []
        for receive in list(self._live.values()):
            if receive.state is not ReceiveState.CLOSED and now_s > receive.deadline_s:
                self._close(receive, CloseReason.EXPIRED, actions, now_s)
        if now_s - self._renewed_s >= self._renew_s:
            self._renewed_s = now_s
            wanted: dict[PeerRank, list[TransferKey]] = {}
            for key, receive in self._live.items():
                if receive.state is not ReceiveState.CLOSED:
                    for producer in receive.producers.values():
                        wanted.setdefault(producer.peer, []).append(key)
            actions += [SendFrame(peer, Renew(tuple(keys))) for peer, keys in wanted.items()]
        return actions

    # ---- inside ---------------------------------------------------------------------------------------------------------------------

    def _most_parcels(self, producer: ProducerEntry) -> int:
        """Return in how many parcels a producer sends what it owes, if each leaves as early as it may."""
        return max(1, -(-producer.num_bytes * EARLY_PARTS // self._slot_bytes))

    def _free(self, slot: int, actions: list[Action]) -> None:
        self._slots.free(slot)
        self._serve_wants(actions)

    def _serve_wants(self, actions: list[Action]) -> None:
        """Give each producer that wants one a slot while there are any, and more if there are plenty."""
        while self._wants and self._slots.num_free:
            key, peer = next(iter(self._wants))
            del self._wants[key, peer]
            (slot,) = self._slots.grant(key, peer, 1)
            actions.append(SendFrame(peer, Grant(*key, slot)))
            self._grant_ahead(self._live[key], self._live[key].producers[peer.rank], actions)

    def _grant_ahead(self, receive: ReceiveTransfer, producer: ProducerEntry, actions: list[Action]) -> None:
        """Give a producer that owes parcels what it may have before it asks."""
        key = receive.order.key
        if producer.owes():
            count = self._slots.num_ahead(key, producer.peer, most=self._most_parcels(producer))
            actions += [SendFrame(producer.peer, Grant(*key, slot)) for slot in self._slots.grant(key, producer.peer, count)]

    def _return_slot(self, receive: ReceiveTransfer, producer: ProducerEntry, slot: int, actions: list[Action]) -> None:
        """A slot came back with its parcel: whoever wants one gets it, then the producer that it came from."""
        self._free(slot, actions)
        if receive.order.key in self._live:
            self._grant_ahead(receive, producer, actions)

    def _forget_wants(self, receive: ReceiveTransfer) -> None:
        for producer in receive.producers.values():
            self._wants.pop((receive.order.key, producer.peer), None)

    def _maybe_land(self, receive: ReceiveTransfer, actions: list[Action], now_s: float) -> None:
        if receive.scattering or not all(producer.is_complete() for producer in receive.producers.values()):
            return
        receive.outcome = CloseReason.LANDED
        self._forget_wants(receive)
        key = receive.order.key
        actions += [SendFrame(entry.peer, Ack(*key, entry.pass_number)) for entry in receive.producers.values()]
        self._report(receive, actions, now_s)

    def _close(self, receive: ReceiveTransfer, reason: CloseReason, actions: list[Action], now_s: float) -> None:
        if receive.state is ReceiveState.CLOSED:
            return
        receive.state = ReceiveState.CLOSED
        receive.outcome = reason
        self._forget_wants(receive)
        order = receive.order
        actions += self._tell(order.key, order.peer_worker, order.peer_incarnation, reason, tuple(receive.producers), now_s)
        self._finish_close(receive, actions, now_s)

    def _tell(
        self, key: TransferKey, worker: str, incarnation: str, reason: CloseReason, producers: tuple[int, ...], now_s: float
    ) -> list[Action]:
        """Tell the producers that a transfer is over, or every rank where the plan is not known; those without a link hear it when they have one."""
        connected = self._ranks(worker, incarnation)
        told = [peer for peer in connected if peer.rank in producers] if producers else connected
        if not producers or len(told) < len(producers):
            self._untold.add(key, worker, incarnation, reason, told, now_s)
        return closes(told, key, TransferSide.RECEIVE, reason)

    def _finish_close(self, receive: ReceiveTransfer, actions: list[Action], now_s: float) -> None:
        if not receive.scattering:
            self._report(receive, actions, now_s)

    def _report(self, receive: ReceiveTransfer, actions: list[Action], now_s: float) -> None:
        del self._live[receive.order.key]
        landed = receive.outcome is CloseReason.LANDED
        if self._ended.get(receive.order.key) is None:
            self._ended.add(receive.order.key, receive.outcome or CloseReason.ABORTED)
        actions.append(ReportReceived(receive.order.request_id, landed, receive.record(self._worker, self._incarnation, now_s)))
