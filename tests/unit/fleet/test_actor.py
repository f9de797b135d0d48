"""The actor as a plain object: what it says of its engine, and what it cleans."""

import os
import signal
from pathlib import Path

from fleet_processes import FakeWorker, wait_until

from pdserve.fleet.actor import EngineState, WorkerActor
from pdserve.fleet.engine_command import EngineCommand
from pdserve.fleet.processes import descendants
from pdserve.fleet.shm import entries
from pdserve.ports import WorkerSpec
from pdserve.types import Role


def make_actor(worker: FakeWorker) -> WorkerActor:
    return WorkerActor(WorkerSpec(worker.worker_id, Role.DECODE, 2), worker.new_incarnation(), worker.state_dir, "127.0.0.1")


def command(worker: FakeWorker, *flags: str) -> EngineCommand:
    return EngineCommand(worker.engine_argv(*flags), {"PDSERVE_SECRET": "hidden"})


def launcher_pid(actor: WorkerActor) -> int:
    """Return the pid of the launcher, the parent of the engine."""
    endpoint = actor.describe().endpoint
    assert endpoint is not None
    stat = Path(f"/proc/{endpoint.pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def test_actor_without_engine_says_so(fake_worker: FakeWorker) -> None:
    """Before the launch there is a place and an address, no engine; stopping it is no error."""
    actor = make_actor(fake_worker)
    report = actor.describe()
    assert (report.state, report.endpoint, report.host) == (EngineState.ABSENT, None, "127.0.0.1")
    assert report.spec == WorkerSpec("prefill-0", Role.DECODE, 2)
    assert actor.stop().state is EngineState.ABSENT


def test_running_engine_is_described_and_stopped(fake_worker: FakeWorker) -> None:
    """A report has the published endpoint; after the stop it says STOPPED, and nothing is left."""
    actor = make_actor(fake_worker)
    assert actor.launch(command(fake_worker)).state is EngineState.RUNNING
    fake_worker.wait_running()
    shared_memory = fake_worker.shared_memory()
    assert actor.describe().endpoint == fake_worker.endpoint
    assert actor.stop().state is EngineState.STOPPED
    assert actor.stop().state is EngineState.STOPPED
    fake_worker.assert_nothing_left(shared_memory)


def test_second_launch_changes_nothing(fake_worker: FakeWorker) -> None:
    """A controller that repeats itself gets the engine that runs."""
    actor = make_actor(fake_worker)
    actor.launch(command(fake_worker))
    fake_worker.wait_running()
    before = fake_worker.endpoint
    assert actor.launch(command(fake_worker)).endpoint == before
    actor.stop()


def test_dead_engine_is_reported_with_reason_and_log(fake_worker: FakeWorker) -> None:
    """A killed engine makes the worker FAILED; the report has the signal and the log's end."""
    actor = make_actor(fake_worker)
    actor.launch(command(fake_worker))
    fake_worker.wait_running()
    shared_memory = fake_worker.shared_memory()
    os.kill(fake_worker.endpoint.pid, signal.SIGKILL)
    wait_until(lambda: actor.describe().state is EngineState.FAILED, "FAILED")
    report = actor.describe()
    assert report.detail == "engine killed by SIGKILL"
    assert "fake engine listens" in report.log_tail
    fake_worker.assert_nothing_left(shared_memory)


def test_killed_launcher_is_cleaned_by_the_actor(fake_worker: FakeWorker) -> None:
    """The actor does at once what the launcher no longer can."""
    actor = make_actor(fake_worker)
    actor.launch(command(fake_worker, "--stubborn"))
    fake_worker.wait_running()
    shared_memory = fake_worker.shared_memory()
    os.kill(launcher_pid(actor), signal.SIGKILL)
    wait_until(lambda: actor.describe().state is EngineState.FAILED, "FAILED")
    assert actor.describe().detail == "its launcher was killed"
    fake_worker.assert_nothing_left(shared_memory)


def test_next_start_cleans_what_a_dead_actor_and_launcher_left(fake_worker: FakeWorker) -> None:
    """Actor and launcher both killed leave core and worker; the worker's next incarnation ends them first."""
    launcher = fake_worker.launch(*fake_worker.engine_argv())
    fake_worker.wait_running()
    left = fake_worker.shared_memory()
    launcher.kill()
    launcher.wait()
    assert set(left) <= entries()

    actor = make_actor(fake_worker)
    actor.launch(command(fake_worker))
    fake_worker.wait_running()

    assert not set(left) & entries()
    shared_memory = fake_worker.shared_memory()
    actor.stop()
    fake_worker.assert_nothing_left((*left, *shared_memory))


def test_command_line_shows_no_secret(fake_worker: FakeWorker) -> None:
    """What the command adds to the environment is nowhere in argv, and not in the log."""
    actor = make_actor(fake_worker)
    actor.launch(command(fake_worker))
    fake_worker.wait_running()
    tree = descendants([os.getpid()])
    assert all(b"hidden" not in Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in tree)
    actor.stop()
    assert b"hidden" not in (fake_worker.state_dir / "logs" / "prefill-0.log").read_bytes()
