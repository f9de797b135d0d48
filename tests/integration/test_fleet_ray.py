"""The fleet over a real local Ray, with scripts for engines: placement, deaths of every kind, adoption, and nothing left at the end."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.config import Config, RayConfig
from pdserve.errors import FleetError
from pdserve.fleet import ray_fleet, ray_local
from pdserve.fleet.engine_command import EngineCommand, EnginePlace, ServedModel
from pdserve.fleet.files import DeploymentFiles
from pdserve.fleet.incarnation import read_record
from pdserve.fleet.leftovers import clean_leftovers
from pdserve.fleet.processes import all_pids, descendants, identify, is_alive, marked
from pdserve.fleet.ray_fleet import RayFleet
from pdserve.fleet.ray_head import RayCluster, read_cluster
from pdserve.fleet.shm import entries
from pdserve.ports import WorkerSpec
from pdserve.types import Role, WorkerSnapshot, WorkerState

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAKE_ENGINE = Path(__file__).resolve().parents[1] / "unit" / "fleet" / "fake_engine.py"
LIMIT_S = 30.0
PREFILL = WorkerSpec("prefill-0", Role.PREFILL, 1)
DECODE = WorkerSpec("decode-0", Role.DECODE, 1)
ADOPT = """
import asyncio, json, sys
from pathlib import Path
from pdserve.config import Config
from pdserve.fleet.engine_command import ServedModel
from pdserve.fleet.ray_fleet import RayFleet

async def main():
    fleet = RayFleet(Config(name=sys.argv[2]), Path(sys.argv[1]), "00", ServedModel(Path("/models/x"), "x"))
    print("SEEN" + json.dumps([[w.worker_id, w.role, w.state, w.incarnation, w.pid] for w in (await fleet.snapshot()).workers]))

asyncio.run(main())
"""


def fake_command(config: Config, spec: WorkerSpec, model: ServedModel, secret: str, place: EnginePlace) -> EngineCommand:
    return EngineCommand((sys.executable, str(FAKE_ENGINE), str(place.endpoint_file)), {"PDSERVE_SECRET": secret})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> DeploymentFiles:
    return DeploymentFiles(tmp_path_factory.mktemp("deployment"))


@pytest.fixture(scope="module")
def config() -> Config:
    """Room for exactly two workers on this node."""
    cpus = (os.cpu_count() or 1) / 2
    return Config(name=f"test-{secrets.token_hex(4)}", ray=RayConfig(num_cpus_per_worker=cpus))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(files: DeploymentFiles, config: Config) -> AsyncIterator[RayFleet]:
    """A fleet whose end leaves no process, no session folder, no record and no name in /dev/shm."""
    before = entries()
    fleet = RayFleet(config, files.state_dir, secrets.token_hex(32), ServedModel(Path("/models/x"), "x"), command=fake_command)
    await fleet.open()
    yield fleet
    cluster, record = read_cluster(files), read_record(files.ray_incarnation)
    assert cluster is not None
    assert record is not None
    await fleet.close()
    assert_nothing_left(files, cluster, Path(record.scratch), before)
    await fleet.close()


def assert_nothing_left(files: DeploymentFiles, cluster: RayCluster, scratch: Path, before: frozenset[str]) -> None:
    """No process of Ray or workers, no session folder, no record, no new name in /dev/shm."""
    assert marked(cluster.incarnation) == frozenset()
    assert not is_alive(cluster.raylet)
    assert not is_alive(cluster.keeper)
    assert not scratch.exists()
    assert [path.name for path in files.state_dir.iterdir()] == ["logs"]
    assert {name for name in entries() - before if name.startswith("pdtest_")} == set()


async def until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S} s: {what}"
        await asyncio.sleep(0.05)


async def until_listed(fleet: RayFleet, worker_id: str, state: WorkerState) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while (worker_id, state) not in [(one.worker_id, one.state) for one in (await fleet.snapshot()).workers]:
        assert time.monotonic() < deadline_s, f"{worker_id} is not {state}"
        await asyncio.sleep(0.05)


async def worker(fleet: RayFleet, worker_id: str) -> WorkerSnapshot:
    return next(one for one in (await fleet.snapshot()).workers if one.worker_id == worker_id)


async def running(fleet: RayFleet, files: DeploymentFiles, spec: WorkerSpec) -> WorkerSnapshot:
    """Start a worker, or take it as it runs, and wait until its engine holds shared memory."""
    await fleet.start(spec)

    def shared_memory() -> tuple[str, ...]:
        record = read_record(files.worker(spec.worker_id).incarnation)
        return () if record is None else record.shared_memory

    await until(shared_memory, "shared memory in the record")
    return await worker(fleet, spec.worker_id)


async def failed(fleet: RayFleet, worker_id: str) -> WorkerSnapshot:
    await until_listed(fleet, worker_id, WorkerState.FAILED)
    return await worker(fleet, worker_id)


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def executable(pid: int) -> str:
    """Return the file name of a process's program, or nothing for one that has ended meanwhile."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name
    return ""


