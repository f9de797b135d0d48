"""`pdserve up`: checks everything, starts the controller, shows how the workers come up, then stays or lets go."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from pdserve import assembly
from pdserve.cli import prechecks
from pdserve.cli.deployment import FLAGS, Name, settings
from pdserve.cli.launch import Launch, launch
from pdserve.cli.progress import Progress, curl_line, progress, summary
from pdserve.config import Config, check_access
from pdserve.control.folder import StateFolder
from pdserve.control.processes import Kind, find, names_folder
from pdserve.control.state import DeploymentReport, Phase, read_report
from pdserve.errors import ConfigError, FleetError

POLL_S = 0.2


def up(
    prefill: Annotated[str | None, typer.Option(metavar="N", help="Prefill workers.")] = None,
    decode: Annotated[str | None, typer.Option(metavar="N", help="Decode workers.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME_OR_PATH", help="A built-in model or a folder that vLLM can serve.")] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address the router listens on.")] = None,
    port: Annotated[str | None, typer.Option(metavar="N", help="Port the router listens on; 0 lets the system choose.")] = None,
    name: Name = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML settings; see `pdserve config schema`.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it is ready and leave it running.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start although memory or /dev/shm look too small.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the engines' commands, start nothing.")] = False,
) -> int:
    """Start a deployment and serve until Ctrl-C, or with --detach until `pdserve down`."""
    given = {
        "name": name,
        "prefill.count": _number(prefill),
        "decode.count": _number(decode),
        "model": model,
        "router.host": host,
        "router.port": _number(port),
    }
    chosen = settings(config, given)
    folder = StateFolder.of(chosen.name)
    console = Console()
    if dry_run:
        for command in assembly.engine_commands(_checked(chosen, console, force=force), folder):
            console.print(command, markup=False, highlight=False, soft_wrap=True)
        return 0
    is_ready = False
    with _interruptible(), folder.locked() as lock_fd:
        if lock_fd is None or _still_serves(folder):
            raise _is_up(folder, chosen.name)
        started = _start(_checked(chosen, console, force=force), folder, lock_fd)
        try:
            with _owned(started, folder, console):
                report = _wait_until_ready(started, folder, progress(console))
                is_ready = True
                _announce(report, console, wants_key=chosen.router.keys_file is not None)
                if detach:
                    started.let_go()
                else:
                    console.print("Ctrl-C stops it.")
                    _stay(started, folder, console)
        except KeyboardInterrupt:
            return 0 if is_ready else 1
    return 0


def _number(text: str | None) -> int | str | None:
    """Return the number if it is one; what is not is left to the settings, whose error names flag and value."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return text


def _checked(chosen: Config, console: Console, *, force: bool) -> Config:
    """Check everything that can be checked before a start; returns the settings with the model resolved. Raises `ConfigError`."""
    if chosen.router.port:
        prechecks.check_port(chosen.router.host, chosen.router.port)
    check_access(chosen.router, FLAGS["router.host"])
    with console.status("model") as status:
        chosen = assembly.resolve_model(chosen, lambda stage, share: status.update(f"model: {stage} {share:.0%}"))
    if not force and not assembly.joins_cluster(chosen):
        prechecks.check_host(chosen)
    return chosen


def _start(chosen: Config, folder: StateFolder, lock_fd: int) -> Launch:
    assembly.end_leftovers(folder)
    folder.prepare(chosen)
    return launch(folder, assembly.process_command(Kind.CONTROLLER, folder), lock_fd)


def _still_serves(folder: StateFolder) -> bool:
    """Return whether a deployment without a controller still has a router or an engine."""
    report = read_report(folder.report_path)
    engines = [worker.pid for worker in report.workers if worker.pid is not None] if report is not None else []
    return bool(find(Kind.ROUTER, folder.path)) or any(names_folder(pid, folder.path) for pid in engines)


def _is_up(folder: StateFolder, name: str) -> ConfigError:
    report = read_report(folder.report_path)
    where = f" at {report.router.url}" if report is not None and report.router.url is not None else ""
    option = "" if name == "default" else f" --name {name}"
    return ConfigError(FLAGS["name"], name, f"is up already{where}: stop it with `pdserve down{option}`, or choose another --name")


def _wait_until_ready(started: Launch, folder: StateFolder, view: Progress) -> DeploymentReport:
    """Show reports until one is ready. Raises `FleetError` when it cannot become so."""
    with view:
        while True:
            has_ended = started.process.poll() is not None
            report = read_report(folder.report_path)
            if report is not None and report.controller_pid == started.process.pid:
                view.show(report)
                if report.phase is Phase.READY:
                    return report
                if report.phase is Phase.FAILED:
                    subject, _, reason = report.detail.partition(": ")
                    raise FleetError(subject, f"{reason} (logs: {folder.logs})")
            if has_ended:
                raise FleetError("controller", f"ended before the deployment was ready; see {folder.log_path('controller')}")
            time.sleep(POLL_S)


def _announce(report: DeploymentReport, console: Console, *, wants_key: bool) -> None:
    console.print(summary(report))
    console.print(f"Ready after {report.ready_s:.1f} s at {report.router.url}. Ask it something:", highlight=False)
    console.print(curl_line(report, wants_key=wants_key), markup=False, highlight=False, soft_wrap=True)


def _stay(started: Launch, folder: StateFolder, console: Console) -> None:
    """Wait for the controller's end, telling each change of phase. Raises `FleetError` if it ended by itself."""
    phase = Phase.READY
    while started.process.poll() is None:
        report = read_report(folder.report_path)
        if report is not None and report.phase is not phase:
            phase = report.phase
            console.print(f"{phase} {report.detail}".rstrip(), markup=False, highlight=False, soft_wrap=True)
        time.sleep(POLL_S)
    if started.process.returncode != 0:
        raise FleetError("controller", f"ended by itself; see {folder.log_path('controller')}")


@contextmanager
def _owned(started: Launch, folder: StateFolder, console: Console) -> Iterator[None]:
    """End the deployment, whole, if the block is left by an interrupt or a failure."""
    try:
        yield
    except (KeyboardInterrupt, FleetError):
        with _uninterruptible(), console.status("stopping"):
            if not started.stop():
                assembly.end_leftovers(folder)
                folder.clear()
        raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and a closed terminal end `up` the way Ctrl-C does; SIGINT too where a shell started it in the background, ignoring that."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), interrupt)):
        yield


@contextmanager
def _uninterruptible() -> Iterator[None]:
    """Ignore further signals while a deployment is taken down: it is bounded, and half of it would be worse."""
    with _handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)):
        yield


@contextmanager
def _handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
