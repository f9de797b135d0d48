"""Joining records to receipts: in any order, early or late, and never at the cost of a request."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from pdserve.clock import MonotonicClock
from pdserve.errors import WorkerLost
from pdserve.ports import AbortReport
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Pick
from pdserve.routing.slots import Lease, Slot
from pdserve.server import records as records_module
from pdserve.server.draft import Draft
from pdserve.server.records import Records
from pdserve.types import CloseReason, Receipt, Role, ServePath, Ticket, TransferRecord, TransferSide, WorkerSnapshot, WorkerState


def worker(worker_id: str, role: Role, incarnation: str = "1") -> WorkerSnapshot:
    return WorkerSnapshot(worker_id, incarnation, role, WorkerState.READY, f"http://{worker_id}/{incarnation}", "m", 4096, 16, 1)


P0, D0 = worker("p0", Role.PREFILL), worker("d0", Role.DECODE)


@dataclass
class Agents:
    """Every worker's agent: a list of records per URL, and which of them do not answer."""

    lists: dict[str, list[TransferRecord]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    calls: list[tuple[str, int]] = field(default_factory=list)

    def add(self, url: str, ticket: Ticket, side: TransferSide, outcome: CloseReason) -> None:
        record = TransferRecord(ticket.transfer_id, ticket.attempt, side, "w", "1", outcome, tokens_moved=9)
        self.lists.setdefault(url, []).append(record)

    async def records(self, url: str, after: int) -> tuple[int, Sequence[TransferRecord]]:
        self.calls.append((url, after))
        if url in self.silent:
            raise WorkerLost(url, "connect")
        kept = self.lists.get(url, [])
        return len(kept), kept[after:]

    async def abort(self, url: str, request_ids: Sequence[str]) -> AbortReport:
        raise AssertionError("not called here")


@dataclass
class Sink:
    """Keeps the receipts."""

    receipts: list[Receipt] = field(default_factory=list)
    has_more: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)
        self.has_more.set()


@dataclass
class Scene:
    agents: Agents
    sink: Sink
    records: Records
    tickets: int = 0

    def begin(self, prefill: WorkerSnapshot = P0, decode: WorkerSnapshot = D0) -> tuple[Draft, Ticket]:
        """Return a request under way on a pair."""
        self.tickets += 1
        ticket = Ticket(f"{self.tickets:032x}", 1, prefill.worker_id, prefill.incarnation, decode.worker_id, decode.incarnation, 60)
        draft = Draft(f"r{self.tickets}", None, "/v1/completions", 0.0, {})
        draft.leased(Lease(Demand("m", 1), Pick(ServePath.DISAGGREGATED, PathReason.DEFAULT, Slot(prefill), Slot(decode))))
        draft.ticket = ticket
        self.records.expect(ticket, prefill, decode)
        return draft, ticket

    def end(self, draft: Draft, outcome: str = "finished") -> None:
        draft.end(1.0, 200, outcome)
        self.records.settle(draft)

    def landed(self, ticket: Ticket, prefill: WorkerSnapshot = P0, decode: WorkerSnapshot = D0) -> None:
        """Have both agents record a good transfer."""
        self.agents.add(prefill.url, ticket, TransferSide.SEND, CloseReason.RELEASED)
        self.agents.add(decode.url, ticket, TransferSide.RECEIVE, CloseReason.LANDED)

    async def receipt(self, count: int = 1) -> Receipt:
        """Wait for the `count`-th receipt and return it."""
        async with asyncio.timeout(2):
            while len(self.sink.receipts) < count:
                self.sink.has_more.clear()
                await self.sink.has_more.wait()
        return self.sink.receipts[count - 1]


@asynccontextmanager
async def scene(settle_s: float = 1.0) -> AsyncIterator[Scene]:
    agents, sink = Agents(), Sink()
    records = Records(agents, sink, MonotonicClock(), settle_s)
    yield Scene(agents, sink, records)
    await records.close()
    assert records.pending == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses too short to wait for in a test."""
    monkeypatch.setattr(records_module, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(records_module, "LONGEST_PAUSE_S", 0.01)


async def test_a_receipt_has_both_records() -> None:
    """In the usual order: data, records, end."""
    async with scene() as s:
        draft, ticket = s.begin()
        s.records.landed(ticket)
        s.landed(ticket)
        s.end(draft)
        receipt = await s.receipt()
        assert receipt.send is not None
        assert receipt.receive is not None
        assert (receipt.send.outcome, receipt.receive.outcome) == (CloseReason.RELEASED, CloseReason.LANDED)


async def test_records_that_were_fetched_early_are_kept_until_the_end() -> None:
    """A long answer's records come at its beginning, with a fetch that another request may have asked for."""
    async with scene() as s:
        long, first = s.begin()
        short, second = s.begin()
        s.landed(first)
        s.landed(second)
        s.records.landed(second)
        s.end(short)
        await s.receipt()
        assert s.records.pending == 1
        calls = len(s.agents.calls)
        s.end(long)
        assert len(s.sink.receipts) == 2
        assert s.sink.receipts[1].receive is not None
        assert len(s.agents.calls) == calls


