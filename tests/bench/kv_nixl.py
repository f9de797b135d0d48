"""The same prompts through NIXL over UCX on CPU, for comparison: one registered region per side, one prepared write per prompt.

The benchmark starts this module under an interpreter that has `nixl`; it needs nothing of the package. It writes straight into the target's blocks,
without slots or checksums.
"""

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tests.bench.kv_baselines import Shape

MEMORY = "DRAM"
ROOT = Path(__file__).resolve().parents[2]


class Nixl:
    """Two agents in two processes of another interpreter. Use as a context manager, call to write one prompt."""

    def __init__(self, shape: Shape, python: str) -> None:
        self._total = shape.total_bytes
        numbers = [str(int(value)) for value in shape]
        self._command = [python, "-m", "tests.bench.kv_nixl", *numbers]

    def __enter__(self) -> "Nixl":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._hear("ready")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate(timeout=60)

    def __call__(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._hear("done")
        return self._total

    def _hear(self, word: str) -> None:
        """Read past what the library prints, up to a line."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise RuntimeError(f"{self._command} ended before it said {word}")


def _agent(name: str, cache: np.ndarray) -> tuple[Any, Any]:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    return agent, agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, name)], MEMORY)


def _runs(shape: Shape, base: int, seed: int) -> list[tuple[int, int, int]]:
    """Return (address, bytes, device) of every run, in the order that both sides use."""
    layer_bytes = 2 * shape.blocks * shape.run_bytes
    if not shape.scattered:
        return [(base + layer * layer_bytes, shape.blocks * shape.run_bytes, 0) for layer in range(shape.layers)]
    places = shape.places(seed)
    return [(base + layer * layer_bytes + place * shape.run_bytes, shape.run_bytes, 0) for layer in range(shape.layers) for place in places]


def _target(pipe: Connection, shape: Shape) -> None:
    cache = shape.cache(4)
    agent, _registered = _agent("target", cache)
    pipe.send((agent.get_agent_metadata(), cache.ctypes.data))
    pipe.recv()
    pipe.send(int(cache[:, list(shape.places(4))].sum(dtype=np.int64)))


class Writer:
    """An agent that writes one prompt after the other into its target's blocks."""

    def __init__(self, shape: Shape, pipe: Connection) -> None:
        self._cache = shape.cache(3)
        self._agent, self._registered = _agent("writer", self._cache)
        metadata, base = pipe.recv()
        peer = self._agent.add_remote_agent(metadata).decode()
        lists = (("", _runs(shape, self._cache.ctypes.data, 3)), (peer, _runs(shape, base, 4)))
        ours, theirs = (self._agent.prep_xfer_dlist(name, self._agent.get_xfer_descs(runs, MEMORY), MEMORY) for name, runs in lists)
        indices = list(range(len(lists[0][1])))
        self._handle = self._agent.make_prepped_xfer("WRITE", ours, indices, theirs, indices, b"")
        self.sum = int(self._cache[:, list(shape.places(3))].sum(dtype=np.int64))

    def write(self) -> None:
        state = self._agent.transfer(self._handle)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl transfer failed")
            state = self._agent.check_xfer_state(self._handle)


def main() -> None:
    run_bytes, layers, blocks, scattered = map(int, sys.argv[1:])
    shape = Shape(run_bytes, layers, blocks, bool(scattered))
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_target, args=(there, shape))
    process.start()
    writer = Writer(shape, here)
    print("ready", flush=True)
    for _ in sys.stdin:
        writer.write()
        print("done", flush=True)
    here.send(None)
    if here.recv() != writer.sum:
        raise SystemExit("the target's blocks hold something else")
    process.join()


if __name__ == "__main__":
    main()
