"""Connector-only workers with the geometry of the full MiniMax-M3: a process per worker, a real `RankIo` over real sockets per rank, no engine.

60 layers, 3 dense and 57 sparse ones with an index cache each: 117 caches of 4 heads or 1, bfloat16-sized, in blocks of 128 tokens. What every
(layer, head, block) of a prompt holds follows from the prompt's number, so each decode rank can tell for itself whether it got its own heads.
"""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np

from pdserve.clock import MonotonicClock
from pdserve.kv.actions import Actions, PeerRank, ReceiveOrder, SendOrder
from pdserve.kv.geometry import Sharding, from_registered
from pdserve.kv.pages import Bytes, CachePages, Memory
from pdserve.kv.peers import PeerAddress
from pdserve.kv.plan import held_heads
from pdserve.kv.rank import RankIo
from pdserve.kv.settings import KvSettings
from pdserve.kv.ticket import TransferKey
from pdserve.kv.transports import make_transport
from pdserve.kv.wire import Identity
from pdserve.types import TransferRecord

NUM_LAYERS, NUM_DENSE, HEADS, BLOCK_TOKENS, HEAD_DIM = 60, 3, 4, 128, 128
NUM_CACHES = NUM_LAYERS + NUM_LAYERS - NUM_DENSE
BLOCK_BYTES = {1: 17_596_416, 2: 9_732_096, 4: 5_799_936, 8: 5_799_936}
"""bytes of one block of all caches on one rank, by tensor-parallel size, as vLLM's own specs have it"""
NUM_BLOCKS = 8
UNTOUCHED = 0xEE
SECRET = bytes(range(32))
SLOT_BYTES, ARENA_BYTES = 1 << 20, 4 << 20
PATIENCE_S = 60.0


@dataclass
class FullAttentionSpec:
    """What geometry reads of vLLM's spec of this name."""

    num_kv_heads: int
    block_size: int = BLOCK_TOKENS
    num_head_slots: None = None


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    """The index cache's spec: one head, on every rank."""


class Prompt(NamedTuple):
    """One prompt to move."""

    number: int
    tokens: int
    first_token: int = 0
    """decode has what lies before it"""

    @property
    def key(self) -> TransferKey:
        return TransferKey(f"{self.number:032x}", 1)

    @property
    def blocks(self) -> range:
        """Positions of the blocks that move."""
        return range(self.first_token // BLOCK_TOKENS, -(-self.tokens // BLOCK_TOKENS))

    def run(self, layer: int, head: int, block: int, num_bytes: int, version: int = 0) -> Bytes:
        """Return what one run holds after a pass."""
        seed = [self.number, layer, head, block, version]
        return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(num_bytes), dtype=np.uint8)


