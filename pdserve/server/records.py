"""Joins the agents' transfer records to the router's facts, and so makes every receipt.

    expect(ticket)   the transfer is under way: its two records will be claimed
    landed(ticket)   first data arrived, so both sides are about to have a record: fetching starts
    received(ticket) decode's record, for those who must see it before they answer
    settle(draft)    the request is over: the receipt goes out when both records are there, or without them after `SETTLE_S`
    forget(ticket)   the attempt failed, another one counts

Owns one cursor and at most one fetch per worker incarnation, and runs only while something is wanted. No request waits for it.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import structlog

from pdserve.clock import Clock
from pdserve.errors import WorkerLost
from pdserve.ports import AgentRecords, ReceiptObserver
from pdserve.server.draft import Draft
from pdserve.types import Ticket, TransferRecord, TransferSide, WorkerSnapshot

SETTLE_S = 10.0
"""how long a receipt waits for its records after the request is over"""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 0.2
"""pause before each fetch from one worker, so that many receipts share it: doubled while fetches bring nothing wanted"""

_Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Transfer:
    """One transfer whose records are awaited."""

    sources: dict[TransferSide, "_Source"]
    on_received: Callable[[TransferRecord], None] | None = None
    """told decode's record when it comes"""
    found: dict[TransferSide, TransferRecord] = field(default_factory=dict)
    draft: Draft | None = None
    """set when the request is over"""
    received: asyncio.Future[TransferRecord] | None = None
    """set while somebody waits for decode's record"""


@dataclass(slots=True, eq=False)
class _Source:
    """One worker incarnation's records. A new incarnation gets a new one, with a new cursor."""

    worker_id: str
    incarnation: str
    url: str
    cursor: int = 0
    wanted: dict[_Key, float] = field(default_factory=dict)
    """transfers whose record is to be fetched → until when; the soonest first, because every wait is as long as any other"""
    task: asyncio.Task[None] | None = None
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """ends the pause before the next fetch"""


