"""The soak of the KV layer: a short one, a long one whose output is kept, and proof that either can fail."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results" / "kv-soak.txt"
SHORT = ("--transfers", "760", "--interval", "190", "--lease", "1.5")
"""four intervals: one calm, one with a killed producer, one with a killed consumer, one with a consumer stopped beyond its lease"""


def soak(*options: str, timeout_s: float = 180.0) -> tuple[int, str]:
    """Run the program; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.kv_soak", *options], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_every_transfer_ends_once_and_nothing_is_left(transport: str) -> None:
    """Aborts, mismatches, preemptions, killed and stopped processes: all accounted for, right bytes, nothing held at rest."""
    status, printed = soak("--transport", transport, *SHORT)
    assert status == 0, printed
    assert f"passed: {transport}, 760 transfers" in printed


@pytest.mark.parametrize(
    ("mutation", "transfers", "told"),
    [
        ("lose-slots", 400, "'slots': "),
        ("report-twice", 2000, "a report that no request waits for"),
        ("keep-marks", 4000, "bytes of "),
        ("keep-mappings", 400, "mapped at rest vary"),
    ],
)
def test_a_broken_layer_fails_the_soak(mutation: str, transfers: int, told: str) -> None:
    """Slots that are not freed, a second report, stale bytes and memory that stays mapped are all seen; what takes luck gets more transfers."""
    status, printed = soak("--transport", "shm", "--transfers", str(transfers), "--interval", "200", "--mutation", mutation)
    assert status == 1
    assert told in printed


def test_a_report_that_never_comes_fails_the_soak() -> None:
    """The engine waits for it beyond every timeout."""
    status, printed = soak("--transport", "tcp", "--transfers", "400", "--interval", "400", "--mutation", "forget-reports")
    assert status == 1
    assert "have not reported all their requests" in printed


def test_a_hundred_thousand_transfers() -> None:
    """Half over each transport; memory is compared too. The output is kept."""
    options = ("--transfers", "100000", "--seed", "1")
    status, printed = soak(*options, timeout_s=1800.0)
    RESULTS.write_text(f"$ python -m tests.soak.kv_soak {' '.join(options)}\n{printed}")
    assert status == 0, printed
