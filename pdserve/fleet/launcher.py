"""The small process between a worker's actor and its engine: `python -m pdserve.fleet.launcher`.

Owns the engine's process tree. It is the subreaper of that tree, so what the engine's API server leaves behind when it is killed becomes its
child, and it ends in one way only: everything below it is gone, its shared memory too, and the reason is written down. It starts to
end when its stdin closes (the actor died), when the engine exits, or on SIGTERM. If it is killed itself, the engine gets SIGTERM from the
kernel, and the incarnation record tells the actor, or the worker's next start, what is left.

Standard library only. Knows nothing of vLLM, Ray or roles.
"""

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pdserve.fleet import processes
from pdserve.fleet.files import WorkerFiles, read_json, write_json
from pdserve.fleet.incarnation import Census, new_scratch

_TICK_S = 0.5
_POLL_S = 0.05
_ORPHAN_GRACE_S = 3.0
"""for what is left once the engine's own process is gone"""

log = logging.getLogger("pdserve.fleet.launcher")


class EndCause(StrEnum):
    """What made a launcher end."""

    STOPPED = "stopped"
    """SIGTERM: somebody asked for it"""
    ENGINE_EXITED = "engine_exited"
    ACTOR_GONE = "actor_gone"
    LAUNCHER_KILLED = "launcher_killed"
    """written by the actor, since the launcher could not"""


@dataclass(frozen=True, slots=True)
class EngineExit:
    """Why an engine runs no more. The exit file."""

    incarnation: str
    cause: EndCause
    detail: str
    """one line for a person"""


def read_exit(files: WorkerFiles, incarnation: str) -> EngineExit | None:
    """Return how this incarnation ended, or None while it runs or if nothing was written."""
    value = read_json(files.exit)
    if value is None or value.get("incarnation") != incarnation:
        return None
    return EngineExit(incarnation, EndCause(str(value["cause"])), str(value["detail"]))


def write_exit(files: WorkerFiles, ended: EngineExit) -> None:
    write_json(files.exit, asdict(ended))


class _Children:
    """Collects every dead child of this process, its own or adopted, and remembers how the engine ended."""

    def __init__(self, engine: subprocess.Popen[bytes]) -> None:
        self._engine = engine

    @property
    def engine_pid(self) -> int:
        return self._engine.pid

    @property
    def engine_code(self) -> int | None:
        """Exit code of the engine, negative for a signal; None while it lives."""
        return self._engine.returncode

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._engine.pid:
                self._engine.returncode = os.waitstatus_to_exitcode(status)


class _Signals:
    """SIGTERM and SIGCHLD as a file descriptor to wait on."""

    def __init__(self, wake: socket.socket) -> None:
        self._wake = wake
        self.stop_asked = False

    def fileno(self) -> int:
        return self._wake.fileno()

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = self._wake.recv(4096)
            self.stop_asked = self.stop_asked or signal.SIGTERM in numbers


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    wake, notify = socket.socketpair()
    with wake, notify:
        wake.setblocking(False)
        notify.setblocking(False)
        signal.set_wakeup_fd(notify.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)
        try:
            yield _Signals(wake)
        finally:
            signal.set_wakeup_fd(-1)


def run(files: WorkerFiles, incarnation: str, command: Sequence[str], grace_s: float) -> EngineExit:
    """Start the engine and stay until nothing of it is left.

    Args:
        files: the worker's folder, which must exist.
        incarnation: value of the mark; must be in this process's environment already.
        command: argv of the engine.
        grace_s: time the engine has to end by itself after SIGTERM.
    """
    processes.become_subreaper()
    scratch = new_scratch(incarnation)
    census = Census(files.incarnation, incarnation, scratch)
    with _signals() as signals:
        children = _Children(_spawn(command, scratch))
        log.info("engine started, pid %d", children.engine_pid)
        cause = _watch(signals, children, census)
        log.info("ending: %s", cause)
        census.look()
        _ask_engine(children, grace_s)
        cleaned = census.close(_ORPHAN_GRACE_S, children.reap)
    detail = _describe(cause, children.engine_code)
    log.info("%s; ended %d processes below it, removed from /dev/shm: %s", detail, len(cleaned.processes), list(cleaned.shared_memory))
    ended = EngineExit(incarnation, cause, detail)
    write_exit(files, ended)
    return ended


def _spawn(command: Sequence[str], scratch: Path) -> subprocess.Popen[bytes]:
    launcher = os.getpid()

    def tie_to_launcher() -> None:
        processes.die_with_parent(launcher, signal.SIGTERM)

    # The mark comes first since nothing sets it again: a process that sets its first variable anew can no longer change its title.
    environment = {processes.MARK: os.environ[processes.MARK], **os.environ, "TMPDIR": str(scratch)}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", _inductor_cache())
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie_to_launcher, env=environment)


def _inductor_cache() -> str:
    """Return a folder for torch's compiled kernels that outlives the incarnation; torch's own default is below TMPDIR."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "torchinductor")


def _watch(signals: _Signals, children: _Children, census: Census) -> EndCause:
    """Return the first cause to end."""
    while True:
        readable, _, _ = select.select([sys.stdin.fileno(), signals], [], [], _TICK_S)
        signals.drain()
        children.reap()
        if signals.stop_asked:
            return EndCause.STOPPED
        if sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 4096):
            return EndCause.ACTOR_GONE
        if children.engine_code is not None:
            return EndCause.ENGINE_EXITED
        census.tick()


def _ask_engine(children: _Children, grace_s: float) -> None:
    """Let the engine's own process, if it lives, end its tree in its own order."""
    deadline_s = time.monotonic() + grace_s
    if children.engine_code is None:
        os.kill(children.engine_pid, signal.SIGTERM)
    while children.engine_code is None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        children.reap()


def _describe(cause: EndCause, code: int | None) -> str:
    if cause is EndCause.STOPPED:
        return "stopped on request"
    if cause is EndCause.ACTOR_GONE:
        return "its actor died"
    if code is not None and code < 0:
        return f"engine killed by {signal.Signals(-code).name}"
    return f"engine exited with code {code}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdserve.fleet.launcher", description="Runs one engine until its actor dies.")
    parser.add_argument("--folder", type=Path, required=True, help="the worker's folder")
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    run(WorkerFiles(options.folder), os.environ[processes.MARK], options.command, options.grace_s)


if __name__ == "__main__":
    main()