class Records:
    """One per router.

    Args:
        sink: gets every receipt once.
        settle_s: see `SETTLE_S`.
    """

    def __init__(self, agent: AgentRecords, sink: ReceiptObserver, clock: Clock, settle_s: float = SETTLE_S) -> None:
        self._agent = agent
        self._sink = sink
        self._clock = clock
        self._settle_s = settle_s
        self._transfers: dict[_Key, _Transfer] = {}
        self._sources: dict[str, _Source] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger().bind()

    @property
    def pending(self) -> int:
        """Transfers that are expected or whose receipt is not out yet."""
        return len(self._transfers)

    def expect(
        self,
        ticket: Ticket,
        prefill: WorkerSnapshot,
        decode: WorkerSnapshot,
        on_received: Callable[[TransferRecord], None] | None = None,
    ) -> None:
        """Claim the records of this transfer before they can exist; `on_received` is told decode's, once, if it comes."""
        sources = {TransferSide.SEND: self._source(prefill), TransferSide.RECEIVE: self._source(decode)}
        self._transfers[_key(ticket)] = _Transfer(sources, on_received)

    def landed(self, ticket: Ticket) -> None:
        """Start fetching this transfer's records."""
        key = _key(ticket)
        self._fetch(key, self._transfers[key])

    async def received(self, ticket: Ticket) -> TransferRecord:
        """Wait for decode's record of this transfer, however long it takes. Cancellation only ends the wait."""
        key = _key(ticket)
        transfer = self._transfers[key]
        if (record := transfer.found.get(TransferSide.RECEIVE)) is not None:
            return record
        transfer.received = asyncio.get_running_loop().create_future()
        self._fetch(key, transfer)
        return await transfer.received

    def hurry(self, ticket: Ticket) -> None:
        """Decode's record must exist by now: fetch it without a pause."""
        self._transfers[_key(ticket)].sources[TransferSide.RECEIVE].hurry.set()

    def forget(self, ticket: Ticket) -> None:
        """Give up a transfer whose attempt failed."""
        self._drop(_key(ticket))

    def settle(self, draft: Draft) -> None:
        """Take over the facts of a request that is over, and see that its receipt goes out, once: after the last abort that it had to make."""
        if not draft.aborts.is_settled:
            draft.aborts.when_settled(partial(self.settle, draft))
            return
        key = None if draft.ticket is None else _key(draft.ticket)
        transfer = None if key is None else self._transfers.get(key)
        if key is None or transfer is None:
            self._emit(draft, None, None)
            return
        transfer.draft = draft
        if not self._try_finish(key, transfer):
            self._fetch(key, transfer)

    async def drained(self) -> None:
        """Wait until every settled receipt is out; bounded by the settle limit."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop fetching; settled receipts go out as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for key, transfer in list(self._transfers.items()):
            self._finish(key, transfer)

    def _source(self, worker: WorkerSnapshot) -> _Source:
        source = self._sources.get(worker.worker_id)
        if source is None or source.incarnation != worker.incarnation:
            source = self._sources[worker.worker_id] = _Source(worker.worker_id, worker.incarnation, worker.url)
        return source

    def _fetch(self, key: _Key, transfer: _Transfer) -> None:
        until_s = self._clock.now_s() + self._settle_s
        for side, source in transfer.sources.items():
            if side in transfer.found:
                continue
            source.wanted.pop(key, None)
            source.wanted[key] = until_s
            if source.task is None:
                source.task = asyncio.create_task(self._run(source))
                self._tasks.add(source.task)
                source.task.add_done_callback(self._tasks.discard)

    async def _run(self, source: _Source) -> None:
        """Fetch from one worker while one of its records is wanted."""
        pause_s = FIRST_PAUSE_S
        try:
            while source.wanted:
                await _pause(source.hurry, pause_s)
                records = await self._records(source)
                took = [self._take(record) for record in records]
                self._give_up_overdue(source)
                pause_s = FIRST_PAUSE_S if any(took) else min(LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            source.task = None

    async def _records(self, source: _Source) -> Sequence[TransferRecord]:
        try:
            source.cursor, records = await self._agent.records(source.url, source.cursor)
        except WorkerLost as error:
            self._log.debug("records not fetched", worker=source.worker_id, error=str(error))
            return ()
        return records

    def _take(self, record: TransferRecord) -> bool:
        """Claim a record; most of those that nobody expects belong to attempts that failed."""
        key = (record.transfer_id, record.attempt)
        transfer = self._transfers.get(key)
        if transfer is None:
            return False
        is_new = record.side not in transfer.found
        transfer.found[record.side] = record
        if is_new and record.side is TransferSide.RECEIVE and transfer.on_received is not None:
            transfer.on_received(record)
        transfer.sources[record.side].wanted.pop(key, None)
        if record.side is TransferSide.RECEIVE and transfer.received is not None and not transfer.received.done():
            transfer.received.set_result(record)
        self._try_finish(key, transfer)
        return True

    def _give_up_overdue(self, source: _Source) -> None:
        """Stop asking for what did not come in time; a settled receipt goes out without it."""
        now_s = self._clock.now_s()
        overdue = list(takewhile(lambda item: item[1] <= now_s, source.wanted.items()))
        for key, _ in overdue:
            del source.wanted[key]
            transfer = self._transfers.get(key)
            if transfer is not None and transfer.draft is None and transfer.received is not None:
                source.wanted[key] = now_s + self._settle_s
            elif transfer is not None and transfer.draft is not None and not any(key in s.wanted for s in transfer.sources.values()):
                self._finish(key, transfer)

    def _try_finish(self, key: _Key, transfer: _Transfer) -> bool:
        if transfer.draft is None or len(transfer.found) < len(transfer.sources):
            return False
        self._finish(key, transfer)
        return True

    def _finish(self, key: _Key, transfer: _Transfer) -> None:
        self._drop(key)
        if transfer.draft is not None:
            self._emit(transfer.draft, transfer.found.get(TransferSide.SEND), transfer.found.get(TransferSide.RECEIVE))

    def _drop(self, key: _Key) -> None:
        transfer = self._transfers.pop(key, None)
        for source in () if transfer is None else transfer.sources.values():
            source.wanted.pop(key, None)

    def _emit(self, draft: Draft, send: TransferRecord | None, receive: TransferRecord | None) -> None:
        receipt = draft.receipt(send, receive)
        self._sink.observe(receipt)
        if draft.receipt_made is not None and not draft.receipt_made.done():
            draft.receipt_made.set_result(receipt)


async def _pause(hurry: asyncio.Event, pause_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(hurry.wait(), pause_s)
    hurry.clear()


def _key(ticket: Ticket) -> _Key:
    return (ticket.transfer_id, ticket.attempt)
