"""Finds the processes of a deployment that no actor owns: its controller and its router. By command line, so a lost state file hides none.

Ends only what it found for one state folder.
"""

import contextlib
import signal
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import psutil


class Kind(StrEnum):
    """A hidden command of `pdserve`, and the process that runs it."""

    CONTROLLER = "controller"
    ROUTER = "router"


def arguments(kind: Kind, folder: Path) -> tuple[str, ...]:
    """Return the tail of the command line by which such a process is started and found."""
    return (kind.value, "--state-dir", str(folder))


def find(kind: Kind, folder: Path) -> list[psutil.Process]:
    """Return the live processes of that kind for that state folder."""
    wanted = arguments(kind, folder)
    found = []
    for process in psutil.process_iter():
        try:
            given = process.cmdline()
            if _contains(given, wanted) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def names_folder(pid: int, folder: Path) -> bool:
    """Return whether the process that has this pid now was started for that state folder; a pid alone may be anyone's."""
    try:
        return any(word.startswith(f"{folder}/") for word in psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def end(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Ask them to end, wait, then kill what is left. Blocking, ≤ `timeout_s` + 5 s.

    Asks by SIGINT: on SIGTERM a process that talks to Ray first writes all its stacks into its log.
    """
    alive = list(processes)
    for process in alive:
        _send(process, signal.SIGINT)
    _, alive = psutil.wait_procs(alive, timeout=timeout_s)
    for process in alive:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5)


def tree_rss_bytes(pid: int) -> int | None:
    """Return the resident bytes of a process and its descendants, shared pages counted in each; None if it is gone."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    total = 0
    for process in tree:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _contains(given: list[str], wanted: tuple[str, ...]) -> bool:
    return any(tuple(given[at : at + len(wanted)]) == wanted for at in range(len(given)))


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
