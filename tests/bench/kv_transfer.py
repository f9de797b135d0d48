"""How fast KV crosses between two processes, beside what the machine can do at all, in one run.

    python -m tests.bench.kv_transfer [--what tcp shm shm+proof] [--rounds 5] [--seconds 1] [--nixl-python PATH]

A consumer and a producer process, each with a real `RankIo` over a cache of its own, move prompts of one shape one after the other. Beside them,
round by round: the same run list copied once by one thread, the same bytes through a plain socket, and the same run list through slots with two
copies and two checksums and nothing else, which is as fast as this design can be on the machine. Prints one JSON line per row; rates are medians of
rounds, ratios are medians of the ratios within one round.
"""

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType

import structlog

from pdserve.clock import MonotonicClock
from pdserve.kv.actions import Actions, PeerRank, ReceiveOrder, ReportReceived, SendOrder
from pdserve.kv.geometry import Geometry, LayerGeometry, Sharding
from pdserve.kv.pages import CachePages, Memory
from pdserve.kv.peers import PeerAddress
from pdserve.kv.rank import RankIo
from pdserve.kv.settings import KvSettings
from pdserve.kv.slots import MAX_SLOTS_PER_PRODUCER
from pdserve.kv.ticket import TransferKey
from pdserve.kv.transports import make_transport
from pdserve.kv.wire import Identity
from tests.bench.kv_baselines import CopyOnce, PlainSocket, Shape, SlotsAlone, median_rate
from tests.bench.kv_nixl import Nixl

SECRET = b"\x07" * 32
PRODUCER, CONSUMER = PeerRank("producer", "producer" * 2, 0), PeerRank("consumer", "consumer" * 2, 0)
BLOCK_TOKENS = 128
SHAPES = {
    "32 KiB": Shape(32 << 10, 64, 128),
    "128 KiB": Shape(128 << 10, 32, 64),
    "64 MiB of neighbouring blocks": Shape(1 << 20, 4, 64, scattered=False),
    "64 MiB block": Shape(64 << 20, 1, 4),
}
PROOF = "+proof"


def geometry(shape: Shape) -> Geometry:
    run = shape.run_bytes
    layers = (
        LayerGeometry(f"layers.{n}", 0, BLOCK_TOKENS, Sharding.SPLIT, 1, run, "uint8", "FullAttentionSpec", 1, run, run)
        for n in range(shape.layers)
    )
    return Geometry(1, 0, tuple(layers), 1)


def slot_bytes(shape: Shape) -> int:
    """Return the default, or a block where that is more."""
    return max(KvSettings("", "").slot_bytes, shape.run_bytes)


class BenchRank:
    """One process's rank over a cache of its own."""

    def __init__(self, me: PeerRank, shape: Shape, transport: str, seed: int) -> None:
        layout, slot = geometry(shape), slot_bytes(shape)
        self.me = me
        self.cache = shape.cache(seed)
        settings = KvSettings(
            me.worker, me.incarnation, transport=transport, slot_bytes=slot, arena_bytes=max(KvSettings("", "").arena_bytes, 4 * slot)
        )
        self.io = RankIo(
            settings,
            SECRET,
            layout,
            lambda arenas: Identity("bench", "w", "c", layout, arenas, slot),
            CachePages(layout, [Memory(layer.ctypes.data, layer.shape[0]) for layer in self.cache]),
            make_transport(transport),
            MonotonicClock(),
        )
        self.io.start()

    def meet(self, pipe: Connection, peer: PeerRank) -> None:
        """Exchange addresses and wait for the link."""
        pipe.send(self.io.address)
        host, port = pipe.recv()
        self.io.set_peers(1, [PeerAddress(peer, host, port, 1)])
        while not any(shake.state == "connected" for shake in self.io.handshakes()):
            time.sleep(0.01)

    def report(self) -> ReportReceived:
        """Wait for what ended next."""
        while not (reports := self.io.take_reports()):
            self.io.wait_report(1.0)
        (report,) = reports
        assert isinstance(report, ReportReceived)
        return report


def consume(pipe: Connection, shape: Shape, transport: str) -> None:
    """The consumer process: one transfer per number it is sent, until None."""
    quiet()
    rank = BenchRank(CONSUMER, shape, transport, seed=2)
    rank.meet(pipe, PRODUCER)
    blocks, tokens = (shape.places(4),), shape.blocks * BLOCK_TOKENS
    while (asked := pipe.recv()) is not None:
        number, proof = asked
        key = TransferKey(f"{number}", 1)
        order = ReceiveOrder(key, f"r{number}", PRODUCER.worker, PRODUCER.incarnation, b"p", tokens, 0, blocks, 60, proof)
        rank.io.submit(lambda order=order: rank.io.open([order], time.monotonic()))
        report = rank.report()
        assert report.landed, report
        assert len(report.record.digests) == (shape.layers * shape.blocks if proof else 0)
        pipe.send(report.record.bytes_moved)
    pipe.send(rank.cache[:, blocks[0]].sum())
    rank.io.close()


