"""`pdserve up` and `down` over real engines: it serves, it says how it is, and whatever is killed, nothing of it stays."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from pdserve.config import DEFAULT_MODEL
from pdserve.control.folder import StateFolder
from pdserve.control.processes import Kind, find
from pdserve.control.state import DeploymentReport, read_report
from pdserve.models.catalog import resolve
from pdserve.types import WorkerState

pytestmark = pytest.mark.engine

PDSERVE = (sys.executable, "-m", "pdserve")
READY_LIMIT_S = 240
MAX_RESIDENT_BYTES = 14e9
SHM = Path("/dev/shm")
SCRATCH = re.compile(r"/tmp/(?:pdserve-|ray/session_)[^/:, ]+")
T = TypeVar("T")


@dataclass
class Site:
    """One deployment, and everything that was ever seen of it: a mark in the environment finds processes that nobody claims."""

    home: Path
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    processes: set[psutil.Process] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    scratch: set[Path] = field(default_factory=set)
    """session folders, of Ray and of engines, that a process of it was told of"""

    def __post_init__(self) -> None:
        self.folder = StateFolder(self.home / "run" / "default")
        self.shm_before = set(SHM.iterdir())
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "RAY_"))}
        self.environment = {**kept, "PDSERVE_HOME": str(self.home), "UP_DOWN_TEST": self.mark, "COLUMNS": "150"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            (*PDSERVE, *arguments), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.home
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command to its end; returns exit code, stdout and stderr."""
        with self.start(*arguments) as command:
            output, errors = command.communicate(timeout=READY_LIMIT_S + 60)
        return command.returncode, output, errors

    def status(self) -> tuple[int, dict[str, Any]]:
        code, output, _ = self.run("status", "--json")
        return code, json.loads(output)

    def look(self) -> set[psutil.Process]:
        """Remember what the deployment has now: processes, listening ports, session folders; returns the processes."""
        alive = {
            process for process in psutil.process_iter() if any(self.mark in word or str(self.home) in word for word in _words(process))
        }
        self.processes |= alive
        for process in alive:
            self.ports |= {one.laddr.port for one in _connections(process) if one.status == psutil.CONN_LISTEN}
            self.scratch |= {Path(found) for word in _words(process) for found in SCRATCH.findall(word)}
        return alive

    def report(self, wanted: Callable[[DeploymentReport], bool], limit_s: float) -> DeploymentReport:
        """Wait for a report of the controller."""
        return until(lambda: report if (report := read_report(self.folder.report_path)) is not None and wanted(report) else None, limit_s)

    def assert_nothing_left(self) -> None:
        """No process, no listening port, nothing new in /dev/shm, no session folder, no state but logs."""
        self.look()
        assert [process for process in self.processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
        assert [port for port in sorted(self.ports) if _listens(port)] == []
        # Waits for what others on this machine hold for a moment; what is lost stays.
        until(lambda: True if set(SHM.iterdir()) <= self.shm_before else None, 30)
        assert [folder for folder in self.scratch if folder.exists()] == []
        assert {path.name for path in self.folder.path.iterdir()} <= {"lock", "logs", "state.json"}


def until(look: Callable[[], T | None], limit_s: float, pause_s: float = 0.1) -> T:
    """Wait until `look` returns something."""
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        if (found := look()) is not None:
            return found
        time.sleep(pause_s)
    raise AssertionError(f"not within {limit_s} s")


def _words(process: psutil.Process) -> list[str]:
    """Return what a process was started with: its command line and its environment."""
    try:
        return [*process.cmdline(), *process.environ().values()]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return []


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def named(processes: set[psutil.Process], title: str) -> list[psutil.Process]:
    """Return the processes with this title."""
    return [process for process in processes if process.is_running() and " ".join(process.cmdline()).startswith(title)]


@pytest.fixture(scope="module")
def model() -> str:
    return str(resolve(DEFAULT_MODEL).path)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site that is taken down whatever a test does to it, and must then be empty."""
    site = Site(tmp_path)
    yield site
    site.run("down")
    site.assert_nothing_left()


def engines_run(report: DeploymentReport) -> bool:
    return all(worker.state is WorkerState.LOADING for worker in report.workers)


def test_interrupt_while_engines_load_leaves_nothing(site: Site, model: str) -> None:
    """Ctrl-C in the longest phase of `up`: engines, their cores, actors, Ray and router all go."""
    with site.start("up", "--model", model, "--port", "0") as up:
        site.report(engines_run, 60)
        until(lambda: True if len(named(site.look(), "VLLM::EngineCore")) == 2 else None, 120, pause_s=1)
        up.send_signal(signal.SIGINT)
        _, errors = up.communicate(timeout=60)
    assert (up.returncode, errors) == (1, "")
    site.assert_nothing_left()


def test_killed_actor_fails_the_start_and_leaves_nothing(site: Site, model: str) -> None:
    """A worker whose actor is killed while it loads ends `up` with one line, and with it all other workers."""
    with site.start("up", "--model", model, "--port", "0", "--detach") as up:
        site.report(engines_run, 60)
        named(site.look(), "ray::WorkerActor")[0].kill()
        _, errors = up.communicate(timeout=60)
    assert (up.returncode, errors.count("\n")) == (1, 1)
    assert errors.startswith(("prefill-0: ", "decode-0: "))
    site.assert_nothing_left()


def test_deployment_serves_replaces_its_dead_and_leaves_nothing(site: Site, model: str) -> None:
    """One engine set from ready to gone: a request, `status`, a killed router, API server, controller and core, then `down`."""
    started_s = time.monotonic()
    code, output, errors = site.run("up", "--model", model, "--port", "0", "--detach")
    assert (code, errors) == (0, "")
    assert time.monotonic() - started_s < READY_LIMIT_S
    alive = site.look()
    assert site.scratch
    assert sum(process.memory_info().rss for process in alive) < MAX_RESIDENT_BYTES

    code, status = site.status()
    assert (code, status["is_ready"], status["phase"]) == (0, True, "ready")
    assert f"curl -s {status['url']}/v1/chat/completions" in output
    workers = {worker["worker_id"]: worker for worker in status["workers"]}
    assert set(workers) == {"prefill-0", "decode-0"}
    assert all(worker["state"] == "ready" and worker["incarnation"] and worker["rss_mb"] > 500 for worker in workers.values())
    assert {worker["port"] for worker in workers.values()} < site.ports
    assert_served(status["url"], status["model"], "disaggregated")

    (router,) = find(Kind.ROUTER, site.folder.path)
    router.kill()
    report = site.report(lambda report: report.phase == "ready" and report.router.starts == 2, 30)
    assert report.router.url == status["url"]
    assert_served(status["url"], status["model"], "disaggregated")

    prefill, decode = (psutil.Process(workers[worker_id]["pid"]) for worker_id in ("prefill-0", "decode-0"))
    prefill_core, decode_core = (named(set(engine.children(recursive=True)), "VLLM::EngineCore")[0] for engine in (prefill, decode))
    prefill.kill()
    report = site.report(lambda report: states(report)["prefill-0"] is WorkerState.FAILED, 30)
    assert (report.phase, report.detail, states(report)["decode-0"]) == ("degraded", "prefill-0 is failed", WorkerState.READY)
    until(lambda: True if not prefill_core.is_running() else None, 30)
    assert_served(status["url"], status["model"], "local")
    report = site.report(lambda report: report.phase == "ready", READY_LIMIT_S)
    assert {worker.worker_id: worker.incarnation for worker in report.workers} != {
        worker_id: worker["incarnation"] for worker_id, worker in workers.items()
    }
    assert_served(status["url"], status["model"], "disaggregated")
    site.look()

    (controller,) = find(Kind.CONTROLLER, site.folder.path)
    controller.kill()
    controller.wait(10)
    code, status = site.status()
    assert (code, status["controller_pid"]) == (1, None)
    assert_served(status["url"], status["model"], "disaggregated")
    decode_core.kill()

    code, output, errors = site.run("down")
    assert (code, errors) == (0, "")
    site.assert_nothing_left()
    assert site.run("status")[0] == 2


def states(report: DeploymentReport) -> dict[str, WorkerState]:
    return {worker.worker_id: worker.state for worker in report.workers}


def assert_served(url: str, model: str, path: str) -> None:
    """Ask for the capital of France; the router's metrics must say by which path it was served."""

    def served() -> float:
        lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        wanted = [line for line in lines if line.startswith("pdserve_requests_total{") and f'path="{path}"' in line and "chat" in line]
        return sum(float(line.rpartition(" ")[2]) for line in wanted)

    before = served()
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    # The receipt follows the answer: it waits for what the engines recorded.
    until(lambda: True if served() == before + 1 else None, 15)
