"""`pdserve controller` (hidden): the controller process.

Its life line is a pipe whose other end `up` holds. End of file on it means that `up` is gone, by whatever signal, and so is the deployment;
a byte before that end means that `up` let go on purpose.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import structlog
import typer

from pdserve import assembly
from pdserve.cli.process import start_process
from pdserve.control.folder import StateFolder
from pdserve.control.state import Phase

LET_GO = b"detach"


def controller(
    state_dir: Annotated[Path, typer.Option(help="State folder that `up` prepared.")],
    lifeline_fd: Annotated[int, typer.Option(help="Read end of the pipe that `up` holds.")],
    lock_fd: Annotated[int, typer.Option(help="Descriptor that holds the folder's lock.")],
) -> int:
    """Run a deployment until it is told to stop, then leave nothing of it."""
    for descriptor in (lifeline_fd, lock_fd):
        os.set_inheritable(descriptor, False)
    folder = StateFolder(state_dir)
    start_process("controller")
    try:
        phase = asyncio.run(_run(folder, lifeline_fd))
    finally:
        assembly.end_leftovers(folder)
    folder.clear(keep_report=phase is Phase.FAILED)
    return 1 if phase is Phase.FAILED else 0


async def _run(folder: StateFolder, lifeline_fd: int) -> Phase:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    log = structlog.get_logger("pdserve.controller")

    def on_signal(number: signal.Signals) -> None:
        log.info("stopping", reason=number.name)
        stop.set()

    def on_lifeline() -> None:
        loop.remove_reader(lifeline_fd)
        if os.read(lifeline_fd, len(LET_GO)) != LET_GO:
            log.info("stopping", reason="the command that started it is gone")
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_reader(lifeline_fd, on_lifeline)
    async with assembly.controller(folder) as control:
        return await control.run(stop)
