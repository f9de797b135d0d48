"""The launcher over a fake engine's process tree: whatever dies, nothing of the tree stays."""

import os
import signal
import socket
import sys
from collections.abc import Callable

import pytest
from fleet_processes import LIMIT_S, FakeWorker, wait_until

from pdserve.fleet.incarnation import clean_up
from pdserve.fleet.launcher import EndCause, EngineExit, read_exit
from pdserve.fleet.processes import identify, is_alive, marked
from pdserve.fleet.shm import entries


def close_stdin(worker: FakeWorker) -> None:
    stdin = worker.launchers[-1].stdin
    assert stdin is not None
    stdin.close()


def terminate(worker: FakeWorker) -> None:
    worker.launchers[-1].terminate()


def kill_engine(worker: FakeWorker) -> None:
    os.kill(worker.endpoint.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "cause", "detail", "flags"),
    [
        (close_stdin, EndCause.ACTOR_GONE, "its actor died", ()),
        (terminate, EndCause.STOPPED, "stopped on request", ()),
        (terminate, EndCause.STOPPED, "stopped on request", ("--stubborn",)),
        (kill_engine, EndCause.ENGINE_EXITED, "engine killed by SIGKILL", ()),
    ],
    ids=["actor died", "stopped", "stopped, deaf to SIGTERM", "engine killed"],
)
def test_every_end_leaves_nothing_but_a_reason(
    fake_worker: FakeWorker, end: Callable[[FakeWorker], None], cause: EndCause, detail: str, flags: tuple[str, ...]
) -> None:
    """The actor's death, a stop and the engine's death all end the tree, core and worker included, and write down why."""
    launcher = fake_worker.launch(*fake_worker.engine_argv(*flags))
    fake_worker.wait_running()
    shared_memory, port = fake_worker.shared_memory(), fake_worker.endpoint.port
    assert len(shared_memory) == 1
    end(fake_worker)
    assert launcher.wait(LIMIT_S) == 0
    fake_worker.assert_nothing_left(shared_memory)
    assert read_exit(fake_worker.files, fake_worker.incarnation) == EngineExit(fake_worker.incarnation, cause, detail)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("role", ["core", "worker"])
def test_death_below_the_engine_is_the_engines_business(fake_worker: FakeWorker, role: str) -> None:
    """The launcher watches the engine's own process; a dead worker makes it end only when the engine does."""
    launcher = fake_worker.launch(*fake_worker.engine_argv())
    fake_worker.wait_running()
    shared_memory = fake_worker.shared_memory()
    os.kill(fake_worker.pid_of(role), signal.SIGKILL)
    kill_engine(fake_worker)
    assert launcher.wait(LIMIT_S) == 0
    fake_worker.assert_nothing_left(shared_memory)


def test_engine_that_fails_at_once_is_reported_with_its_code(fake_worker: FakeWorker) -> None:
    """An exit code reaches the exit file."""
    launcher = fake_worker.launch(sys.executable, "-c", "raise SystemExit(3)")
    assert launcher.wait(LIMIT_S) == 0
    ended = read_exit(fake_worker.files, fake_worker.incarnation)
    assert ended == EngineExit(fake_worker.incarnation, EndCause.ENGINE_EXITED, "engine exited with code 3")


def test_exit_of_another_incarnation_does_not_count(fake_worker: FakeWorker) -> None:
    """A reader asks for its own incarnation and hears nothing of an earlier one."""
    fake_worker.launch(sys.executable, "-c", "").wait(LIMIT_S)
    assert read_exit(fake_worker.files, "0" * 16) is None


def test_killed_launcher_takes_the_engine_along_and_leaves_a_record(fake_worker: FakeWorker) -> None:
    """The kernel ends the engine; core, worker and shared memory stay until the clean-up reads the record."""
    launcher = fake_worker.launch(*fake_worker.engine_argv())
    fake_worker.wait_running()
    shared_memory, engine = fake_worker.shared_memory(), identify(fake_worker.endpoint.pid)
    assert engine is not None
    launcher.kill()
    launcher.wait(LIMIT_S)
    wait_until(lambda: not is_alive(engine), "the engine's end")
    assert len(marked(fake_worker.incarnation)) == 2
    assert set(shared_memory) <= entries()

    cleaned = clean_up(fake_worker.files.incarnation, 0.5)

    assert len(cleaned.processes) == 2
    assert cleaned.shared_memory == shared_memory
    assert cleaned.survivors == ()
    fake_worker.assert_nothing_left(shared_memory)


def test_clean_up_ends_a_living_launcher_too(fake_worker: FakeWorker) -> None:
    """A clean-up from outside ends the whole tree, stubborn or not."""
    fake_worker.launch(*fake_worker.engine_argv("--stubborn"))
    fake_worker.wait_running()
    shared_memory = fake_worker.shared_memory()
    clean_up(fake_worker.files.incarnation, 0.2)
    fake_worker.assert_nothing_left(shared_memory)


def test_scratch_folder_is_the_engines_temporary_folder(fake_worker: FakeWorker) -> None:
    """Sockets and temporary files of the tree go where the incarnation's end removes them."""
    program = "import pathlib, tempfile; pathlib.Path('told').write_text(tempfile.gettempdir())"
    told = fake_worker.state_dir / "told"
    fake_worker.launch(sys.executable, "-c", program.replace("'told'", repr(str(told)))).wait(LIMIT_S)
    assert f"pdserve-{fake_worker.incarnation[:6]}-" in told.read_text()
