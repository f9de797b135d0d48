"""Cleans what a dead deployment left on this host, from its state folder alone: no connection to Ray, no controller.

Touches only what the deployment's own records name. Knows nothing of why they were left.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import FleetError
from pdserve.fleet.files import DeploymentFiles
from pdserve.fleet.incarnation import Cleaned, clean_up
from pdserve.fleet.ray_local import stop_ray

_ENGINE_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was found and removed."""

    processes: tuple[int, ...]
    shared_memory: tuple[str, ...]

    @property
    def any(self) -> bool:
        return bool(self.processes or self.shared_memory)


def clean_leftovers(state_dir: Path) -> Leftovers:
    """End every process of a deployment on this host, remove its `/dev/shm` names, its Ray and the records of both. Blocking, ≤ 60 s.

    Logs, the secret and what others keep in the folder stay. Idempotent: finds nothing the second time.

    Raises:
        FleetError: a process cannot be ended.
    """
    files = DeploymentFiles(state_dir)
    folders = sorted(files.workers_dir.iterdir()) if files.workers_dir.is_dir() else []
    with ThreadPoolExecutor(max(1, len(folders))) as threads:
        cleaned = list(threads.map(_clean_worker, (files.worker(folder.name).incarnation for folder in folders)))
    stuck = [process.pid for one in cleaned for process in one.survivors]
    if stuck:
        raise FleetError("workers", f"processes {stuck} cannot be ended; see dmesg")
    cleaned.append(stop_ray(files))
    shutil.rmtree(files.workers_dir, ignore_errors=True)
    return Leftovers(
        processes=tuple(sorted(process.pid for one in cleaned for process in one.processes)),
        shared_memory=tuple(sorted(name for one in cleaned for name in one.shared_memory)),
    )


def _clean_worker(record: Path) -> Cleaned:
    return clean_up(record, _ENGINE_GRACE_S)
