"""`up`, `status` and `down` as real processes over engines in memory: signals, exit codes, and what is left."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from pdserve.control.folder import StateFolder
from pdserve.control.processes import Kind, end, find
from pdserve.control.state import DeploymentReport, Phase, read_report

PDSERVE = (sys.executable, str(Path(__file__).with_name("fake_pdserve.py")))
LIMIT_S = 90.0
T = TypeVar("T")


class Home:
    """One user's folder, and commands run with it."""

    def __init__(self, path: Path) -> None:
        self.folder = StateFolder(path / "run" / "default")
        self.model = path / "tiny"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"dtype": "float32"}')
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "RAY_"))}
        self.environment = {**clean, "PDSERVE_HOME": str(path), "COLUMNS": "200"}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            (*PDSERVE, *arguments), env={**self.environment, **environment}, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def up(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `up` on a port that the system chooses."""
        return self.run("up", "--model", str(self.model), "--port", "0", "--force", *arguments, **environment)

    def foreground(self, **environment: str) -> subprocess.Popen[str]:
        """Start `up` in the foreground."""
        return subprocess.Popen(
            (*PDSERVE, "up", "--model", str(self.model), "--port", "0", "--force"),
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, wanted: Callable[[DeploymentReport], bool]) -> DeploymentReport:
        """Wait for a report."""
        return until(lambda: report if (report := read_report(self.folder.report_path)) is not None and wanted(report) else None)

    def controller(self) -> psutil.Process:
        (process,) = find(Kind.CONTROLLER, self.folder.path)
        return process

    def processes(self) -> list[psutil.Process]:
        return [process for kind in Kind for process in find(kind, self.folder.path)]


def until(look: Callable[[], T | None]) -> T:
    """Wait until `look` returns something."""
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s:
        if (found := look()) is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("it never came")


def is_ready(report: DeploymentReport) -> bool:
    return report.phase is Phase.READY


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home in which no test may leave a process."""
    home = Home(tmp_path)
    yield home
    left = home.processes()
    end(left, 1)
    assert left == []


def test_detached_deployment_is_there_until_down(home: Home) -> None:
    """`up --detach` returns when ready, `status` says so, a second `up` refuses, `down` leaves nothing but logs."""
    up = home.up("--detach", "--prefill", "2")
    assert (up.returncode, up.stderr) == (0, "")
    status = home.run("status", "--json")
    found = json.loads(status.stdout)
    assert (status.returncode, found["is_ready"], found["phase"], found["name"], found["model"]) == (0, True, "ready", "default", "tiny")
    assert [(worker["worker_id"], worker["role"], worker["state"]) for worker in found["workers"]] == [
        ("prefill-0", "prefill", "ready"),
        ("prefill-1", "prefill", "ready"),
        ("decode-0", "decode", "ready"),
    ]
    assert f"curl -s {found['url']}/v1/chat/completions" in up.stdout
    with socket.create_connection(("127.0.0.1", int(found["url"].rpartition(":")[2])), timeout=5):
        pass

    second = home.up("--detach")
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr == f"--name: 'default': is up already at {found['url']}: stop it with `pdserve down`, or choose another --name\n"
    assert [process.pid for process in home.processes()] == [found["controller_pid"], found["router_pid"]]

    down = home.run("down")
    assert (down.returncode, down.stdout, down.stderr) == (0, "default is down\n", "")
    gone = home.run("status")
    assert (gone.returncode, gone.stderr) == (2, "--name: 'default': no such deployment here; `pdserve up` starts one\n")
    assert sorted(path.name for path in home.folder.path.iterdir()) == ["lock", "logs"]


@pytest.fixture(scope="module")
def detached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, str]]:
    """A detached deployment that tests only look at, and what its `up` printed."""
    home = Home(tmp_path_factory.mktemp("home"))
    up = home.up("--detach", FAKE_POLLS_TO_LOAD="12")
    yield home, up.stdout
    home.run("down")
    assert home.processes() == []


def test_files_of_a_deployment_are_private(detached: tuple[Home, str]) -> None:
    """Nobody else on the host reads the secret, and it is in no log and on no command line."""
    home, _ = detached
    secret = home.folder.secret()
    assert stat.S_IMODE(home.folder.logs.stat().st_mode) == 0o700
    assert all(secret not in path.read_text() for path in home.folder.logs.iterdir())
    assert all(secret not in word for process in home.processes() for word in process.cmdline())


def test_progress_is_one_line_a_change_without_a_terminal(detached: tuple[Home, str]) -> None:
    """Each worker's states come in order, with seconds."""
    _, output = detached
    steps = [line.split()[2:] for line in output.splitlines() if line.strip()[:1].isdigit()]
    shown = [state for worker, state in steps if worker == "decode-0"]
    assert shown == [state for state in ("pending", "placed", "loading", "warming", "ready") if state in shown]
    assert {"loading", "ready"} <= set(shown)


