"""Cached folders that are whole or absent.

Owns the life of one such folder; does not know what is in it.

    absent or broken ──lock──► built under a hidden name ──► manifest written last ──rename──► whole

A killed builder leaves only its hidden folder, which the next holder of the lock removes. Nothing is synced to disk on the way: a file that
a power cut tore is found by its digest and the folder is built again.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "pdserve-manifest.json"


def ensure(folder: Path, build: Callable[[Path], None]) -> bool:
    """Return once `folder` is whole; True if this call built it.

    Any number of processes may ask at once: one builds, the others wait for it. Interrupting the call is safe at every point.

    Args:
        folder: where it belongs; its parent is created.
        build: writes the files into the empty folder it is given.

    Raises:
        OSError: the parent cannot be written, or the disk is full.
    """
    if is_whole(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{folder.name}.lock"):
        for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
            shutil.rmtree(leftover)
        if is_whole(folder):
            return False
        if folder.exists():
            shutil.rmtree(folder)
        partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
        partial.mkdir()
        try:
            build(partial)
            _write_manifest(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def is_whole(folder: Path) -> bool:
    """Return whether every file that the folder's manifest lists has the size and the sha256 it had when built."""
    try:
        listed: dict[str, list[int | str]] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if any((folder / name).stat().st_size != size for name, (size, _) in listed.items()):
            return False
        return bool(listed) and all(sha256(folder / name) == digest for name, (_, digest) in listed.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, TypeError):
        return False


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = {path.name: [path.stat().st_size, sha256(path)] for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when the holder dies. The file stays: removing it would let two holders in."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
