"""Rids engines of what requests left on them. Closing an HTTP exchange ends a leg that is still answering, but acknowledges nothing; an engine that
has answered keeps the prompt's blocks for the transfer. Only its agent can end that, and say so.

    begin          one leg is to be aborted on one worker
    acknowledged   its agent answered: the abort went through the engine's loop
    blocks free    its agent says that the engine keeps nothing of the leg; it is asked again until then

One call at a time to each worker: legs that come while it is under way go with the next, so a thousand clients that leave at once are a few calls.
Owns a task per worker while there is something to tell it. No request waits for that; its receipt does, so every wait here has an end.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import structlog

from pdserve.clock import Clock
from pdserve.errors import WorkerLost
from pdserve.observe.metrics import Metrics
from pdserve.ports import AgentRecords
from pdserve.types import LegAbort

CALL_TIMEOUT_S = 3.0
"""an abort is answered after one engine step"""
MOST_LEGS = 1024
"""in one call"""
PAUSES_S = (0.1, 0.3)
"""after failed calls; a leg that no call could tell of by then is given up"""
ASK_AGAIN_S = 0.05
"""pause before an agent is asked whether blocks are free by now, unless there is more to tell it"""
FREE_LIMIT_S = 3.0
"""how long after its acknowledgement an agent is asked for a leg's blocks; a lost consumer's lease on them may last longer"""


class LegAborts:
    """What one request has to have aborted, over all its attempts, and what came of it."""

    def __init__(self) -> None:
        self.left_s: float | None = None
        """when the client's departure was noticed"""
        self.ended: list[LegAbort] = []
        self._open = 0
        self._on_settled: Callable[[], None] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether every abort has come to its end."""
        return self._open == 0

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call this once, when the last abort under way has come to its end."""
        self._on_settled = call

    def begin(self) -> None:
        """One more is under way."""
        self._open += 1

    def end(self, abort: LegAbort) -> None:
        """One has come to its end."""
        self.ended.append(abort)
        self._open -= 1
        if self._open == 0 and self._on_settled is not None:
            call, self._on_settled = self._on_settled, None
            call()


@dataclass(slots=True, eq=False)
class _Leg:
    """One leg that a worker is to be rid of."""

    aborts: LegAborts
    since_s: float
    failures: int = 0
    acknowledged_s: float | None = None
    """on the router's clock; None while no call has told of it"""


@dataclass(slots=True, eq=False)
class _Line:
    """What one worker is to be told."""

    worker_id: str
    url: str
    legs: dict[str, _Leg] = field(default_factory=dict)
    """by the id that the engine knows; those that were told of stay until their blocks are free"""
    failures: int = 0
    """calls that failed since the last that did not"""
    more: asyncio.Event = field(default_factory=asyncio.Event)
    """ends the pause before the next question"""


class Aborts:
    """One per router. Every call is counted, done or failed."""

    def __init__(self, agent: AgentRecords, clock: Clock, metrics: Metrics) -> None:
        self._agent = agent
        self._clock = clock
        self._metrics = metrics
        self._lines: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._log = structlog.get_logger().bind()

    @property
    def pending(self) -> int:
        """Legs whose abort has not come to its end."""
        return sum(len(line.legs) for line in self._lines.values())

    def send(self, worker_id: str, url: str, leg_id: str, aborts: LegAborts) -> None:
        """Have one worker abort one leg, in the background; `aborts` is told the outcome. Idempotent while that is under way."""
        line = self._lines.get(url)
        if line is None:
            line = self._lines[url] = _Line(worker_id, url)
            task = asyncio.create_task(self._run(line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if leg_id not in line.legs:
            aborts.begin()
            line.legs[leg_id] = _Leg(aborts, self._clock.now_s() if aborts.left_s is None else aborts.left_s)
            line.more.set()

    async def drained(self) -> None:
        """Tell workers what they have not been told, once, and wait until that is done."""
        self._is_closing = True
        for line in self._lines.values():
            line.more.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, line: _Line) -> None:
        """Call one worker while there is something to tell or to ask."""
        try:
            while line.legs:
                line.more.clear()
                await self._call(line)
                if line.failures:
                    await asyncio.sleep(PAUSES_S[min(line.failures, len(PAUSES_S)) - 1])
                elif line.legs:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(line.more.wait(), ASK_AGAIN_S)
        finally:
            del self._lines[line.url]

    async def _call(self, line: _Line) -> None:
        batch = dict(islice(line.legs.items(), MOST_LEGS))
        if len(batch) < len(line.legs):
            line.more.set()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                report = await self._agent.abort(line.url, tuple(batch))
        except (WorkerLost, TimeoutError) as error:
            self._metrics.record_abort("failed")
            self._log.warning("abort failed", worker=line.worker_id, legs=len(batch), error=str(error) or "timeout")
            self._failed(line, batch)
        else:
            self._metrics.record_abort("done")
            self._acknowledged(line, batch, frozenset(report.held))

    def _failed(self, line: _Line, batch: Mapping[str, _Leg]) -> None:
        line.failures += 1
        for leg_id, leg in batch.items():
            leg.failures += 1
            if leg.failures > len(PAUSES_S) or self._is_closing:
                self._end(line, leg_id, leg, None)

    def _acknowledged(self, line: _Line, batch: Mapping[str, _Leg], held: frozenset[str]) -> None:
        now_s = self._clock.now_s()
        line.failures = 0
        for leg_id, leg in batch.items():
            leg.failures = 0
            if leg.acknowledged_s is None:
                leg.acknowledged_s = now_s
            if leg_id not in held:
                self._end(line, leg_id, leg, now_s)
            elif self._is_closing or now_s - leg.acknowledged_s >= FREE_LIMIT_S:
                self._end(line, leg_id, leg, None)
            else:
                # Behind those that have not been told of yet.
                line.legs[leg_id] = line.legs.pop(leg_id)

    def _end(self, line: _Line, leg_id: str, leg: _Leg, free_s: float | None) -> None:
        del line.legs[leg_id]
        if leg.acknowledged_s is None:
            self._log.warning("abort given up", worker=line.worker_id, leg=leg_id)
        leg.aborts.end(
            LegAbort(
                worker=line.worker_id,
                leg_id=leg_id,
                acknowledged_s=None if leg.acknowledged_s is None else leg.acknowledged_s - leg.since_s,
                blocks_free_s=None if free_s is None else free_s - leg.since_s,
            )
        )
