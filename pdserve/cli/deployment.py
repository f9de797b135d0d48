"""Which deployment a command is about, and its settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.config import Config, load_config
from pdserve.control.folder import StateFolder
from pdserve.control.processes import Kind, find
from pdserve.control.state import read_report
from pdserve.errors import ConfigError

Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the deployment; one of a name runs at a time.")]
FLAGS = {
    "name": "--name",
    "prefill.count": "--prefill",
    "decode.count": "--decode",
    "model": "--model",
    "router.host": "--host",
    "router.port": "--port",
}
"""settings that have a flag"""


def settings(path: Path | None, given: Mapping[str, Any]) -> Config:
    """Read the settings of a command.

    Args:
        path: YAML file, or None.
        given: what flags set, by dotted name; None was not given.

    Raises:
        ConfigError: naming the flag where the value came from one.
    """
    try:
        return load_config(path, given)
    except ConfigError as error:
        if given.get(error.field) is None:
            raise
        raise ConfigError(FLAGS[error.field], error.value, error.fix) from error


def existing(name: str | None) -> StateFolder:
    """Return the folder of a deployment of which something is there. Raises `ConfigError` if nothing is.

    Args:
        name: from the command line; None takes the name that `up` would use.
    """
    deployment = settings(None, {"name": name}).name
    folder = StateFolder.of(deployment)
    if read_report(folder.report_path) is None and not any(find(kind, folder.path) for kind in Kind):
        raise ConfigError(FLAGS["name"], deployment, "no such deployment here; `pdserve up` starts one")
    return folder
