"""Where an engine listens, as it tells the processes around it: a file that is written after the port is bound.

Standard library only.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.fleet.files import read_json, write_json


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A bound private server; it answers only once the model is loaded."""

    incarnation: str
    host: str
    port: int
    pid: int
    """of the API server"""


def publish(path: Path, endpoint: Endpoint) -> None:
    write_json(path, asdict(endpoint))


def read_endpoint(path: Path, incarnation: str) -> Endpoint | None:
    """Return what this incarnation published, or None; another incarnation's file does not count."""
    value = read_json(path)
    if value is None or value.get("incarnation") != incarnation:
        return None
    return Endpoint(incarnation, str(value["host"]), int(str(value["port"])), int(str(value["pid"])))