def test_file_limit_is_raised_and_logged(detached: tuple[Home, str]) -> None:
    """Both long-running processes may open as many files as the system allows."""
    home, _ = detached
    for process in home.processes():
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard
    for name in ("controller", "router"):
        line = json.loads(home.folder.log_path(name).read_text().splitlines()[0])
        assert (line["event"], line["process"], line["open_files"]) == ("started", name, hard)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_takes_a_ready_deployment_down(home: Home, number: signal.Signals) -> None:
    """Ctrl-C is the normal end of a foreground `up`; the controller does not get the signal, yet ends."""
    with home.foreground() as up:
        home.until(is_ready)
        until(lambda: (up.stdout is not None and "Ctrl-C stops it" in up.stdout.readline()) or None)
        up.send_signal(number)
        _, stderr = up.communicate(timeout=LIMIT_S)
    assert (up.returncode, stderr) == (0, "")
    assert home.processes() == []
    assert not home.folder.is_prepared


def test_interrupt_while_loading_takes_everything_down(home: Home) -> None:
    """It never served, so the exit code says that it failed."""
    with home.foreground(FAKE_POLLS_TO_LOAD="100000") as up:
        home.until(lambda report: report.router.url is not None and all(worker.state == "loading" for worker in report.workers))
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=LIMIT_S)
    assert up.returncode == 1
    assert home.processes() == []


def test_killed_up_takes_everything_down(home: Home) -> None:
    """SIGKILL of a foreground `up` cannot be handled there: the controller notices the closed pipe."""
    with home.foreground() as up:
        home.until(is_ready)
        up.kill()
        up.communicate(timeout=LIMIT_S)
    until(lambda: True if home.processes() == [] else None)
    assert not home.folder.is_prepared


def test_deployment_that_fails_leaves_one_line_and_nothing_else(home: Home) -> None:
    """The reason of the worker that failed is what the operator reads; `down` then forgets the report."""
    up = home.up("--detach", FAKE_CANNOT_START="no CPU left")
    assert (up.returncode, up.stderr) == (1, f"decode-0: no CPU left (logs: {home.folder.logs})\n")
    assert home.processes() == []
    status = home.run("status", "--json")
    assert (status.returncode, json.loads(status.stdout)["phase"]) == (1, "failed")
    assert sorted(path.name for path in home.folder.path.iterdir()) == ["lock", "logs", "state.json"]
    assert home.run("down").returncode == 0
    assert home.run("status").returncode == 2


def test_serving_outlives_a_killed_controller(home: Home) -> None:
    """Router and engines go on; `status` tells, `up` refuses, `down` ends them."""
    home.up("--detach")
    url = home.until(is_ready).router.url
    home.controller().kill()
    until(lambda: True if find(Kind.CONTROLLER, home.folder.path) == [] else None)
    status = home.run("status", "--json")
    found = json.loads(status.stdout)
    assert (status.returncode, found["is_ready"], found["controller_pid"], found["url"]) == (1, False, None, url)
    assert "the controller is gone" in found["detail"]
    assert url is not None
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5):
        pass
    assert home.up("--detach").returncode == 2
    down = home.run("down")
    assert (down.returncode, down.stdout) == (0, "default is down; 1 process was left without a controller\n")


def test_killed_controller_ends_a_foreground_up(home: Home) -> None:
    """Nobody watches the workers any more, so `up` cleans after it and says so."""
    with home.foreground() as up:
        home.until(is_ready)
        home.controller().kill()
        _, stderr = up.communicate(timeout=LIMIT_S)
    assert (up.returncode, stderr) == (1, f"controller: ended by itself; see {home.folder.log_path('controller')}\n")
    assert home.processes() == []


def test_killed_router_comes_back_on_its_port(home: Home) -> None:
    """Clients keep their URL."""
    home.up("--detach")
    first = home.until(is_ready)
    (router,) = find(Kind.ROUTER, home.folder.path)
    router.kill()
    second = home.until(lambda report: is_ready(report) and report.router.starts == 2)
    assert (second.router.url, second.router.pid != first.router.pid) == (first.router.url, True)
    home.run("down")


def test_killed_host_leaves_no_obstacle(home: Home) -> None:
    """After a power cut the folder still holds a report, but nothing runs: `up` starts afresh."""
    home.up("--detach")
    for process in home.processes():
        process.kill()
    until(lambda: True if home.processes() == [] else None)
    assert home.up("--detach").returncode == 0
    home.run("down")


def test_two_deployments_run_side_by_side(home: Home) -> None:
    """A name is all that separates them; `down` of one leaves the other."""
    assert home.up("--detach").returncode == 0
    assert home.up("--detach", "--name", "other").returncode == 0
    other = StateFolder(home.folder.path.with_name("other"))
    assert home.run("down").returncode == 0
    assert home.run("status", "--name", "other").returncode == 0
    assert home.run("down", PDSERVE_NAME="other").returncode == 0
    assert [process for kind in Kind for process in find(kind, other.path)] == []
