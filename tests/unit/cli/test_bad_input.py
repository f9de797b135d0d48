"""Wrong input: exit code 2, one line that names field, value and fix, and nothing started."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.cli import main, prechecks
from pdserve.config import Config, load_config
from pdserve.errors import ConfigError, FleetError

GB = 10**9


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder in which nothing may be written, and an environment without settings."""
    for name in [name for name in os.environ if name.startswith(("PDSERVE_", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model of 100 MB in float32."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(100 * 10**6)
    return folder


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["up", "--prefill", "0"], "--prefill: 0: give a value that is greater than or equal to 1"),
        (["up", "--decode", "-1"], "--decode: -1: give a value that is greater than or equal to 1"),
        (["up", "--prefill", "two"], "--prefill: 'two': give a value that is a valid integer, unable to parse string as an integer"),
        (["up", "--prefill", "1.5"], "--prefill: '1.5': give a value that is a valid integer, unable to parse string as an integer"),
        (["up", "--port", "70000"], "--port: 70000: give a value that is less than or equal to 65535"),
        (["up", "--name", "No Good"], "--name: 'No Good': string should match pattern '^[a-z0-9][a-z0-9-]{0,31}$'"),
        (["up", "--model", "no/such/model"], "--model: 'no/such/model': give a model folder, or a built-in name: smollm2-135m-instruct"),
        (["up", "--host", "no.such.host.invalid"], "--host: 'no.such.host.invalid': give an address or a name of this machine"),
        (["up", "--host", "192.0.2.1"], "--host: '192.0.2.1': give an address of this machine (Cannot assign requested address)"),
        (["up", "--config", "/no/such/file"], "--config: '/no/such/file': give a readable YAML file (No such file or directory)"),
        (["up", "--bogus"], "No such option: --bogus"),
        (["up", "--prefill"], "Option '--prefill' requires an argument"),
        (["up", "extra"], "Got unexpected extra argument"),
        (["lift"], "No such command 'lift'"),
        (["down"], "--name: 'default': no such deployment here; `pdserve up` starts one"),
        (["down", "--name", "../x"], "--name: '../x': string should match pattern '^[a-z0-9][a-z0-9-]{0,31}$'"),
        (["status", "--name", "other"], "--name: 'other': no such deployment here; `pdserve up` starts one"),
        (["config", "validate", "/no/such/file"], "--config: '/no/such/file': give a readable YAML file (No such file or directory)"),
    ],
)
def test_one_line_names_field_value_and_fix(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The field is the flag that was typed."""
    assert main.run(arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith(line)


@pytest.mark.parametrize(
    ("yaml", "line"),
    [
        ("prefill: {count: 0}", "prefill.count: 0: give a value that is greater than or equal to 1"),
        ("prefil: {count: 1}", "prefil: {'count': 1}: unknown setting; `pdserve config schema` lists all"),
        ("router: {port: http}", "router.port: 'http': give a value that is a valid integer"),
        ("prefill: [", "--config: 'FILE': mend the YAML syntax at line 1"),
        ("- 1", "--config: 'FILE': give a mapping of settings at the top level"),
        ("prefill: {tensor_parallel_size: 3}", "prefill.tensor_parallel_size: 3: give a value that is 1, 2, 4 or 8"),
    ],
)
@pytest.mark.parametrize("command", [["up", "--config"], ["config", "validate"], ["config", "show", "--config"]])
def test_file_errors_name_the_setting(command: list[str], yaml: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that came from the file is named as it is written there, by every command that reads one."""
    file = tmp_path / "settings.yaml"
    file.write_text(yaml)
    assert main.run([*command, str(file)]) == 2
    assert capsys.readouterr().err.startswith(line.replace("FILE", str(file)))


def test_environment_errors_name_the_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A variable is a setting like any other."""
    monkeypatch.setenv("PDSERVE_DECODE__COUNT", "0")
    assert main.run(["up"]) == 2
    assert capsys.readouterr().err == "decode.count: 0: give a value that is greater than or equal to 1\n"


def test_busy_port_names_who_listens(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The operator sees which process to stop, or that another port is needed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main.run(["up", "--model", str(model), "--port", str(port)]) == 2
    listener = f"{psutil.Process().name()} (pid {os.getpid()})"
    assert capsys.readouterr().err == f"--port: {port}: {listener} listens there: stop it or choose another --port\n"


def test_port_in_time_wait_is_free() -> None:
    """A router that was just stopped does not keep its port busy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)
    prechecks.check_port("127.0.0.1", port)


