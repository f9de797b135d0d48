"""What a soak's transfers are: pure functions of seed and number, so that both sides draw the same ones without talking to each other.

Says who moves what, what goes wrong, and how each side may end. Knows no process and no clock.
"""

import random
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from pdserve.kv.ticket import TransferKey
from pdserve.types import CloseReason, TransferSide

PRODUCERS, CONSUMERS = ("p0", "p1"), ("c0", "c1")
VETERANS = ("c0", "p0")
"""never killed, so that what they gather over a whole run shows"""
BLOCK_TOKENS = (16, 32)
"""by group"""
MAX_TOKENS = 128
MAX_PASSES = 3
TIMEOUT_S, NO_SHOW_TIMEOUT_S = 30.0, 0.4


class Fate(Enum):
    """What becomes of a transfer, if no process is hurt."""

    WHOLE = auto()
    PREEMPTED = auto()
    """prefill loses its blocks and computes again, once or twice, in any state"""
    MISMATCH = auto()
    """the two sides hold different prompts"""
    DECLINED = auto()
    """decode has the prompt already"""
    DROPPED = auto()
    """decode's request is aborted before it has blocks"""
    CONSUMER_ABORTS = auto()
    PRODUCER_ABORTS = auto()
    NEVER_SENT = auto()
    """prefill's request is aborted before it has blocks"""
    NO_PRODUCER = auto()
    """prefill's request never comes"""
    NO_CONSUMER = auto()


WEIGHTS: Mapping[Fate, int] = {
    Fate.WHOLE: 66,
    Fate.PREEMPTED: 8,
    Fate.MISMATCH: 4,
    Fate.DECLINED: 4,
    Fate.DROPPED: 2,
    Fate.CONSUMER_ABORTS: 6,
    Fate.PRODUCER_ABORTS: 6,
    Fate.NEVER_SENT: 2,
    Fate.NO_PRODUCER: 1,
    Fate.NO_CONSUMER: 1,
}
_FATES, _WEIGHTS = list(WEIGHTS), list(WEIGHTS.values())

_R = CloseReason
ENDS: Mapping[Fate, tuple[frozenset[CloseReason], frozenset[CloseReason]]] = {
    Fate.WHOLE: (frozenset({_R.RELEASED}), frozenset({_R.LANDED})),
    Fate.PREEMPTED: (frozenset({_R.RELEASED}), frozenset({_R.LANDED})),
    Fate.MISMATCH: (frozenset({_R.PROMPT_MISMATCH}), frozenset({_R.PROMPT_MISMATCH})),
    Fate.DECLINED: (frozenset({_R.NOTHING_TO_MOVE}), frozenset()),
    Fate.DROPPED: (frozenset({_R.PEER_CLOSED}), frozenset()),
    Fate.CONSUMER_ABORTS: (frozenset({_R.RELEASED, _R.PEER_CLOSED}), frozenset({_R.LANDED, _R.ABORTED})),
    Fate.PRODUCER_ABORTS: (frozenset({_R.RELEASED, _R.ABORTED}), frozenset({_R.LANDED, _R.PEER_CLOSED})),
    Fate.NEVER_SENT: (frozenset(), frozenset({_R.PEER_CLOSED})),
    Fate.NO_PRODUCER: (frozenset(), frozenset({_R.EXPIRED})),
    Fate.NO_CONSUMER: (frozenset({_R.EXPIRED}), frozenset()),
}
"""how the producer and the consumer may end; empty where a side has nothing to report"""
IF_KILLED = frozenset({_R.PEER_LOST, _R.PEER_UNKNOWN})
"""how transfers with a process that is killed may end as well"""
IF_STOPPED = frozenset({_R.EXPIRED, _R.PEER_CLOSED})
"""how transfers with a process that is stopped beyond its lease may end as well"""


class Transfer(NamedTuple):
    """One transfer of the script."""

    number: int
    fate: Fate
    tokens: int
    first_token: int
    """decode holds the tokens before this one"""
    chunks: int
    """forward passes of the prefill"""
    passes: int
    turn: int
    """engine steps until the abort, or the chunk after which the blocks are taken; each side counts its own steps"""

    @property
    def key(self) -> TransferKey:
        return TransferKey(f"soak-{self.number}", 1)

    @property
    def producer(self) -> str:
        return pair(self.number)[0]

    @property
    def consumer(self) -> str:
        return pair(self.number)[1]

    @property
    def timeout_s(self) -> float:
        return NO_SHOW_TIMEOUT_S if self.fate in (Fate.NO_PRODUCER, Fate.NO_CONSUMER) else TIMEOUT_S

    def digest(self, side: TransferSide) -> bytes:
        """Return what a side holds for the prompt's digest, 16 bytes."""
        differs = self.fate is Fate.MISMATCH and side is TransferSide.RECEIVE
        return b"%c%015d" % (b"x" if differs else b"p", self.number)

    def ends(self, side: TransferSide) -> frozenset[CloseReason]:
        return ENDS[self.fate][side is TransferSide.RECEIVE]


def transfer(seed: int, number: int) -> Transfer:
    """Return one transfer of a script."""
    draw = random.Random(seed << 32 | number)
    (fate,) = draw.choices(_FATES, _WEIGHTS)
    tokens = draw.randint(1, MAX_TOKENS)
    unit = max(BLOCK_TOKENS)
    chunks = draw.randint(1, 3)
    return Transfer(
        number,
        fate,
        tokens,
        first_token=unit * draw.randint(0, (tokens - 1) // unit) if draw.random() < 0.3 else 0,
        chunks=chunks,
        passes=draw.randint(2, MAX_PASSES) if fate is Fate.PREEMPTED else 1,
        turn=draw.randint(0, chunks) if fate is Fate.PREEMPTED else draw.randint(0, 8),
    )


def pair(number: int) -> tuple[str, str]:
    """Return the producer and the consumer of a transfer."""
    return PRODUCERS[number % len(PRODUCERS)], CONSUMERS[number // len(PRODUCERS) % len(CONSUMERS)]


def share(seed: int, worker: str, first: int, end: int) -> list[Transfer]:
    """Return a worker's transfers among those with numbers in [first, end), in order."""
    return [transfer(seed, number) for number in range(first, end) if worker in pair(number)]
