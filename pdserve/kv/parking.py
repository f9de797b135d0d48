"""Bounded memory for messages that come early and for transfers that are over. Owns no transfer; knows no message type.

Messages of different links commute: one that names a transfer this side has not opened yet is parked and replayed when it opens; one for a
transfer that is over meets its tombstone; an end that could not be told to a rank is told when its link is up. All tables are bounded and timed, so
made-up ids cost a fixed amount.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from pdserve.kv.actions import PeerRank
from pdserve.kv.ticket import TransferKey
from pdserve.types import CloseReason

M = TypeVar("M")
T = TypeVar("T")

MAX_PARKED_TRANSFERS = 1024
MAX_PARKED_PER_TRANSFER = 32
MAX_TOMBSTONES = 8192


class Parking(Generic[M]):
    """Early messages by transfer.

    Args:
        keep_s: how long a message waits for its transfer.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._parked: OrderedDict[TransferKey, tuple[float, list[M]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(messages) for _, messages in self._parked.values())

    def park(self, key: TransferKey, message: M, now_s: float) -> bool:
        """Keep a message; False where a bound drops it."""
        entry = self._parked.get(key)
        if entry is None:
            if len(self._parked) >= MAX_PARKED_TRANSFERS:
                return False
            entry = self._parked[key] = (now_s, [])
        if len(entry[1]) >= MAX_PARKED_PER_TRANSFER:
            return False
        entry[1].append(message)
        return True

    def take(self, key: TransferKey) -> list[M]:
        """Return and forget what was parked for a transfer, in order of arrival."""
        entry = self._parked.pop(key, None)
        return entry[1] if entry else []

    def expire(self, now_s: float) -> int:
        """Drop what waited too long; return how many messages."""
        dropped = 0
        while self._parked:
            key, (since_s, messages) = next(iter(self._parked.items()))
            if now_s - since_s < self._keep_s:
                break
            dropped += len(messages)
            del self._parked[key]
        return dropped

    def __iter__(self) -> Iterator[TransferKey]:
        """Go through the transfers that something is parked for; they may be taken meanwhile."""
        return iter(list(self._parked))


class Tombstones(Generic[T]):
    """How the last transfers ended, so that a late message gets an answer and never opens anything."""

    def __init__(self) -> None:
        self._ended: OrderedDict[TransferKey, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, key: TransferKey, outcome: T) -> None:
        self._ended[key] = outcome
        self._ended.move_to_end(key)
        if len(self._ended) > MAX_TOMBSTONES:
            self._ended.popitem(last=False)

    def get(self, key: TransferKey) -> T | None:
        return self._ended.get(key)


class _End(NamedTuple):
    worker: str
    incarnation: str
    reason: CloseReason
    told: set[PeerRank]
    since_s: float


class UntoldEnds:
    """Ends that some ranks of a peer have not heard of, because no link with them was up.

    Args:
        keep_s: how long an end is worth telling.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._ends: OrderedDict[TransferKey, _End] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, key: TransferKey, worker: str, incarnation: str, reason: CloseReason, told: Iterable[PeerRank], now_s: float) -> None:
        """Note an end and who has heard of it; the oldest makes room where too many wait."""
        self._ends[key] = _End(worker, incarnation, reason, {*told}, now_s)
        if len(self._ends) > MAX_PARKED_TRANSFERS:
            self._ends.popitem(last=False)

    def due(self, peer: PeerRank) -> list[tuple[TransferKey, CloseReason]]:
        """Return what a rank has not heard of; it counts as told from now on."""
        due = [(key, end) for key, end in self._ends.items() if (end.worker, end.incarnation) == (peer.worker, peer.incarnation)]
        due = [(key, end) for key, end in due if peer not in end.told]
        for _, end in due:
            end.told.add(peer)
        return [(key, end.reason) for key, end in due]

    def expire(self, now_s: float) -> None:
        while self._ends and now_s - next(iter(self._ends.values())).since_s >= self._keep_s:
            self._ends.popitem(last=False)
