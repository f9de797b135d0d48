"""The life line between `up` and its controller."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli import launch as launch_module
from pdserve.cli.launch import Launch, launch
from pdserve.control.folder import StateFolder

READ = "import os, sys; fd = int(sys.argv[sys.argv.index('--lifeline-fd') + 1]); got = os.read(fd, 99); print(got, flush=True); "
"""a controller that prints what comes out of its life line"""


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path)
    folder.logs.mkdir()
    return folder


@pytest.fixture
def started() -> Iterator[list[Launch]]:
    """Launches of a test; none of their processes may outlive it."""
    launches: list[Launch] = []
    yield launches
    for one in launches:
        assert one.process.poll() is not None


def start(folder: StateFolder, started: list[Launch], script: str) -> Launch:
    with folder.locked() as lock_fd:
        assert lock_fd is not None
        started.append(launch(folder, (sys.executable, "-c", script), lock_fd))
    return started[-1]


def printed(folder: StateFolder) -> str:
    return folder.log_path("controller").read_text()


def test_closed_life_line_reads_as_end(folder: StateFolder, started: list[Launch]) -> None:
    """A controller that is stopped sees the end of the pipe, ends by itself, and keeps the lock until then."""
    one = start(folder, started, READ + "sys.exit(1)")
    with folder.locked() as lock_fd:
        assert lock_fd is None
    assert one.stop() is True
    assert printed(folder) == "b''\n"


def test_controller_that_was_let_go_is_told_so(folder: StateFolder, started: list[Launch]) -> None:
    """It reads the word before the end, and a later stop only waits for it."""
    one = start(folder, started, READ)
    one.let_go()
    one.let_go()
    assert one.process.wait(10) == 0
    assert one.stop() is True
    assert printed(folder) == "b'detach'\n"


def test_stuck_controller_is_killed(folder: StateFolder, started: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller learns that the cleaning is left to it."""
    monkeypatch.setattr(launch_module, "STOP_LIMIT_S", 0.2)
    one = start(folder, started, READ + "import time; time.sleep(60)")
    assert one.stop() is False


def test_killed_controller_leaves_the_cleaning(folder: StateFolder, started: list[Launch]) -> None:
    """A controller that died by a signal did not clean."""
    one = start(folder, started, READ)
    one.process.kill()
    assert one.stop() is False


def test_command_that_cannot_start_leaves_no_pipe(folder: StateFolder) -> None:
    """Nothing to hold on to, and no descriptor lost."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError), folder.locked() as lock_fd:
        assert lock_fd is not None
        launch(folder, ("/no/such/program",), lock_fd)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
