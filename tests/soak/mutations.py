"""Ways to break the code under test inside a worker's process. A soak that stays green with one of them is worth nothing."""

import itertools
from collections.abc import Callable, Mapping

from pdserve.kv.actions import Report, ReportReceived
from pdserve.kv.proof import Proofs
from pdserve.kv.rank import RankIo
from pdserve.kv.send_ledger import SendLedger
from pdserve.kv.slots import SlotPool
from pdserve.kv.ticket import TransferKey
from pdserve.kv.transports.base import Mover
from pdserve.kv.transports.shm import ShmTransport

EVERY = 100
"""calls until one goes wrong"""


def lose_slots() -> None:
    """A slot in so many is not freed."""
    free, calls = SlotPool.free, itertools.count(1)

    def lossy(self: SlotPool, slot: int) -> None:
        if next(calls) % EVERY:
            free(self, slot)

    SlotPool.free = lossy  # type: ignore[method-assign]


def report_twice() -> None:
    """A report in so many comes twice."""
    complete, calls = Proofs.complete, itertools.count(1)
    ranks: list[RankIo] = []
    start = RankIo.start

    def note(self: RankIo) -> None:
        ranks.append(self)
        start(self)

    def twice(self: Proofs, report: Report) -> Report:
        if next(calls) % EVERY == 0:
            ranks[0]._reports.append(report)
        return complete(self, report)

    RankIo.start, Proofs.complete = note, twice  # type: ignore[method-assign]


def forget_reports() -> None:
    """A failed receive in so many is never reported; its request waits for ever."""
    execute, calls = RankIo._execute, itertools.count(1)

    def lossy(self: RankIo, actions: object) -> None:
        kept = [
            action
            for action in actions  # type: ignore[attr-defined]
            if not isinstance(action, ReportReceived) or action.landed or next(calls) % 10
        ]
        execute(self, kept)

    RankIo._execute = lossy  # type: ignore[method-assign]


def keep_marks() -> None:
    """A new pass counts what the earlier one wrote, and where, so blocks are sent that are others' by now."""
    begin_pass = SendLedger.begin_pass

    def begin(self: SendLedger, key: TransferKey, pass_number: int) -> None:
        send = self._live.get(key)
        written, block_ids = (list(send.written_tokens), send.block_ids) if send else ([], ())
        begin_pass(self, key, pass_number)
        if send:
            send.written_tokens, send.block_ids = written, block_ids

    SendLedger.begin_pass = begin  # type: ignore[method-assign]


def keep_mappings() -> None:
    """The memory of peers that are gone stays mapped."""
    connect, kept = ShmTransport.connect, list[Mover]()

    def keep(self: ShmTransport, descriptor: str, slot_bytes: int) -> Mover:
        mover = connect(self, descriptor, slot_bytes)
        kept.append(mover)
        kept.append(mover._segment)  # type: ignore[arg-type]
        return mover

    ShmTransport.connect = keep  # type: ignore[method-assign, assignment]


MUTATIONS: Mapping[str, Callable[[], None]] = {
    mutation.__name__.replace("_", "-"): mutation for mutation in (lose_slots, report_twice, forget_reports, keep_marks, keep_mappings)
}
