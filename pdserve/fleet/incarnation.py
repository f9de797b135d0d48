"""What one incarnation of a worker (or of the Ray head) holds on this host, and how all of it is given back.

Owns the incarnation record: the one file from which a later process can clean up after an incarnation that nobody survived.
Standard library only. Knows nothing of why an incarnation ended.
"""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdserve.fleet import processes, shm
from pdserve.fleet.files import read_json, write_json
from pdserve.fleet.processes import ProcessId

CENSUS_INTERVAL_S = 5.0
_SCRATCH_PREFIX = "pdserve-"
_SCRATCH_MAX_CHARS = 24
"""unix sockets below a scratch folder must stay within 107 characters, and Ray adds 68"""


@dataclass(frozen=True, slots=True)
class IncarnationRecord:
    """What was held when the record was written."""

    host: str
    """name of the node; a state folder may be shared between nodes, pids are not"""
    incarnation: str
    """random, hex; also the value of the mark in the environment of every process of it"""
    processes: tuple[ProcessId, ...]
    scratch: str
    """folder for sockets and temporary files, removed with the incarnation"""
    shared_memory: tuple[str, ...]
    """names in /dev/shm that its processes have mapped or open"""
    shared_memory_before: tuple[str, ...]
    """names that existed before it started, so never its own"""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a clean-up found and removed."""

    processes: tuple[ProcessId, ...] = ()
    shared_memory: tuple[str, ...] = ()
    scratch: str = ""
    survivors: tuple[ProcessId, ...] = ()
    """stuck in the kernel; the record is kept for the next try"""


def new_scratch(incarnation: str) -> Path:
    """Make a private folder with a short path for one incarnation."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=f"{_SCRATCH_PREFIX}{incarnation[:6]}-", dir=base if len(base) <= _SCRATCH_MAX_CHARS else "/tmp"))


class Census:
    """Keeps the record of a running incarnation true, from the process at its root.

    A look costs a walk over /proc, so `tick` looks only when /dev/shm changed or the interval passed.
    """

    def __init__(self, path: Path, incarnation: str, scratch: Path) -> None:
        self._path = path
        self._incarnation = incarnation
        self._scratch = scratch
        self._before = shm.entries()
        self._seen_entries = self._before
        self._shared_memory: frozenset[str] = frozenset()
        self._written: IncarnationRecord | None = None
        self._next_look_s = 0.0
        self.look()

    def tick(self) -> None:
        """Look again if there is a reason to."""
        if shm.entries() != self._seen_entries or time.monotonic() >= self._next_look_s:
            self.look()

    def look(self) -> None:
        """Find the processes and names held now, and write them down if they changed."""
        self._next_look_s = time.monotonic() + CENSUS_INTERVAL_S
        self._seen_entries = shm.entries()
        below = processes.descendants([os.getpid()])
        held = shm.held_by(process.pid for process in below) - self._before
        self._shared_memory = (self._shared_memory | held) & self._seen_entries
        record = IncarnationRecord(
            host=socket.gethostname(),
            incarnation=self._incarnation,
            processes=tuple(sorted(below | {processes.current()})),
            scratch=str(self._scratch),
            shared_memory=tuple(sorted(self._shared_memory)),
            shared_memory_before=tuple(sorted(self._before)),
        )
        if record != self._written:
            write_json(self._path, asdict(record))
            self._written = record

    def close(self, grace_s: float, reap: Callable[[], object]) -> Cleaned:
        """End every process below this one, then give back what they held and remove the record."""
        self.look()
        ended = processes.descendants([os.getpid()])
        survivors = processes.end_all(lambda: processes.descendants([os.getpid()]), grace_s, reap=reap)
        return _give_back(self._path, self._scratch, self._shared_memory, ended, survivors)


def clean_up(path: Path, grace_s: float) -> Cleaned:
    """Do for a dead root what `Census.close` does for a living one; ends the root too if it lives. Idempotent.

    Args:
        path: the incarnation record; nothing happens without one, or with one of another node.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    record = read_record(path)
    if record is None or record.host != socket.gethostname():
        return Cleaned()

    def find() -> frozenset[ProcessId]:
        roots = frozenset(filter(processes.is_alive, record.processes)) | processes.marked(record.incarnation)
        return roots | processes.descendants(process.pid for process in roots)

    ended = find()
    held = shm.held_by(process.pid for process in ended) - frozenset(record.shared_memory_before)
    survivors = processes.end_all(find, grace_s)
    return _give_back(path, Path(record.scratch), held | frozenset(record.shared_memory), ended, survivors)


def read_record(path: Path) -> IncarnationRecord | None:
    """Return the record at this path, or None if there is none that can be read."""
    value: Any = read_json(path)
    if value is None:
        return None
    try:
        return IncarnationRecord(
            host=str(value["host"]),
            incarnation=str(value["incarnation"]),
            processes=tuple(ProcessId(int(entry["pid"]), int(entry["start_ticks"])) for entry in value["processes"]),
            scratch=str(value["scratch"]),
            shared_memory=tuple(map(str, value["shared_memory"])),
            shared_memory_before=tuple(map(str, value["shared_memory_before"])),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _give_back(path: Path, scratch: Path, names: frozenset[str], ended: frozenset[ProcessId], survivors: frozenset[ProcessId]) -> Cleaned:
    removed = shm.unlink_unheld(names)
    if not survivors:
        if scratch.name.startswith(_SCRATCH_PREFIX):
            shutil.rmtree(scratch, ignore_errors=True)
        path.unlink(missing_ok=True)
    return Cleaned(tuple(sorted(ended)), removed, str(scratch), tuple(sorted(survivors)))
