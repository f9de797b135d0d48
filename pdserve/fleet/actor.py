"""The actor that holds a worker's place on Ray. Thin: starts the launcher, answers for it, cleans up after it. No policy, no restarts.

Owns the launcher's stdin: when this process dies, however it does, the pipe closes and the launcher ends the engine. Does not import Ray
unless it must ask for the node's address.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pdserve.errors import FleetError
from pdserve.fleet.endpoint import Endpoint, read_endpoint
from pdserve.fleet.engine_command import EngineCommand
from pdserve.fleet.files import DeploymentFiles
from pdserve.fleet.incarnation import clean_up
from pdserve.fleet.launcher import EndCause, EngineExit, read_exit, write_exit
from pdserve.fleet.processes import MARK
from pdserve.ports import WorkerSpec

ENGINE_GRACE_S = 10.0
"""time an engine has to end by itself after SIGTERM"""
STOP_LIMIT_S = 2 * ENGINE_GRACE_S
_LEFTOVER_GRACE_S = 3.0
_TAIL_BYTES = 4000


class EngineState(StrEnum):
    """What the actor's one engine is doing, in order."""

    ABSENT = "absent"
    """not started yet"""
    RUNNING = "running"
    FAILED = "failed"
    """ended without being asked to"""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """An actor's answer about its worker."""

    spec: WorkerSpec
    incarnation: str
    host: str
    """address that the engine binds"""
    cpus: int
    """of this node"""
    state: EngineState
    endpoint: Endpoint | None
    """None until the engine has bound its port"""
    detail: str
    """why it ended, if it did"""
    log_tail: str
    """last lines that this incarnation wrote to the log, if it failed"""


class WorkerActor:
    """One worker's actor. Methods may be called at once from several threads.

    Args:
        spec: the worker; its role is carried, not used.
        incarnation: random hex of this start.
        state_dir: the deployment's state folder; made on this node if it is not there.
        host: address for the engine to bind; None asks Ray for this node's.
    """

    def __init__(self, spec: WorkerSpec, incarnation: str, state_dir: Path, host: str | None) -> None:
        self._spec = spec
        self._incarnation = incarnation
        files = DeploymentFiles(state_dir)
        self._files = files.worker(spec.worker_id)
        self._log_file = files.log(spec.worker_id)
        self._host = host or _node_address()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def launch(self, command: EngineCommand) -> WorkerReport:
        """Start the engine after cleaning what an earlier incarnation of this worker left here. A second call changes nothing.

        Raises:
            FleetError: something of the earlier incarnation cannot be ended.
        """
        with self._lock:
            if self._launcher is None:
                self._clean_predecessor()
                self._launcher = self._start_launcher(command)
                threading.Thread(target=self._attend, args=(self._launcher,), name="attend-launcher", daemon=True).start()
        return self.describe()

    def describe(self) -> WorkerReport:
        """Return the worker's state now."""
        ended = read_exit(self._files, self._incarnation)
        state = self._state(ended)
        return WorkerReport(
            spec=self._spec,
            incarnation=self._incarnation,
            host=self._host,
            cpus=os.cpu_count() or 1,
            state=state,
            endpoint=read_endpoint(self._files.endpoint, self._incarnation),
            detail="" if ended is None else ended.detail,
            log_tail=self._tail() if state is EngineState.FAILED else "",
        )

    def stop(self) -> WorkerReport:
        """End the engine and everything it started; returns when nothing of it is left, within `STOP_LIMIT_S`. Idempotent."""
        with self._lock:
            launcher = self._launcher
        if launcher is not None and not self._ended.is_set():
            launcher.send_signal(signal.SIGTERM)
            if not self._ended.wait(STOP_LIMIT_S):
                launcher.kill()
                self._ended.wait()
        return self.describe()

    def _state(self, ended: EngineExit | None) -> EngineState:
        if self._launcher is None:
            return EngineState.ABSENT
        if ended is None or not self._ended.is_set():
            return EngineState.RUNNING
        return EngineState.STOPPED if ended.cause is EndCause.STOPPED else EngineState.FAILED

    def _clean_predecessor(self) -> None:
        self._files.folder.mkdir(parents=True, exist_ok=True)
        cleaned = clean_up(self._files.incarnation, _LEFTOVER_GRACE_S)
        if cleaned.survivors:
            pids = [process.pid for process in cleaned.survivors]
            raise FleetError(self._spec.worker_id, f"processes {pids} of an earlier start cannot be ended; see dmesg")
        self._files.endpoint.unlink(missing_ok=True)
        self._files.exit.unlink(missing_ok=True)

    def _start_launcher(self, command: EngineCommand) -> subprocess.Popen[bytes]:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        launcher = (sys.executable, "-m", "pdserve.fleet.launcher", "--folder", str(self._files.folder), "--grace-s", str(ENGINE_GRACE_S))
        with self._log_file.open("ab") as log:
            self._log_start_bytes = log.tell()
            return subprocess.Popen(
                (*launcher, "--", *command.argv),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **command.env, MARK: self._incarnation},
            )

    def _attend(self, launcher: subprocess.Popen[bytes]) -> None:
        """Wait for the launcher's end; if it was killed, do its work."""
        launcher.wait()
        if launcher.stdin is not None:
            launcher.stdin.close()
        clean_up(self._files.incarnation, _LEFTOVER_GRACE_S)
        if read_exit(self._files, self._incarnation) is None:
            write_exit(self._files, EngineExit(self._incarnation, EndCause.LAUNCHER_KILLED, "its launcher was killed"))
        self._ended.set()

    def _tail(self) -> str:
        with contextlib.suppress(OSError), self._log_file.open("rb") as log:
            log.seek(max(self._log_start_bytes, self._log_file.stat().st_size - _TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace")
        return ""


def _node_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
