"""What a person sees while a deployment comes up, and what is printed once it is there. Reads reports; starts nothing."""

import time
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pdserve.control.state import DeploymentReport, WorkerReport
from pdserve.types import WorkerState

STEPS = (WorkerState.PLACED, WorkerState.LOADING, WorkerState.WARMING, WorkerState.READY)
STYLES = {WorkerState.READY: "green", WorkerState.FAILED: "red"}


class Progress(Protocol):
    """Shows reports as they come, inside a `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def show(self, report: DeploymentReport) -> None:
        """Take the present report; one that says nothing new shows nothing new."""
        ...


class LiveProgress:
    """A table that is drawn in place; for terminals."""

    def __init__(self, console: Console) -> None:
        self._report: DeploymentReport | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def show(self, report: DeploymentReport) -> None:
        self._report = report

    def _render(self) -> Table:
        report = self._report
        table = Table(
            title=f"{report.name}: {report.phase}" if report is not None else "starting", title_justify="left", box=box.SIMPLE_HEAD
        )
        table.add_column("worker")
        for step in STEPS:
            table.add_column(step.value, justify="right")
        table.add_column("")
        for worker in report.workers if report is not None else ():
            elapsed_s = time.time() - report.started_unix_s if report is not None else 0.0
            table.add_row(worker.worker_id, *(_cell(worker, step, elapsed_s) for step in STEPS), worker.detail)
        return table


class PlainProgress:
    """One line for each change; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, WorkerState] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def show(self, report: DeploymentReport) -> None:
        for worker in report.workers:
            if self._shown.get(worker.worker_id) is not worker.state:
                self._shown[worker.worker_id] = worker.state
                at_s = worker.entered_s[worker.state]
                note = f"  {worker.detail}" if worker.state is WorkerState.FAILED else ""
                self._console.print(
                    f"{at_s:7.1f} s  {worker.worker_id:<12} {worker.state}{note}", markup=False, highlight=False, soft_wrap=True
                )


def progress(console: Console) -> Progress:
    """Return what fits the console."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


def summary(report: DeploymentReport) -> Table:
    """Return the table of a deployment's workers."""
    table = Table(title=f"{report.name} serves {report.model}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("worker", "role", "state", "pid", "engine"):
        table.add_column(name)
    table.add_column("ready after", justify="right")
    for worker in report.workers:
        ready_s = worker.entered_s.get(WorkerState.READY)
        table.add_row(
            worker.worker_id,
            worker.role,
            f"[{STYLES.get(worker.state, 'yellow')}]{worker.state}[/]",
            str(worker.pid or ""),
            worker.url,
            f"{ready_s:.1f} s" if ready_s is not None else "",
        )
    return table


def curl_line(report: DeploymentReport, *, wants_key: bool = False) -> str:
    """Return one shell line that asks the deployment something."""
    question = '"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32, "temperature": 0'
    body = f'{{"model": "{report.model}", {question}}}'
    key = " -H 'authorization: Bearer KEY'" if wants_key else ""
    return f"curl -s {report.router.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"


def _cell(worker: WorkerReport, step: WorkerState, elapsed_s: float) -> str:
    """Return the seconds a step took or takes so far; for READY, when it was reached."""
    entered = worker.entered_s
    if step not in entered:
        return ""
    if step is WorkerState.READY:
        return f"[green]{entered[step]:.1f} s[/]"
    later = [at_s for at_s in entered.values() if at_s > entered[step]]
    if later or worker.state is not step:
        return f"{min(later, default=entered[step]) - entered[step]:.1f} s"
    return f"[yellow]{elapsed_s - entered[step]:.0f} s …[/]"
