"""`state.json`: what a deployment is and how far it is, for other processes of this host. Schema, atomic writer, reader.

Written by the controller alone. It tells a person what is there; nothing that serves reads it.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from pdserve.types import Role, WorkerState


class Phase(StrEnum):
    """Life of a deployment."""

    STARTING = "starting"
    READY = "ready"
    """every worker is ready and the router has them"""
    DEGRADED = "degraded"
    """it was ready; something of it is not now"""
    STOPPING = "stopping"
    FAILED = "failed"
    """it could not become ready; nothing of it runs"""


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker."""

    worker_id: str
    role: Role
    state: WorkerState
    incarnation: str
    pid: int | None
    """of the engine's API server"""
    url: str
    detail: str
    entered_s: Mapping[WorkerState, float]
    """when each state was entered, seconds after the deployment's start; the last is the present one"""


class RouterReport(msgspec.Struct, frozen=True):
    """The router process."""

    pid: int | None = None
    url: str | None = None
    starts: int = 0


class DeploymentReport(msgspec.Struct, frozen=True):
    """One deployment; the content of `state.json`."""

    name: str
    model: str
    """served name"""
    phase: Phase
    controller_pid: int
    started_unix_s: float
    """wall clock; for display"""
    ready_s: float | None
    """from start until first ready; None if it was not yet"""
    detail: str
    """one line for a person: why it failed or what is missing"""
    router: RouterReport
    workers: tuple[WorkerReport, ...]
    schema: int = 1


def write_report(path: Path, report: DeploymentReport) -> None:
    """Replace the file in one step; a reader sees the old or the new one, never a part."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    partial.replace(path)


def read_report(path: Path) -> DeploymentReport | None:
    """Return the last report, None if there is none or another version of pdserve wrote it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeploymentReport)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
