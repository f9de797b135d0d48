"""Many clients leave at once: every engine is rid of every leg in a few calls, and nothing is left of them."""

import asyncio

import pytest
from router_rig import COMPLETIONS, filled, rig, until

from pdserve.testing.fake_worker import Fault, Script

STEP_S = 0.1
CALLS_PER_WORKER = 4
"""the first few, those that leave while that call is under way, and stragglers"""


@pytest.mark.parametrize("clients", [200, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("prefill", [Script(fault=Fault.HANG), Script()], ids=["while prefill runs", "while tokens come"])
async def test_a_storm_of_departures_is_a_few_calls(clients: int, prefill: Script) -> None:
    """Each receipt tells when both engines had acknowledged; the next request is served at once. The rig's end shows that nothing is left."""
    async with rig(prefills=2, decodes=2, max_queued_requests=clients) as r:
        for worker in r.workers:
            worker.script = prefill if worker in r.prefills else Script(tokens=("x",) * 100, token_delay_s=1.0)
            worker.abort_delay_s = STEP_S
        await r.put_fleet(max_running=clients)
        streams = [asyncio.create_task(r.stream(COMPLETIONS, **filled(COMPLETIONS, {"max_tokens": 20}))) for _ in range(clients)]
        await until(lambda: len(r.legs) == 2 * clients, timeout_s=30)
        left_s = asyncio.get_running_loop().time()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await until(lambda: all(leg.ended is not None for leg in r.legs), timeout_s=30)
        receipts = await r.receipts(clients, timeout_s=30)
        assert {(receipt.outcome, len(receipt.aborts)) for receipt in receipts} == {("cancelled", 2)}
        took_s = [answered_s - left_s for worker in r.workers for answered_s in worker.aborted_s.values()]
        assert len(took_s) == 2 * clients
        assert max(took_s) < STEP_S + 1.0 + 0.002 * clients
        told_s = [abort.blocks_free_s for receipt in receipts for abort in receipt.aborts if abort.blocks_free_s is not None]
        assert len(told_s) == 2 * clients and max(told_s) <= max(took_s) + STEP_S
        assert max(worker.abort_calls for worker in r.workers) <= CALLS_PER_WORKER
        for worker in r.workers:
            worker.script = Script()
        assert (await r.post())[0] == 200
