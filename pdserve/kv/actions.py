"""What the ledgers ask their driver to do, and what they are asked with. Values only.

A ledger changes its state first and returns actions; the driver (`rank`, or a test) carries them out and reports back through the ledger's
methods. Actions of one call are ordered; those of different peers may be carried out in any order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdserve.kv.plan import HeadSlice, PairPlan
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Item, Message, Parcel
from pdserve.types import CloseReason, TransferRecord


class PeerRank(NamedTuple):
    """One rank of another worker's present incarnation."""

    worker: str
    incarnation: str
    rank: int


class SendOrder(NamedTuple):
    """Scheduler → producer rank: a prefill request with a ticket got its first blocks."""

    key: TransferKey
    request_id: str
    peer_worker: str
    peer_incarnation: str
    prompt: bytes
    prompt_tokens: int
    timeout_s: float
    proof: bool = False


class ReceiveOrder(NamedTuple):
    """Scheduler → consumer rank: a decode request with a ticket got its blocks."""

    key: TransferKey
    request_id: str
    peer_worker: str
    peer_incarnation: str
    prompt: bytes
    prompt_tokens: int
    first_token: int
    """tokens before this one are cached here already"""
    block_ids: tuple[tuple[int, ...], ...]
    """per group, by position in the prompt"""
    timeout_s: float
    proof: bool = False


class SendFrame(NamedTuple):
    """Send one message to a peer rank; if the link is gone, do nothing (`peer_lost` says so to the ledger)."""

    peer: PeerRank
    message: Message


class PostParcel(NamedTuple):
    """Gather pages and bring them into the peer's slot.

    Ask `begin_gather` just before reading them and call `gathered` once they are not read any more.
    """

    peer: PeerRank
    key: TransferKey
    pass_number: int
    slot: int
    items: tuple[Item, ...]
    slices: tuple[HeadSlice, ...]
    """one per item: which heads"""
    block_ids: tuple[tuple[int, ...], ...]
    num_bytes: int


class Scatter(NamedTuple):
    """Check a parcel in its slot and copy it into this rank's blocks; report `scattered` or `corrupt`."""

    peer: PeerRank
    key: TransferKey
    parcel: Parcel
    slices: tuple[HeadSlice, ...]
    block_ids: tuple[tuple[int, ...], ...]


class ReportSent(NamedTuple):
    """The producer's blocks are free: tell the engine, once per request."""

    request_id: str
    record: TransferRecord


class ReportReceived(NamedTuple):
    """The consumer's request may go on: with the moved KV, or by computing the prompt itself."""

    request_id: str
    landed: bool
    record: TransferRecord


Report = ReportSent | ReportReceived
Action = SendFrame | PostParcel | Scatter | ReportSent | ReportReceived
Actions = Sequence[Action]

PlanLookup = Callable[[str, str], PairPlan | CloseReason]
"""(worker, incarnation) of a peer → the plan with it while every link that the plan needs is up, else why nothing can be moved"""
RankLookup = Callable[[str, str], Sequence[PeerRank]]
"""(worker, incarnation) of a peer → those of its ranks that are connected now"""
