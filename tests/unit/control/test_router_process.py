"""The router as a real child process."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdserve.control import router_process
from pdserve.control.folder import StateFolder
from pdserve.control.observation import RouterSeen
from pdserve.control.processes import Kind, arguments, end, find, names_folder, tree_rss_bytes
from pdserve.control.router_process import LocalRouterProcess

SERVE = """
import os, pathlib, sys, time
from pdserve.control.folder import RouterBinding, StateFolder
StateFolder(pathlib.Path(sys.argv[-1])).write_binding(RouterBinding(os.getpid(), 8123, 8124))
time.sleep(60)
"""
FAIL = "import sys; sys.stderr.write('{}\\nrouter.port: 8000: taken\\n'); sys.exit(2)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVE


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[StateFolder]:
    """A state folder none of whose routers may outlive the test."""
    folder = StateFolder(tmp_path)
    folder.logs.mkdir()
    yield folder
    left = find(Kind.ROUTER, folder.path)
    end(left, 1)
    assert left == []


def router(folder: StateFolder, script: str, host: str = "127.0.0.1") -> LocalRouterProcess:
    return LocalRouterProcess(folder, (sys.executable, "-c", script, *arguments(Kind.ROUTER, folder.path)), host)


async def until(process: LocalRouterProcess, wanted: Callable[[RouterSeen], bool]) -> RouterSeen:
    for _ in range(1000):
        if wanted(seen := process.seen()):
            return seen
        await asyncio.sleep(0.01)
    raise AssertionError(f"still {process.seen()}")


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:8123"), ("::1", "http://[::1]:8123")])
async def test_router_is_seen_once_it_has_bound(folder: StateFolder, host: str, url: str) -> None:
    """It runs in a session of its own and is found by its command line; its URL is known once it published its ports."""
    process = router(folder, SERVE, host)
    assert process.seen() == RouterSeen()
    process.start()
    seen = await until(process, lambda seen: seen.url is not None)
    assert (seen.starts, seen.running, seen.url) == (1, True, url)
    assert seen.pid is not None and os.getsid(seen.pid) == seen.pid
    assert [found.pid for found in find(Kind.ROUTER, folder.path)] == [seen.pid]
    assert (tree_rss_bytes(seen.pid) or 0) > 1e6
    await process.stop()
    assert process.seen().running is False
    assert tree_rss_bytes(seen.pid) is None


async def test_killed_router_is_seen_and_started_again(folder: StateFolder) -> None:
    """The binding of the dead process is not taken for that of the new one."""
    process = router(folder, SERVE)
    process.start()
    first = await until(process, lambda seen: seen.url is not None)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    await until(process, lambda seen: not seen.running)
    process.start()
    assert process.seen().url is None
    second = await until(process, lambda seen: seen.url is not None)
    assert second.starts == 2 and second.pid != first.pid
    await process.stop()


async def test_last_line_of_a_failed_router_is_kept(folder: StateFolder) -> None:
    """The operator reads why it ended without opening the log."""
    process = router(folder, FAIL)
    process.start()
    seen = await until(process, lambda seen: not seen.running)
    assert seen.detail == "router.port: 8000: taken"


async def test_router_that_ignores_sigterm_is_killed(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping is bounded, and doing it twice is no error."""
    monkeypatch.setattr(router_process, "STOP_S", 0.2)
    process = router(folder, STUBBORN)
    process.start()
    await until(process, lambda seen: seen.url is not None)
    await process.stop()
    await process.stop()
    assert process.seen().running is False


def test_reused_pid_is_not_taken_for_an_engine(tmp_path: Path) -> None:
    """Only a command line that names a file of the deployment counts."""
    script = "import time; print(flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", script, str(tmp_path / "workers" / "endpoint.json")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as engine:
        try:
            # Popen returns before the kernel has laid the new command line; a line printed comes after that.
            assert engine.stdout is not None and engine.stdout.readline()
            assert names_folder(engine.pid, tmp_path)
            assert not names_folder(engine.pid, tmp_path / "workers" / "end")
            assert not names_folder(os.getpid(), tmp_path)
        finally:
            engine.kill()
    assert not names_folder(engine.pid, tmp_path)


async def test_stop_before_start_does_nothing(folder: StateFolder) -> None:
    """A controller that is stopped early has no router yet."""
    await router(folder, SERVE).stop()


def test_other_deployments_are_not_found(folder: StateFolder, tmp_path: Path) -> None:
    """Processes are matched by the whole folder name, not by its beginning."""
    assert find(Kind.CONTROLLER, tmp_path) == []
    assert find(Kind.ROUTER, Path("/")) == []
