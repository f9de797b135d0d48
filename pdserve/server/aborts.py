"""Tells agents to abort what a request left on their engines. Closing the HTTP exchange ends a leg that is still answering; an engine that has
answered keeps the prompt's blocks for the transfer, and only its agent can end that.

Owns the tasks that make these calls; nobody waits for them.
"""

import asyncio
from collections.abc import Sequence

import structlog

from pdserve.errors import WorkerLost
from pdserve.observe.metrics import Metrics
from pdserve.ports import AgentRecords

TIMEOUT_S = 3.0
"""an abort is answered after one engine step"""


class Aborts:
    """One per router. Every call is counted, done or failed."""

    def __init__(self, agent: AgentRecords, metrics: Metrics) -> None:
        self._agent = agent
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger().bind()

    def send(self, worker_id: str, url: str, request_ids: Sequence[str]) -> None:
        """Have one worker abort these requests, in the background."""
        task = asyncio.create_task(self._abort(worker_id, url, request_ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drained(self) -> None:
        """Wait until no call is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _abort(self, worker_id: str, url: str, request_ids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._agent.abort(url, request_ids)
        except (WorkerLost, TimeoutError) as error:
            self._metrics.record_abort("failed")
            self._log.warning("abort failed", worker=worker_id, request_ids=list(request_ids), error=str(error) or "timeout")
        else:
            self._metrics.record_abort("done")
