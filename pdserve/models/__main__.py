"""`python -m pdserve.models [NAME]`: makes a built-in model ready ahead of time, with a progress bar, and prints its folder."""

import sys

from rich.console import Console
from rich.progress import Progress

from pdserve.config import DEFAULT_MODEL
from pdserve.errors import ConfigError
from pdserve.models.catalog import resolve


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, or 2 for a model that cannot be had."""
    name = arguments[0] if arguments else DEFAULT_MODEL
    try:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"model {name}", total=1)
            model = resolve(name, lambda stage, fraction: progress.update(task, description=f"{stage} {name}", completed=fraction))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{model.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
