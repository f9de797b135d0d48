"""What the fleet says of a worker that ended; its life on Ray is tested in integration."""

import pytest

from pdserve.fleet.actor import EngineState, WorkerReport
from pdserve.fleet.ray_fleet import explain
from pdserve.ports import WorkerSpec
from pdserve.types import Role

TRACEBACK = """(Worker pid=7) ERROR 11-30 23:29:13 [executor.py:1063] Traceback (most recent call last):
ValueError: first
(EngineCore pid=6)   File "core.py", line 1
RuntimeError: Engine core initialization failed.
2026-11-30 23:29:20,881 pdserve.fleet.launcher INFO engine exited with code 1
"""


@pytest.mark.parametrize(
    ("log_tail", "expected"),
    [
        ("", "engine exited with code 1"),
        ("no such word here\n", "engine exited with code 1"),
        (TRACEBACK, "engine exited with code 1: RuntimeError: Engine core initialization failed."),
        (f"OSError: {'x' * 300}\n", f"engine exited with code 1: {'x' * 200}"),
    ],
    ids=["empty log", "no error", "last error of a traceback", "long error"],
)
def test_end_is_explained_in_one_line(log_tail: str, expected: str) -> None:
    """The exit reason, and the last error that the log names, cut to a length that a table holds."""
    report = WorkerReport(
        spec=WorkerSpec("a", Role.DECODE, 1),
        incarnation="ab",
        host="127.0.0.1",
        cpus=1,
        state=EngineState.FAILED,
        endpoint=None,
        detail="engine exited with code 1",
        log_tail=log_tail,
    )
    assert explain(report) == expected
