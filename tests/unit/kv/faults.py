"""What can go wrong between and around the ranks of a rig, and how a run of it ends.

Loss, repetition and disorder within one link cannot happen on the product's links, which close instead; they are here because the ledgers must
stay right without that help. Producers that write slots themselves get no repeated or disordered messages: who may write a slot is told in order.
"""

from decode_model import ConsumerRank
from network import Link
from prefill_model import PrefillState
from rig import Rig

from pdserve.kv.actions import PostParcel
from pdserve.kv.wire import Parcel
from pdserve.types import CloseReason

MAX_DRAIN_STEPS = 200_000


class FaultyRig(Rig):
    """A rig that things happen to."""

    # ---- the network ----------------------------------------------------------------------------------------------------------------

    def drop(self, pick: int) -> bool:
        """Lose one message."""
        if not (lanes := [lane for link in self.links.values() for lane in link.lanes if lane.wire]):
            return False
        pick, lane = self._choose(pick, lanes)
        del lane.wire[pick % len(lane.wire)]
        return True

    def duplicate(self, pick: int) -> bool:
        """Lay a copy of one message somewhere behind it."""
        lanes = [lane for link in self.links.values() for lane in link.lanes if lane.wire]
        if self.setup.is_direct or not lanes:
            return False
        pick, lane = self._choose(pick, lanes)
        pick, (position, delivery) = self._choose(pick, list(enumerate(lane.wire)))
        lane.wire.insert(position + 1 + pick % (len(lane.wire) - position), delivery)
        return True

    def reorder(self, pick: int) -> bool:
        """Let one message overtake those before it."""
        lanes = [lane for link in self.links.values() for lane in link.lanes if len(lane.wire) > 1]
        if self.setup.is_direct or not lanes:
            return False
        pick, lane = self._choose(pick, lanes)
        lane.wire.rotate(-(1 + pick % (len(lane.wire) - 1)))
        return True

    def tear(self, pick: int) -> bool:
        """Flip one byte of a parcel under way."""
        parcels = [
            (lane, delivery)
            for link in self.links.values()
            for lane in link.lanes
            for delivery in lane.wire
            if isinstance(delivery.message, Parcel)
        ]
        if not parcels:
            return False
        pick, (lane, delivery) = self._choose(pick, parcels)
        parcel = delivery.message
        assert isinstance(parcel, Parcel)
        pages = delivery.pages if delivery.pages is not None else self.consumers[lane.target].arena[parcel.slot]
        pages[pick % parcel.num_bytes] ^= 1 + pick % 255
        return True

    def fail_post(self, pick: int) -> bool:
        """Let the transport fail to bring one parcel into its slot."""
        lanes = [link.lanes[0] for link in self.links.values() if link.lanes[0].outbox and link.lanes[0].gathering is None]
        if not lanes:
            return False
        _, lane = self._choose(pick, lanes)
        post, rank = lane.outbox.popleft(), self.producers[lane.source]
        assert isinstance(post, PostParcel)
        if rank.ledger.begin_gather(post):
            self.execute(rank, rank.ledger.gathered(post))
            self.execute(rank, rank.ledger.cancel(post.key, CloseReason.PEER_LOST))
        lane.flush()
        return True

    def cut(self, pick: int) -> bool:
        """Break a link; its ends notice in their own time."""
        if not (links := [link for link in self.links.values() if link.is_up]):
            return False
        _, link = self._choose(pick, links)
        link.cut()
        return True

    def notice(self, pick: int) -> bool:
        """Let one end of a broken link notice."""
        ends = [(link, end) for link in self.links.values() for end in sorted(link.unaware)]
        if not ends:
            return False
        _, (link, end) = self._choose(pick, ends)
        link.unaware.remove(end)
        if end in self.producers:
            peer, producer = link.ends[1], self.producers[end]
            self.execute(producer, producer.ledger.peer_lost(peer.worker, peer.incarnation))
        else:
            peer, consumer = link.ends[0], self.consumers[end]
            self.execute(consumer, consumer.ledger.peer_lost(peer, self.now_s, may_still_write=self.setup.is_direct))
        if self._is_gone(link):
            del self.links[link.ends]
            self._release(link)
        return True

    def connect(self, pick: int) -> bool:
        """Bring a broken link up again; an end that had not noticed learns it from the new link."""
        links = [link for link in self.links.values() if not link.is_up and not self._is_gone(link)]
        if not links:
            return False
        _, link = self._choose(pick, links)
        while link.unaware:
            self.notice([(other, end) for other in self.links.values() for end in sorted(other.unaware)].index((link, min(link.unaware))))
        if (post := link.lanes[0].gathering) is not None:
            self.end_gather(self.producers[link.ends[0]], link, post)
        self.bring_up(link)
        return True

    def _release(self, link: Link) -> None:
        """A decode rank learns that a producer's process is gone."""
        if (consumer := self.consumers.get(link.ends[1])) is not None:
            self.execute(consumer, consumer.ledger.release_slots(link.ends[0]))

    def _is_gone(self, link: Link) -> bool:
        return link.ends[0] not in self.producers or link.ends[1] not in self.consumers

    # ---- workers --------------------------------------------------------------------------------------------------------------------

    def restart(self, pick: int) -> bool:
        """Kill a worker; its next incarnation starts behind the same name."""
        _, worker = self._choose(pick, sorted((*self.prefills, *self.decodes)))
        old = self.incarnation(worker)
        for link in list(self.links.values()):
            dead = {end for end in link.ends if (end.worker, end.incarnation) == (worker, old)}
            if dead:
                link.cut()
                if link.lanes[0].gathering is not None:
                    self.release_gather(self.producers[link.ends[0]], link.lanes[0])
                link.unaware -= dead
                if not link.unaware:
                    del self.links[link.ends]
                    self._release(link)
        for rank in [*self.producers, *self.consumers]:
            if (rank.worker, rank.incarnation) == (worker, old):
                self.producers.pop(rank, None)
                self.consumers.pop(rank, None)
        if self.prefills.pop(worker, None) is not None:
            self.start_prefill(worker)
        else:
            del self.decodes[worker]
            self.start_decode(worker)
        return True

    # ---- the end --------------------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let everything that is under way arrive, be heard and be carried out."""
        steps = (self.call, self.write, self.deliver, self.scatter)
        for count in range(MAX_DRAIN_STEPS):
            if not sum(step(count) for step in steps):
                return
        raise AssertionError("the rig never comes to rest")

    def settle(self) -> None:
        """Let the engines do what they have, without new requests, and drain; broken links are noticed and come up again."""
        self.drain()
        while self.notice(0) or self.connect(0):
            pass
        for _ in range(MAX_DRAIN_STEPS):
            self.drain()
            tries = range(sum(len(engine.requests) for engine in (*self.prefills.values(), *self.decodes.values())))
            if not sum(step(pick) for pick in tries for step in (self.reserve, self.prefill)) and not self._make_room():
                return
        raise AssertionError("the engines never come to rest")

    def _make_room(self) -> bool:
        """Where prefills hold each other's blocks, preempt the newest and let the oldest go on, as an engine does."""
        for engine in self.prefills.values():
            running = [request for request in engine.requests.values() if request.state is PrefillState.RUNNING]
            if len(running) > 1:
                engine.preempt(running[-1])
                engine.run_chunk(running[0], running[0].prompt.tokens, 0, ())
                return True
        return False

    def finish(self, *, is_reliable: bool) -> None:
        """End the run and check that nothing is left behind.

        Args:
            is_reliable: no message was lost, so everything must end without help from the clock.
        """
        self.settle()
        if not is_reliable:
            self._let_time_pass()
        self._check_ended()
        if not is_reliable:
            self._renew_links()
        self._check_alive()
        if is_reliable:
            self._check_slots()
        for link in list(self.links.values()):
            link.cut()
        while self.notice(0):
            pass
        for consumer in self.consumers.values():
            for producer in self.producers:
                self.execute(consumer, consumer.ledger.release_slots(producer))
        self._check_slots()
        self.tick(2 * self.setup.timeout_s)
        assert not any(len(parking) for rank in self.producers.values() for parking in rank.ledger._parking.values())
        assert not any(len(rank.ledger._untold) for rank in self.consumers.values())

    def _let_time_pass(self) -> None:
        for _ in range(3):
            self.tick(self.setup.timeout_s + 1)
            self.settle()

    def _renew_links(self) -> None:
        """Begin every link anew, as a link does that has lost a message."""
        for link in list(self.links.values()):
            link.cut()
        self.settle()

    def _check_alive(self) -> None:
        """Whatever has happened before: without further faults, as many requests as the deployment takes end well, and no clock helps them."""
        before, count = self.num_loads, 0
        while self.submit(4 * count + 1):
            count += 1
        self.settle()
        assert self.num_loads == before + count, f"{self.num_loads - before} of {count} requests landed after the faults had stopped"
        self._check_ended()

    def _check_ended(self) -> None:
        for producer in self.producers.values():
            assert len(producer.ledger) == 0, f"{producer.me} still holds transfers"
            assert producer.opened == producer.reported, f"{producer.me} never reported {producer.opened - producer.reported}"
            assert not producer.readable
        for consumer in self.consumers.values():
            assert len(consumer.ledger) == 0, f"{consumer.me} still holds transfers"
            assert consumer.opened == consumer.reported, f"{consumer.me} never reported {consumer.opened - consumer.reported}"
            assert not consumer.writable
        for engine in (*self.prefills.values(), *self.decodes.values()):
            assert not engine.requests
            assert engine.free.are_all_free

    def _check_slots(self) -> None:
        for consumer in self.consumers.values():
            assert consumer.slots.num_free == consumer.slots.num_slots, f"{consumer.me} lost {self._held(consumer)}"

    @staticmethod
    def _held(consumer: ConsumerRank) -> str:
        return f"{consumer.slots.num_slots - consumer.slots.num_free} of {consumer.slots.num_slots} slots"
