"""The state folder of a deployment: what its processes and the command line share on disk. Names, modes, and who may write.

    secret        0600   what engines and the admin port demand; written by `up`
    config.json          the settings in force; written by `up`
    lock                 held for as long as a controller lives; handed over by `up` as an open descriptor
    state.json           see `state`; written by the controller
    router.json          the router's present ports; written by the router
    logs/                one file per process

Knows nothing of what runs.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pdserve.config import Config, home

SECRET_BYTES = 32


class RouterBinding(msgspec.Struct, frozen=True):
    """Where one router process listens."""

    pid: int
    port: int
    admin_port: int


class StateFolder:
    """The files of one deployment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report_path = path / "state.json"
        self.logs = path / "logs"
        self._secret_path = path / "secret"
        self._config_path = path / "config.json"
        self._binding_path = path / "router.json"
        self._lock_path = path / "lock"

    @classmethod
    def of(cls, name: str) -> "StateFolder":
        """Return the folder of deployment `name` of this user."""
        return cls(home() / "run" / name)

    def log_path(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @contextmanager
    def locked(self) -> Iterator[int | None]:
        """Hold the lock, yielding its descriptor, or None if someone else has it.

        A child that was given the descriptor keeps the lock after the context ends.
        """
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield descriptor
        finally:
            os.close(descriptor)

    def prepare(self, config: Config) -> None:
        """Write what the processes of a new deployment read; forget what an earlier one left. The lock must be held."""
        self.clear()
        descriptor = os.open(self._secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
        self._config_path.write_text(config.model_dump_json(indent=1), encoding="utf-8")
        for log in self.logs.glob("*.log"):
            log.unlink()

    def clear(self, *, keep_report: bool = False) -> None:
        """Forget the deployment; logs stay for a post-mortem, and the report if it says why the deployment failed."""
        kept = (self.report_path,) if keep_report else ()
        for path in (self.report_path, self._binding_path, self._config_path, self._secret_path):
            if path not in kept:
                path.unlink(missing_ok=True)

    @property
    def is_prepared(self) -> bool:
        """Whether settings and secret of a deployment are there."""
        return self._config_path.exists() and self._secret_path.exists()

    def config(self) -> Config:
        """Return the settings in force. Raises FileNotFoundError before `prepare`."""
        return Config(**msgspec.json.decode(self._config_path.read_bytes()))

    def secret(self) -> str:
        """Return the deployment's secret. Raises FileNotFoundError before `prepare`."""
        return self._secret_path.read_text(encoding="utf-8")

    def write_binding(self, binding: RouterBinding) -> None:
        """Publish where the router listens, in one step."""
        partial = self._binding_path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(binding))
        partial.replace(self._binding_path)

    def binding(self) -> RouterBinding | None:
        """Return where the last router listens or listened."""
        try:
            return msgspec.json.decode(self._binding_path.read_bytes(), type=RouterBinding)
        except FileNotFoundError:
            return None
