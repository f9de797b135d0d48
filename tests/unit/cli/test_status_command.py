"""What `status` makes of a report and of the processes that are there."""

import json
import os
import time
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.control.folder import StateFolder
from pdserve.control.state import DeploymentReport, Phase, RouterReport, WorkerReport, write_report
from pdserve.types import Role, WorkerState

NO_PID = 2**22 + 1
"""above any pid that Linux gives"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    for name in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    folder = StateFolder.of("default")
    folder.logs.mkdir(parents=True)
    return folder


def report(phase: Phase) -> DeploymentReport:
    def worker(worker_id: str, role: Role, pid: int | None, state: WorkerState) -> WorkerReport:
        return WorkerReport(worker_id, role, state, "62edb96fe6d6f9fb", pid, "http://127.0.0.1:4321", "so [it] is", {state: 5.0})

    workers = (
        worker("prefill-0", Role.PREFILL, os.getpid(), WorkerState.READY),
        worker("decode-0", Role.DECODE, NO_PID, WorkerState.FAILED),
    )
    return DeploymentReport("default", "tiny", phase, 1, time.time() - 65, 40.0, "was so", RouterReport(2, "http://h:1", 1), workers)


def test_json_joins_report_and_processes(folder: StateFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is measured now, ages are counted from the report, and what is gone is null."""
    write_report(folder.report_path, report(Phase.READY))
    assert main.run(["status", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["is_ready"], found["controller_pid"], found["router_pid"], found["url"]) == (False, None, None, "http://h:1")
    prefill, decode = found["workers"]
    assert (prefill["port"], prefill["incarnation"], prefill["rss_mb"] > 10) == (4321, "62edb96fe6d6f9fb", True)
    assert 59 < prefill["since_s"] < 70
    assert (decode["pid"], decode["rss_mb"]) == (NO_PID, None)


def test_table_fits_a_narrow_terminal(folder: StateFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each worker is one line of 80 columns; what there is to say about it follows, brackets and all."""
    monkeypatch.setenv("COLUMNS", "80")
    write_report(folder.report_path, report(Phase.DEGRADED))
    assert main.run(["status"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (prefill,) = (line for line in lines if "prefill-0" in line and not line.startswith("prefill-0:"))
    assert all(word in prefill for word in ("prefill", "ready", "62edb96f", str(os.getpid()), "4321"))
    assert "prefill-0: so [it] is" in lines


def test_gone_controller_is_told(folder: StateFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that says ready is not believed without its author; one that failed needs none."""
    write_report(folder.report_path, report(Phase.READY))
    main.run(["status"])
    assert "the controller is gone" in capsys.readouterr().out
    write_report(folder.report_path, report(Phase.FAILED))
    main.run(["status"])
    assert "default is failed was so" in capsys.readouterr().out