class Pair:
    """Two ranks in two processes; this one produces. Use as a context manager, call to move a prompt."""

    def __init__(self, shape: Shape, what: str) -> None:
        self._shape = shape
        self._transport = what.removesuffix(PROOF)
        self._proof = what.endswith(PROOF)
        self._blocks, self._tokens = (shape.places(3),), shape.blocks * BLOCK_TOKENS
        self._numbers = itertools.count()

    def __enter__(self) -> "Pair":
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=consume, args=(theirs, self._shape, self._transport))
        self._process.start()
        self.rank = BenchRank(PRODUCER, self._shape, self._transport, seed=1)
        self.rank.meet(self._pipe, CONSUMER)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.send(None)
        if kind is None:
            assert self._pipe.recv() == self.rank.cache[:, self._blocks[0]].sum(), "the consumer's blocks hold something else"
        self._process.join()
        self.rank.io.close()

    def __call__(self) -> int:
        """Move a prompt that is computed already; return its bytes once the consumer has reported it."""
        number = next(self._numbers)
        key, sends = TransferKey(f"{number}", 1), self.rank.io.sends
        order = SendOrder(key, f"s{number}", CONSUMER.worker, CONSUMER.incarnation, b"p", self._tokens, 60, self._proof)
        self._pipe.send((number, self._proof))

        def send() -> Actions:
            now_s = time.monotonic()
            actions = list(self.rank.io.open([order], now_s))
            sends.set_blocks(key, self._blocks, 0)
            sends.wrote(key, 1, range(self._shape.layers), self._tokens)
            actions += sends.finished(order.request_id)
            return [*actions, *sends.seal(key, 1, now_s)]

        self.rank.io.submit(send)
        moved = self._pipe.recv()
        self.rank.io.take_reports()
        assert isinstance(moved, int)
        return moved


def quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


Columns = dict[str, Callable[[], int]]


def rounds_of(columns: Columns, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return GB/s of each column in each round."""
    rates: dict[str, list[float]] = {name: [] for name in columns}
    for _ in range(rounds):
        for name, step in columns.items():
            rates[name].append(median_rate(step, seconds))
    return rates


def row_of(rates: dict[str, list[float]], baselines: dict[str, str]) -> dict[str, float]:
    """Return medians of the rates, and of the ratios to each column's baseline in the same round."""
    row = {f"{name}_gb_s": round(statistics.median(found), 2) for name, found in rates.items()}
    for name, baseline in baselines.items():
        row[f"{name}_ratio"] = round(statistics.median(a / b for a, b in zip(rates[name], rates[baseline], strict=True)), 2)
    return row


def measure(shape: Shape, what: Sequence[str], rounds: int, seconds: float) -> dict[str, float]:
    """Return GB/s of each column and its ratio to the baseline of its kind."""
    with contextlib.ExitStack() as stack:
        columns: Columns = {
            "copy_once": CopyOnce(shape),
            "plain_socket": stack.enter_context(PlainSocket(shape)),
            "slots_alone": stack.enter_context(SlotsAlone(shape, slot_bytes(shape), MAX_SLOTS_PER_PRODUCER)),
        }
        for name in what:
            columns[name] = stack.enter_context(Pair(shape, name))
        baselines = {name: "plain_socket" if name.startswith("tcp") else "copy_once" for name in ("slots_alone", *what)}
        return row_of(rounds_of(columns, rounds, seconds), baselines)


def measure_nixl(shape: Shape, python: str, rounds: int, seconds: float) -> dict[str, float]:
    """Return what NIXL does beside a copy of its own rounds; apart from the others, since its idle agents poll."""
    with Nixl(shape, python) as nixl:
        row = row_of(rounds_of({"copy_once": CopyOnce(shape), "nixl": nixl}, rounds, seconds), {"nixl": "copy_once"})
    return {name: value for name, value in row.items() if name.startswith("nixl")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", nargs="+", default=["tcp", f"tcp{PROOF}", "shm", f"shm{PROOF}"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="per round and column")
    parser.add_argument("--nixl-python", help="an interpreter that can import nixl")
    options = parser.parse_args()
    quiet()
    for name in options.shapes:
        shape = SHAPES[name]
        row = measure(shape, options.what, options.rounds, options.seconds)
        if options.nixl_python:
            row |= measure_nixl(shape, options.nixl_python, options.rounds, options.seconds)
        print(json.dumps({"runs": name, "prompt_mib": shape.total_bytes >> 20, **row}), flush=True)


if __name__ == "__main__":
    main()
