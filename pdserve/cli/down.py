"""`pdserve down`: ends a deployment, also one whose controller was killed."""

from rich.console import Console

from pdserve import assembly
from pdserve.cli.deployment import Name, existing
from pdserve.cli.launch import STOP_LIMIT_S
from pdserve.control.processes import Kind, end, find


def down(name: Name = None) -> int:
    """Stop a deployment: router, engines, and Ray if it started it."""
    folder = existing(name)
    console = Console()
    with console.status("stopping"):
        end(find(Kind.CONTROLLER, folder.path), STOP_LIMIT_S)
        ended = assembly.end_leftovers(folder)
        folder.clear()
    count = "1 process was" if ended == 1 else f"{ended} processes were"
    note = f"; {count} left without a controller" if ended else ""
    console.print(f"{folder.path.name} is down{note}", highlight=False)
    return 0
