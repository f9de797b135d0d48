"""The facts of one request while it runs, and the receipt they become once the transfer records are known.

Owns no resource. Times are points on the router's clock, in seconds.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from pdserve.routing.reasons import PathReason, transfer_reason
from pdserve.routing.slots import Lease
from pdserve.server import features
from pdserve.server.aborts import LegAborts
from pdserve.server.features import Facts, has_moved
from pdserve.types import CloseReason, Receipt, ServePath, Ticket, TransferRecord


class Draft:
    """Filled in by `handoff`, read once by `records`.

    Args:
        configured: what the deployment is set to, as in `Receipt.configured`.
    """

    def __init__(self, request_id: str, client_request_id: str | None, route: str, started_s: float, configured: Facts) -> None:
        self.request_id = request_id
        self.client_request_id = client_request_id
        self.route = route
        self.started_s = started_s
        self.configured = configured
        self.model = ""
        self.stream = False
        self.tenant = ""
        """whose request it is, empty if keys are not used"""
        self.session = ""
        """the client's name for the conversation, by header; empty if it gave none"""
        self.local_reason: PathReason | None = None
        self.path = ServePath.NONE
        self.reason = PathReason.REJECTED
        self.prefill_worker: str | None = None
        self.decode_worker: str | None = None
        self.ticket: Ticket | None = None
        self.attempts = 0
        self.resume_hindrance: str | None = None
        """why its stream would not be taken up again if it broke"""
        self.resumed_at: list[int] = []
        """tokens that the client had, each time that its stream was taken up again"""
        self.queue_wait_s = 0.0
        self.usage: Mapping[str, Any] = {}
        """counts of the answer, by the receipt's names"""
        self.status = 0
        self.outcome = ""
        self.aborts = LegAborts()
        self.receipt_made: asyncio.Future[Receipt] | None = None
        """set by whoever wants to wait for the receipt"""
        self._ended_s = started_s
        self.is_answering = False
        """data of the present attempt arrived"""
        self._first_data_s: float | None = None
        self._last_data_s = 0.0
        self._gaps_s: list[float] = []

    def leased(self, lease: Lease) -> None:
        """One more attempt begins, on this pair."""
        self.attempts += 1
        self.is_answering = False
        self.path, self.reason = lease.path, lease.reason
        self.prefill_worker = None if lease.prefill is None else lease.prefill.worker_id
        self.decode_worker = lease.decode.worker_id
        self.ticket = None

    def data(self, now_s: float) -> bool:
        """Note that data of the answer arrived; several events in one read are one arrival. Returns True for the first of an attempt."""
        is_first, self.is_answering = not self.is_answering, True
        if self._first_data_s is None:
            self._first_data_s = now_s
        else:
            self._gaps_s.append(now_s - self._last_data_s)
        self._last_data_s = now_s
        return is_first

    def end(self, now_s: float, status: int, outcome: str) -> None:
        """The client has its outcome; the first call counts."""
        if not self.outcome:
            self._ended_s, self.status, self.outcome = now_s, status, outcome

    def receipt(self, send: TransferRecord | None, receive: TransferRecord | None) -> Receipt:
        """Return the frozen facts, joined with what both sides of the transfer recorded."""
        path, reason = self._executed_path(receive)
        first_data_s = self._first_data_s
        return Receipt(
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            route=self.route,
            model=self.model,
            stream=self.stream,
            status=self.status,
            outcome=self.outcome,
            path=path,
            reason=reason.value,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            transfer_id=None if self.ticket is None else self.ticket.transfer_id,
            attempts=self.attempts,
            queue_wait_s=self.queue_wait_s,
            ttft_s=first_data_s - self.started_s if self.stream and first_data_s is not None else None,
            duration_s=self._ended_s - self.started_s,
            prompt_tokens=self.usage.get("prompt_tokens"),
            completion_tokens=self.usage.get("completion_tokens"),
            cached_tokens=self.usage.get("cached_tokens"),
            aborts=tuple(self.aborts.ended),
            resumed_at=tuple(self.resumed_at),
            inter_token_s=tuple(self._gaps_s),
            send=send,
            receive=receive,
            configured=self.configured,
            eligible=self._eligible(),
            executed=self._executed(send, receive),
        )

    @property
    def has_data(self) -> bool:
        """Whether data of an answer arrived."""
        return self._first_data_s is not None

    @property
    def lease_to_first_data_s(self) -> float | None:
        """Time that the first attempt took to its first data, waiting excluded; None if that was not seen."""
        if self.attempts != 1 or not self.stream or self._first_data_s is None:
            return None
        return self._first_data_s - self.started_s - self.queue_wait_s

    def _eligible(self) -> Facts:
        if self.path is ServePath.NONE:
            return {}
        eligible = features.eligible(self.local_reason)
        if "resume" in self.configured:
            return {**eligible, "resume": features.yes_unless(self.resume_hindrance)}
        return eligible

    def _executed(self, send: TransferRecord | None, receive: TransferRecord | None) -> Facts:
        if self.ticket is None:
            executed = features.executed_locally(self.path, self.reason, self.usage.get("cached_tokens"))
        else:
            executed = features.executed(send, receive)
        if self.resumed_at:
            executed["resume"] = f"after {', '.join(map(str, self.resumed_at))} tokens"
        return executed

    def _executed_path(self, receive: TransferRecord | None) -> tuple[ServePath, PathReason]:
        """Return the path that was really taken: decode computes the prompt itself when the transfer brought nothing."""
        if self.ticket is None or self.outcome != "finished":
            return self.path, self.reason
        if receive is None:
            return self.path, PathReason.TRANSFER_UNPROVEN
        if has_moved(receive):
            return self.path, self.reason
        if receive.outcome in (CloseReason.LANDED, CloseReason.RELEASED):
            return ServePath.LOCAL, PathReason.TRANSFER_NOTHING_TO_MOVE
        return ServePath.LOCAL, transfer_reason(receive.outcome)
