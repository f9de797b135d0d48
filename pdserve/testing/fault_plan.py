"""Which of the following posts and reads of a transport go wrong, counted from now. Knows no transport: it fits `memory`'s hooks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.errors import TransferError


@dataclass
class FaultPlan:
    """Faults by number; counting begins at 0 and goes over all ranks that share the plan."""

    fail_posts: frozenset[int] = frozenset()
    """posts that fail before anything is written"""
    tear_reads: frozenset[int] = frozenset()
    """reads that find one byte changed"""
    posts: int = 0
    reads: int = 0

    def before_post(self) -> None:
        """Raises `TransferError` where the plan says so."""
        number, self.posts = self.posts, self.posts + 1
        if number in self.fail_posts:
            raise TransferError("unreachable", f"post {number} fails by plan")

    def before_read(self, slot: npt.NDArray[np.uint8]) -> None:
        """Change the slot's first byte where the plan says so."""
        number, self.reads = self.reads, self.reads + 1
        if number in self.tear_reads:
            slot[0] ^= 0xFF
