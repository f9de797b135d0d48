"""Runs the control loop: observe, plan, apply, publish, until told to stop; then takes everything down.

Does what `plan` says and decides nothing but order: outcomes are collected before anything is observed, so no plan is made from a view that is
older than an action it believes done.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from pdserve.clock import Clock
from pdserve.control.actions import Action, PutFleet, PutPeers, ReplaceWorker, RunCanary, StartRouter, StartWorker
from pdserve.control.observation import Observation, Outcome
from pdserve.control.plan import ControlState, Policy, initial_state, plan
from pdserve.control.router_process import RouterProcess
from pdserve.control.state import DeploymentReport, Phase, RouterReport, WorkerReport
from pdserve.control.workers import ENDED, Worker
from pdserve.errors import FleetError, WorkerLost
from pdserve.ports import AgentControl, AgentStatus, Fleet, RouterControl, WorkerSpec
from pdserve.types import FleetSnapshot, WorkerSnapshot, WorkerState

FLEET_TIMEOUT_S = 10.0
"""a fleet that says nothing for so long is unknown in this tick"""


class Controller:
    """The one controller of a deployment.

    Args:
        name: of the deployment.
        model: served name.
        controller_pid: process id to publish.
        started_unix_s: wall clock, to publish.
        specs: workers to run.
        policy: what the plan keeps to.
        publish: takes each new report; must not block for long.
        tick_s: longest wait between two ticks; an action that ends cuts it short.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        controller_pid: int,
        started_unix_s: float,
        specs: Sequence[WorkerSpec],
        policy: Policy,
        fleet: Fleet,
        agents: AgentControl,
        router: RouterControl,
        router_process: RouterProcess,
        publish: Callable[[DeploymentReport], None],
        clock: Clock,
        tick_s: float = 0.5,
    ) -> None:
        self._name = name
        self._model = model
        self._controller_pid = controller_pid
        self._started_unix_s = started_unix_s
        self._policy = policy
        self._fleet = fleet
        self._agents = agents
        self._router = router
        self._router_process = router_process
        self._publish = publish
        self._clock = clock
        self._tick_s = tick_s
        self._start_s = clock.now_s()
        self._state = initial_state(specs, self._start_s)
        self._tasks: set[asyncio.Task[Outcome]] = set()
        self._wake = asyncio.Event()
        self._published: DeploymentReport | None = None
        self._log = structlog.get_logger("pdserve.control")

    async def run(self, stop: asyncio.Event) -> Phase:
        """Tick until `stop` is set or the deployment failed; then stop router and fleet.

        Returns:
            STOPPING if it was told to stop, FAILED if it could not become ready.

        Cancelling it, or an error of its own, takes everything down as `stop` does.
        """
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set() and self._state.phase is not Phase.FAILED:
                self._wake.clear()
                await self._tick()
                waking = asyncio.create_task(self._wake.wait())
                await asyncio.wait({stopping, waking}, timeout=self._tick_s, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
        finally:
            stopping.cancel()
            await self._take_down()
        return self._state.phase if self._state.phase is Phase.FAILED else Phase.STOPPING

    async def _tick(self) -> None:
        outcomes = tuple(task.result() for task in self._tasks if task.done())
        self._tasks = {task for task in self._tasks if not task.done()}
        fleet = await self._ask_fleet()
        seen = Observation(
            now_s=self._clock.now_s(),
            fleet=fleet,
            agents=await self._ask_agents(fleet),
            router=self._router_process.seen(),
            outcomes=outcomes,
        )
        before = self._state
        self._state, actions = plan(before, seen, self._policy)
        self._note(before, outcomes)
        self._report(self._state.phase, seen)
        for action in actions:
            task = asyncio.create_task(self._apply(action), name=action.subject)
            task.add_done_callback(lambda _: self._wake.set())
            self._tasks.add(task)

    async def _ask_fleet(self) -> FleetSnapshot | None:
        if all(worker.state is WorkerState.PENDING for worker in self._state.workers):
            return None
        try:
            async with asyncio.timeout(FLEET_TIMEOUT_S):
                return await self._fleet.snapshot()
        except (FleetError, TimeoutError) as error:
            self._log.warning("the fleet could not be asked", error=str(error) or "timeout")
            return None

    async def _ask_agents(self, fleet: FleetSnapshot | None) -> dict[str, AgentStatus]:
        known = fleet.workers if fleet is not None else tuple(w.placed for w in self._state.workers if w.placed is not None)
        asked = [row for row in known if row.url and row.state not in ENDED]
        answers = await asyncio.gather(*(self._ask_agent(row) for row in asked))
        return {row.worker_id: answer for row, answer in zip(asked, answers, strict=True) if answer is not None}

    async def _ask_agent(self, row: WorkerSnapshot) -> AgentStatus | None:
        try:
            return await self._agents.status(row.url)
        except WorkerLost:
            return None

    async def _apply(self, action: Action) -> Outcome:
        try:
            match action:
                case StartWorker(spec):
                    await self._fleet.start(spec)
                case ReplaceWorker(spec):
                    await self._fleet.stop(spec.worker_id)
                    await self._fleet.start(spec)
                case StartRouter():
                    self._router_process.start()
                case PutPeers():
                    await self._agents.put_peers(action.url, action.version, action.peers)
                case PutFleet(_, snapshot):
                    await self._router.put_fleet(snapshot)
                case RunCanary():
                    await self._router.canary(action.prefill_worker, action.decode_worker)
        except FleetError as error:
            return Outcome(action, error.reason)
        except (WorkerLost, OSError) as error:
            return Outcome(action, str(error))
        return Outcome(action)

    async def _take_down(self) -> None:
        if self._state.phase is not Phase.FAILED:
            self._report(Phase.STOPPING, Observation(self._clock.now_s(), router=self._router_process.seen()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._router_process.stop()
        await self._fleet.close()

    def _note(self, before: ControlState, outcomes: Sequence[Outcome]) -> None:
        """Log what changed."""
        for outcome in outcomes:
            if outcome.error is not None:
                self._log.warning("action failed", action=outcome.action.subject, error=outcome.error)
        for old, new in zip(before.workers, self._state.workers, strict=True):
            if (old.state, old.detail) != (new.state, new.detail):
                self._log.info("worker", worker=new.worker_id, state=new.state, incarnation=new.incarnation, detail=new.detail)
        if before.phase is not self._state.phase:
            self._log.info("deployment", phase=self._state.phase, detail=self._state.detail)

    def _report(self, phase: Phase, seen: Observation) -> None:
        state = self._state
        report = DeploymentReport(
            name=self._name,
            model=self._model,
            phase=phase,
            controller_pid=self._controller_pid,
            started_unix_s=self._started_unix_s,
            ready_s=None if state.ready_at_s is None else round(state.ready_at_s - self._start_s, 2),
            detail=state.detail,
            router=RouterReport(seen.router.pid, seen.router.url, seen.router.starts),
            workers=tuple(self._worker_report(worker) for worker in state.workers),
        )
        if report != self._published:
            self._publish(report)
            self._published = report

    def _worker_report(self, worker: Worker) -> WorkerReport:
        return WorkerReport(
            worker_id=worker.worker_id,
            role=worker.spec.role,
            state=worker.state,
            incarnation=worker.incarnation,
            pid=worker.placed.pid if worker.placed is not None else None,
            url=worker.placed.url if worker.placed is not None else "",
            detail=worker.detail,
            entered_s={state: round(at_s - self._start_s, 2) for state, at_s in worker.entered_s},
        )
