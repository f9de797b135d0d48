"""The state folder and what is written there."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import Config, load_config
from pdserve.control.folder import RouterBinding, StateFolder
from pdserve.control.state import DeploymentReport, Phase, RouterReport, WorkerReport, read_report, write_report
from pdserve.types import Role, WorkerState


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "run" / "default")


def prepared(folder: StateFolder, config: Config) -> None:
    with folder.locked() as lock_fd:
        assert lock_fd is not None
        folder.prepare(config)


def report() -> DeploymentReport:
    worker = WorkerReport(
        "decode-0",
        Role.DECODE,
        WorkerState.WARMING,
        "ab",
        12,
        "http://127.0.0.1:1",
        "canary",
        {WorkerState.PENDING: 0.0, WorkerState.WARMING: 4.5},
    )
    return DeploymentReport("default", "m", Phase.STARTING, 11, 1.5e9, None, "", RouterReport(13, "http://127.0.0.1:2", 1), (worker,))


def test_settings_come_back_as_they_went_in(folder: StateFolder) -> None:
    """The processes of a deployment see the settings that `up` checked, also those from flags."""
    config = load_config(None, {"prefill.count": 3, "engine.env": {"A": "1"}, "router.port": 0})
    prepared(folder, config)
    assert folder.config() == config


def test_secret_is_private_and_new_for_each_deployment(folder: StateFolder) -> None:
    """Only the owner may read it, and a later deployment does not reuse it."""
    prepared(folder, Config())
    first = folder.secret()
    assert stat.S_IMODE((folder.path / "secret").stat().st_mode) == 0o600
    prepared(folder, Config())
    assert len(first) == 64 and int(first, 16) and folder.secret() != first


def test_preparing_forgets_the_last_deployment(folder: StateFolder) -> None:
    """No reader takes an old report, an old port or old logs for new ones."""
    prepared(folder, Config())
    write_report(folder.report_path, report())
    folder.write_binding(RouterBinding(1, 2, 3))
    folder.log_path("router").write_text("old")
    prepared(folder, Config())
    assert (read_report(folder.report_path), folder.binding(), list(folder.logs.iterdir())) == (None, None, [])


def test_clearing_keeps_logs_only(folder: StateFolder) -> None:
    """After `down` the logs are there for a post-mortem; clearing twice is no error."""
    prepared(folder, Config())
    folder.log_path("router").write_text("why")
    folder.clear()
    folder.clear()
    assert not folder.is_prepared
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "logs"]


def test_lock_is_held_once(folder: StateFolder) -> None:
    """A second holder is told so, and gets it after the first let go."""
    with folder.locked() as first, folder.locked() as second:
        assert first is not None and second is None
    with folder.locked() as third:
        assert third is not None


def test_child_that_was_given_the_lock_keeps_it(folder: StateFolder) -> None:
    """`up` may close its own descriptor: the controller's keeps everyone else out until it ends."""
    with folder.locked() as lock_fd:
        assert lock_fd is not None
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock_fd,))
    with child:
        with folder.locked() as other:
            assert other is None
        child.communicate(b"\n")
    with folder.locked() as other:
        assert other is not None


def test_report_survives_the_disk(folder: StateFolder) -> None:
    """What the controller published is what the command line reads, in order of the states."""
    folder.logs.mkdir(parents=True)
    write_report(folder.report_path, report())
    found = read_report(folder.report_path)
    assert found == report() and found is not None
    assert list(found.workers[0].entered_s) == [WorkerState.PENDING, WorkerState.WARMING]


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 1}', b'{"schema": 99, "phase": "unheard-of"}'])
def test_unreadable_report_is_none(folder: StateFolder, content: bytes) -> None:
    """A file that another version wrote is no deployment, and no traceback."""
    folder.logs.mkdir(parents=True)
    folder.report_path.write_bytes(content)
    assert read_report(folder.report_path) is None
