"""The processes of a soak: starts, kills, stops and replaces them, and keeps everyone's peer table as the controller does.

A process that was killed leaves the table once it is reaped, and its successor enters it under a new incarnation. Knows pipes and signals; takes
no decision and judges nothing.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple

from pdserve.kv.peers import PeerAddress
from tests.soak.script import CONSUMERS, PRODUCERS
from tests.soak.worker import Failed, Setup, serve

WORKERS = (*CONSUMERS, *PRODUCERS)
PATIENCE_S = 75.0
"""beyond the timeout of every transfer"""


class SoakFailed(Exception):
    """A process saw something wrong, or should be there and does not answer."""


class _Member(NamedTuple):
    process: BaseProcess
    pipe: Connection
    address: PeerAddress


class Fleet:
    """All workers. Use as a context manager; no process outlives it."""

    def __init__(self, seed: int, transport: str, lease_s: float, mutation: str) -> None:
        self._setup = Setup("", "", seed, transport, lease_s, mutation)
        self._spawn = multiprocessing.get_context("spawn")
        self._members: dict[str, _Member] = {}
        self._births = 0
        self._version = 0

    def __enter__(self) -> "Fleet":
        try:
            self.start(WORKERS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    @property
    def incarnations(self) -> dict[str, str]:
        """What a ticket made now names."""
        return {worker: member.address.peer.incarnation for worker, member in self._members.items()}

    def start(self, workers: Iterable[str]) -> None:
        """Start processes, tell everyone, and wait for nothing."""
        started: list[tuple[str, BaseProcess, Connection]] = []
        for worker in workers:
            self._births += 1
            here, there = self._spawn.Pipe()
            setup = self._setup._replace(worker=worker, incarnation=f"{worker}-{self._births}")
            process: BaseProcess = self._spawn.Process(target=serve, args=(there, setup), daemon=True)
            process.start()
            there.close()
            started.append((worker, process, here))
        for worker, process, pipe in started:
            self._members[worker] = _Member(process, pipe, _received(worker, pipe))
        self._tell_table()

    def kill(self, workers: Iterable[str]) -> None:
        """Kill processes at once, reap them, and take them out of the table."""
        gone = [self._members.pop(worker) for worker in workers]
        for member in gone:
            member.process.kill()
        for member in gone:
            _reap(member)
        self._tell_table()

    def signal(self, worker: str, number: signal.Signals) -> None:
        pid = self._members[worker].process.pid
        assert pid is not None
        os.kill(pid, number)

    def send(self, worker: str, *command: object) -> None:
        """Give a process a command. Raises `SoakFailed` with its last words if it has ended."""
        try:
            self._members[worker].pipe.send(command)
        except OSError:
            _received(worker, self._members[worker].pipe)
            raise

    def receive(self, workers: Iterable[str]) -> dict[str, Any]:
        """Return what each of some processes answers. Raises `SoakFailed` for one that has no answer or a bad one, whichever comes first."""
        pipes = {self._members[worker].pipe: worker for worker in workers}
        answers: dict[str, Any] = {}
        deadline_s = time.monotonic() + PATIENCE_S
        while pipes:
            ready = wait(list(pipes), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise SoakFailed(f"{sorted(pipes.values())} have not reported all their requests")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = pipes.pop(pipe)
                answers[worker] = _received(worker, pipe)
        return answers

    def ask_all(self, *command: object) -> dict[str, Any]:
        """Give everyone a command and return the answers."""
        for worker in self._members:
            self.send(worker, *command)
        return self.receive(self._members)

    def meet(self) -> list[str]:
        """Wait until every link is up; returns what is missing."""
        peers = {member.address.peer for member in self._members.values()}
        for worker, member in self._members.items():
            self.send(worker, "meet", peers - {member.address.peer})
        return [missing for missing in self.receive(self._members).values() if missing]

    def _tell_table(self) -> None:
        self._version += 1
        entries = [member.address for member in self._members.values()]
        for worker in self._members:
            self.send(worker, "peers", self._version, entries)

    def _end(self) -> None:
        for member in self._members.values():
            try:
                member.pipe.send(None)
                member.process.join(5)
            except OSError:
                pass
            member.process.kill()
            _reap(member)
        self._members.clear()


def _received(worker: str, pipe: Connection) -> Any:
    try:
        answer = pipe.recv()
    except (EOFError, OSError) as error:
        raise SoakFailed(f"{worker} is gone: {error!r}") from error
    if isinstance(answer, Failed):
        raise SoakFailed("\n  ".join(f"{worker}: {text}" for text in answer.wrong[:5]))
    return answer


def _reap(member: _Member) -> None:
    member.process.join()
    member.process.close()
    member.pipe.close()
