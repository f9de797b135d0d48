"""Keeper of the Ray that a deployment started for itself: `python -m pdserve.fleet.ray_head`.

Owns all of that Ray's processes as their subreaper: starts them, starts the GCS again when it dies, and on SIGTERM, or when the raylet
dies, ends them all and removes session folder and records. It outlives the command that started it. Standard library only.
"""

import argparse
import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pdserve.fleet import processes
from pdserve.fleet.files import DeploymentFiles, read_json, write_json
from pdserve.fleet.incarnation import Census, new_scratch
from pdserve.fleet.processes import ProcessId
from pdserve.fleet.ray_settings import head_command, head_environment

_START_TIMEOUT_S = 120.0
_STOP_GRACE_S = 2.0
"""raylet and GCS wait for each other when both are asked; nothing of theirs is worth a longer wait"""
_TICK_S = 0.5
_GCS_RETRY_S = 2.0

log = logging.getLogger("pdserve.fleet.ray_head")


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A running Ray of ours, as a driver needs to know it."""

    address: str
    """``host:port`` of the GCS"""
    token_file: str
    incarnation: str
    keeper: ProcessId
    raylet: ProcessId


def read_cluster(files: DeploymentFiles) -> RayCluster | None:
    """Return what the keeper published, or None."""
    value: Any = read_json(files.ray_cluster)
    if value is None:
        return None
    keeper, raylet = (ProcessId(int(value[role]["pid"]), int(value[role]["start_ticks"])) for role in ("keeper", "raylet"))
    return RayCluster(str(value["address"]), str(value["token_file"]), str(value["incarnation"]), keeper, raylet)


class _Stopping(Exception):
    """SIGTERM arrived."""


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopping


@dataclass(frozen=True, slots=True)
class _Gcs:
    """The GCS process and how to start it again."""

    pid: int
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str


def keep(files: DeploymentFiles, incarnation: str, *, gpus: bool) -> None:
    """Start Ray, publish it, keep it until SIGTERM or until its raylet is gone; leaves nothing."""
    processes.become_subreaper()
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    scratch = new_scratch(incarnation)
    census = Census(files.ray_incarnation, incarnation, scratch)
    try:
        gcs, raylet = _start(files, incarnation, scratch, gpus=gpus)
        _watch(gcs, raylet, census)
        log.error("the raylet is gone; ending the rest")
    except _Stopping:
        log.info("asked to stop")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        cleaned = census.close(_STOP_GRACE_S, _reap)
        if not cleaned.survivors:
            shutil.rmtree(files.ray_dir, ignore_errors=True)
        log.info("ended %d processes", len(cleaned.processes))


def _start(files: DeploymentFiles, incarnation: str, scratch: Path, *, gpus: bool) -> tuple[_Gcs, int]:
    token_file = files.ray_dir / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32), encoding="ascii")
    storage_dir = files.ray_dir / "gcs"
    storage_dir.mkdir()
    environment = head_environment(os.environ, token_file, storage_dir)
    starter = subprocess.Popen(head_command(scratch, gpus=gpus), stdin=subprocess.DEVNULL, env=environment)
    code = starter.wait(_START_TIMEOUT_S)
    if code != 0:
        raise SystemExit(f"ray start ended with code {code}")
    address = (scratch / "ray_current_cluster").read_text(encoding="utf-8").strip()
    gcs = _record_gcs(_descendant("gcs_server").pid, address.rpartition(":")[2])
    raylet = _descendant("raylet")
    write_json(files.ray_cluster, asdict(RayCluster(address, str(token_file), incarnation, processes.current(), raylet)))
    log.info("ray answers at %s", address)
    return gcs, raylet.pid


def _watch(gcs: _Gcs, raylet: int, census: Census) -> None:
    """Return when the raylet is dead."""
    restart_at_s = time.monotonic()
    while True:
        dead = _reap()
        if raylet in dead:
            return
        if gcs.pid in dead:
            time.sleep(max(0.0, restart_at_s - time.monotonic()))
            gcs = _restart(gcs)
            log.warning("the GCS was gone; started it again, pid %d", gcs.pid)
            restart_at_s = time.monotonic() + _GCS_RETRY_S
        census.tick()
        time.sleep(_TICK_S)


def _restart(gcs: _Gcs) -> _Gcs:
    process = subprocess.Popen(gcs.argv, stdin=subprocess.DEVNULL, env=gcs.env, cwd=gcs.folder)
    return _Gcs(process.pid, gcs.argv, gcs.env, gcs.folder)


def _reap() -> set[int]:
    """Collect dead children, own and adopted; returns their pids."""
    dead: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            dead.add(pid)
    return dead


def _descendant(name: str) -> ProcessId:
    """Return the descendant that runs this program."""
    for process in processes.descendants([os.getpid()]):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/exe").readlink().name == name:
                return process
    raise SystemExit(f"ray start left no {name}")


def _record_gcs(pid: int, port: str) -> _Gcs:
    """Read from /proc how to start the GCS again, with the port it chose in place of 0."""

    def words(name: str) -> list[str]:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8").rstrip("\0").split("\0")

    argv = tuple("--gcs_server_port=" + port if word.startswith("--gcs_server_port=") else word for word in words("cmdline"))
    return _Gcs(pid, argv, dict(word.split("=", 1) for word in words("environ")), str(Path(f"/proc/{pid}/cwd").readlink()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pdserve.fleet.ray_head", description="Keeps a local Ray for one deployment.")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args(arguments)
    os.chdir("/")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    keep(DeploymentFiles(options.state_dir), os.environ[processes.MARK], gpus=options.gpus)


if __name__ == "__main__":
    main()
