"""The fixture of launcher and actor tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_processes import LIMIT_S, FakeWorker

from pdserve.fleet.incarnation import clean_up
from pdserve.fleet.shm import entries


@pytest.fixture
def fake_worker(tmp_path: Path) -> Iterator[FakeWorker]:
    """A worker without processes yet; nothing of it is left afterwards, or the test fails."""
    before = {name for name in entries() if name.startswith("pdtest_")}
    worker = FakeWorker(tmp_path)
    yield worker
    for launcher in worker.launchers:
        if launcher.stdin is not None:
            launcher.stdin.close()
        launcher.wait(LIMIT_S)
    clean_up(worker.files.incarnation, 0)
    worker.assert_nothing_left(())
    assert {name for name in entries() if name.startswith("pdtest_")} <= before
