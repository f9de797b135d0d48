"""`pdserve` as it is, but for its engines: they are in memory. For tests of processes, signals and exit codes.

`FAKE_POLLS_TO_LOAD` makes engines load longer, `FAKE_CANNOT_START` names a worker that does not start.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve import assembly
from pdserve.cli.main import main
from pdserve.clock import MonotonicClock
from pdserve.control.folder import RouterBinding, StateFolder
from pdserve.control.loop import Controller
from pdserve.control.plan import Policy
from pdserve.control.processes import Kind, arguments
from pdserve.control.router_process import LocalRouterProcess
from pdserve.control.state import write_report
from pdserve.control.workers import Limits
from pdserve.testing.fleet import FakeAgents, FakeFleet, FakeRouter


def process_command(kind: Kind, folder: StateFolder) -> tuple[str, ...]:
    return (sys.executable, __file__, *arguments(kind, folder.path))


@asynccontextmanager
async def controller(folder: StateFolder) -> AsyncIterator[Controller]:
    config = folder.config()
    reason = os.environ.get("FAKE_CANNOT_START")
    fleet = FakeFleet(
        polls_to_load=int(os.environ.get("FAKE_POLLS_TO_LOAD", "1")), cannot_start={"decode-0": reason} if reason is not None else {}
    )
    yield Controller(
        name=config.name,
        model=assembly.served_name(config),
        controller_pid=os.getpid(),
        started_unix_s=time.time(),
        specs=assembly.worker_specs(config),
        policy=Policy(Limits(load_s=60)),
        fleet=fleet,
        agents=FakeAgents(fleet),
        router=FakeRouter(fleet),
        router_process=LocalRouterProcess(folder, process_command(Kind.ROUTER, folder), config.router.host),
        publish=lambda report: write_report(folder.report_path, report),
        clock=MonotonicClock(),
        tick_s=0.05,
    )


async def run_router(folder: StateFolder) -> None:
    before = folder.binding()
    with socket.create_server(("127.0.0.1", before.port if before is not None else folder.config().router.port)) as server:
        folder.write_binding(RouterBinding(os.getpid(), server.getsockname()[1], 1))
        await asyncio.sleep(120)


if __name__ == "__main__":
    assembly.process_command = process_command
    assembly.controller = controller
    assembly.run_router = run_router
    main()