def ray_process(files: DeploymentFiles, name: str) -> int:
    cluster = read_cluster(files)
    assert cluster is not None
    below = [process.pid for process in descendants([cluster.keeper.pid])]
    return next(pid for pid in below if executable(pid) == name)


async def test_workers_are_placed_and_described(fleet: RayFleet, files: DeploymentFiles) -> None:
    """Two starts at once give two actors with an engine each; the snapshot has their roles, ports and incarnations."""
    empty = await fleet.snapshot()
    assert empty.workers == ()
    await asyncio.gather(fleet.start(PREFILL), fleet.start(DECODE))
    prefill, decode = [await running(fleet, files, spec) for spec in (PREFILL, DECODE)]
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert (prefill.state, decode.state) == (WorkerState.LOADING, WorkerState.LOADING)
    assert prefill.url.startswith("http://127.0.0.1:")
    assert prefill.url != decode.url
    assert prefill.incarnation != decode.incarnation
    assert prefill.pid is not None and identify(prefill.pid) is not None
    assert (prefill.model, prefill.max_running, prefill.kv_capacity_tokens) == ("x", Config().engine.max_num_seqs, 0)
    assert (await fleet.snapshot()).version > empty.version


async def test_version_stays_while_nothing_changes(fleet: RayFleet, files: DeploymentFiles) -> None:
    """Two looks at the same fleet are one version."""
    await running(fleet, files, PREFILL)
    await running(fleet, files, DECODE)
    assert await fleet.snapshot() == await fleet.snapshot()


async def test_second_start_changes_nothing(fleet: RayFleet, files: DeploymentFiles) -> None:
    """A worker that runs is left as it is."""
    before = await running(fleet, files, PREFILL)
    await fleet.start(PREFILL)
    assert await worker(fleet, PREFILL.worker_id) == before