class Rank:
    """One rank with its caches; `num_layers` makes it shallower than the full model."""

    def __init__(self, worker: str, size: int, rank: int, *, num_layers: int = NUM_LAYERS, transport: str = "tcp") -> None:
        self.me = PeerRank(worker, f"{worker}-1", rank)
        self.size = size
        local = max(1, HEADS // size)
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(num_layers)]
        shapes = dict.fromkeys(names, (local, 2 * HEAD_DIM)) | {f"{name}.index_cache": (1, HEAD_DIM) for name in names[NUM_DENSE:]}
        self._caches = {
            name: np.full((NUM_BLOCKS, heads, BLOCK_TOKENS, width * 2), UNTOUCHED, dtype=np.uint8)
            for name, (heads, width) in shapes.items()
        }
        self.geometry = from_registered(
            {name: _Registered(cache) for name, cache in self._caches.items()},
            {name: (0, MLAAttentionSpec(1) if name.endswith("index_cache") else FullAttentionSpec(local)) for name in shapes},
            total_kv_heads=HEADS,
            tensor_parallel_size=size,
            rank=rank,
        )
        self.views = [self._caches[layer.name].reshape(NUM_BLOCKS, layer.local_heads, layer.run_bytes) for layer in self.geometry.layers]
        self.heads = [held_heads(HEADS, size, rank) if layer.sharding is Sharding.SPLIT else range(1) for layer in self.geometry.layers]
        settings = KvSettings(*self.me[:2], transport=transport, slot_bytes=SLOT_BYTES, arena_bytes=ARENA_BYTES)
        places = [Memory(view.ctypes.data, NUM_BLOCKS) for view in self.views]
        self.io = RankIo(
            settings,
            SECRET,
            self.geometry,
            lambda arenas: Identity("0.32.0", "weights", "config", self.geometry, arenas, SLOT_BYTES),
            CachePages(self.geometry, places),
            make_transport(transport),
            MonotonicClock(),
        )

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.me, *self.io.address, self.size)

    def write(self, prompt: Prompt, block_ids: Sequence[int], layer: int, version: int = 0) -> None:
        """Compute one layer of a whole prompt."""
        for position in range(-(-prompt.tokens // BLOCK_TOKENS)):
            for local, head in enumerate(self.heads[layer]):
                run = prompt.run(layer, head, position, self.geometry.layers[layer].run_bytes, version)
                self.views[layer][block_ids[position], local] = run

    def produce(self, prompt: Prompt, peer: PeerRank, block_ids: Sequence[int]) -> None:
        """Compute a prompt layer by layer, announcing each as an engine's hooks do, then seal."""
        sends, key, now_s = self.io.sends, prompt.key, time.monotonic()
        self.open_send(prompt, peer, block_ids)

        def wrote(layer: int) -> Actions:
            sends.wrote(key, 1, [layer], prompt.tokens)
            return sends.pump(key, now_s)

        for layer in range(len(self.views)):
            self.write(prompt, block_ids, layer)
            self.io.submit(lambda layer=layer: wrote(layer))
        self.seal(prompt)

    def open_send(self, prompt: Prompt, peer: PeerRank, block_ids: Sequence[int], *, proof: bool = False) -> None:
        order = SendOrder(prompt.key, str(prompt.number), *peer[:2], b"%016d" % prompt.number, prompt.tokens, PATIENCE_S, proof)
        self.io.submit(lambda: self.io.open([order], time.monotonic()))
        self.io.submit(lambda: self.io.sends.set_blocks(prompt.key, (tuple(block_ids),), 0))

    def seal(self, prompt: Prompt, pass_number: int = 1) -> None:
        self.io.submit(lambda: self.io.sends.seal(prompt.key, pass_number, time.monotonic()))
        self.io.submit(lambda: self.io.sends.finished(str(prompt.number)))

    def consume(
        self, prompt: Prompt, peer: PeerRank, block_ids: Sequence[int], *, timeout_s: float = PATIENCE_S, proof: bool = False
    ) -> None:
        order = ReceiveOrder(
            prompt.key,
            str(prompt.number),
            *peer[:2],
            b"%016d" % prompt.number,
            prompt.tokens,
            prompt.first_token,
            (tuple(block_ids),),
            timeout_s,
            proof,
        )
        self.io.submit(lambda: self.io.open([order], time.monotonic()))

    def records(self, count: int) -> list[TransferRecord]:
        """Wait until so many transfers are over."""
        deadline_s, records = time.monotonic() + PATIENCE_S, list[TransferRecord]()
        while len(records) < count:
            assert time.monotonic() < deadline_s, (self.me, records, self.io.handshakes())
            self.io.wait_report(0.1)
            records += [report.record for report in self.io.take_reports()]
        return sorted(records, key=lambda record: record.transfer_id)

    def wrong_runs(self, prompts: Sequence[Prompt], tables: Sequence[Sequence[int]], version: int = 0) -> list[tuple[str, int, int]]:
        """Return (layer, head, block of this rank) of all runs that are not what they should be, those nobody may write included."""
        expected = {
            table[position]: (prompt, position) for prompt, table in zip(prompts, tables, strict=True) for position in prompt.blocks
        }
        wrong = []
        for number, layer in enumerate(self.geometry.layers):
            for local, head in enumerate(self.heads[number]):
                for block in range(NUM_BLOCKS):
                    found = self.views[number][block, local]
                    if block in expected:
                        prompt, position = expected[block]
                        is_right = np.array_equal(found, prompt.run(number, head, position, layer.run_bytes, version))
                    else:
                        is_right = bool((found == UNTOUCHED).all())
                    if not is_right:
                        wrong.append((layer.name, head, block))
        return wrong


class _Registered:
    """A numpy cache as vLLM registers it: [blocks, heads, tokens, values], index caches without heads."""

    def __init__(self, cache: Bytes) -> None:
        values = cache.view(np.uint16)
        self._values = values[:, 0] if values.shape[3] == HEAD_DIM else values
        self.shape = self._values.shape
        self.dtype = "torch.bfloat16"

    def stride(self) -> tuple[int, ...]:
        return tuple(step // 2 for step in self._values.strides)

    def element_size(self) -> int:
        return 2


@contextmanager
def running(ranks: Sequence[Rank]) -> Iterator[None]:
    """Start ranks and close them whatever happens."""
    try:
        for rank in ranks:
            rank.io.start()
        yield
    finally:
        for rank in ranks:
            rank.io.close()


def join(ranks: Sequence[Rank], table: Sequence[PeerAddress]) -> None:
    """Install a peer table and wait until every link of these ranks is up."""
    for rank in ranks:
        rank.io.set_peers(1, table)
    deadline_s = time.monotonic() + PATIENCE_S
    for rank in ranks:
        rank.io.submit(lambda: None).result(PATIENCE_S)
        while any(shake.state != "connected" for shake in rank.io.handshakes()):
            assert time.monotonic() < deadline_s, rank.io.handshakes()
            time.sleep(0.01)


def serve(pipe: Connection, worker: str, size: int) -> None:
    """Be one worker: run what comes through the pipe, answer, and end with it."""
    ranks = [Rank(worker, size, rank) for rank in range(size)]
    with running(ranks):
        pipe.send([rank.address for rank in ranks])
        join(ranks, pipe.recv())
        pipe.send("joined")
        prompts, tables, peer, is_producer = pipe.recv()
        begin_s = time.monotonic()
        if is_producer:
            for prompt, table in zip(prompts, tables, strict=True):
                _at_once(ranks, lambda rank, prompt=prompt, table=table: rank.produce(prompt, peer, table))
        else:
            for prompt, table in zip(prompts, tables, strict=True):
                for rank in ranks:
                    rank.consume(prompt, peer, table)
        records = [rank.records(len(prompts)) for rank in ranks]
        elapsed_s = time.monotonic() - begin_s
        wrong = [] if is_producer else [rank.wrong_runs(prompts, tables) for rank in ranks]
        pipe.send((records, elapsed_s, wrong, threading.active_count() - 1))
        pipe.recv()


def _at_once(ranks: Sequence[Rank], call: Any) -> None:
    threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Moved(NamedTuple):
    """What one pair of workers did."""

    sent: list[list[TransferRecord]]
    """by rank, then by prompt"""
    received: list[list[TransferRecord]]
    wrong: list[list[tuple[str, int, int]]]
    """by decode rank"""
    elapsed_s: float
    """of the slower side, from its first order to its last report"""


def move(producer_ranks: int, consumer_ranks: int, prompts: Sequence[Prompt]) -> Moved:
    """Move prompts from one new process to another, all at once."""
    sides = ("prefill", producer_ranks), ("decode", consumer_ranks)
    # The two sides hold a prompt in different blocks, none of which are neighbours in order.
    tables = [_tables(prompts, seed) for seed in (1, 2)]
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for worker, size in sides:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, worker, size), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        addresses = [_receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send([*addresses[0], *addresses[1]])
        assert [_receive(pipe) for pipe in pipes] == ["joined", "joined"]
        for number in (1, 0):
            pipes[number].send((prompts, tables[number], addresses[1 - number][0].peer, number == 0))
        (sent, sent_s, _, _), (received, received_s, wrong, _) = (_receive(pipe) for pipe in pipes)
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in processes] == [0, 0]
        return Moved(sent, received, wrong, max(sent_s, received_s))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(2 * PATIENCE_S), "a worker does not answer"
    return pipe.recv()


def _tables(prompts: Sequence[Prompt], seed: int) -> list[list[int]]:
    """Give each prompt blocks of its own."""
    free = iter(np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist())
    return [[next(free) for _ in range(-(-prompt.tokens // BLOCK_TOKENS))] for prompt in prompts]
