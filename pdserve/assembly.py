"""Builds the object graph from a `Config`; the only place that names concrete classes of several rooms.

What pulls in Ray or the server is imported by the function that needs it: `pdserve status` must not wait for either.
"""

import asyncio
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.clock import MonotonicClock
from pdserve.config import Config
from pdserve.control.agent_client import HttpAgents
from pdserve.control.folder import RouterBinding, StateFolder
from pdserve.control.loop import Controller
from pdserve.control.plan import Policy
from pdserve.control.processes import Kind, arguments, end, find
from pdserve.control.router_client import HttpRouter
from pdserve.control.router_process import STOP_S, LocalRouterProcess
from pdserve.control.state import write_report
from pdserve.control.workers import Limits
from pdserve.ports import Fleet, WorkerSpec
from pdserve.types import Role


def process_command(kind: Kind, folder: StateFolder) -> tuple[str, ...]:
    """Return the command line of a process of the deployment."""
    return (sys.executable, "-m", "pdserve", *arguments(kind, folder.path))


def worker_specs(config: Config) -> tuple[WorkerSpec, ...]:
    """Return the workers of a deployment."""
    return tuple(
        WorkerSpec(f"{role}-{number}", role, pool.tensor_parallel_size)
        for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
        for number in range(pool.count)
    )


def resolve_model(config: Config, on_progress: Callable[[str, float], None]) -> Config:
    """Return the settings with the model's folder and served name filled in. Raises `ConfigError`."""
    from pdserve.models.catalog import resolve
    from pdserve.models.heads import require_divisible

    model = resolve(config.model, on_progress)
    for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        require_divisible(model.path, f"{role}.tensor_parallel_size", pool.tensor_parallel_size)
    return config.model_copy(update={"model": str(model.path), "served_model_name": config.served_model_name or model.served_name})


@asynccontextmanager
async def controller(folder: StateFolder) -> AsyncIterator[Controller]:
    """Build the controller of the deployment in `folder`; nothing is started before it runs."""
    config, secret = folder.config(), folder.secret()
    async with HttpAgents(secret) as agents, HttpRouter(lambda: admin_url(folder, config.router.admin_host), secret) as router:
        yield Controller(
            name=config.name,
            model=served_name(config),
            controller_pid=os.getpid(),
            started_unix_s=time.time(),
            specs=worker_specs(config),
            policy=Policy(Limits(load_s=config.engine.load_timeout_s)),
            fleet=_fleet(folder),
            agents=agents,
            router=router,
            router_process=LocalRouterProcess(folder, process_command(Kind.ROUTER, folder), local_host(config.router.host)),
            publish=lambda report: write_report(folder.report_path, report),
            clock=MonotonicClock(),
        )


async def run_router(folder: StateFolder) -> None:
    """Serve until SIGTERM; a router that is started again takes the port that clients know. Raises `ConfigError`."""
    from pdserve.server.serve import serve

    config = folder.config()
    before = folder.binding()
    if before is not None:
        config = config.model_copy(update={"router": config.router.model_copy(update={"port": before.port})})

    def publish(port: int, admin_port: int) -> None:
        folder.write_binding(RouterBinding(os.getpid(), port, admin_port))

    await serve(config, folder.secret(), clock=MonotonicClock(), on_bound=publish)


def engine_commands(config: Config, folder: StateFolder) -> tuple[str, ...]:
    """Return one shell line for each engine as it would be started on this host; the secret is in none. The model must be resolved."""
    from pdserve.fleet.engine_command import EnginePlace, ServedModel, cpus_per_rank, engine_command
    from pdserve.fleet.ray_fleet import installed_platform

    model = ServedModel(Path(config.model), served_name(config))
    cpus = cpus_per_rank(config, os.cpu_count() or 1)

    def line(spec: WorkerSpec) -> str:
        endpoint_file = folder.path / "workers" / spec.worker_id / "endpoint.json"
        place = EnginePlace("INCARNATION", "127.0.0.1", endpoint_file, installed_platform(), cpus)
        return shlex.join(engine_command(config, spec, model, "", place).argv)

    return tuple(line(spec) for spec in worker_specs(config))


def end_leftovers(folder: StateFolder) -> int:
    """End every process of a deployment but its controller, and remove what they held. Blocking, idempotent.

    Returns:
        How many processes of this host had to be ended.

    Raises:
        FleetError: something cannot be ended, or a cluster that was joined does not answer.
    """
    from pdserve.fleet.leftovers import clean_leftovers

    routers = find(Kind.ROUTER, folder.path)
    end(routers, STOP_S)
    if folder.is_prepared and joins_cluster(folder.config()):
        asyncio.run(_fleet(folder).close())
    return len(routers) + len(clean_leftovers(folder.path).processes)


def joins_cluster(config: Config) -> bool:
    """Return whether the workers run on a Ray that someone else started, so maybe on other hosts."""
    return bool(config.ray.address or os.environ.get("RAY_ADDRESS"))


def local_host(host: str) -> str:
    """Return the address at which this machine's clients reach a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def served_name(config: Config) -> str:
    """Return the name clients use; the model must be resolved."""
    return config.served_model_name or Path(config.model).name


def _fleet(folder: StateFolder) -> Fleet:
    from pdserve.fleet.engine_command import ServedModel
    from pdserve.fleet.ray_fleet import RayFleet

    config = folder.config()
    return RayFleet(config, folder.path, folder.secret(), ServedModel(Path(config.model), served_name(config)))


def admin_url(folder: StateFolder, host: str) -> str | None:
    """Return where the router's admin port is, None if no router was ever bound."""
    binding = folder.binding()
    host = local_host(host)
    return f"http://{f'[{host}]' if ':' in host else host}:{binding.admin_port}" if binding is not None else None
