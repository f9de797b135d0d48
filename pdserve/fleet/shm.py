"""Names in /dev/shm: which exist, who holds them, and how those are removed that their owners died over.

Owns nothing. Standard library only: it runs inside the launcher. Knows no naming scheme: what a process has mapped or open is its
business, and a name that any living process still holds is never removed.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from pdserve.fleet.processes import all_pids

_FOLDER = Path("/dev/shm")
_PREFIX = f"{_FOLDER}/"
_DELETED = " (deleted)"


def entries() -> frozenset[str]:
    """Return the names that exist now."""
    try:
        with os.scandir(_FOLDER) as found:
            return frozenset(entry.name for entry in found)
    except FileNotFoundError:
        return frozenset()


def held_by(pids: Iterable[int]) -> frozenset[str]:
    """Return the names that these processes have mapped or open; those already unlinked are left out."""
    found: set[str] = set()
    for pid in pids:
        found.update(_mapped(pid), _opened(pid))
    return frozenset(found)


def unlink_unheld(names: Iterable[str]) -> tuple[str, ...]:
    """Remove those of the names that exist and that no living process holds. Returns what was removed, sorted."""
    candidates = frozenset(names) & entries()
    if not candidates:
        return ()
    orphans = candidates - held_by(all_pids())
    removed = []
    for name in sorted(orphans):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            (_FOLDER / name).unlink()
            removed.append(name)
    return tuple(removed)


def _mapped(pid: int) -> set[str]:
    try:
        with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as lines:
            paths = {line[line.index(_PREFIX) :].rstrip("\n") for line in lines if _PREFIX in line}
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return set()
    return {name for path in paths if (name := _name(path))}


def _opened(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    if name := _name(str(Path(descriptor.path).readlink())):
                        found.add(name)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        pass
    return found


def _name(path: str) -> str:
    """Return the entry of /dev/shm that a path names; empty for other paths, folders in it, and entries already unlinked."""
    if not path.startswith(_PREFIX) or path.endswith(_DELETED):
        return ""
    name = path.removeprefix(_PREFIX)
    return "" if "/" in name else name
