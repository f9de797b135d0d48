"""Where a deployment keeps what its processes must tell each other, and how such a file is written.

Owns names and the atomic write. Standard library only: the launcher imports it. Knows nothing of what the files mean.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """One worker's folder under the state folder, on the node that runs the worker."""

    folder: Path

    @property
    def incarnation(self) -> Path:
        """Written by the launcher: what must be cleaned if it dies."""
        return self.folder / "incarnation.json"

    @property
    def endpoint(self) -> Path:
        """Written by the engine once its port is bound."""
        return self.folder / "endpoint.json"

    @property
    def exit(self) -> Path:
        """Written by the launcher after the last process is gone."""
        return self.folder / "exit.json"


@dataclass(frozen=True, slots=True)
class DeploymentFiles:
    """Layout of a state folder, ``home()/run/<name>``, as far as the fleet uses it."""

    state_dir: Path

    @property
    def ray_dir(self) -> Path:
        """Token, GCS storage and records of the Ray that this deployment started."""
        return self.state_dir / "ray"

    @property
    def ray_cluster(self) -> Path:
        """Written by the Ray head's keeper once Ray answers."""
        return self.ray_dir / "cluster.json"

    @property
    def ray_incarnation(self) -> Path:
        return self.ray_dir / "incarnation.json"

    @property
    def workers_dir(self) -> Path:
        return self.state_dir / "workers"

    def worker(self, worker_id: str) -> WorkerFiles:
        return WorkerFiles(self.workers_dir / worker_id)

    def log(self, name: str) -> Path:
        """Return the log file of a worker, or of ``ray``."""
        return self.state_dir / "logs" / f"{name}.log"


def write_json(path: Path, value: object) -> None:
    """Replace a file in one step; a reader sees the old or the new content, never a part. Readable by the owner alone."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
    partial.replace(path)


def read_json(path: Path) -> dict[str, object] | None:
    """Return what `write_json` wrote, or None if there is no such file or it holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None
