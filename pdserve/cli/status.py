"""`pdserve status`: what the controller last published, checked against the processes that are there now."""

import time
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdserve.cli.deployment import Name, existing
from pdserve.control.processes import Kind, find, tree_rss_bytes
from pdserve.control.state import DeploymentReport, Phase, RouterReport, WorkerReport, read_report
from pdserve.types import Role, WorkerState

MB = 1e6
NUMBERS = {"pid", "port", "RSS MB", "for s"}
INCARNATION_SHOWN = 8
"""characters of an incarnation in the table; `--json` has all"""


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker, for a person or a script."""

    worker_id: str
    role: Role
    state: WorkerState
    incarnation: str
    pid: int | None
    port: int | None
    rss_mb: float | None
    """resident memory of the engine's processes, 10⁶ bytes, shared pages counted in each; None if there are none"""
    since_s: float
    """how long it is in this state"""
    detail: str


class Status(msgspec.Struct, frozen=True):
    """One deployment, for a person or a script."""

    name: str
    phase: Phase
    is_ready: bool
    model: str
    url: str | None
    controller_pid: int | None
    """None if it is gone; what serves goes on without it"""
    router_pid: int | None
    ready_s: float | None
    """from start until first ready"""
    detail: str
    workers: tuple[WorkerStatus, ...]


def status(
    name: Name = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show a deployment. Exit code 0 if it is ready, 1 if not, 2 if there is none."""
    folder = existing(name)
    report = read_report(folder.report_path) or _unreported(folder.path.name)
    controllers, routers = find(Kind.CONTROLLER, folder.path), find(Kind.ROUTER, folder.path)
    found = _status(
        report,
        controller_pid=next((process.pid for process in controllers), None),
        router_pid=next((process.pid for process in routers), None),
        now_unix_s=time.time(),
    )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _show(found, Console())
    return 0 if found.is_ready else 1


def _status(report: DeploymentReport, *, controller_pid: int | None, router_pid: int | None, now_unix_s: float) -> Status:
    workers = tuple(_worker_status(worker, now_unix_s - report.started_unix_s) for worker in report.workers)
    detail = report.detail
    if controller_pid is None and report.phase is not Phase.FAILED:
        detail = "the controller is gone: what serves goes on unwatched; `pdserve down` ends it"
    return Status(
        name=report.name,
        phase=report.phase,
        is_ready=report.phase is Phase.READY and None not in {controller_pid, router_pid},
        model=report.model,
        url=report.router.url,
        controller_pid=controller_pid,
        router_pid=router_pid,
        ready_s=report.ready_s,
        detail=detail,
        workers=workers,
    )


def _worker_status(worker: WorkerReport, elapsed_s: float) -> WorkerStatus:
    rss_bytes = tree_rss_bytes(worker.pid) if worker.pid is not None else None
    return WorkerStatus(
        worker_id=worker.worker_id,
        role=worker.role,
        state=worker.state,
        incarnation=worker.incarnation,
        pid=worker.pid,
        port=urlsplit(worker.url).port,
        rss_mb=round(rss_bytes / MB, 1) if rss_bytes is not None else None,
        since_s=round(max(0.0, elapsed_s - worker.entered_s[worker.state]), 1),
        detail=worker.detail,
    )


def _unreported(name: str) -> DeploymentReport:
    """Return what is known of a deployment whose controller has not published yet."""
    return DeploymentReport(name, "", Phase.STARTING, 0, time.time(), None, "", RouterReport(), ())


def _show(found: Status, console: Console) -> None:
    style = "green" if found.is_ready else "yellow"
    console.print(f"[bold]{found.name}[/] is [{style}]{found.phase}[/] {escape(found.detail)}".rstrip(), highlight=False, soft_wrap=True)
    console.print(f"router {found.url or 'is not up'}", highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("worker", "role", "state", "incarnation", "pid", "port", "RSS MB", "for s"):
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=True)
    for worker in found.workers:
        incarnation = worker.incarnation[:INCARNATION_SHOWN]
        values = (worker.worker_id, worker.role, worker.state, incarnation, worker.pid, worker.port, worker.rss_mb, worker.since_s)
        table.add_row(*("" if value is None else str(value) for value in values))
    console.print(table)
    for worker in found.workers:
        if worker.detail:
            console.print(f"{worker.worker_id}: {worker.detail}", markup=False, highlight=False, soft_wrap=True)
