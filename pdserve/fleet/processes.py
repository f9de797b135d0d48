"""Processes as Linux' /proc shows them: who descends from whom, who carries a mark, and how a set of them is ended.

Owns no process. Standard library only: it runs inside the launcher, which must stay small. A pid alone is never trusted, since the
kernel reuses it: a process is its pid with the tick it started at.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "PDSERVE_INCARNATION"
"""environment variable that every process of an incarnation inherits; it finds those whose parents are gone"""

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_KILL_LIMIT_S = 20.0
"""a process that survives SIGKILL for so long is stuck in the kernel"""


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process, for ever."""

    pid: int
    start_ticks: int
    """clock ticks between boot and its start"""


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    start_ticks: int


def become_subreaper() -> None:
    """Make orphaned descendants children of this process. Raises `OSError`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent dies; for use between fork and exec. Exits if the parent is gone already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def all_pids() -> list[int]:
    """Return every pid of this pid namespace, zombies too."""
    with os.scandir(_PROC) as entries:
        return [int(entry.name) for entry in entries if entry.name.isdecimal()]


def identify(pid: int) -> ProcessId | None:
    """Return the live process that has this pid now, or None; a zombie is not live."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else ProcessId(pid, stat.start_ticks)


def current() -> ProcessId:
    """Return the calling process."""
    process = identify(os.getpid())
    if process is None:
        raise ProcessLookupError("/proc does not show the calling process; is it mounted?")
    return process


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def descendants(roots: Iterable[int]) -> frozenset[ProcessId]:
    """Return all live processes below the roots, without the roots themselves."""
    stats = _all_stats()
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[ProcessId] = set()
    frontier = list(roots)
    while frontier:
        for pid in children.get(frontier.pop(), ()):
            process = ProcessId(pid, stats[pid].start_ticks)
            if process not in found:
                found.add(process)
                frontier.append(pid)
    return frozenset(found)


def marked(incarnation: str) -> frozenset[ProcessId]:
    """Return all live processes whose environment carries this incarnation, the calling process excepted."""
    entry = f"{MARK}={incarnation}".encode()
    found: set[ProcessId] = set()
    for pid, stat in _all_stats().items():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.add(ProcessId(pid, stat.start_ticks))
    return frozenset(found)


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signal exactly this process; does nothing if it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def end_all(find: Callable[[], frozenset[ProcessId]], grace_s: float, *, reap: Callable[[], object] = lambda: None) -> frozenset[ProcessId]:
    """Send SIGTERM to what `find` returns, and SIGKILL to what it still returns after `grace_s`, until it returns nothing.

    Args:
        find: asked again and again, so that processes born meanwhile are met too.
        grace_s: seconds between the two signals; 0 kills at once.
        reap: called in every round by a parent that must collect its dead children.

    Returns:
        What could not be ended within the limit; empty unless a process is stuck in the kernel.
    """
    kill_at_s = time.monotonic() + grace_s
    asked: set[ProcessId] = set()
    while found := find():
        now_s = time.monotonic()
        if now_s > kill_at_s + _KILL_LIMIT_S:
            return found
        for process in found:
            if now_s >= kill_at_s:
                send(process, signal.SIGKILL)
            elif process not in asked:
                send(process, signal.SIGTERM)
        asked |= found
        time.sleep(_POLL_S)
        reap()
    return frozenset()


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def _all_stats() -> Mapping[int, _Stat]:
    """Return every live process; zombies are left out."""
    stats: dict[int, _Stat] = {}
    for pid in all_pids():
        stat = _stat(pid)
        if stat is not None and stat.state not in "ZX":
            stats[pid] = stat
    return stats
