"""A stand-in for an engine's process tree, run as a script: `fake_engine.py ENDPOINT_FILE [--stubborn]`.

Like the real one it binds a port before it publishes it, has a core in a session of its own with a worker below it, and shared memory that the
worker holds. Unlike the real one it leaves core and worker behind when it ends, and with `--stubborn` nothing of it heeds SIGTERM.
"""

import argparse
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from pdserve.fleet.endpoint import Endpoint, publish
from pdserve.fleet.processes import MARK

SHARED_BYTES = 4096


def hold_shared_memory() -> None:
    """Map a new segment; leave it when killed."""
    path = Path(f"/dev/shm/pdtest_{secrets.token_hex(6)}")
    with path.open("wb+") as file:
        file.truncate(SHARED_BYTES)
        mapped = mmap.mmap(file.fileno(), SHARED_BYTES)
    mapped[0] = 1
    sleep_for_ever()


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def child(role: str, *flags: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, __file__, "-", "--role", role, *flags], start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint_file")
    parser.add_argument("--role", choices=("api", "core", "worker"), default="api")
    parser.add_argument("--stubborn", action="store_true")
    options = parser.parse_args()
    flags = ("--stubborn",) if options.stubborn else ()
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.role == "worker":
        hold_shared_memory()
    elif options.role == "core":
        kept = child("worker", *flags)
        sleep_for_ever()
    else:
        kept = child("core", *flags)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            print("fake engine listens", flush=True)
            publish(Path(options.endpoint_file), Endpoint(os.environ[MARK], "127.0.0.1", port, os.getpid()))
            sleep_for_ever()
    kept.wait()


if __name__ == "__main__":
    main()
