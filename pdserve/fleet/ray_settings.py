"""The environment and command line of the Ray that a deployment starts for itself. Pure.

With Ray's defaults a GCS that is away for 60 s takes the raylet, the actors and thus the engines with it, and one that comes back without
storage kills the actors it forgot. Here the head may die: the GCS keeps its tables on disk and everyone waits an hour for it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

RECONNECT_TIMEOUT_S = 3600
OBJECT_STORE_BYTES = 80 << 20
"""about Ray's minimum: no object of ours goes through the store"""

_START = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; main()"
"""`ray start` opens Ray Client's fixed port whenever grpc can be imported, and no flag leaves it out"""


def client_environment(token_file: Path) -> dict[str, str]:
    """Return what a process needs to talk to this Ray and to outwait its GCS."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_TIMEOUT_S),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def head_environment(base: Mapping[str, str], token_file: Path, storage_dir: Path) -> dict[str, str]:
    """Return the environment of `ray start --head`, made from the caller's own."""
    kept = {name: value for name, value in base.items() if name != "RAY_ADDRESS"}
    return {
        **kept,
        **client_environment(token_file),
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(storage_dir),
        # Ray would kill a worker's actor when other programs fill the host; an engine's memory is fixed at its start.
        "RAY_memory_monitor_refresh_ms": "0",
        # Process titles are written into argv alone, so that /proc/PID/environ keeps the incarnation's mark.
        "SPT_NOENV": "1",
    }


def head_command(temp_dir: Path, *, gpus: bool) -> tuple[str, ...]:
    """Return the command that starts the head's processes and returns."""
    return (
        *(sys.executable, "-c", _START, "start", "--head"),
        *("--port", "0"),
        *("--temp-dir", str(temp_dir)),
        *("--include-dashboard", "false"),
        *("--include-log-monitor", "false"),
        "--no-monitor",
        "--disable-usage-stats",
        *("--object-store-memory", str(OBJECT_STORE_BYTES)),
        *(() if gpus else ("--num-gpus", "0")),
    )


def actor_environment() -> dict[str, str]:
    """Return what a worker's actor needs in its runtime environment."""
    # Ray would SIGKILL the launcher with the actor, before it can end the engine's tree; it ends by itself when its stdin closes.
    return {"RAY_kill_child_processes_on_worker_exit": "0"}
