"""One worker's process in a soak: a real rank, an engine that follows the script, and what the process holds at rest.

Does what comes through the pipe until it is told to end: ``peers`` installs a table, ``meet`` waits for its links, ``run`` takes on transfers and
answers when the last has been reported, ``rest`` waits until nothing is held and tells what the process takes. Draws its own part of the script.
"""

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from pdserve.clock import MonotonicClock
from pdserve.kv.actions import PeerRank
from pdserve.kv.peers import PeerAddress
from pdserve.kv.rank import RankIo
from pdserve.kv.settings import KvSettings
from pdserve.kv.transports import make_transport
from pdserve.kv.wire import Identity
from tests.soak.cache import GEOMETRY, Cache
from tests.soak.engines import ConsumerEngine, Engine, ProducerEngine
from tests.soak.mutations import MUTATIONS
from tests.soak.script import PRODUCERS, TIMEOUT_S, share

SECRET = bytes(range(32))
SLOT_BYTES, NUM_SLOTS = 2048, 8
NAP_S = 0.002
SWITCH_S = 0.0005
"""the rank's thread gets its turn this soon while the engine computes"""
PATIENCE_S = 20.0
REST_PATIENCE_S = 5.0
"""until the last messages are through"""


class Setup(NamedTuple):
    """What a worker's process is started with."""

    worker: str
    incarnation: str
    seed: int
    transport: str
    lease_s: float
    mutation: str
    """what to break in the code under test, empty for nothing"""


class Status(NamedTuple):
    """What a process holds and takes at rest."""

    rss_kib: int
    descriptors: int
    threads: int
    mapped: int
    """mappings of shared memory, one for each arena that this process has or reaches"""
    tombstones: tuple[int, int]
    """of sends and receives"""
    dropped: Counter[str]
    """messages that came for transfers that were over, and links distrusted, by reason"""
    wrong: list[str]


class Failed(NamedTuple):
    """Sent in place of an answer by a process that saw something wrong; it ends then."""

    wrong: list[str]


class _Worker:
    def __init__(self, pipe: Connection, setup: Setup) -> None:
        self._pipe = pipe
        self._setup = setup
        self._logged: list[str] = []
        self._cache = Cache()
        settings = KvSettings(
            setup.worker,
            setup.incarnation,
            transport=setup.transport,
            slot_bytes=SLOT_BYTES,
            arena_bytes=SLOT_BYTES * NUM_SLOTS,
            lease_s=setup.lease_s,
            transfer_timeout_s=TIMEOUT_S,
        )
        self._io = RankIo(
            settings,
            SECRET,
            GEOMETRY,
            lambda arenas: Identity("soak", "weights", "config", GEOMETRY, arenas, SLOT_BYTES),
            self._cache.pages,
            make_transport(setup.transport),
            MonotonicClock(),
        )
        self._engine: Engine = (ProducerEngine if setup.worker in PRODUCERS else ConsumerEngine)(self._io, self._cache)
        self._is_running = False

    def serve(self) -> None:
        """Be the process."""
        structlog.configure(
            processors=[self._hear_log],
            wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        )
        self._io.start()
        try:
            self._pipe.send(PeerAddress(PeerRank(self._setup.worker, self._setup.incarnation, 0), *self._io.address, 1))
            while self._obey():
                if self._is_running and (wrong := self._wrong()):
                    self._pipe.send(Failed(wrong))
                    return
                if self._is_running and not self._engine.is_busy:
                    self._is_running = False
                    ended, self._engine.ended = self._engine.ended, []
                    self._pipe.send(ended)
                elif self._is_running and not self._engine.step():
                    self._io.wait_report(NAP_S)
        finally:
            self._io.close()

    def _obey(self) -> bool:
        """Take one command if there is one, or wait for it where there is nothing else to do; False once there is no more to come."""
        if self._is_running and not self._pipe.poll():
            return True
        match self._pipe.recv():
            case "peers", version, entries:
                self._io.set_peers(version, entries)
            case "meet", peers:
                self._pipe.send(self._meet(peers))
            case "run", first, end, incarnations:
                self._run(first, end, incarnations)
            case ("rest",):
                self._pipe.send(self._rest())
            case None:
                return False
        return True

    def _run(self, first: int, end: int, incarnations: Mapping[str, str]) -> None:
        self._engine.begin(share(self._setup.seed, self._setup.worker, first, end), incarnations)
        self._is_running = True

    def _meet(self, peers: set[PeerRank]) -> str:
        """Wait until the links with exactly these are up; returns what is missing, if anything is."""
        deadline_s = time.monotonic() + PATIENCE_S
        while {(shake.peer, shake.state) for shake in self._io.handshakes()} != {(peer, "connected") for peer in peers}:
            if time.monotonic() > deadline_s:
                return f"{self._setup.worker} has not met its peers: {self._io.handshakes()}"
            time.sleep(0.005)
        return ""

    def _rest(self) -> Status:
        """Wait until the last messages are through, and tell what is left then."""
        deadline_s = time.monotonic() + REST_PATIENCE_S
        while (held := self._held()) and time.monotonic() < deadline_s:
            time.sleep(0.005)
        wrong = self._wrong()
        if held:
            wrong.append(f"held at rest: {held}")
        if left := self._io.take_reports():
            wrong.append(f"reports after the last request: {left[:3]}")
        if spoilt := self._cache.at_rest():
            wrong.append(spoilt)
        return self._status(wrong)

    def _wrong(self) -> list[str]:
        """Return what the engine saw and the layer logged that must not be."""
        return [*self._engine.wrong, *self._logged]

    def _held(self) -> dict[str, int]:
        """Count what must be nothing once all transfers are over. Reads what has no public name: a soak is about what nobody sees."""
        io, held = self._io, dict[str, int]()

        def count() -> None:
            held.update(
                sends=len(io.sends),
                receives=len(io.receives),
                requests=len(io.sends._by_request),
                slots=io.slots.num_slots - io.slots.num_free,
                owners=len(io.slots._held),
                wants=len(io.receives._wants),
                parked=sum(map(len, io.sends._parking.values())),
                proofs=len(io._proofs._sent) + len(io._proofs._scattered),
            )

        io.submit(count).result(timeout=PATIENCE_S)
        return {name: number for name, number in held.items() if number}

    def _status(self, wrong: list[str]) -> Status:
        io = self._io
        process = Path("/proc/self")
        maps = (process / "maps").read_text()
        return Status(
            rss_kib=int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10,
            descriptors=len(os.listdir(process / "fd")) - 1,  # not the one that lists them
            threads=len(os.listdir(process / "task")),
            mapped=maps.count("/memfd:") + maps.count("/dev/shm/"),
            tombstones=(len(io.sends._ended), len(io.receives._ended)),
            dropped=Counter(io.sends.dropped) + Counter(io.receives.dropped) + io.distrusted,
            wrong=wrong,
        )

    def _hear_log(self, logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """Keep errors: the layer logs one only where its own code failed."""
        self._logged.append(f"logged {method}: {event}")
        raise structlog.DropEvent


def serve(pipe: Connection, setup: Setup) -> None:
    """Be one worker until the pipe ends."""
    sys.setswitchinterval(SWITCH_S)
    if setup.mutation:
        MUTATIONS[setup.mutation]()
    with contextlib.suppress(EOFError, BrokenPipeError):
        _Worker(pipe, setup).serve()
