"""What an agent does about an abort, step by step, before an engine of a few lines: abort, barrier, whose blocks are kept, their transfers closed."""

import asyncio
from collections import defaultdict
from typing import Any

from pdserve.fleet.agent import abort_requests

LEG, OTHER = "0af3" * 8 + "-1", "0af3" * 8 + "-2"


class Engine:
    """The two halves of an engine as the agent sees them: a front end that knows live requests, and a core that is asked between steps."""

    def __init__(self, *live: str, kept: tuple[str, ...] = ()) -> None:
        self.engine_core = self.output_processor = self
        self.external_req_ids: dict[str, list[str]] = defaultdict(list, {engine_id: [] for engine_id in live})
        self.kept = list(kept)
        self.did: list[tuple[str, Any]] = []
        self.arrives_late: list[str] = []
        """requests that the front end gets between two steps of the core"""

    async def call_utility_async(self, method: str, operation: str, argument: Any = None) -> Any:
        assert method == "pdserve"
        self.did.append((operation, argument))
        await asyncio.sleep(0)
        if self.arrives_late and operation == "kept":
            self.external_req_ids[self.arrives_late.pop()] = []
        return {"blocks": 90, "kept": [100, list(self.kept)], "close": None}[operation]

    async def abort(self, engine_ids: list[str]) -> None:
        self.did.append(("abort", list(engine_ids)))
        for engine_id in engine_ids:
            del self.external_req_ids[engine_id]


async def test_the_answer_comes_after_a_barrier_behind_the_abort() -> None:
    """Free blocks are told from before and after; requests of others live on."""
    engine = Engine(f"cmpl-{LEG}-0", f"cmpl-{OTHER}-0")
    report = await abort_requests(engine, [LEG])
    assert engine.did == [("blocks", None), ("abort", [f"cmpl-{LEG}-0"]), ("kept", None)]
    assert (report.aborted, report.blocks_free_before, report.blocks_free_after, report.held) == (1, 90, 100, ())
    assert list(engine.external_req_ids) == [f"cmpl-{OTHER}-0"]


async def test_a_request_that_was_answered_has_its_transfer_closed() -> None:
    """The front end has forgotten it, but the core keeps its blocks; the answer says so, by the router's id."""
    mine, others = f"chatcmpl-{LEG}-1a2b3c4d", f"cmpl-{OTHER}-0-1a2b3c4d"
    engine = Engine(kept=(mine, others))
    report = await abort_requests(engine, [LEG])
    assert engine.did[-1] == ("close", [mine])
    assert (report.aborted, report.held) == (0, (LEG,))


async def test_a_request_that_comes_behind_its_abort_is_aborted_too() -> None:
    """Abort and request travel on connections of their own."""
    engine = Engine()
    engine.arrives_late.append(f"cmpl-{LEG}-0")
    report = await abort_requests(engine, [LEG])
    assert report.aborted == 1
    assert not engine.external_req_ids
