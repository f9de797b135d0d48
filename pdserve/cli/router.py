"""`pdserve router` (hidden): the router process."""

from pathlib import Path
from typing import Annotated

import typer
import uvloop

from pdserve import assembly
from pdserve.cli.process import start_process
from pdserve.control.folder import StateFolder


def router(state_dir: Annotated[Path, typer.Option(help="State folder that `up` prepared.")]) -> None:
    """Serve the public API of a deployment."""
    start_process("router", handles_prompts=True)
    uvloop.run(assembly.run_router(StateFolder(state_dir)))
