"""Accounting of /dev/shm."""

import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.fleet.shm import entries, held_by, unlink_unheld

SIZE = 4096


@pytest.fixture
def segment() -> Iterator[Path]:
    """A new shared memory file; gone afterwards."""
    path = Path(f"/dev/shm/pdtest_{secrets.token_hex(6)}")
    path.write_bytes(bytes(SIZE))
    yield path
    path.unlink(missing_ok=True)


def test_mapped_name_is_held(segment: Path) -> None:
    """A mapping counts after its descriptor is closed."""
    with segment.open("rb+") as file:
        mapped = mmap.mmap(file.fileno(), SIZE)
    assert segment.name in held_by([os.getpid()])
    mapped.close()
    assert segment.name not in held_by([os.getpid()])


def test_open_name_is_held(segment: Path) -> None:
    """An open descriptor counts without a mapping."""
    with segment.open("rb"):
        assert segment.name in held_by([os.getpid()])
    assert segment.name not in held_by([os.getpid()])


def test_unlinked_name_is_not_held(segment: Path) -> None:
    """A mapping of a name that is gone is nothing to clean."""
    with segment.open("rb+") as file, mmap.mmap(file.fileno(), SIZE):
        segment.unlink()
        assert segment.name not in held_by([os.getpid()])


def test_held_name_is_not_removed(segment: Path) -> None:
    """Whoever asks, a name that a living process holds stays."""
    with segment.open("rb"):
        assert unlink_unheld([segment.name]) == ()
    assert segment.name in entries()


def test_unheld_name_is_removed(segment: Path) -> None:
    """An orphaned name goes; one that does not exist is no error."""
    assert unlink_unheld([segment.name, "pdtest_never_there"]) == (segment.name,)
    assert segment.name not in entries()


def test_dead_process_holds_nothing() -> None:
    """A pid that nobody has is no error."""
    assert held_by([2**22 + 1]) == frozenset()