def config(model: Path, **overrides: object) -> Config:
    return load_config(None, {"model": str(model), "engine.kv_cache_bytes": GB, "kv.arena_bytes": 64 * 10**6, **overrides})


def test_too_little_memory_is_refused_with_numbers(model: Path) -> None:
    """The estimate is the fixed part plus, per worker, engine, weights, cache and arena."""
    need_bytes = prechecks.SHARED_BYTES + 3 * (prechecks.ENGINE_BYTES + prechecks.RANK_BYTES + GB + 64 * 10**6 + 100 * 10**6)
    three = config(model, **{"prefill.count": 2})
    prechecks.check_memory(three, need_bytes)
    with pytest.raises(ConfigError) as refused:
        prechecks.check_memory(three, need_bytes - 1)
    assert str(refused.value) == (
        f"--prefill, --decode: '2+1': 3 workers need about {need_bytes / GB:.1f} GB and {need_bytes / GB:.1f} GB are free: "
        "start fewer, lower engine.kv_cache_bytes, or pass --force"
    )


def test_up_refuses_for_memory_unless_forced(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand workers fit on no test machine; nothing is written for a deployment that was refused."""
    assert main.run(["up", "--model", str(model), "--port", "0", "--prefill", "1000"]) == 2
    assert capsys.readouterr().err.startswith("--prefill, --decode: '1000+1': 1001 workers need about ")


def test_dry_run_checks_and_prints_but_starts_nothing(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command line per engine, after the same checks as a real start, and no file of a deployment."""
    arguments = ["up", "--dry-run", "--model", str(model), "--port", "0", "--prefill", "2"]
    assert main.run([*arguments, "--force"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(f"--model {model}" in line and "pdserve.fleet.engine_main" in line for line in lines)
    assert main.run([*arguments, "--decode", "1000"]) == 2
    assert not (home / "run").exists()


@pytest.mark.parametrize(
    ("stored", "dtype", "factor"),
    [
        ("float32", "float32", 1.0),
        ("bfloat16", "float32", 2.0),
        ("float32", "float16", 0.5),
        ("bfloat16", "auto", 1.0),
        ("fp8", "float32", 1.0),
    ],
)
def test_weights_count_in_the_type_they_are_loaded_in(model: Path, stored: str, dtype: str, factor: float) -> None:
    """A bfloat16 checkpoint takes twice its files on CPU, where engines run in float32; an unknown type counts as it is."""
    (model / "config.json").write_text(f'{{"dtype": "{stored}"}}')
    assert prechecks.weight_bytes(model, dtype) == 100 * 10**6 * factor


@pytest.mark.parametrize(("transport", "fits"), [("tcp", True), ("shm", False)])
def test_shared_memory_counts_arenas_only_where_they_live_there(model: Path, transport: str, fits: bool) -> None:
    """A container's default of 64 MB is too little for anything; arenas add to it with the transport that keeps them there."""
    settings = config(model, **{"kv.transport": transport})
    with pytest.raises(ConfigError, match=r"/dev/shm: '0\.06 GB free'"):
        prechecks.check_shared_memory(settings, 64 * 10**6)
    room_bytes = prechecks.RAY_OBJECT_STORE_BYTES + 2 * prechecks.ENGINE_SHM_BYTES
    if fits:
        prechecks.check_shared_memory(settings, room_bytes)
    else:
        with pytest.raises(ConfigError, match="are needed"):
            prechecks.check_shared_memory(settings, room_bytes)


def test_errors_of_a_running_deployment_are_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What goes wrong without the operator's fault is not a matter of input."""

    def fail(*_: object) -> None:
        raise FleetError("ray", "does not answer")

    monkeypatch.setattr("pdserve.cli.down.existing", fail)
    assert main.run(["down"]) == 1
    assert capsys.readouterr().err == "ray: does not answer\n"


@pytest.mark.parametrize(
    ("arguments", "code"), [(["up", "--prefill", "0"], 2), (["status"], 2), (["config", "schema"], 0), (["--version"], 0)]
)
def test_exit_code_of_the_process(arguments: list[str], code: int, home: Path) -> None:
    """What a shell sees, through `python -m pdserve`."""
    done = subprocess.run([sys.executable, "-m", "pdserve", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    assert (done.stderr == "") is (code == 0)
    assert not (home / "run").exists()
