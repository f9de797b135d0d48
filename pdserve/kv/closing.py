"""What one side says, and hears, when a transfer ends. Pure; used by both ledgers."""

from collections.abc import Iterable

from pdserve.kv.actions import Action, PeerRank, SendFrame
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Close
from pdserve.types import CloseReason, TransferSide

KEPT = (CloseReason.PROMPT_MISMATCH, CloseReason.SEAL_MISMATCH, CloseReason.DIGEST_MISMATCH, CloseReason.NOTHING_TO_MOVE)
"""reasons that say something about the bytes, and so are both sides' own"""


def closes(peers: Iterable[PeerRank], key: TransferKey, side: TransferSide, reason: CloseReason) -> list[Action]:
    """Tell ranks of the other side that a transfer is over on this one."""
    message = Close(*key, side.value, reason.value)
    return [SendFrame(peer, message) for peer in peers]


def reason_of(message: Close) -> CloseReason:
    """Translate a peer's close: reasons that say something about the bytes keep their name, all others are the peer's own business."""
    try:
        reason = CloseReason(message.reason)
    except ValueError:
        return CloseReason.PEER_CLOSED
    return reason if reason in KEPT else CloseReason.PEER_CLOSED
