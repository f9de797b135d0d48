"""Runs the router in one event loop: binds its two sockets, serves until told to stop, drains.

Owns sockets, signals and the order of ending. Knows nothing of state folders or of who started it.
"""

import asyncio
import ctypes
import errno
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from pdserve.clock import Clock
from pdserve.config import Config, check_access
from pdserve.errors import ConfigError
from pdserve.server.admin import create_admin_app
from pdserve.server.agent_client import AiohttpAgentClient
from pdserve.server.app import create_app
from pdserve.server.descriptors import Allowance, allowance, raise_file_limit
from pdserve.server.door import Door
from pdserve.server.gate import Gate
from pdserve.server.http_protocol import ConnectionLimits, GuardedProtocol
from pdserve.server.key_file import KeyFile
from pdserve.server.router import Router
from pdserve.server.upstream import EngineClient

DRAIN_S = 5.0
"""running requests get so long to finish after the signal"""
BACKLOG = 2048
ADMIN_CONNECTIONS = 16
YOUNG_OBJECTS = 10_000
"""made before the collector looks at them"""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""glibc's names for `mallopt`"""
KEPT_MEMORY_BYTES = 64 << 20
LARGEST_KEPT_BLOCK_BYTES = 4 << 20
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(config: Config, secret: str, *, clock: Clock, on_bound: Callable[[int, int], None]) -> None:
    """Serve the public and the admin application in this event loop until SIGTERM or SIGINT.

    After the signal new requests are refused and running ones get `DRAIN_S` to finish. Cancellation ends them at once. Run it on uvloop.

    Args:
        config: the whole deployment's settings; `router.*` and `kv.*` are used.
        secret: what engines and the admin port want in `x-pdserve-secret`.
        clock: source of every point in time.
        on_bound: called once, with the public and the admin port, when both accept connections.

    Raises:
        ConfigError: the address is taken or not this host's, or open to others without keys; the keys file cannot be used.
    """
    _keep_freed_memory()
    asyncio.get_running_loop().set_exception_handler(_log_unawaited)
    settings = config.router
    check_access(settings)
    keys = None if settings.keys_file is None else KeyFile(Path(settings.keys_file))
    ring = None if keys is None else keys.load()
    with (
        _bound("router.host", settings.host, "router.port", settings.port) as public_socket,
        _bound("router.admin_host", settings.admin_host, "router.admin_port", settings.admin_port) as admin_socket,
    ):
        allowed = _allowed(config)
        engines = EngineClient(secret, config.router.connect_timeout_s, allowed.kept)
        agent = AiohttpAgentClient(secret, config.router.connect_timeout_s, allowed.agents)
        router = Router(config, clock, engines, agent, CollectorRegistry(), secret, ring, allowed)
        public = _Server(
            Gate(create_app(router), router.auth), public_socket, allowed.connections, config, router.access.record_slow_client
        )
        admin = _Server(create_admin_app(router, secret), admin_socket, ADMIN_CONNECTIONS, config)
        servers = (public, admin)
        router.metrics.watch_connections(lambda: len(public.server_state.connections), allowed.connections)
        try:
            with _quiet_collector():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(server.serve(sockets=[server.socket])) for server in servers]
                    for server in servers:
                        await server.accepts.wait()
                    on_bound(public_socket.getsockname()[1], admin_socket.getsockname()[1])
                    async with _watched(keys, router):
                        await _until_stopped(router, servers, tasks)
        finally:
            await engines.close()
            await agent.close()


class _Server(uvicorn.Server):
    """One application on one socket, up to so many connections; leaves signals to `serve`."""

    def __init__(
        self, app: ASGIApp, listening: socket.socket, max_connections: int, config: Config, on_slow: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=GuardedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=round(config.router.client_idle_timeout_s),
                timeout_graceful_shutdown=1,
            )
        )
        self.socket = listening
        self.accepts = asyncio.Event()
        self._max_connections = max_connections
        self._on_slow = on_slow
        self._limits = ConnectionLimits(
            header_timeout_s=config.router.header_timeout_s,
            body_timeout_s=config.router.body_timeout_s,
            slow_client_timeout_s=config.router.slow_client_timeout_s,
            max_headers=config.limits.max_headers,
            max_header_bytes=config.limits.max_header_bytes,
        )
        self._door: Door | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections by our own loop, which stops where uvicorn would go on until the system refuses."""
        await self.lifespan.startup()
        self.servers = []
        self._door = Door(self.socket, self._protocol, self.server_state.connections, self._max_connections)
        self._door.open()
        self.started = True
        self.accepts.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is not None:
            await self._door.close()
        await super().shutdown(sockets)

    def _protocol(self) -> GuardedProtocol:
        protocol = GuardedProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        protocol.limits, protocol.on_slow = self._limits, self._on_slow
        return protocol


@asynccontextmanager
async def _watched(keys: KeyFile | None, router: Router) -> AsyncIterator[None]:
    """Take over changes of the keys file meanwhile."""
    if keys is None:
        yield
        return
    watch = asyncio.create_task(keys.watch(router.take_keys, router.access.record_refused_file))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait((watch,))


async def _until_stopped(router: Router, servers: Sequence[_Server], tasks: Sequence[asyncio.Task[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
        await router.drain(DRAIN_S)
    except asyncio.CancelledError:
        await router.drain(0)
        raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        for server in servers:
            server.should_exit = True
        # Also when cancelled: a server that is dropped in its loop leaves its sockets registered.
        await asyncio.wait(tasks)


@contextmanager
def _bound(host_field: str, host: str, port_field: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(port_field, port, f"choose a port that is free and allowed ({error.strerror}), or 0 for any") from error
        raise ConfigError(host_field, host, f"give an address of this host ({error.strerror or error})") from error
    with listening:
        listening.setblocking(False)
        yield listening


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep what is loaded by now out of garbage collection: walking it stops every stream for 90 ms each time.

    The rest is collected less often: a request makes hundreds of objects, nearly all of which are gone with it.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _log_unawaited(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that nobody awaited, without the loop's description of it, which quotes what the error holds."""
    structlog.get_logger().error("event loop", what=str(context.get("message")), exc_info=context.get("exception"))


def _keep_freed_memory() -> None:
    """Have glibc keep memory of freed bodies instead of returning it to the kernel each time, to be faulted in again by the next one.

    Worth 15 to 20 % of the requests per second with prompts of 240 KB. Other C libraries have no such call and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_MEMORY_BYTES)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK_BYTES)


def _allowed(config: Config) -> Allowance:
    """Take all the open files that the system allows, and say what that makes."""
    before, now = raise_file_limit()
    allowed = allowance(now, config.router.max_connections)
    structlog.get_logger().info("open files", soft_limit_before=before, soft_limit=now, **asdict(allowed))
    return allowed
