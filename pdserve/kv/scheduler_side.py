"""The connector's half in the engine core: which requests carry tickets, which blocks they use, and what the ranks must do about it this step.

    prefill leg   allocated → SendOrder;  each step → SendProgress;  preempted → next pass;  finished → blocks kept until the ranks report
    decode leg    asked for matches → (missing tokens, True), once per ticket;  allocated → ReceiveOrder;  nothing missing → Decline

Every ticket that got as far as this engine ends in exactly one message to the ranks: an order, a decline or a cancel, so that the other side
never waits for one that will not come. Knows vLLM's scheduler objects; nothing of links, bytes or ledgers.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import structlog

from pdserve.kv.actions import ReceiveOrder, SendOrder
from pdserve.kv.identity import prompt_digest
from pdserve.kv.metadata import Decline, RankReports, SendProgress, StepMetadata
from pdserve.kv.records import RecordLog
from pdserve.kv.settings import KvSettings
from pdserve.kv.ticket import LegTicket, TransferKey, parse
from pdserve.types import CloseReason, TransferRecord, TransferSide

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = structlog.get_logger("pdserve.kv")


class _Leg:
    """One request with a ticket."""

    def __init__(self, ticket: LegTicket, prompt_tokens: int) -> None:
        self.ticket = ticket
        self.prompt_tokens = prompt_tokens
        self.ordered = False
        """the ranks have, or get in this step, an order for it"""
        self.settled = False
        """decode: landed, failed or declined; prefill: sealed"""
        self.finished = False
        """the engine is done with the request"""
        self.pass_number = 1
        self.cached_tokens: int | None = None
        """of the present pass; None before its first chunk"""


class SchedulerSide:
    """Decides per step; holds no thread and no socket.

    Args:
        settings: of this worker.
        num_ranks: tensor-parallel size.
    """

    def __init__(self, settings: KvSettings, num_ranks: int) -> None:
        self._settings = settings
        self._legs: dict[str, _Leg] = {}
        self._keys: set[TransferKey] = set()
        self._next = StepMetadata()
        self.records = RecordLog(num_ranks)
        self.refused: Counter[str] = Counter()
        """tickets that were not usable, by reason"""

    @property
    def num_open(self) -> int:
        """Requests with a ticket that this engine still holds."""
        return len(self._legs)

    # ---- requests come and go -------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """Read the request's ticket, if it has one. A ticket that is malformed or in use is refused: the request then computes its own KV."""
        ticket = parse(request.kv_transfer_params)
        if ticket is None:
            return
        if isinstance(ticket, str):
            self._refuse(request, f"bad_{ticket}")
        elif ticket.key in self._keys:
            self._refuse(request, "ticket_in_use")
        else:
            self._legs[request.request_id] = _Leg(ticket, request.num_prompt_tokens)
            self._keys.add(ticket.key)

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks must stay until the ranks report."""
        leg = self._legs.get(request.request_id)
        if leg is None:
            return False, None
        leg.finished = True
        is_receive = leg.ticket.side is TransferSide.RECEIVE
        if is_receive and not leg.ordered and not leg.settled:
            self._decline(request.request_id, leg, CloseReason.ABORTED)
        elif not leg.settled:
            cancelled = self._next.cancelled_receives if is_receive else self._next.cancelled_sends
            cancelled.append((leg.ticket.key, CloseReason.ABORTED))
            if not leg.ordered:
                self._record(request.request_id, leg, CloseReason.ABORTED)
        if leg.settled if is_receive else not leg.ordered:
            self._forget(request.request_id)
        return leg.ordered and not is_receive, None

    def close(self, request_ids: Iterable[str]) -> None:
        """End the transfers of finished requests that their consumers have not acknowledged. Idempotent."""
        for request_id in request_ids:
            leg = self._legs.get(request_id)
            if leg is not None and leg.finished and leg.ticket.side is TransferSide.SEND:
                self._next.cancelled_sends.append((leg.ticket.key, CloseReason.ABORTED))

    # ---- decode: what can be loaded -------------------------------------------------------------------------------------------------

    def num_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many prompt tokens the ticket brings beyond those that are cached here: a positive count once per ticket, else (0, False)."""
        leg = self._legs.get(request.request_id)
        if leg is None or leg.ticket.side is TransferSide.SEND or leg.ordered or leg.settled:
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Turn a ticket into an order, now that the request has blocks; called again for later allocations."""
        leg = self._legs.get(request.request_id)
        if leg is None or leg.ordered or leg.settled:
            return
        ticket = leg.ticket
        if ticket.side is TransferSide.SEND:
            leg.ordered = True
            self._next.sends.append(
                SendOrder(
                    ticket.key,
                    request.request_id,
                    ticket.peer_worker,
                    ticket.peer_incarnation,
                    prompt_digest(request),
                    request.num_prompt_tokens,
                    ticket.timeout_s,
                    ticket.proof or self._settings.digest == "full",
                )
            )
        elif num_external_tokens > 0:
            leg.ordered = True
            self._next.receives.append(
                ReceiveOrder(
                    ticket.key,
                    request.request_id,
                    ticket.peer_worker,
                    ticket.peer_incarnation,
                    prompt_digest(request),
                    request.num_prompt_tokens,
                    request.num_prompt_tokens - num_external_tokens,
                    tuple(tuple(group) for group in blocks.get_block_ids()),
                    ticket.timeout_s,
                    ticket.proof or self._settings.digest == "full",
                )
            )
        else:
            self._decline(request.request_id, leg, CloseReason.NOTHING_TO_MOVE)

    # ---- steps ----------------------------------------------------------------------------------------------------------------------

    def build_metadata(self, output: "SchedulerOutput") -> StepMetadata:
        """Return everything the ranks must know for this step, and start collecting for the next."""
        metadata, self._next = self._next, StepMetadata()
        metadata.num_scheduled_tokens = output.total_num_scheduled_tokens
        for request_id in output.preempted_req_ids or ():
            leg = self._legs.get(request_id)
            if leg is not None and leg.ticket.side is TransferSide.SEND and leg.ordered:
                leg.pass_number += 1
                leg.cached_tokens = None
                leg.settled = False
                metadata.preempted.append((leg.ticket.key, leg.pass_number))
        for new in output.scheduled_new_reqs:
            self._progress(metadata, output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._progress(metadata, output, request_id, computed)
        return metadata

    def _progress(self, metadata: StepMetadata, output: "SchedulerOutput", request_id: str, computed: int) -> None:
        leg = self._legs.get(request_id)
        if leg is None or leg.ticket.side is TransferSide.RECEIVE or not leg.ordered or leg.settled:
            return
        if leg.cached_tokens is None:
            leg.cached_tokens = computed
        block_state = output.kv_connector_block_state
        block_ids = block_state.get_block_ids(request_id) if block_state is not None else None
        if block_ids is None:
            return
        end = min(computed + output.num_scheduled_tokens[request_id], leg.prompt_tokens)
        leg.settled = end >= leg.prompt_tokens
        metadata.progress.append(
            SendProgress(
                leg.ticket.key,
                leg.pass_number,
                tuple(tuple(group) for group in block_ids),
                leg.cached_tokens,
                end,
                leg.settled,
            )
        )

    def on_output(self, output: "KVConnectorOutput") -> None:
        """Take the ranks' records, and forget requests whose transfers are over."""
        reports = output.kv_connector_worker_meta
        if isinstance(reports, RankReports):
            for record in reports.records:
                self.records.add_rank(record)
        for request_id in output.finished_recving or ():
            leg = self._legs.get(request_id)
            if leg is not None:
                leg.settled = True
                if leg.finished:
                    self._forget(request_id)
        for request_id in output.finished_sending or ():
            self._forget(request_id)

    # ---- inside ---------------------------------------------------------------------------------------------------------------------

    def _decline(self, request_id: str, leg: _Leg, reason: CloseReason) -> None:
        """Tell the producer that this ticket will not be used."""
        leg.settled = True
        ticket = leg.ticket
        self._next.declines.append(Decline(ticket.key, ticket.peer_worker, ticket.peer_incarnation, reason))
        self._record(request_id, leg, reason)

    def _record(self, request_id: str, leg: _Leg, reason: CloseReason) -> None:
        """Note how a ticket ended that no rank had an order for."""
        self.records.add(
            TransferRecord(
                transfer_id=leg.ticket.key.transfer_id,
                attempt=leg.ticket.key.attempt,
                side=leg.ticket.side,
                worker=self._settings.worker_id,
                incarnation=self._settings.incarnation,
                outcome=reason,
                request_id=request_id,
                prompt_tokens=leg.prompt_tokens,
                tokens_reused=leg.prompt_tokens if reason is CloseReason.NOTHING_TO_MOVE else 0,
            )
        )

    def _refuse(self, request: "Request", reason: str) -> None:
        self.refused[reason] += 1
        log.warning("kv.ticket_refused", request_id=request.request_id, reason=reason)

    def _forget(self, request_id: str) -> None:
        leg = self._legs.pop(request_id, None)
        if leg is not None:
            self._keys.discard(leg.ticket.key)
