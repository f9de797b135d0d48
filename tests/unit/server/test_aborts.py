"""Aborts in few calls: one at a time to each worker, sent again when they fail, asked again while blocks are held, and always with an end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from pdserve.clock import MonotonicClock
from pdserve.errors import WorkerLost
from pdserve.observe.metrics import Metrics
from pdserve.ports import AbortReport
from pdserve.server import aborts as aborts_module
from pdserve.server.aborts import Aborts, LegAborts
from pdserve.types import LegAbort, TransferRecord


@dataclass
class Agents:
    """Every worker's agent: answers when told to, and remembers what it was asked."""

    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    failures: int = 0
    """calls that fail from now on"""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[str, int] = field(default_factory=dict)
    most_running: int = 0

    async def abort(self, url: str, request_ids: Sequence[str]) -> AbortReport:
        self.calls.append((url, tuple(request_ids)))
        self.running[url] = self.running.get(url, 0) + 1
        self.most_running = max(self.most_running, self.running[url])
        try:
            await self.may_answer.wait()
        finally:
            self.running[url] -= 1
        if self.failures:
            self.failures -= 1
            raise WorkerLost(url, "head", "503")
        return AbortReport(len(request_ids), 0, 0, 0.0, tuple(self.held.intersection(request_ids)))

    async def records(self, url: str, after: int) -> tuple[int, Sequence[TransferRecord]]:
        raise AssertionError("not called here")


@dataclass
class Scene:
    agents: Agents
    aborts: Aborts

    def send(self, leg_id: str, worker: str = "d0") -> LegAborts:
        told = LegAborts()
        self.aborts.send(worker, f"http://{worker}", leg_id, told)
        return told

    @property
    def batches(self) -> list[tuple[str, ...]]:
        return [ids for _, ids in self.agents.calls]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """Aborts with short pauses, whose agents answer at once; at the end nothing is left."""
    monkeypatch.setattr(aborts_module, "PAUSES_S", (0.001, 0.001))
    monkeypatch.setattr(aborts_module, "ASK_AGAIN_S", 0.001)
    agents = Agents()
    agents.may_answer.set()
    made = Scene(agents, Aborts(agents, MonotonicClock(), Metrics(CollectorRegistry(), "1")))
    yield made
    await made.aborts.drained()
    assert made.aborts.pending == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def outcome(*told: LegAborts) -> list[LegAbort]:
    """Wait until these have come to their end."""
    async with asyncio.timeout(5):
        for aborts in told:
            settled = asyncio.Event()
            aborts.when_settled(settled.set)
            if not aborts.is_settled:
                await settled.wait()
    return [abort for aborts in told for abort in aborts.ended]


async def test_what_comes_during_a_call_goes_with_the_next(scene: Scene) -> None:
    """A thousand at once, and a thousand more while the first are told: three calls for two thousand, never two at a time."""
    scene.agents.may_answer.clear()
    told = [scene.send("first")]
    while not scene.agents.calls:
        await asyncio.sleep(0)
    told += [scene.send(f"leg-{number}") for number in range(2000)]
    scene.agents.may_answer.set()
    ended = await outcome(*told)
    assert [len(batch) for batch in scene.batches] == [1, aborts_module.MOST_LEGS, 2000 - aborts_module.MOST_LEGS]
    assert sorted(leg_id for batch in scene.batches for leg_id in batch) == sorted(abort.leg_id for abort in ended)
    assert all(abort.acknowledged_s is not None and abort.acknowledged_s == abort.blocks_free_s for abort in ended)
    assert scene.agents.most_running == 1


async def test_workers_do_not_wait_for_each_other(scene: Scene) -> None:
    """A worker that does not answer holds up nobody else's aborts."""
    scene.agents.may_answer.clear()
    told = [scene.send("a", "d0"), scene.send("a", "p0")]
    while len(scene.agents.calls) < 2:
        await asyncio.sleep(0)
    scene.agents.may_answer.set()
    assert {abort.worker for abort in await outcome(*told)} == {"d0", "p0"}


