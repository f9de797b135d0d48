"""Joins the ranks' records of one transfer into the worker's, and keeps the last of them for whoever asks with a cursor.

Owns a bounded ring; a reader that falls behind loses the oldest and sees it in the jump of the cursor.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from pdserve.types import CloseReason, TransferRecord, TransferSide

MAX_RECORDS = 4096
MAX_PARTIAL = 4096

GOOD = (CloseReason.LANDED, CloseReason.RELEASED)


class RecordLog:
    """Records of one worker.

    Args:
        num_ranks: how many ranks report each transfer.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._partial: dict[tuple[str, int, TransferSide], list[TransferRecord]] = {}
        self._records: deque[TransferRecord] = deque(maxlen=MAX_RECORDS)
        self._next = 0

    def add_rank(self, record: TransferRecord) -> None:
        """Take one rank's record; the joined one appears when all ranks have reported."""
        key = (record.transfer_id, record.attempt, record.side)
        parts = self._partial.setdefault(key, [])
        parts.append(record)
        if len(parts) >= self._num_ranks:
            del self._partial[key]
            self.add(join_ranks(parts))
        elif len(self._partial) > MAX_PARTIAL:
            del self._partial[next(iter(self._partial))]

    def add(self, record: TransferRecord) -> None:
        """Take a record that speaks for the whole worker."""
        self._records.append(record)
        self._next += 1

    def after(self, cursor: int) -> tuple[int, Sequence[TransferRecord]]:
        """Return the cursor to ask with next time, and the records added since `cursor` that are still kept."""
        count = min(max(0, self._next - cursor), len(self._records))
        newest = list(self._records)[len(self._records) - count :]
        return self._next, newest


def join_ranks(parts: Sequence[TransferRecord]) -> TransferRecord:
    """Return one record for all ranks: sums of bytes, parcels and acks; the worst outcome; the longest times."""
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    bad = [part.outcome for part in parts if part.outcome not in GOOD]
    return replace(
        parts[0],
        outcome=bad[0] if bad else parts[0].outcome,
        tokens_moved=min(part.tokens_moved for part in parts),
        tokens_reused=min(part.tokens_reused for part in parts),
        bytes_moved=sum(part.bytes_moved for part in parts),
        parcels=sum(part.parcels for part in parts),
        layers_sealed=min(part.layers_sealed for part in parts),
        acks=sum(part.acks for part in parts),
        acks_expected=sum(part.acks_expected for part in parts),
        passes=max(part.passes for part in parts),
        bytes_before_forward_end=sum(part.bytes_before_forward_end for part in parts),
        wait_s=max(part.wait_s for part in parts),
        transfer_s=max(part.transfer_s for part in parts),
        dropped=dict(dropped),
        digests=tuple(digest for part in parts for digest in part.digests),
    )
