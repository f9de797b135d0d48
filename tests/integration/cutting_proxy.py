"""A TCP proxy before an engine, that drops connections where a test wants it: an engine dies for one request, and for no other."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

HOST = "127.0.0.1"


@dataclass
class CuttingProxy:
    """What happens to the next inference request; agents' calls always pass."""

    engine_port: int
    port: int = 0
    cut_after: int | None = None
    """drop the connection once so many events have passed; once only"""
    may_pass: threading.Event = field(default_factory=threading.Event)
    """while this is clear, inference requests do not reach the engine"""
    held: int = 0
    """inference requests that came meanwhile"""

    def serve(self, client: socket.socket) -> None:
        """Carry one connection until either side closes it."""
        events = [0]
        with suppress(OSError), client, socket.create_connection((HOST, self.engine_port)) as engine:
            threading.Thread(target=self._carry, args=(engine, client, events), daemon=True).start()
            while request := client.recv(1 << 20):
                events[0] = 0
                if b"POST /v1/" in request and not self.may_pass.is_set():
                    self.held += 1
                    client.settimeout(0.02)
                    while not self.may_pass.is_set():
                        with suppress(TimeoutError):
                            if not client.recv(1, socket.MSG_PEEK):
                                return
                            self.may_pass.wait(0.02)
                    client.settimeout(None)
                engine.sendall(request)
            engine.shutdown(socket.SHUT_RDWR)

    def _carry(self, engine: socket.socket, client: socket.socket, events: list[int]) -> None:
        """Carry what the engine says, up to the cut; `events` counts those of the present answer."""
        with suppress(OSError):
            while answer := engine.recv(1 << 16):
                events[0] += answer.count(b"data: ")
                client.sendall(answer)
                if self.cut_after is not None and events[0] >= self.cut_after:
                    self.cut_after = None
                    break
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(engine_port: int) -> Iterator[CuttingProxy]:
    """Run a proxy until the block ends."""
    proxy = CuttingProxy(engine_port)
    proxy.may_pass.set()
    with socket.create_server((HOST, 0)) as listening:
        proxy.port = listening.getsockname()[1]

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield proxy
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=5)
        assert not thread.is_alive()