async def test_a_failed_call_is_made_again(scene: Scene) -> None:
    """What it was to tell goes with the next, together with what came meanwhile."""
    scene.agents.failures = 2
    told = [scene.send("a")]
    ended = await outcome(*told)
    assert [abort.acknowledged_s is not None for abort in ended] == [True]
    assert scene.batches == [("a",)] * 3


async def test_a_leg_is_given_up_in_the_end(scene: Scene) -> None:
    """Three failed calls, and the receipt goes out: nothing is known of the engine."""
    scene.agents.failures = 3
    assert await outcome(scene.send("a")) == [LegAbort("d0", "a", None, None)]
    assert len(scene.batches) == 3
    assert (await outcome(scene.send("b")))[0].blocks_free_s is not None


async def test_a_call_without_an_answer_is_a_failed_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not turn cannot hold up a receipt for ever."""
    monkeypatch.setattr(aborts_module, "CALL_TIMEOUT_S", 0.01)
    scene.agents.may_answer.clear()
    assert await outcome(scene.send("a")) == [LegAbort("d0", "a", None, None)]


async def test_held_blocks_are_asked_for_until_they_are_free(scene: Scene) -> None:
    """Meanwhile others are told without delay, and what is free is not asked for again."""
    scene.agents.held.add("a")
    told = scene.send("a")
    while len(scene.agents.calls) < 3:
        await asyncio.sleep(0)
    await outcome(scene.send("b"))
    scene.agents.held.clear()
    (abort,) = await outcome(told)
    assert abort.acknowledged_s is not None and abort.blocks_free_s is not None
    assert abort.blocks_free_s > abort.acknowledged_s
    assert sum("b" in batch for batch in scene.batches) == 1


async def test_held_blocks_keep_nobody_from_being_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are asked about again: who has not been told of goes first."""
    monkeypatch.setattr(aborts_module, "MOST_LEGS", 1)
    scene.agents.held.add("a")
    told = scene.send("a")
    while not scene.agents.calls:
        await asyncio.sleep(0)
    await outcome(scene.send("b"))
    scene.agents.held.clear()
    await outcome(told)


async def test_blocks_that_stay_held_have_no_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort is acknowledged; when the blocks came free, nobody knows."""
    monkeypatch.setattr(aborts_module, "FREE_LIMIT_S", 0.01)
    scene.agents.held.add("a")
    (abort,) = await outcome(scene.send("a"))
    assert abort.acknowledged_s is not None and abort.blocks_free_s is None


async def test_times_count_from_the_departure(scene: Scene) -> None:
    """Not from when the router got round to it."""
    told = LegAborts()
    told.left_s = MonotonicClock().now_s() - 10
    scene.aborts.send("d0", "http://d0", "a", told)
    (abort,) = await outcome(told)
    assert abort.acknowledged_s is not None and 10 < abort.acknowledged_s < 12


async def test_the_same_leg_twice_is_one_abort(scene: Scene) -> None:
    """Whoever ends an attempt twice waits for one answer."""
    told = LegAborts()
    for _ in range(2):
        scene.aborts.send("d0", "http://d0", "a", told)
    assert len(await outcome(told)) == 1


async def test_draining_tells_everyone_once_and_asks_nobody_again(scene: Scene) -> None:
    """A router that stops leaves no leg untold, and waits neither for blocks nor for an agent that fails."""
    scene.agents.held.add("a")
    scene.agents.failures = 1
    scene.agents.may_answer.clear()
    told = [scene.send("a"), scene.send("b", "p0")]
    drained = asyncio.create_task(scene.aborts.drained())
    while len(scene.agents.calls) < 2:
        await asyncio.sleep(0)
    scene.agents.may_answer.set()
    await drained
    assert all(aborts.is_settled for aborts in told)
    assert len(scene.batches) == 2
