"""Processes found in /proc and ended by signal."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.fleet.processes import MARK, ProcessId, current, descendants, end_all, identify, is_alive, marked, send

SLEEP = "import time; time.sleep(600)"
SLEEP_DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); {SLEEP}"
TELL_AND_SLEEP = f"import os; print(os.getpid(), flush=True); {SLEEP}"
PARENT_OF_SLEEP = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {TELL_AND_SLEEP!r}]); child.wait()"
"""the child tells its own pid: by then /proc shows its environment, which it does not at once when its parent knows the pid"""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """A list for started processes; whatever is in it is dead afterwards."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()


def start(children: list[subprocess.Popen[str]], program: str, **environment: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    children.append(child)
    return child


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def known(pid: int) -> ProcessId:
    process = identify(pid)
    assert process is not None
    return process


def test_process_is_known_by_pid_and_start(children: list[subprocess.Popen[str]]) -> None:
    """A record with the right pid but another start is a stranger."""
    process = known(start(children, SLEEP).pid)
    assert is_alive(process)
    assert not is_alive(ProcessId(process.pid, process.start_ticks - 1))


def test_zombie_is_not_alive(children: list[subprocess.Popen[str]]) -> None:
    """What only waits to be collected runs no more."""
    child = start(children, SLEEP)
    process = known(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process)
    assert identify(child.pid) is None


def test_descendants_are_found_through_generations(children: list[subprocess.Popen[str]]) -> None:
    """Children of children belong to the root; the root itself does not."""
    parent = start(children, PARENT_OF_SLEEP)
    grandchild = int(first_line(parent))
    try:
        below = {process.pid for process in descendants([os.getpid()])}
        assert {parent.pid, grandchild} <= below
        assert os.getpid() not in below
        assert {process.pid for process in descendants([parent.pid])} == {grandchild}
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_mark_finds_orphans(children: list[subprocess.Popen[str]]) -> None:
    """The environment's mark finds a process whose parent is gone, and only those of the incarnation."""
    incarnation = secrets.token_hex(8)
    parent = start(children, PARENT_OF_SLEEP, **{MARK: incarnation})
    start(children, SLEEP, **{MARK: incarnation + "0"})
    orphan = int(first_line(parent))
    parent.kill()
    parent.wait()
    try:
        assert {process.pid for process in marked(incarnation)} == {orphan}
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_signal_reaches_only_the_very_process(children: list[subprocess.Popen[str]]) -> None:
    """A pid that another process has now is not signalled."""
    child = start(children, SLEEP)
    process = known(child.pid)
    send(ProcessId(process.pid, process.start_ticks + 1), signal.SIGKILL)
    assert is_alive(process)
    send(process, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL


def test_signal_to_a_dead_process_does_nothing(children: list[subprocess.Popen[str]]) -> None:
    """Sending to what is gone raises nothing."""
    child = start(children, SLEEP)
    process = known(child.pid)
    child.kill()
    child.wait()
    send(process, signal.SIGTERM)
    assert not is_alive(process)


@pytest.mark.parametrize(("program", "code"), [(SLEEP, -signal.SIGTERM), (SLEEP_DEAF, -signal.SIGKILL)], ids=["polite", "deaf"])
def test_end_asks_first_and_kills_what_does_not_listen(children: list[subprocess.Popen[str]], program: str, code: int) -> None:
    """SIGTERM is enough for the polite; the deaf get SIGKILL after the grace."""
    child = start(children, program)
    if program == SLEEP_DEAF:
        first_line(child)
    process = known(child.pid)

    def find() -> frozenset[ProcessId]:
        return frozenset({process}) if is_alive(process) else frozenset()

    assert end_all(find, 0.3) == frozenset()
    assert child.wait(10) == code


def test_current_process_knows_itself() -> None:
    """The calling process is alive by its own record."""
    assert current().pid == os.getpid()
    assert is_alive(current())
