"""Who may fill which receive slot of this rank. Arithmetic over slot numbers; the bytes are the transport's.

A slot is granted in one of two ways. Ahead of need, as long as more than the reserve is free: its producer may keep it idle, since its prefill may
be far away. On demand, when a producer has a parcel and no slot, from whatever is free: its producer fills it or returns it at once. So of all slots
at least the reserve is always free, on its way or being read, and whoever wants one gets one, however few there are and whoever holds the rest.

A slot that was granted comes back with the parcel it carried, with a return, with that producer's close of the transfer, or when the producer is
gone, and in no other way. Until then nobody else gets it, so a peer that is late, slow or dead can spoil only what it was granted. One that came
back with a parcel is taken: it is nobody's while the parcel is read.
"""

from collections import Counter
from collections.abc import Callable

from pdserve.kv.actions import PeerRank
from pdserve.kv.ticket import TransferKey

MAX_SLOTS_PER_PRODUCER = 8
RESERVED_PART = 4
"""one slot in so many, and at least one, is granted on demand only"""

Owner = tuple[TransferKey, PeerRank]


class SlotPool:
    """The slots of one rank's arena.

    Args:
        num_slots: ≥ 1.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._reserve = max(1, num_slots // RESERVED_PART)
        self._free = list(reversed(range(num_slots)))
        """the one that came back last goes first: its memory is still in the caches"""
        self._granted: dict[int, Owner] = {}
        self._held: Counter[Owner] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_ahead(self, key: TransferKey, peer: PeerRank, *, most: int, among: int = 1) -> int:
        """Return how many more slots a producer may get ahead of need.

        Args:
            most: how many are of use to it, ≥ 0.
            among: how many producers ask now, this one included, that hold none yet.
        """
        spare, held = len(self._free) - self._reserve, self._held[key, peer]
        owners = len(self._held) - (held > 0) + among
        fair = max(1, (self.num_slots - self._reserve) // owners)
        return max(0, min(spare // among, min(fair, MAX_SLOTS_PER_PRODUCER, most) - held))

    def grant(self, key: TransferKey, peer: PeerRank, count: int) -> tuple[int, ...]:
        """Give a producer free slots; there must be as many."""
        slots = tuple(self._free.pop() for _ in range(count))
        for slot in slots:
            self._granted[slot] = (key, peer)
        if slots:
            self._held[key, peer] += count
        return slots

    def may_fill(self, slot: int, key: TransferKey, peer: PeerRank) -> bool:
        """Whether this producer holds this slot for this transfer."""
        return self._granted.get(slot) == (key, peer)

    def take(self, slot: int, key: TransferKey, peer: PeerRank) -> bool:
        """A slot came back: nobody may fill it until it is freed and granted again. False if it was not this producer's."""
        if self._granted.get(slot) != (key, peer):
            return False
        self._forget(slot)
        return True

    def free(self, slot: int) -> None:
        """What came in a taken slot is read or will never be."""
        self._free.append(slot)

    def give_back_all(self, key: TransferKey, peer: PeerRank) -> int:
        """Free what a producer held for one transfer; return how many."""
        return self._give_back_where(lambda owner: owner == (key, peer))

    def forget_peer(self, peer: PeerRank) -> int:
        """Free what a producer rank held that can write no more; return how many."""
        return self._give_back_where(lambda owner: owner[1] == peer)

    def held(self, key: TransferKey, peer: PeerRank) -> int:
        """Return how many slots a producer may fill for one transfer."""
        return self._held[key, peer]

    def _give_back_where(self, matches: Callable[[Owner], bool]) -> int:
        slots = [slot for slot, owner in self._granted.items() if matches(owner)]
        for slot in slots:
            self._forget(slot)
        self._free.extend(slots)
        return len(slots)

    def _forget(self, slot: int) -> None:
        owner = self._granted.pop(slot)
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
