"""The engines of a soak: a scheduler's part of one worker, step by step, against a real rank.

Each makes the calls of vLLM's step in its order (`pdserve/kv/worker_side.py`), gives blocks to others as soon as the engine would, and notes how
every request ended. Knows nothing of processes or of what the other side does.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pdserve.kv.actions import Actions, ReceiveOrder, Report, ReportReceived, ReportSent, SendOrder
from pdserve.kv.rank import RankIo
from pdserve.kv.ticket import TransferKey
from pdserve.types import CloseReason, TransferSide
from tests.soak.cache import GEOMETRY, OWN, BlockIds, Cache
from tests.soak.script import MAX_TOKENS, Fate, Transfer

WINDOW = 32
"""requests that an engine holds at once; a consumer has far fewer slots"""
PAUSES = 4
"""a request that was preempted is left out of fewer steps than this"""
LAYERS = range(len(GEOMETRY.layers))

Call = Callable[[], Actions | None]


class Engine(Protocol):
    """What a worker's process drives."""

    ended: list[tuple[int, CloseReason]]
    """number and outcome of what was reported, in order"""
    wrong: list[str]

    def begin(self, transfers: Sequence[Transfer], incarnations: Mapping[str, str]) -> None:
        """Take on more requests, whose tickets name these incarnations."""
        ...

    def step(self) -> bool:
        """Do one engine step; False if there was nothing to compute."""
        ...

    @property
    def is_busy(self) -> bool: ...


class _Requests:
    """What both engines have."""

    def __init__(self, io: RankIo, cache: Cache) -> None:
        self.ended: list[tuple[int, CloseReason]] = []
        self.wrong: list[str] = []
        self._io = io
        self._cache = cache
        self._queue: deque[Transfer] = deque()
        self._incarnations: Mapping[str, str] = {}

    def begin(self, transfers: Sequence[Transfer], incarnations: Mapping[str, str]) -> None:
        self._queue.extend(transfers)
        self._incarnations = incarnations

    def _submit(self, calls: Sequence[Call]) -> None:
        """Run a step's calls on the rank's thread, in order."""

        def run() -> Actions:
            try:
                return [action for call in calls for action in call() or ()]
            except Exception as error:
                self.wrong.append(f"the rank raised {error!r}")
                raise

        if calls:
            self._io.submit(run)


class _Prefill:
    """A prefill request that has blocks."""

    def __init__(self, one: Transfer, block_ids: BlockIds) -> None:
        self.one = one
        self.block_ids = block_ids
        self.pass_number = 1
        self.chunk = 0
        self.age = 0
        self.pause = 0
        """steps until it is scheduled again"""

    @property
    def request_id(self) -> str:
        return f"send-{self.one.number}"

    @property
    def loses_blocks(self) -> bool:
        return self.pass_number < self.one.passes and self.chunk == self.one.turn


