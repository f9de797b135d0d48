"""An event loop in a thread of its own, and the one way in. Knows nothing of what runs on it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

import structlog
import uvloop

log = structlog.get_logger("pdserve.kv")


class LoopThread:
    """Runs calls and tasks on its own thread until it is closed.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run a call on the loop. Never blocks; the future is for the few who must wait, and carries the call's error."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                call()
            except BaseException as error:  # the loop's edge: the caller must hear of it, the loop must go on
                log.exception("kv.call_failed")
                future.set_exception(error)
            else:
                future.set_result(None)

        self.loop.call_soon_threadsafe(run)
        return future

    def spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Start a task, from the loop itself; what it raises is logged. It is cancelled when the thread closes."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def close(self) -> None:
        """Cancel all tasks and end the thread; returns when it has ended. Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=10)
        elif not self.loop.is_closed():
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.close()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv.task_failed", task=str(task.get_coro()), error=repr(error), exc_info=error)
