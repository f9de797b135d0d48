"""A cached folder is whole or absent, whatever happens to its builder."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.models import store

KILLED_BUILDER = """
import os, signal, sys
from pathlib import Path
from pdserve.models import store

def build(target):
    (target / "half").write_bytes(b"x" * 4096)
    os.kill(os.getpid(), signal.SIGKILL)

store.ensure(Path(sys.argv[1]), build)
"""


class CountingBuilder:
    """Writes two small files and counts how often it was asked to."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, target: Path) -> None:
        self.builds += 1
        assert list(target.iterdir()) == []
        (target / "config").write_text("{}")
        (target / "weights").write_bytes(bytes(range(256)) * 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a cached folder belongs; its parent does not exist yet."""
    return tmp_path / "models" / "m"


def strangers(folder: Path) -> list[str]:
    """Return what lies beside the folder other than its lock."""
    return sorted(path.name for path in folder.parent.iterdir() if path != folder and path.name != f".{folder.name}.lock")


def test_first_call_builds_and_second_finds_it(folder: Path) -> None:
    """A whole folder is not built again."""
    build = CountingBuilder()
    assert store.ensure(folder, build) is True
    assert store.ensure(folder, build) is False
    assert build.builds == 1
    assert sorted(path.name for path in folder.iterdir()) == ["config", store.MANIFEST, "weights"]
    assert strangers(folder) == []


def test_failed_build_leaves_nothing(folder: Path) -> None:
    """An exception of the builder passes through and no part of the folder stays."""

    def fail(target: Path) -> None:
        (target / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.ensure(folder, fail)
    assert not folder.exists()
    assert strangers(folder) == []


def test_killed_builder_leaves_only_a_hidden_folder_that_the_next_one_removes(folder: Path) -> None:
    """SIGKILL in the middle of a build shows nothing under the real name."""
    killed = subprocess.run([sys.executable, "-c", KILLED_BUILDER, str(folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert len(strangers(folder)) == 1
    assert store.ensure(folder, CountingBuilder()) is True
    assert strangers(folder) == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda folder: (folder / "weights").write_bytes(bytes(4096)), id="same size, other content"),
        pytest.param(lambda folder: (folder / "weights").write_bytes(b""), id="truncated"),
        pytest.param(lambda folder: (folder / "config").unlink(), id="file missing"),
        pytest.param(lambda folder: (folder / store.MANIFEST).unlink(), id="manifest missing"),
        pytest.param(lambda folder: (folder / store.MANIFEST).write_text("{}"), id="manifest lists nothing"),
        pytest.param(lambda folder: (folder / store.MANIFEST).write_text('{"weights'), id="manifest torn"),
        pytest.param(lambda folder: (folder / store.MANIFEST).write_text('["weights"]'), id="manifest of another form"),
    ],
)
def test_damaged_folder_is_built_again(folder: Path, damage: object) -> None:
    """What is not as it was built counts as absent."""
    build = CountingBuilder()
    store.ensure(folder, build)
    assert callable(damage)
    damage(folder)
    assert not store.is_whole(folder)
    assert store.ensure(folder, build) is True
    assert store.is_whole(folder)
    assert build.builds == 2


def test_callers_at_once_build_once(folder: Path) -> None:
    """One builds while the others wait for it and then find it whole."""
    build = CountingBuilder()
    start = threading.Barrier(8)
    built: list[bool] = []

    def ask() -> None:
        start.wait()
        built.append(store.ensure(folder, build))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built) == [False] * 7 + [True]
    assert build.builds == 1