class ProducerEngine(_Requests):
    """An engine that prefills in chunks, is preempted, and aborts."""

    def __init__(self, io: RankIo, cache: Cache) -> None:
        super().__init__(io, cache)
        self._running: list[_Prefill] = []
        self._waiting: dict[TransferKey, _Prefill] = {}
        """not reported yet, running or not"""

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._waiting)

    def step(self) -> bool:
        for prefill in self._running:
            if prefill.loses_blocks:
                self._preempt(prefill)
        calls = self._admit()
        running, self._running = self._running, []
        for prefill in running:
            calls += self._advance(prefill)
        self._submit(calls)
        for report in self._io.take_reports():
            self._take(report)
        return bool(calls)

    def _preempt(self, prefill: _Prefill) -> None:
        """Move a request to other blocks, if there are any; the old ones may be others' at once."""
        fresh = self._cache.take(prefill.one.tokens)
        if fresh is None:
            return
        prefill.pass_number += 1
        prefill.chunk = 0
        prefill.pause = prefill.one.number // 4 % PAUSES
        key, pass_number, sends = prefill.one.key, prefill.pass_number, self._io.sends
        self._io.submit(lambda: sends.begin_pass(key, pass_number)).result(timeout=30)
        self._cache.give(prefill.block_ids)
        prefill.block_ids = fresh

    def _admit(self) -> list[Call]:
        calls: list[Call] = []
        while self._queue and len(self._waiting) < WINDOW:
            one = self._queue[0]
            if one.fate is Fate.NEVER_SENT:
                calls.append(lambda key=one.key: self._io.sends.cancel(key, CloseReason.ABORTED))  # type: ignore[misc]
            elif one.fate is not Fate.NO_PRODUCER:
                block_ids = self._cache.take(one.tokens)
                if block_ids is None:
                    break
                prefill = self._waiting[one.key] = _Prefill(one, block_ids)
                self._running.append(prefill)
                peer = one.consumer, self._incarnations[one.consumer]
                order = SendOrder(one.key, prefill.request_id, *peer, one.digest(TransferSide.SEND), one.tokens, one.timeout_s)
                calls.append(lambda order=order: self._io.open([order], time.monotonic()))  # type: ignore[misc]
            self._queue.popleft()
        return calls

    def _advance(self, prefill: _Prefill) -> list[Call]:
        """Compute the request's next chunk, or end it; it is running for as long as it is put back."""
        one, sends = prefill.one, self._io.sends
        if prefill.pause:
            prefill.pause -= 1
            self._running.append(prefill)
            return []
        prefill.age += 1
        if one.fate is Fate.PRODUCER_ABORTS:
            if prefill.age > one.turn:
                return [lambda: sends.cancel(one.key, CloseReason.ABORTED), lambda: sends.finished(prefill.request_id)]
            self._running.append(prefill)
            return [] if prefill.chunk == one.chunks else self._compute(prefill)
        if prefill.chunk == one.chunks:
            return [lambda: sends.finished(prefill.request_id)]
        self._running.append(prefill)
        return self._compute(prefill)

    def _compute(self, prefill: _Prefill) -> list[Call]:
        """Write one chunk: every other request layer by layer as hooks tell it, the others in one sweep."""
        one, sends, now_s = prefill.one, self._io.sends, time.monotonic()
        key, pass_number, block_ids = one.key, prefill.pass_number, prefill.block_ids
        start, end = (one.tokens * number // one.chunks for number in (prefill.chunk, prefill.chunk + 1))
        prefill.chunk += 1
        is_last = prefill.chunk == one.chunks
        calls: list[Call] = [lambda: sends.set_blocks(key, block_ids, 0)]
        self._cache.write(one, pass_number, block_ids, start, end, LAYERS)

        def hook(layer: int) -> Actions:
            sends.wrote(key, pass_number, [layer], end)
            return sends.pump(key, now_s)

        def sweep() -> Actions:
            sends.wrote(key, pass_number, LAYERS, end)
            return sends.seal(key, pass_number, now_s) if is_last else sends.pump(key, now_s, flush=True)

        if one.number & 4:
            calls += [lambda layer=layer: hook(layer) for layer in LAYERS]  # type: ignore[misc]
        return [*calls, sweep]

    def _take(self, report: Report) -> None:
        key = TransferKey(report.record.transfer_id, report.record.attempt)
        prefill = self._waiting.pop(key, None)
        if prefill is None or not isinstance(report, ReportSent) or report.request_id != prefill.request_id:
            self.wrong.append(f"{key}: a report that no request waits for")
            return
        self._cache.give(prefill.block_ids)
        self.ended.append((prefill.one.number, report.record.outcome))


class _Decode:
    """A decode request that waits for its KV."""

    def __init__(self, one: Transfer, block_ids: BlockIds) -> None:
        self.one = one
        self.block_ids = block_ids
        self.age = 0


class ConsumerEngine(_Requests):
    """An engine that decodes: reserves blocks, waits for the report, and gives them to others."""

    def __init__(self, io: RankIo, cache: Cache) -> None:
        super().__init__(io, cache)
        self._aborting: list[_Decode] = []
        self._waiting: dict[TransferKey, _Decode] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._waiting)

    def step(self) -> bool:
        calls = self._admit()
        aborting, self._aborting = self._aborting, []
        for decode in aborting:
            decode.age += 1
            if decode.age <= decode.one.turn:
                self._aborting.append(decode)
            elif decode.one.key in self._waiting:
                calls.append(
                    lambda key=decode.one.key: self._io.receives.cancel(key, CloseReason.ABORTED, time.monotonic())  # type: ignore[misc]
                )
        self._submit(calls)
        for report in self._io.take_reports():
            self._take(report)
        return bool(calls)

    def _admit(self) -> list[Call]:
        calls: list[Call] = []
        while self._queue and len(self._waiting) < WINDOW:
            one = self._queue[0]
            peer = one.producer, self._incarnations[one.producer]
            if one.fate in (Fate.DECLINED, Fate.DROPPED):
                reason = CloseReason.NOTHING_TO_MOVE if one.fate is Fate.DECLINED else CloseReason.ABORTED
                decline = (one.key, *peer, reason)
                calls.append(lambda decline=decline: self._io.receives.decline(*decline))  # type: ignore[misc]
            elif one.fate is not Fate.NO_CONSUMER:
                # The last output block is reserved with the prompt's, as for speculative tokens.
                block_ids = self._cache.take(one.tokens + MAX_TOKENS // 8)
                if block_ids is None:
                    break
                self._open(one, peer, block_ids, calls)
            self._queue.popleft()
        return calls

    def _open(self, one: Transfer, peer: tuple[str, str], block_ids: BlockIds, calls: list[Call]) -> None:
        decode = self._waiting[one.key] = _Decode(one, block_ids)
        if one.fate is Fate.CONSUMER_ABORTS:
            self._aborting.append(decode)
        self._cache.write(one, OWN, block_ids, 0, one.first_token, LAYERS)
        digest, request_id = one.digest(TransferSide.RECEIVE), f"receive-{one.number}"
        order = ReceiveOrder(one.key, request_id, *peer, digest, one.tokens, one.first_token, block_ids, one.timeout_s)
        calls.append(lambda: self._io.open([order], time.monotonic()))

    def _take(self, report: Report) -> None:
        key = TransferKey(report.record.transfer_id, report.record.attempt)
        decode = self._waiting.pop(key, None)
        if decode is None or not isinstance(report, ReportReceived) or report.request_id != f"receive-{decode.one.number}":
            self.wrong.append(f"{key}: a report that no request waits for")
            return
        if report.landed != (report.record.outcome is CloseReason.LANDED):
            self.wrong.append(f"{key}: landed {report.landed}, outcome {report.record.outcome}")
        if wrong := self._cache.wrong(decode.one, decode.block_ids, landed=report.landed):
            self.wrong.append(f"{key} ({decode.one.fate.name}, {report.record.outcome}): {wrong}")
        self._cache.give(decode.block_ids)
        self.ended.append((decode.one.number, report.record.outcome))
