"""Cleaning a dead deployment from its state folder."""

from pathlib import Path

import pytest
from fleet_processes import LIMIT_S, FakeWorker

from pdserve.fleet.leftovers import Leftovers, clean_leftovers


def test_nothing_left_means_nothing_found(tmp_path: Path) -> None:
    """A folder without records, or none at all, is clean."""
    assert clean_leftovers(tmp_path) == Leftovers((), ())
    assert clean_leftovers(tmp_path / "none") == Leftovers((), ())


@pytest.mark.parametrize("launcher_lives", [True, False], ids=["launcher lives", "launcher killed"])
def test_every_worker_of_the_folder_is_ended(fake_worker: FakeWorker, launcher_lives: bool) -> None:
    """Processes, memory and records go; what others keep in the folder stays."""
    launcher = fake_worker.launch(*fake_worker.engine_argv())
    fake_worker.wait_running()
    shared_memory = fake_worker.shared_memory()
    if not launcher_lives:
        launcher.kill()
        launcher.wait(LIMIT_S)
    (fake_worker.state_dir / "secret").touch()

    found = clean_leftovers(fake_worker.state_dir)

    assert found.any
    assert len(found.processes) >= 2
    fake_worker.assert_nothing_left(shared_memory)
    assert [path.name for path in fake_worker.state_dir.iterdir()] == ["secret"]
    assert clean_leftovers(fake_worker.state_dir) == Leftovers((), ())
