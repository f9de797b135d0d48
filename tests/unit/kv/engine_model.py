"""What the two engine models share: blocks that belong to one owner at a time, and the order in which a rank hears what the engine decides.

The scheduler of an engine decides for all ranks at once; each rank carries that out in the same order but in its own time, as vLLM's workers do.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shapes import BlockIds

from pdserve.kv.actions import Actions, PeerRank
from pdserve.kv.ticket import TransferKey


def always() -> bool:
    """The guard of a call that waits for nothing."""
    return True


class Call(NamedTuple):
    """One call of the engine's step on one rank."""

    run: Callable[[], Actions]
    may_run: Callable[[], bool] = always


class Rank:
    """The engine's side of one rank: calls that are due, and what it has reported."""

    def __init__(self, me: PeerRank) -> None:
        self.me = me
        self.calls: deque[Call] = deque()
        self.opened: set[TransferKey] = set()
        self.reported: set[TransferKey] = set()

    def run_call(self) -> Actions:
        return self.calls.popleft().run()

    @property
    def can_run_call(self) -> bool:
        return bool(self.calls) and self.calls[0].may_run()

    def note_report(self, key: TransferKey) -> None:
        """Every order is reported once."""
        assert key in self.opened, f"{self.me} reports {key}, which it was never given"
        assert key not in self.reported, f"{self.me} reports {key} twice"
        self.reported.add(key)


class FreeBlocks:
    """Block numbers of one engine; those freed last are given out first, so that late readers and writers meet a new owner."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [list(range(num_blocks)) for _ in range(num_groups)]

    @property
    def are_all_free(self) -> bool:
        return all(sorted(group) == list(range(self.num_blocks)) for group in self._free)

    def take(self, counts: Sequence[int]) -> BlockIds | None:
        """Take so many of each group, all or none."""
        if any(count > len(free) for count, free in zip(counts, self._free, strict=True)):
            return None
        return tuple(tuple(free.pop() for _ in range(count)) for count, free in zip(counts, self._free, strict=True))

    def give(self, block_ids: BlockIds) -> None:
        for free, ids in zip(self._free, block_ids, strict=True):
            free.extend(ids)


def joined(first: BlockIds, second: BlockIds) -> BlockIds:
    """Append blocks to a block table, group by group."""
    return tuple(a + b for a, b in zip(first, second, strict=True))
