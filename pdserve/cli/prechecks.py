"""What `up` makes sure of before anything starts: the port, the memory, room in /dev/shm. Each names the flag to change.

Reads this host only; a deployment that joins a cluster elsewhere is checked for its port alone.
"""

import contextlib
import errno
import json
import os
import socket
from pathlib import Path

import psutil

from pdserve.config import Config
from pdserve.errors import ConfigError

GB = 1e9
ENGINE_BYTES = int(1.0 * GB)
"""memory of one vLLM CPU engine's API server and core, shared pages split; vLLM 0.32, measured 0.9"""
RANK_BYTES = int(0.8 * GB)
"""memory of one of its ranks, without weights, KV cache and receive slots; measured 0.6 of four and 0.85 of one"""
SHARED_BYTES = int(0.7 * GB)
"""Ray with its actors, controller and router together, measured 0.65"""
RAY_OBJECT_STORE_BYTES = 100 << 20
ENGINE_SHM_BYTES = 64 << 20
"""message queues between an engine's processes, per worker, rounded up"""
SHM = Path("/dev/shm")
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_port(host: str, port: int) -> None:
    """Raise `ConfigError` unless the router can listen on `host`:`port`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError("--host", host, "give an address or a name of this machine") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            match error.errno:
                case errno.EADDRINUSE:
                    raise ConfigError("--port", port, f"{_listener(port)} listens there: stop it or choose another --port") from error
                case errno.EACCES:
                    raise ConfigError("--port", port, "not allowed for this user: choose one above 1023") from error
                case _:
                    raise ConfigError("--host", host, f"give an address of this machine ({os.strerror(error.errno or 0)})") from error


def check_memory(config: Config, available_bytes: int) -> None:
    """Raise `ConfigError` if the workers would not fit into `available_bytes` of memory."""
    workers = config.prefill.count + config.decode.count
    need_bytes = SHARED_BYTES + sum(
        pool.count * ENGINE_BYTES
        + pool.count * pool.tensor_parallel_size * (RANK_BYTES + config.engine.kv_cache_bytes + config.kv.arena_bytes)
        + pool.count * weight_bytes(Path(config.model), config.engine.dtype)
        for pool in (config.prefill, config.decode)
    )
    if need_bytes > available_bytes:
        raise ConfigError(
            "--prefill, --decode",
            f"{config.prefill.count}+{config.decode.count}",
            f"{workers} workers need about {need_bytes / GB:.1f} GB and {available_bytes / GB:.1f} GB are free: start fewer, lower "
            "engine.kv_cache_bytes, or pass --force",
        )


def check_shared_memory(config: Config, free_bytes: int) -> None:
    """Raise `ConfigError` if /dev/shm has too little room."""
    per_rank_bytes = config.kv.arena_bytes if config.kv.transport == "shm" else 0
    ranks = sum(pool.count * pool.tensor_parallel_size for pool in (config.prefill, config.decode))
    need_bytes = RAY_OBJECT_STORE_BYTES + ranks * (per_rank_bytes + ENGINE_SHM_BYTES)
    if need_bytes > free_bytes:
        raise ConfigError(
            str(SHM),
            f"{free_bytes / GB:.2f} GB free",
            f"about {need_bytes / GB:.2f} GB are needed: make it larger (containers: --shm-size), start fewer workers, or pass --force",
        )


def check_host(config: Config) -> None:
    """Run the checks of memory and /dev/shm against this host. Raises `ConfigError`."""
    check_memory(config, psutil.virtual_memory().available)
    usage = os.statvfs(SHM)
    check_shared_memory(config, usage.f_bavail * usage.f_frsize)


def weight_bytes(model: Path, dtype: str) -> int:
    """Return the memory that the model's weights take in `dtype`, from the sizes of its files and the type its config names."""
    stored_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    stored = settings.get("dtype") or settings.get("torch_dtype")
    if dtype not in VALUE_BYTES or stored not in VALUE_BYTES:
        return stored_bytes
    return stored_bytes * VALUE_BYTES[dtype] // VALUE_BYTES[stored]


def _listener(port: int) -> str:
    """Return who listens on a port, as far as this user may know."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr and connection.laddr.port == port:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another program"
