"""What the machine can do without the KV layer: one thread that copies a run list, two processes that pass it on through slots, one plain socket."""

import ctypes
import mmap
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import numpy as np
import xxhash

SOCKET_BUFFER_BYTES = 4 << 20


class Shape(NamedTuple):
    """One prompt's run list on each side: per layer, `blocks` blocks of one run each, at places drawn from twice as many."""

    run_bytes: int
    layers: int
    blocks: int
    scattered: bool = True
    """no two blocks are neighbours by intent; else the blocks of a layer lie one after the other"""

    @property
    def total_bytes(self) -> int:
        return self.run_bytes * self.layers * self.blocks

    def places(self, seed: int) -> tuple[int, ...]:
        """Return a block table as a busy engine has one: another on each side."""
        if not self.scattered:
            return tuple(range(self.blocks))
        return tuple(int(place) for place in np.random.default_rng(seed).permutation(self.blocks * 2)[: self.blocks])

    def rows(self, seed: int) -> np.ndarray:
        """Return the run list, layer by layer, as rows of a cache that is seen as [layers × 2 × blocks, run_bytes]."""
        return np.add.outer(np.arange(self.layers) * 2 * self.blocks, np.array(self.places(seed))).ravel()

    def cache(self, seed: int) -> np.ndarray:
        """Return uint8 [layers, 2 × blocks, run_bytes], every page written."""
        return np.random.default_rng(seed).integers(0, 255, size=(self.layers, self.blocks * 2, self.run_bytes), dtype=np.uint8)


def median_rate(step: Callable[[], int], seconds: float) -> float:
    """Repeat a step for some time after one that does not count; return the median of its GB/s.

    Args:
        step: moves bytes and returns how many.
    """
    step()
    rates: list[float] = []
    end_s = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        moved = step()
        rates.append(moved / (time.perf_counter() - began_s) / 1e9)
    return statistics.median(rates)


class CopyOnce:
    """The run list of a shape, copied once by one thread: from one cache's places to another's, addresses worked out before."""

    def __init__(self, shape: Shape) -> None:
        self._total = shape.total_bytes
        self._caches = shape.cache(1), shape.cache(2)
        source, target = (cache.ctypes.data for cache in self._caches)
        every = shape.blocks if not shape.scattered else 1
        self._run_bytes = shape.run_bytes * every
        pairs = zip(shape.rows(3).tolist()[::every], shape.rows(4).tolist()[::every], strict=True)
        self._runs = [(target + into * shape.run_bytes, source + out * shape.run_bytes) for out, into in pairs]

    def __call__(self) -> int:
        move, size = ctypes.memmove, self._run_bytes
        for target, source in self._runs:
            move(target, source, size)
        return self._total


class SlotsAlone:
    """The least that slots cost: one process gathers and hashes, the other hashes and scatters, and each spins until the other is done.

    No frames, no ledgers, no event loop. Use as a context manager.
    """

    def __init__(self, shape: Shape, slot_bytes: int, num_slots: int) -> None:
        self._total = shape.total_bytes
        per_slot = slot_bytes // shape.run_bytes
        self._slots = np.frombuffer(mmap.mmap(-1, num_slots * slot_bytes), dtype=np.uint8).reshape(num_slots, -1, shape.run_bytes)
        flags = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.int64)
        self._filled, self._emptied, self._stop = flags[0:1], flags[8:9], flags[16:17]
        self._caches = [shape.cache(seed).reshape(-1, shape.run_bytes) for seed in (1, 2)]
        self._chunks = [
            [rows[start : start + per_slot] for start in range(0, len(rows), per_slot)] for rows in (shape.rows(3), shape.rows(4))
        ]
        self._number = 0

    def __enter__(self) -> "SlotsAlone":
        self._process = multiprocessing.get_context("fork").Process(target=self._scatter)
        self._process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop[0] = 1
        self._process.join()

    def __call__(self) -> int:
        cache = self._caches[0]
        for rows in self._chunks[0]:
            while self._number - self._emptied[0] >= len(self._slots):
                os.sched_yield()
            slot = self._slots[self._number % len(self._slots)][: len(rows)]
            cache.take(rows, axis=0, out=slot, mode="clip")
            xxhash.xxh3_64_intdigest(slot.data)
            self._number += 1
            self._filled[0] = self._number
        while self._emptied[0] < self._number:
            os.sched_yield()
        return self._total

    def _scatter(self) -> None:
        cache, number = self._caches[1], 0
        while True:
            for rows in self._chunks[1]:
                while self._filled[0] <= number:
                    if self._stop[0]:
                        return
                    # Between prompts others are measured.
                    time.sleep(0.0001) if not number % len(self._chunks[1]) else os.sched_yield()
                slot = self._slots[number % len(self._slots)][: len(rows)]
                xxhash.xxh3_64_intdigest(slot.data)
                cache[rows] = slot
                number += 1
                self._emptied[0] = number


class PlainSocket:
    """A loopback socket between two processes with nothing else to do. Use as a context manager."""

    def __init__(self, shape: Shape) -> None:
        self._data = memoryview(shape.cache(1).reshape(-1))[: shape.total_bytes]

    def __enter__(self) -> "PlainSocket":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._process = multiprocessing.get_context("fork").Process(target=_sink, args=(listener, len(self._data)))
            self._process.start()
            self._socket = socket.create_connection(listener.getsockname())
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
        self._process.join()

    def __call__(self) -> int:
        """Send one prompt's bytes and wait until the other side has read them."""
        self._socket.sendall(self._data)
        self._socket.recv(1)
        return len(self._data)


def _sink(listener: socket.socket, total_bytes: int) -> None:
    """Read prompts of `total_bytes`; answer each with one byte."""
    with listener:
        sock, _ = listener.accept()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    buffer, missing = memoryview(bytearray(SOCKET_BUFFER_BYTES)), total_bytes
    with sock:
        while count := sock.recv_into(buffer[: min(missing, len(buffer))]):
            missing -= count
            if not missing:
                sock.sendall(b".")
                missing = total_bytes
