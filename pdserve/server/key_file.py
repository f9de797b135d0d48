"""A keys file on disk, read again whenever it changes. One that cannot be used leaves the keys in force as they are, and is told of once.

Owns the file's descriptor while it reads. Knows nothing of what keys are for.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from pdserve.errors import ConfigError
from pdserve.server.keys import FIELD, KeyRing, parse_keys

POLL_S = 1.0
MAX_FILE_BYTES = 16 << 20

_Mark = tuple[int, ...] | None
"""tells one content of the file from another; None while it cannot be read"""


class KeyFile:
    """One file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark: _Mark = None
        self._log = structlog.get_logger().bind()

    def load(self) -> KeyRing:
        """Read the file for the first time. Raises `ConfigError`."""
        self._mark, ring = _read(self._path)
        return ring

    async def watch(self, on_loaded: Callable[[KeyRing], None], on_refused: Callable[[], None]) -> None:
        """Follow the file until cancelled.

        Args:
            on_loaded: given the new keys.
            on_refused: told that a change of the file could not be taken over.
        """
        while True:
            await asyncio.sleep(POLL_S)
            await self.poll(on_loaded, on_refused)

    async def poll(self, on_loaded: Callable[[KeyRing], None], on_refused: Callable[[], None]) -> None:
        """Look once. A file that is just being written is left for the next time."""
        mark = await asyncio.to_thread(_mark_of, self._path)
        if mark == self._mark:
            return
        try:
            read_mark, ring = await asyncio.to_thread(_read, self._path)
        except ConfigError as error:
            self._mark = mark
            self._log.warning("keys file refused; the keys before it stay in force", value=str(error.value), fix=error.fix)
            on_refused()
            return
        if read_mark == await asyncio.to_thread(_mark_of, self._path):
            self._mark = read_mark
            self._log.info("keys loaded", keys=len(ring.keys))
            on_loaded(ring)


def _mark_of(path: Path) -> _Mark:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _read(path: Path) -> tuple[_Mark, KeyRing]:
    mark = _mark_of(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(FIELD, str(path), f"give a readable file ({error.strerror})") from error
    except UnicodeDecodeError:
        raise ConfigError(FIELD, str(path), "give a file in UTF-8") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(FIELD, str(path), f"the file is larger than {MAX_FILE_BYTES} bytes")
    return mark, parse_keys(text)