async def test_full_cluster_refuses_with_the_fix(fleet: RayFleet, files: DeploymentFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third worker has no room: the error names the setting, and the worker is not in the fleet."""
    monkeypatch.setattr(ray_fleet, "_PLACEMENT_TIMEOUT_S", 1.0)
    await running(fleet, files, PREFILL)
    await running(fleet, files, DECODE)
    with pytest.raises(FleetError, match=r"no node has room .* lower ray\.num_cpus_per_worker"):
        await fleet.start(WorkerSpec("decode-1", Role.DECODE, 1))
    assert [one.worker_id for one in (await fleet.snapshot()).workers] == ["decode-0", "prefill-0"]


async def test_cancelled_start_takes_back_what_it_placed(fleet: RayFleet, files: DeploymentFiles) -> None:
    """A start that waits for room is undone before its cancellation is raised."""
    await running(fleet, files, PREFILL)
    await running(fleet, files, DECODE)
    start = asyncio.create_task(fleet.start(WorkerSpec("decode-1", Role.DECODE, 1)))
    await until_listed(fleet, "decode-1", WorkerState.PENDING)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [one.worker_id for one in (await fleet.snapshot()).workers] == ["decode-0", "prefill-0"]


async def test_killed_engine_fails_the_worker_and_the_next_start_replaces_it(fleet: RayFleet, files: DeploymentFiles) -> None:
    """Nothing of the dead incarnation is left; the new one is another."""
    before = await running(fleet, files, PREFILL)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    assert (await failed(fleet, PREFILL.worker_id)).detail == "engine killed by SIGKILL"
    assert marked(before.incarnation) == frozenset()
    after = await running(fleet, files, PREFILL)
    assert after.state is WorkerState.LOADING
    assert after.incarnation != before.incarnation


@pytest.mark.parametrize("with_launcher", [False, True], ids=["actor", "actor and launcher"])
async def test_killed_actor_leaves_nothing(fleet: RayFleet, files: DeploymentFiles, with_launcher: bool) -> None:
    """The launcher ends the engine when its actor dies; if both die, the next start does."""
    before = await running(fleet, files, DECODE)
    assert before.pid is not None
    launcher = parent(before.pid)
    os.kill(parent(launcher), signal.SIGKILL)
    if with_launcher:
        os.kill(launcher, signal.SIGKILL)
    assert "its actor died" in (await failed(fleet, DECODE.worker_id)).detail
    if not with_launcher:
        await until(lambda: not marked(before.incarnation), "the launcher's clean-up")
    after = await running(fleet, files, DECODE)
    assert after.incarnation != before.incarnation
    assert marked(before.incarnation) == frozenset()


async def test_gcs_may_die(fleet: RayFleet, files: DeploymentFiles) -> None:
    """Without its GCS the fleet is still described; the keeper starts it again, actors and engines live on, and workers can be placed."""
    before = await running(fleet, files, PREFILL)
    await fleet.stop(DECODE.worker_id)
    gcs = ray_process(files, "gcs_server")
    os.kill(gcs, signal.SIGKILL)
    assert await worker(fleet, PREFILL.worker_id) == before
    await running(fleet, files, DECODE)
    assert await worker(fleet, PREFILL.worker_id) == before
    assert ray_process(files, "gcs_server") != gcs


async def test_new_controller_adopts_what_runs(fleet: RayFleet, files: DeploymentFiles, config: Config) -> None:
    """Another process that opens the same deployment sees the same workers, and leaving it stops nothing."""
    expected = [await running(fleet, files, spec) for spec in (DECODE, PREFILL)]
    adopt = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ADOPT, str(files.state_dir), config.name, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(adopt.communicate(), 60)
    assert adopt.returncode == 0, err.decode()
    seen = json.loads(out.decode().rpartition("SEEN")[2])
    assert seen == [[one.worker_id, one.role, one.state, one.incarnation, one.pid] for one in expected]
    assert [await worker(fleet, one.worker_id) for one in expected] == expected


async def test_stopped_worker_is_gone_and_gives_its_room_back(fleet: RayFleet, files: DeploymentFiles) -> None:
    """After a stop nothing of the worker is left, a second stop is no error, and another worker fits."""
    before = await running(fleet, files, DECODE)
    await fleet.stop(DECODE.worker_id)
    await fleet.stop(DECODE.worker_id)
    assert marked(before.incarnation) == frozenset()
    assert not files.worker(DECODE.worker_id).incarnation.exists()
    assert [one.worker_id for one in (await fleet.snapshot()).workers] == [PREFILL.worker_id]
    await running(fleet, files, DECODE)


async def test_dead_raylet_fails_all_workers_and_the_next_start_brings_a_new_ray(fleet: RayFleet, files: DeploymentFiles) -> None:
    """The keeper ends what the raylet leaves; a start does not wait for the dead."""
    before = await running(fleet, files, PREFILL)
    cluster = read_cluster(files)
    assert cluster is not None
    os.kill(cluster.raylet.pid, signal.SIGKILL)
    await until(lambda: not is_alive(cluster.keeper), "the keeper's end")
    assert marked(before.incarnation) == frozenset()
    await failed(fleet, PREFILL.worker_id)
    assert (await running(fleet, files, PREFILL)).state is WorkerState.LOADING
    assert read_cluster(files) != cluster


async def test_cancelled_open_leaves_no_ray(tmp_path: Path) -> None:
    """Leaving while Ray starts, at once or a little later, ends what has begun."""
    for delay_s in (0.0, 0.5):
        other = RayFleet(Config(name="cancelled"), tmp_path, "00", ServedModel(Path("/models/x"), "x"), command=fake_command)
        opening = asyncio.create_task(other.open())
        await asyncio.sleep(delay_s)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await other.close()
        assert not DeploymentFiles(tmp_path).ray_dir.exists()
        assert [pid for pid in all_pids() if str(tmp_path) in command_line(pid)] == []


def started_ray(files: DeploymentFiles) -> RayCluster:
    cluster = ray_local.start_ray(files, gpus=False)
    assert ray_local.find_ray(files) == cluster
    return cluster


async def test_dead_keeper_is_cleaned_after_and_other_rays_are_left_alone(fleet: RayFleet, files: DeploymentFiles, tmp_path: Path) -> None:
    """Cleaning a deployment whose keeper was killed ends its own Ray only."""
    other = DeploymentFiles(tmp_path / ("deep" * 20) / "state")
    cluster = await asyncio.to_thread(started_ray, other)
    os.kill(cluster.keeper.pid, signal.SIGKILL)
    await until(lambda: not is_alive(cluster.keeper), "the keeper's end")
    assert ray_local.find_ray(other) == cluster
    found = await asyncio.to_thread(clean_leftovers, other.state_dir)
    assert cluster.raylet.pid in found.processes
    assert marked(cluster.incarnation) == frozenset()
    assert not other.ray_dir.exists()
    assert (await running(fleet, files, PREFILL)).state is WorkerState.LOADING
