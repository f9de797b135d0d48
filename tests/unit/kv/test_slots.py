"""Receive slots: one owner at a time, and a reserve that nobody may sit on."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.kv.actions import PeerRank
from pdserve.kv.slots import MAX_SLOTS_PER_PRODUCER, SlotPool
from pdserve.kv.ticket import TransferKey

KEYS = [TransferKey("a", 1), TransferKey("a", 2), TransferKey("b", 1)]
PEERS = [PeerRank("prefill-0", "x", 0), PeerRank("prefill-0", "x", 1), PeerRank("prefill-0", "y", 0)]
OWNERS = st.tuples(st.sampled_from(KEYS), st.sampled_from(PEERS))


class SlotMachine(RuleBasedStateMachine):
    """A pool beside a plain model of who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(12)
        self.owners: dict[int, tuple[TransferKey, PeerRank]] = {}
        self.taken: set[int] = set()

    @rule(owner=OWNERS, most=st.integers(0, 12), among=st.integers(1, 4))
    def grant_ahead(self, owner: tuple[TransferKey, PeerRank], most: int, among: int) -> None:
        count = self.pool.num_ahead(*owner, most=most, among=among)
        self.grant(owner, count)
        assert count == 0 or self.pool.num_free >= self.pool.num_slots // 4
        assert self.pool.held(*owner) <= MAX_SLOTS_PER_PRODUCER or count == 0

    @precondition(lambda self: self.pool.num_free)
    @rule(owner=OWNERS)
    def grant_on_demand(self, owner: tuple[TransferKey, PeerRank]) -> None:
        self.grant(owner, 1)

    def grant(self, owner: tuple[TransferKey, PeerRank], count: int) -> None:
        slots = self.pool.grant(*owner, count)
        assert len(slots) == count
        assert not {*slots} & ({*self.owners} | self.taken)
        self.owners |= dict.fromkeys(slots, owner)

    @rule(owner=OWNERS, slot=st.integers(-1, 12))
    def parcel(self, owner: tuple[TransferKey, PeerRank], slot: int) -> None:
        is_his = self.owners.get(slot) == owner
        assert self.pool.may_fill(slot, *owner) == is_his
        assert self.pool.take(slot, *owner) == is_his
        if is_his:
            del self.owners[slot]
            self.taken.add(slot)

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 11))
    def own_parcel(self, choice: int) -> None:
        slot = sorted(self.owners)[choice % len(self.owners)]
        assert self.pool.take(slot, *self.owners.pop(slot))
        self.taken.add(slot)

    @precondition(lambda self: self.taken)
    @rule()
    def read(self) -> None:
        self.pool.free(self.taken.pop())

    @rule(owner=OWNERS)
    def close(self, owner: tuple[TransferKey, PeerRank]) -> None:
        mine = [slot for slot, who in self.owners.items() if who == owner]
        assert self.pool.give_back_all(*owner) == len(mine)
        for slot in mine:
            del self.owners[slot]

    @rule(peer=st.sampled_from(PEERS))
    def lose(self, peer: PeerRank) -> None:
        gone = [slot for slot, who in self.owners.items() if who[1] == peer]
        assert self.pool.forget_peer(peer) == len(gone)
        for slot in gone:
            del self.owners[slot]

    @invariant()
    def every_slot_is_somewhere_once(self) -> None:
        assert self.pool.num_free == self.pool.num_slots - len(self.owners) - len(self.taken)
        for key in KEYS:
            for peer in PEERS:
                assert self.pool.held(key, peer) == sum(who == (key, peer) for who in self.owners.values())


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = SlotMachine.TestCase


@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (2, 1), (3, 2), (4, 3), (8, 6), (16, 8)])
def test_reserve_is_never_given_ahead_of_need(slots: int, ahead: int) -> None:
    """A quarter and at least one stays; of a large arena nobody gets more than a few."""
    pool = SlotPool(slots)
    assert pool.num_ahead(KEYS[0], PEERS[0], most=100) == ahead
    pool.grant(KEYS[0], PEERS[0], ahead)
    assert pool.num_ahead(KEYS[0], PEERS[0], most=100) == 0


def test_what_is_given_ahead_is_fair_and_of_use() -> None:
    """Shared among those that hold some and those that ask; no more than there are parcels."""
    pool = SlotPool(16)
    assert pool.num_ahead(KEYS[0], PEERS[0], most=3) == 3
    assert pool.num_ahead(KEYS[0], PEERS[0], most=100, among=4) == 3
    assert pool.num_ahead(KEYS[0], PEERS[0], most=100, among=13) == 0
    pool.grant(KEYS[0], PEERS[0], 8)
    assert pool.num_ahead(KEYS[1], PEERS[0], most=100) == 4
    pool.grant(KEYS[1], PEERS[0], 4)
    assert [pool.take(slot, KEYS[0], PEERS[0]) for slot in range(3)] == [True] * 3
    for slot in range(3):
        pool.free(slot)
    assert pool.num_ahead(KEYS[0], PEERS[0], most=100) == 1
    assert pool.num_ahead(KEYS[1], PEERS[0], most=100) == 2
    assert pool.num_ahead(KEYS[2], PEERS[0], most=100) == 3
