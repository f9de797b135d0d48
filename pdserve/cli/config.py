"""`pdserve config`: what is in force, whether a file is right, and what can be set."""

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from pdserve.config import Config, check_access, load_config

app = typer.Typer(no_args_is_help=True, help="Show, check and describe settings.")

File = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML settings.")]


@app.command()
def show(config: File = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the settings in force: defaults, then the file, then `PDSERVE_*`."""
    settings = load_config(config).model_dump(mode="json")
    typer.echo(json.dumps(settings, indent=2) if as_json else yaml.safe_dump(settings, sort_keys=False).rstrip())


@app.command()
def validate(file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML settings.")]) -> None:
    """Check a file; exit code 2 and one line name what is wrong."""
    check_access(load_config(file).router)
    typer.echo(f"{file}: valid")


@app.command()
def schema() -> None:
    """Print the JSON schema of all settings."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))
