"""The real controller over a fleet in memory: from nothing to ready, through faults, to nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from pdserve.clock import MonotonicClock
from pdserve.control import restarts
from pdserve.control.loop import Controller
from pdserve.control.observation import RouterSeen
from pdserve.control.plan import Policy
from pdserve.control.state import DeploymentReport, Phase
from pdserve.control.workers import Limits
from pdserve.ports import WorkerSpec
from pdserve.testing.fleet import FakeAgents, FakeFleet, FakeRouter, specs
from pdserve.types import WorkerState


@dataclass
class FakeRouterProcess:
    """A router process in memory; binds as soon as it is started."""

    router: FakeRouter
    starts: int = 0
    running: bool = False
    stops: int = 0

    def start(self) -> None:
        self.starts += 1
        self.running = True
        self.router.view = None

    def seen(self) -> RouterSeen:
        return RouterSeen(self.starts, self.running, self.starts if self.running else None, "http://router" if self.running else None)

    async def stop(self) -> None:
        self.running = False
        self.stops += 1

    def kill(self) -> None:
        self.running = False


@dataclass
class World:
    """One controller and all it talks to."""

    fleet: FakeFleet = field(default_factory=FakeFleet)
    reports: list[DeploymentReport] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    read: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    run: asyncio.Task[Phase] | None = None

    def __post_init__(self) -> None:
        self.agents = FakeAgents(self.fleet)
        self.router = FakeRouter(self.fleet)
        self.process = FakeRouterProcess(self.router)

    def start(self, specs: tuple[WorkerSpec, ...], lost_s: float = 2.0) -> None:
        """Start the controller's loop."""
        controller = Controller(
            name="test",
            model="fake",
            controller_pid=1,
            started_unix_s=0.0,
            specs=specs,
            policy=Policy(Limits(load_s=5, link_s=2, silence_s=0.2, lost_s=lost_s), canary_pause_s=0.01),
            fleet=self.fleet,
            agents=self.agents,
            router=self.router,
            router_process=self.process,
            publish=self.publish,
            clock=MonotonicClock(),
            tick_s=0.01,
        )
        self.run = asyncio.create_task(controller.run(self.stop))

    async def reported(self, wanted: Callable[[DeploymentReport], bool]) -> DeploymentReport:
        """Wait for the next report that is wanted, after the last one that was."""
        async with asyncio.timeout(5):
            while True:
                while self.read < len(self.reports):
                    self.read += 1
                    if wanted(self.reports[self.read - 1]):
                        return self.reports[self.read - 1]
                self.news.clear()
                await self.news.wait()

    async def phase(self, phase: Phase) -> DeploymentReport:
        """Wait until this phase is published."""
        return await self.reported(lambda report: report.phase is phase)

    async def worker(self, worker_id: str, state: WorkerState) -> DeploymentReport:
        """Wait until a worker is published in this state."""
        return await self.reported(lambda report: any(w.worker_id == worker_id and w.state is state for w in report.workers))

    def publish(self, report: DeploymentReport) -> None:
        self.reports.append(report)
        self.news.set()

    async def end(self) -> Phase:
        """Tell the controller to stop and wait for it."""
        assert self.run is not None
        self.stop.set()
        return await asyncio.wait_for(self.run, 5)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A world whose controller, if it was started, is ended after the test; then nothing of it may be left."""
    before = asyncio.all_tasks()
    world = World()
    yield world
    if world.run is not None:
        if not world.run.done():
            await world.end()
        assert (world.fleet.is_closed, world.process.running, world.process.stops) == (True, False, 1)
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}


async def test_fleet_becomes_ready_through_every_state(world: World) -> None:
    """Each worker is published in each state, and ready means that a canary went through it."""
    world.start(specs(2, 1))
    report = await world.phase(Phase.READY)
    assert [worker.worker_id for worker in report.workers] == ["prefill-0", "prefill-1", "decode-0"]
    for worker in report.workers:
        assert list(worker.entered_s) == ["pending", "placed", "loading", "warming", "ready"]
        assert list(worker.entered_s.values()) == sorted(worker.entered_s.values())
        assert any(worker.worker_id in pair for pair in world.router.canaries)
    assert world.router.view is not None
    assert {row.state for row in world.router.view.workers} == {WorkerState.READY}
    assert (report.router.url, report.ready_s is not None) == ("http://router", True)


async def test_stop_takes_everything_down(world: World) -> None:
    """A told controller publishes that it stops, then leaves nothing."""
    world.start(specs(1, 1))
    await world.phase(Phase.READY)
    assert await world.end() is Phase.STOPPING
    assert world.reports[-1].phase is Phase.STOPPING


async def test_stop_while_loading_takes_everything_down(world: World) -> None:
    """Actions in flight are cancelled, not waited for."""
    world.fleet.polls_to_load = 10**9
    world.start(specs(2, 2))
    await world.worker("decode-1", WorkerState.LOADING)
    assert await world.end() is Phase.STOPPING


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ({"cannot_start": {"decode-0": "no CPU left"}}, "decode-0: no CPU left"),
        ({"refusals": {("decode-0", "prefill-0"): "dtype differs: ours 'f32', peer's 'bf16'"}}, "decode-0: refused by prefill-0: dtype"),
    ],
)
async def test_worker_that_cannot_serve_fails_the_deployment(world: World, script: dict[str, object], detail: str) -> None:
    """Before it was ever ready a deployment is all or nothing, and the last report says why."""
    for name, value in script.items():
        setattr(world.fleet, name, value)
    world.start(specs(1, 1))
    assert world.run is not None
    assert await asyncio.wait_for(world.run, 5) is Phase.FAILED
    assert world.reports[-1].phase is Phase.FAILED
    assert world.reports[-1].detail.startswith(detail)


async def test_no_token_through_a_worker_fails_the_deployment(world: World) -> None:
    """A worker that loads and links but does not serve is found by the canary."""
    world.router.broken = {"prefill-1"}
    world.start(specs(2, 1))
    assert world.run is not None
    assert await asyncio.wait_for(world.run, 5) is Phase.FAILED
    assert world.reports[-1].detail == "prefill-1: no token through prefill-1 and decode-0: prefill-1 gave no token"
    ready = {worker.worker_id for worker in world.reports[-1].workers if worker.state is WorkerState.READY}
    assert ready == {"prefill-0", "decode-0"}


async def test_dead_router_is_started_again_with_the_fleet(world: World) -> None:
    """A router that is killed comes back, is given the fleet, and the deployment is ready again."""
    world.start(specs(1, 1))
    await world.phase(Phase.READY)
    world.process.kill()
    await world.phase(Phase.DEGRADED)
    await world.phase(Phase.READY)
    assert world.process.starts == 2
    assert world.router.view is not None and len(world.router.view.workers) == 2


async def test_restarted_engine_is_linked_and_proven_again(world: World) -> None:
    """A new incarnation gets peers, a canary, and its peers get it."""
    world.start(specs(1, 1))
    await world.phase(Phase.READY)
    canaries = len(world.router.canaries)
    world.fleet.restart("decode-0")
    await world.phase(Phase.DEGRADED)
    await world.phase(Phase.READY)
    assert len(world.router.canaries) == canaries + 1
    incarnation = world.fleet.workers["decode-0"].incarnation
    assert incarnation in {entry.incarnation for entry in world.fleet.workers["prefill-0"].peers}


async def test_failed_engine_is_reported_and_advertised(world: World) -> None:
    """What is left goes on; the router learns which worker is gone."""
    world.start(specs(2, 1))
    await world.phase(Phase.READY)
    world.fleet.fail("prefill-1", "its engine ended with signal 9")
    report = await world.phase(Phase.DEGRADED)
    assert report.detail == "prefill-1 is failed"

    world.fleet.restart("prefill-0")  # its canary waits for the router to have the newest fleet
    await world.worker("prefill-0", WorkerState.READY)
    assert world.router.view is not None
    assert [(row.worker_id, row.detail) for row in world.router.view.workers if row.state is WorkerState.FAILED] == [
        ("prefill-1", "its engine ended with signal 9; starts again after 1 s (failure 1 in a row)")
    ]


async def test_dead_engine_is_replaced_and_proven(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unaided, as often as it dies; the new incarnation serves a token before it is advertised."""
    monkeypatch.setattr(restarts, "BACKOFF_S", (0.01,))
    world.start(specs(1, 2))
    await world.phase(Phase.READY)
    for _ in range(3):
        before = world.fleet.workers["decode-1"].incarnation
        canaries = len(world.router.canaries)
        world.fleet.fail("decode-1", "its engine ended with signal 9")
        await world.worker("decode-1", WorkerState.FAILED)
        await world.phase(Phase.READY)
        assert world.fleet.workers["decode-1"].incarnation != before
        assert ("prefill-0", "decode-1") in world.router.canaries[canaries:]


