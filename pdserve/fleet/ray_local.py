"""Starts, finds and stops the Ray that a deployment runs for itself. Blocking; call it from a thread.

Owns nothing that lives: the keeper (`ray_head`) owns the processes. Never touches a Ray that this deployment did not start. Does not
import Ray.
"""

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable

from pdserve.errors import FleetError
from pdserve.fleet import processes
from pdserve.fleet.files import DeploymentFiles
from pdserve.fleet.incarnation import Cleaned, clean_up
from pdserve.fleet.processes import MARK
from pdserve.fleet.ray_head import RayCluster, read_cluster

_START_TIMEOUT_S = 150.0
_STOP_TIMEOUT_S = 40.0
_POLL_S = 0.1
_GRACE_S = 5.0
_LOG_TAIL_BYTES = 2000


def find_ray(files: DeploymentFiles) -> RayCluster | None:
    """Return the Ray that this deployment started, if it lives; its keeper and its GCS need not."""
    cluster = read_cluster(files)
    return cluster if cluster is not None and processes.is_alive(cluster.raylet) else None


def start_ray(files: DeploymentFiles, *, gpus: bool, is_cancelled: Callable[[], bool] = lambda: False) -> RayCluster:
    """Start a local Ray and return once it answers; what a dead one left is cleaned first.

    Raises:
        FleetError: it did not come up, or it was cancelled; nothing of it is left.
    """
    _clean(files)
    files.ray_dir.mkdir(parents=True, mode=0o700)
    log_file = files.log("ray")
    log_file.parent.mkdir(parents=True, exist_ok=True)
    incarnation = secrets.token_hex(8)
    keeper = _spawn_keeper(files, incarnation, gpus=gpus)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not _has_ended(keeper) and time.monotonic() < deadline_s and not is_cancelled():
        cluster = read_cluster(files)
        if cluster is not None:
            return cluster
        time.sleep(_POLL_S)
    processes.end_all(lambda: processes.marked(incarnation), _GRACE_S, reap=lambda: _has_ended(keeper))
    _clean(files)
    raise FleetError("ray", f"did not start; {log_file} ends with: {_tail(files)}")


def stop_ray(files: DeploymentFiles) -> Cleaned:
    """End the deployment's own Ray with everything under it; removes its session folder and records. Idempotent."""
    cluster = read_cluster(files)
    if cluster is not None:
        processes.send(cluster.keeper, signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while processes.is_alive(cluster.keeper) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        _has_ended(cluster.keeper.pid)
    return _clean(files)


def _spawn_keeper(files: DeploymentFiles, incarnation: str, *, gpus: bool) -> int:
    """Start the keeper in a session of its own, to outlive this process; returns its pid."""
    command = [sys.executable, "-m", "pdserve.fleet.ray_head", "--state-dir", str(files.state_dir), *(["--gpus"] if gpus else [])]
    environment = {**os.environ, MARK: incarnation}
    with files.log("ray").open("ab") as log:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
        ]
        return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)


def _has_ended(keeper: int) -> bool:
    """Collect the keeper if it is this process's dead child; False while it runs or if it is another's."""
    try:
        return os.waitpid(keeper, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _clean(files: DeploymentFiles) -> Cleaned:
    cleaned = clean_up(files.ray_incarnation, _GRACE_S)
    if cleaned.survivors:
        raise FleetError("ray", f"processes {[process.pid for process in cleaned.survivors]} cannot be ended; see dmesg")
    shutil.rmtree(files.ray_dir, ignore_errors=True)
    return cleaned


def _tail(files: DeploymentFiles) -> str:
    content = files.log("ray").read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", errors="replace")
    return " | ".join(content.splitlines()[-5:])
