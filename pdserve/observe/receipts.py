"""The last receipts of this router, and the fan-out of each to whoever observes.

Owns a bounded ring. Knows not how a receipt comes about.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import structlog

from pdserve.types import CloseReason, Receipt

KEPT = 1024
"""receipts in the ring"""


class ReceiptBook:
    """Takes every receipt once, shows it to each observer, keeps the last ones.

    Args:
        observers: called in order with the whole receipt; must neither block nor raise.
        kept: size of the ring.
    """

    def __init__(self, observers: Sequence[Callable[[Receipt], None]] = (), kept: int = KEPT) -> None:
        self._observers = tuple(observers)
        self._ring: deque[Receipt] = deque(maxlen=kept)

    def observe(self, receipt: Receipt) -> None:
        """Hand the receipt on, then store it without its list of gaps."""
        for observer in self._observers:
            observer(receipt)
        self._ring.append(replace(receipt, inter_token_s=()) if receipt.inter_token_s else receipt)

    def last(self, limit: int, matches: Callable[[Receipt], bool] = lambda _receipt: True) -> tuple[Receipt, ...]:
        """Return at most `limit` receipts that match, newest first."""
        return tuple(islice(filter(matches, reversed(self._ring)), max(0, limit)))

    def find(self, known_as: str) -> Receipt | None:
        """Return the newest receipt of this id: the request's own, the client's word for it, or its transfer's."""
        return next(iter(self.last(1, lambda r: known_as in (r.request_id, r.client_request_id, r.transfer_id))), None)


class ReceiptLog:
    """Writes one line per receipt: ids, workers, path, counts and times; never a word of prompt or answer."""

    def __init__(self) -> None:
        self._log = structlog.get_logger().bind()

    def observe(self, receipt: Receipt) -> None:
        """Write the line; level ``warning`` when the request failed on our side or what was executed is not what was chosen."""
        receive = receipt.receive
        fields: dict[str, object] = {
            "request_id": receipt.request_id,
            "route": receipt.route,
            "status": receipt.status,
            "outcome": receipt.outcome,
            "path": receipt.path.value,
            "reason": receipt.reason,
            "prefill_worker": receipt.prefill_worker,
            "decode_worker": receipt.decode_worker,
            "transfer_id": receipt.transfer_id,
            "attempts": receipt.attempts,
            "queue_wait_s": round(receipt.queue_wait_s, 6),
            "ttft_s": None if receipt.ttft_s is None else round(receipt.ttft_s, 6),
            "duration_s": round(receipt.duration_s, 6),
            "prompt_tokens": receipt.prompt_tokens,
            "completion_tokens": receipt.completion_tokens,
            "tokens_moved": None if receive is None else receive.tokens_moved,
            "bytes_moved": None if receive is None else receive.bytes_moved,
        }
        transfer_failed = receipt.transfer_id is not None and (receive is None or receive.outcome is not CloseReason.LANDED)
        suspicious = receipt.outcome in ("failed", "upstream_error") or (receipt.outcome == "finished" and transfer_failed)
        if suspicious:
            self._log.warning("request", **fields)
        else:
            self._log.info("request", **fields)