async def test_stuck_engine_is_stopped_before_it_is_started_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers nothing is first not advertised, then ended; until then its peers keep what it could still write to."""
    monkeypatch.setattr(restarts, "BACKOFF_S", (0.5,))
    world.start(specs(1, 1), lost_s=0.4)
    await world.phase(Phase.READY)
    stuck = world.fleet.workers["decode-0"]
    stuck.is_silent = True
    await world.worker("decode-0", WorkerState.FAILED)
    await asyncio.sleep(0.1)
    assert stuck.incarnation in {entry.incarnation for entry in world.fleet.workers["prefill-0"].peers}
    await world.phase(Phase.READY)
    assert world.fleet.stopped == ["decode-0"]
    assert stuck.incarnation not in {entry.incarnation for entry in world.fleet.workers["prefill-0"].peers}


async def test_replacement_that_cannot_start_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deployment goes on with what is left, says why, and is whole again once there is room."""
    monkeypatch.setattr(restarts, "BACKOFF_S", (0.01,))
    world.start(specs(1, 2))
    await world.phase(Phase.READY)
    world.fleet.cannot_start["decode-0"] = "no node has room"
    world.fleet.fail("decode-0", "killed")
    report = await world.reported(lambda report: any("no node has room" in w.detail and "failure 3" in w.detail for w in report.workers))
    assert report.phase is Phase.DEGRADED
    del world.fleet.cannot_start["decode-0"]
    await world.phase(Phase.READY)


async def test_silent_engine_is_not_advertised_until_it_proves_itself(world: World) -> None:
    """An engine loop that stops answering is taken out, and comes back through a canary."""
    world.start(specs(1, 1))
    await world.phase(Phase.READY)
    world.fleet.workers["decode-0"].is_silent = True
    await world.worker("decode-0", WorkerState.WARMING)
    world.fleet.workers["decode-0"].is_silent = False
    await world.phase(Phase.READY)
    assert len(world.router.canaries) >= 2


async def test_unreachable_fleet_leaves_a_ready_deployment_alone(world: World) -> None:
    """With Ray's head away nothing is restarted, failed or unadvertised."""
    world.start(specs(1, 1))
    report = await world.phase(Phase.READY)
    world.fleet.is_unreachable = True
    await asyncio.sleep(0.1)
    assert world.reports[-1] == report
