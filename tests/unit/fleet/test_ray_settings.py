"""How the local Ray is started."""

from pathlib import Path

from pdserve.fleet.ray_settings import actor_environment, client_environment, head_command, head_environment

TOKEN, STORAGE = Path("/state/token"), Path("/state/gcs")


def test_head_may_die() -> None:
    """The GCS keeps its tables on disk, and everyone waits an hour for it."""
    environment = head_environment({"PATH": "/bin"}, TOKEN, STORAGE)
    assert (environment["RAY_gcs_storage"], environment["RAY_gcs_storage_path"]) == ("rocksdb", "/state/gcs")
    assert environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == "3600"
    assert environment["PATH"] == "/bin"


def test_driver_waits_and_authenticates_like_the_head() -> None:
    """A driver with other settings would be refused, or die with the GCS."""
    head = head_environment({}, TOKEN, STORAGE)
    client = client_environment(TOKEN)
    assert client["RAY_AUTH_MODE"] == "token"
    assert client.items() <= head.items()


def test_head_joins_nobody() -> None:
    """An address in the caller's environment is another cluster's."""
    assert "RAY_ADDRESS" not in head_environment({"RAY_ADDRESS": "10.0.0.1:6379"}, TOKEN, STORAGE)


def test_head_opens_no_dashboard_and_no_fixed_port() -> None:
    """Ports are the system's choice; the token is on no command line."""
    command = head_command(Path("/tmp/x"), gpus=False)
    assert command[command.index("--port") + 1] == "0"
    assert command[command.index("--include-dashboard") + 1] == "false"
    assert command[command.index("--num-gpus") + 1] == "0"
    assert "--num-gpus" not in head_command(Path("/tmp/x"), gpus=True)


def test_ray_leaves_the_launcher_to_end_by_itself() -> None:
    """Ray must not kill an actor's children: the launcher would leave the engine's tree behind."""
    assert actor_environment()["RAY_kill_child_processes_on_worker_exit"] == "0"
