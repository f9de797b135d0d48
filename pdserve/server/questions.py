"""Questions that any ready engine can answer: carried to one, and to another if that one is lost. Knows no pair, no ticket and no queue."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import NoReadyWorker, PoolSaturated, UpstreamError, WorkerLost
from pdserve.ports import EngineClient
from pdserve.routing.pool import Pool
from pdserve.server.api.questions import Question
from pdserve.types import WorkerSnapshot, WorkerState

MAX_ASKED = 64
"""questions under way at once; each takes an engine's front end from the requests that it serves"""
MAX_ATTEMPTS = 2
RETRY_AFTER_S = 1.0
ERROR_BODY_BYTES = 64 << 10


@dataclass(slots=True)
class Questions:
    """One per router.

    Args:
        first_byte_timeout_s: longest wait for an answer.
    """

    pool: Pool
    engines: EngineClient
    first_byte_timeout_s: float
    asked: int = 0
    """under way"""

    async def ask(self, question: Question, raw: bytes, model: str, request_id: str) -> bytes:
        """Return a worker's answer.

        Raises:
            NoReadyWorker: none serves this model.
            PoolSaturated: too many are asked already.
            UpstreamError: the worker refused it.
            WorkerLost: no worker that was asked gave an answer.
        """
        if self.asked >= MAX_ASKED:
            raise PoolSaturated("connections", RETRY_AFTER_S)
        workers = self._by_load(model)[:MAX_ATTEMPTS]
        if not workers:
            raise NoReadyWorker("healthy")
        self.asked += 1
        try:
            for worker in workers[:-1]:
                try:
                    return await self._ask(question, raw, worker, request_id)
                except WorkerLost:
                    continue
            return await self._ask(question, raw, workers[-1], request_id)
        finally:
            self.asked -= 1

    async def _ask(self, question: Question, raw: bytes, worker: WorkerSnapshot, request_id: str) -> bytes:
        async with self.engines.post(
            worker.worker_id,
            worker.url,
            question.path,
            raw,
            {"X-Request-Id": request_id},
            first_byte_timeout_s=self.first_byte_timeout_s,
            idle_timeout_s=self.first_byte_timeout_s,
        ) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise UpstreamError(worker.worker_id, answer.status, content[:ERROR_BODY_BYTES])
            return content

    def _by_load(self, model: str) -> Sequence[WorkerSnapshot]:
        load = self.pool.load()
        ready = [worker for worker in self.pool.workers if worker.state is WorkerState.READY and worker.model == model]
        return sorted(ready, key=lambda worker: load.get(worker.worker_id, 0))
