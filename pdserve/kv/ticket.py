"""Reads the ticket that a leg carries in vLLM's `kv_transfer_params`. The writer is `pdserve.types.Ticket.params`.

Only the router may mint tickets, but an engine must survive anything: what does not parse is no ticket, with a reason.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pdserve.types import TransferSide

MAX_TIMEOUT_S = 3600.0
MAX_ID_CHARS = 128


class TransferKey(NamedTuple):
    """Identity of one transfer on both sides and on the wire."""

    transfer_id: str
    attempt: int


class LegTicket(NamedTuple):
    """One side's view of a ticket."""

    key: TransferKey
    side: TransferSide
    peer_worker: str
    peer_incarnation: str
    timeout_s: float
    proof: bool


def parse(params: Mapping[str, object] | None) -> LegTicket | str | None:
    """Return the ticket, the name of the field that is wrong, or None where there is no ticket.

    Args:
        params: `Request.kv_transfer_params`; lists may stand for tuples, as they do after a process boundary.
    """
    if not params:
        return None
    for field in ("transfer_id", "worker", "incarnation"):
        value = params.get(field)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
            return field
    attempt = params.get("attempt")
    if not isinstance(attempt, int) or isinstance(attempt, bool) or not 1 <= attempt <= 1 << 20:
        return "attempt"
    timeout_s = params.get("timeout_s")
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        return "timeout_s"
    role = params.get("role")
    if role not in (TransferSide.SEND.value, TransferSide.RECEIVE.value):
        return "role"
    return LegTicket(
        key=TransferKey(str(params["transfer_id"]), attempt),
        side=TransferSide(str(role)),
        peer_worker=str(params["worker"]),
        peer_incarnation=str(params["incarnation"]),
        timeout_s=float(timeout_s),
        proof=params.get("proof") is True,
    )
