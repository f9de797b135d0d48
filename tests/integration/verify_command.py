"""`pdserve verify`, run in this process over workers that a test started: a state folder is what makes a deployment of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdserve.cli.main import run
from pdserve.control.folder import StateFolder
from pdserve.control.state import DeploymentReport, Phase, RouterReport, WorkerReport, write_report
from pdserve.types import Role, WorkerState

NAME = "verified"


class Member(NamedTuple):
    """One worker."""

    worker_id: str
    incarnation: str
    url: str


class Answer(NamedTuple):
    """What the command said."""

    code: int
    verdict: dict[str, Any]
    """its JSON; empty if it printed none"""
    errors: str


def publish(home: Path, model: str, secret: str, prefills: Sequence[Member], decodes: Sequence[Member]) -> None:
    """Write the state folder of a deployment under `home`, which must be `PDSERVE_HOME`."""
    folder = StateFolder(home / "run" / NAME)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "secret").write_text(secret)
    workers = [
        WorkerReport(member.worker_id, role, WorkerState.READY, member.incarnation, None, member.url, "", {})
        for role, members in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
        for member in members
    ]
    report = DeploymentReport(NAME, model, Phase.READY, 0, 0.0, 0.0, "", RouterReport(), tuple(workers))
    write_report(folder.report_path, report)


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Run the command with `--json`."""
    capsys.readouterr()
    code = run(["verify", "--name", NAME, "--json", *arguments])
    output, errors = capsys.readouterr()
    return Answer(code, json.loads(output) if output else {}, errors)
