"""A worker's folder with launchers of fake engines in it, and the proof that nothing of them stays."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.fleet.endpoint import Endpoint, read_endpoint
from pdserve.fleet.files import DeploymentFiles, WorkerFiles
from pdserve.fleet.incarnation import read_record
from pdserve.fleet.processes import MARK, marked
from pdserve.fleet.shm import entries

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
TREE = 4
"""processes of an incarnation: launcher, engine, core, worker"""
LIMIT_S = 20.0


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.02)


@dataclass
class FakeWorker:
    """One worker's files, and launchers of fake engines in them."""

    state_dir: Path
    worker_id: str = "prefill-0"
    incarnations: list[str] = field(default_factory=list)
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def files(self) -> WorkerFiles:
        return DeploymentFiles(self.state_dir).worker(self.worker_id)

    @property
    def incarnation(self) -> str:
        """The latest one."""
        return self.incarnations[-1]

    @property
    def endpoint(self) -> Endpoint:
        endpoint = read_endpoint(self.files.endpoint, self.incarnation)
        assert endpoint is not None
        return endpoint

    def new_incarnation(self) -> str:
        self.incarnations.append(secrets.token_hex(8))
        return self.incarnation

    def engine_argv(self, *flags: str) -> tuple[str, ...]:
        return (sys.executable, str(FAKE_ENGINE), str(self.files.endpoint), *flags)

    def launch(self, *argv: str, grace_s: float = 0.5) -> "subprocess.Popen[bytes]":
        """Start a launcher around a command, its stdin a pipe of this process."""
        self.files.folder.mkdir(parents=True, exist_ok=True)
        launcher = subprocess.Popen(
            (sys.executable, "-m", "pdserve.fleet.launcher", "--folder", str(self.files.folder), "--grace-s", str(grace_s), "--", *argv),
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, MARK: self.new_incarnation()},
        )
        self.launchers.append(launcher)
        return launcher

    def wait_running(self) -> None:
        """Wait until the whole tree runs and the record knows its shared memory."""
        wait_until(lambda: len(marked(self.incarnation)) == TREE, f"{TREE} processes of {self.incarnation}")
        wait_until(lambda: self.shared_memory(), "shared memory in the record")

    def shared_memory(self) -> tuple[str, ...]:
        record = read_record(self.files.incarnation)
        return () if record is None else record.shared_memory

    def pid_of(self, role: str) -> int:
        """Return the pid of the ``core`` or ``worker`` process."""
        for process in marked(self.incarnation):
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                if role.encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"):
                    return process.pid
        raise AssertionError(f"no {role} process")

    def assert_nothing_left(self, shared_memory: tuple[str, ...]) -> None:
        """No process of any incarnation, no name, no record, no scratch folder."""
        for incarnation in self.incarnations:
            assert marked(incarnation) == frozenset()
            assert list(Path("/tmp").glob(f"pdserve-{incarnation[:6]}-*")) == []
        assert not set(shared_memory) & entries()
        assert not self.files.incarnation.exists()