async def test_records_that_come_late_are_waited_for() -> None:
    """The end of the request does not wait, its receipt does."""
    async with scene() as s:
        draft, ticket = s.begin()
        s.end(draft)
        await asyncio.sleep(0.05)
        assert s.sink.receipts == []
        s.landed(ticket)
        assert (await s.receipt()).executed["disaggregation"] == "yes"


async def test_a_receipt_goes_out_without_the_record_that_never_came() -> None:
    """After its limit, with what there is; once."""
    async with scene(settle_s=0.05) as s:
        draft, ticket = s.begin()
        s.agents.add(P0.url, ticket, TransferSide.SEND, CloseReason.RELEASED)
        s.agents.silent.add(D0.url)
        s.end(draft)
        receipt = await s.receipt()
        assert receipt.send is not None
        assert receipt.receive is None
        s.agents.silent.clear()
        s.agents.add(D0.url, ticket, TransferSide.RECEIVE, CloseReason.LANDED)
        await asyncio.sleep(0.05)
        assert len(s.sink.receipts) == 1


async def test_with_no_agent_answering_every_receipt_still_goes_out() -> None:
    """Many at once, each exactly once."""
    async with scene(settle_s=0.05) as s:
        s.agents.silent.update((P0.url, D0.url))
        for _ in range(50):
            s.end(s.begin()[0])
        await s.receipt(50)
        await asyncio.sleep(0.05)
        assert len({receipt.request_id for receipt in s.sink.receipts}) == len(s.sink.receipts) == 50


async def test_a_request_without_a_ticket_has_its_receipt_at_once() -> None:
    """A local or refused request waits for nothing."""
    async with scene() as s:
        draft = Draft("r", None, "/v1/completions", 0.0, {})
        draft.end(1.0, 400, "client_error")
        s.records.settle(draft)
        assert [receipt.outcome for receipt in s.sink.receipts] == ["client_error"]
        assert s.agents.calls == []


async def test_a_forgotten_attempt_claims_nothing() -> None:
    """Its records come, and are nobody's."""
    async with scene() as s:
        draft, first = s.begin()
        s.records.forget(first)
        second = replace(first, transfer_id="f" * 32, attempt=2)
        draft.ticket = second
        s.records.expect(second, P0, D0)
        s.landed(first)
        s.landed(second)
        s.end(draft)
        receipt = await s.receipt()
        assert receipt.send is not None
        assert receipt.send.attempt == 2


async def test_each_fetch_goes_on_where_the_last_one_ended() -> None:
    """A cursor per worker: nothing is read twice, nothing is skipped."""
    async with scene() as s:
        for count in range(1, 4):
            draft, ticket = s.begin()
            s.landed(ticket)
            s.end(draft)
            await s.receipt(count)
        for url in (P0.url, D0.url):
            cursors = [after for called, after in s.agents.calls if called == url]
            assert cursors == sorted(cursors)
            assert cursors[0] == 0
            assert cursors[-1] == 2


async def test_a_new_incarnation_is_read_from_its_start() -> None:
    """Its list is another one, though the worker has the same name."""
    async with scene() as s:
        draft, ticket = s.begin()
        s.landed(ticket)
        s.end(draft)
        await s.receipt()
        again = worker("d0", Role.DECODE, incarnation="2")
        draft, ticket = s.begin(decode=again)
        s.landed(ticket, decode=again)
        s.end(draft)
        assert (await s.receipt(2)).receive is not None
        assert (again.url, 0) in s.agents.calls


async def test_nothing_is_fetched_while_nothing_is_wanted() -> None:
    """A request under way that has no data yet causes no call, and a finished one leaves no loop behind."""
    async with scene() as s:
        draft, ticket = s.begin()
        await asyncio.sleep(0.03)
        assert s.agents.calls == []
        s.landed(ticket)
        s.end(draft)
        await s.receipt()
        await asyncio.sleep(0.03)
        calls = len(s.agents.calls)
        await asyncio.sleep(0.05)
        assert len(s.agents.calls) == calls


async def test_many_requests_share_a_fetch() -> None:
    """One call brings the records of all that wait."""
    async with scene() as s:
        for _ in range(100):
            draft, ticket = s.begin()
            s.landed(ticket)
            s.end(draft)
        await s.receipt(100)
        assert len(s.agents.calls) <= 6


async def test_one_fetch_at_a_time_per_worker() -> None:
    """A slow agent is not asked again before it has answered."""
    async with scene() as s:
        under_way = 0
        most = 0
        answer = s.agents.records

        async def slow(url: str, after: int) -> tuple[int, Sequence[TransferRecord]]:
            nonlocal under_way, most
            if url == D0.url:
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0.03)
                under_way -= 1
            return await answer(url, after)

        s.agents.records = slow  # type: ignore[method-assign]
        for _ in range(20):
            draft, ticket = s.begin()
            s.landed(ticket)
            s.end(draft)
            await asyncio.sleep(0.005)
        await s.receipt(20)
        assert most == 1


async def test_closing_lets_settled_receipts_out_as_they_are() -> None:
    """At the end of the process nothing settled is lost, and what is still under way is not invented."""
    agents, sink = Agents(), Sink()
    s = Scene(agents, sink, Records(agents, sink, MonotonicClock()))
    settled, _ = s.begin()
    s.begin()
    s.end(settled)
    await s.records.close()
    assert [receipt.request_id for receipt in sink.receipts] == ["r1"]
