"""Starts, watches and ends the router process. It lives in a session of its own, so the controller's death does not touch it.

When to start it is decided in `router_plan`; this room only does it.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Protocol

from pdserve.control.folder import StateFolder
from pdserve.control.observation import RouterSeen

STOP_S = 10.0
"""time to finish answers after SIGTERM, then SIGKILL"""
DETAIL_BYTES = 2000


class RouterProcess(Protocol):
    """What the control loop needs of it."""

    def start(self) -> None:
        """Start the process; returns at once. Raises OSError."""
        ...

    def seen(self) -> RouterSeen:
        """Return how it is now."""
        ...

    async def stop(self) -> None:
        """End it and wait for its end. Idempotent."""
        ...


class LocalRouterProcess:
    """The router as a child process.

    Args:
        folder: the router publishes its ports there; its output goes to ``logs/router.log``.
        command: how to start it.
        host: address that clients on this machine reach it by.
    """

    def __init__(self, folder: StateFolder, command: Sequence[str], host: str) -> None:
        self._folder = folder
        self._command = tuple(command)
        self._host = f"[{host}]" if ":" in host else host
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self) -> None:
        with self._folder.log_path("router").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder.path, start_new_session=True
            )
        self._starts += 1

    def seen(self) -> RouterSeen:
        if self._process is None:
            return RouterSeen()
        if self._process.poll() is not None:
            return RouterSeen(self._starts, running=False, detail=self._last_line())
        binding = self._folder.binding()
        is_bound = binding is not None and binding.pid == self._process.pid
        url = f"http://{self._host}:{binding.port}" if binding is not None and is_bound else None
        return RouterSeen(self._starts, running=True, pid=self._process.pid, url=url)

    async def stop(self) -> None:
        process = self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
            for _ in range(int(STOP_S / 0.05)):
                if process.poll() is not None:
                    return
                await asyncio.sleep(0.05)

    def _last_line(self) -> str:
        with self._folder.log_path("router").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - DETAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
