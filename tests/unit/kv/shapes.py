"""Small caches shaped like M3's, and prompts whose every byte of KV says which prompt, layer, head and token it belongs to.

Two block sizes in two groups whose block numbers overlap, split and replicated layers mixed, strides that differ between the two sides. Knows no
transfers: a test lays bytes into blocks with `RankMemory.write` and asks with `RankMemory.holds` whether a rank has them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from pdserve.kv.geometry import Geometry, LayerGeometry, Sharding
from pdserve.kv.pages import Bytes, CachePages, Memory
from pdserve.kv.plan import HeadSlice, PairPlan, held_heads, make_plan

BlockIds = tuple[tuple[int, ...], ...]
"""per group, by position in the prompt"""

FREED = 0xFF
"""what blocks hold that nobody owns"""

_NOISE = np.random.default_rng(20240229).integers(0, 255, size=1 << 16, dtype=np.uint8)
_NOISE.flags.writeable = False


class Shape(NamedTuple):
    """One logical layer: group, tokens of a block, bytes of one token and head, and whether heads are split."""

    name: str
    group: int
    block_tokens: int
    token_bytes: int
    sharding: Sharding


class Model(NamedTuple):
    """What the two sides of a transfer have in common."""

    shapes: tuple[Shape, ...]
    heads: int

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Tokens of a block, per group."""
        return tuple(dict(sorted((shape.group, shape.block_tokens) for shape in self.shapes)).values())

    @property
    def largest_block_tokens(self) -> int:
        return max(self.block_tokens)

    def blocks_of(self, tokens: int) -> tuple[int, ...]:
        """Blocks that hold so many tokens, per group."""
        return tuple(-(-tokens // size) for size in self.block_tokens)

    def geometry(self, tensor_parallel_size: int, rank: int, *, padding: int = 0) -> Geometry:
        """Return one rank's geometry; `padding` bytes lie between heads and between blocks."""
        layers = []
        for shape in self.shapes:
            total = self.heads if shape.sharding is Sharding.SPLIT else 1
            local = len(held_heads(total, tensor_parallel_size, rank)) if shape.sharding is Sharding.SPLIT else 1
            run = shape.block_tokens * shape.token_bytes
            layers.append(
                LayerGeometry(
                    name=shape.name,
                    group=shape.group,
                    block_tokens=shape.block_tokens,
                    sharding=shape.sharding,
                    total_heads=total,
                    run_bytes=run,
                    dtype="uint8",
                    kind="Test",
                    local_heads=local,
                    block_stride_bytes=local * (run + padding) + padding,
                    head_stride_bytes=run + padding,
                )
            )
        return Geometry(tensor_parallel_size, rank, tuple(layers), len(self.block_tokens))

    def plan(self, producer_ranks: int, consumer_ranks: int) -> PairPlan:
        return make_plan(self.geometry(1, 0).layers, producer_ranks, consumer_ranks)


M3_SMALL = Model(
    (
        Shape("layers.0.attn", 0, 4, 2, Sharding.SPLIT),
        Shape("layers.1.attn", 0, 4, 2, Sharding.SPLIT),
        Shape("layers.1.attn.index", 0, 4, 1, Sharding.REPLICATED),
        Shape("layers.2.attn", 1, 8, 1, Sharding.SPLIT),
    ),
    heads=4,
)


class Prompt:
    """One prompt's true KV; computing it again gives other bytes, as a GPU may, so that a mixture of two passes shows.

    Args:
        model: whose KV.
        seed: distinguishes prompts.
        tokens: ≥ 1.
    """

    def __init__(self, model: Model, seed: int, tokens: int) -> None:
        self.seed = seed
        self.tokens = tokens
        self.digest = xxhash.xxh3_128(f"{seed}:{tokens}".encode()).digest()
        self._model = model

    def blocks(self, layer: int, heads: range, version: int) -> Bytes:
        """Return what a rank with these heads holds of one layer after one pass, uint8 [blocks, heads, run_bytes]."""
        return np.stack([self._run(layer, head, version) for head in heads], axis=1)

    def _run(self, layer: int, head: int, version: int) -> Bytes:
        shape = self._model.shapes[layer]
        size = -(-self.tokens // shape.block_tokens) * shape.block_tokens * shape.token_bytes
        start = xxhash.xxh3_64_intdigest(f"{self.seed}:{version}:{layer}:{head}".encode()) % (len(_NOISE) - size)
        run: Bytes = _NOISE[start : start + size].reshape(-1, shape.block_tokens * shape.token_bytes)
        return run


class RankMemory:
    """One rank's KV blocks in numpy memory, and the product's own view of them.

    Args:
        model: whose layers.
        geometry: of this rank.
        num_blocks: of each group.
    """

    def __init__(self, model: Model, geometry: Geometry, num_blocks: int) -> None:
        self._model = model
        self.geometry = geometry
        self._raw = [np.full(num_blocks * layer.block_stride_bytes, FREED, dtype=np.uint8) for layer in geometry.layers]
        self.views = [
            np.lib.stride_tricks.as_strided(
                raw,
                shape=(num_blocks, layer.local_heads, layer.run_bytes),
                strides=(layer.block_stride_bytes, layer.head_stride_bytes, 1),
            )
            for raw, layer in zip(self._raw, geometry.layers, strict=True)
        ]
        self.pages = CachePages(geometry, [Memory(raw.ctypes.data, num_blocks) for raw in self._raw])
        self.heads = [
            held_heads(layer.total_heads, geometry.tensor_parallel_size, geometry.rank) if layer.sharding is Sharding.SPLIT else range(1)
            for layer in geometry.layers
        ]
        self._expected: dict[Prompt, dict[int, list[Bytes]]] = {}

    def write(
        self, prompt: Prompt, block_ids: BlockIds, start: int, end: int, *, version: int = 0, layers: Sequence[int] | None = None
    ) -> None:
        """Compute the KV of tokens [start, end) into blocks."""
        truth = self._truth(prompt, version)
        for layer in range(len(self.views)) if layers is None else layers:
            view, ids = self.views[layer], block_ids[self.geometry.layers[layer].group]
            for first, last, part in self._pieces(layer, start, end):
                view[list(ids[first:last]), :, part] = truth[layer][first:last, :, part]

    def holds(
        self, prompt: Prompt, block_ids: BlockIds, start: int, end: int, *, version: int = 0, slices: Sequence[HeadSlice] | None = None
    ) -> bool:
        """Return whether blocks hold exactly the KV of tokens [start, end).

        Args:
            slices: heads to look at (the consumer's numbers); all if None.
        """
        truth = self._truth(prompt, version)
        for layer, heads in self._heads_of(slices):
            view, ids = self.views[layer], block_ids[self.geometry.layers[layer].group]
            for first, last, part in self._pieces(layer, start, end):
                if not np.array_equal(view[list(ids[first:last]), heads, part], truth[layer][first:last, heads, part]):
                    return False
        return True

    def scribble(self, block_ids: BlockIds) -> None:
        """Spoil blocks, as whoever gets them next would."""
        for layer, view in zip(self.geometry.layers, self.views, strict=True):
            view[list(block_ids[layer.group])] = FREED

    def forget(self, prompt: Prompt) -> None:
        """Drop what was kept to know a prompt's truth faster."""
        self._expected.pop(prompt, None)

    def _truth(self, prompt: Prompt, version: int) -> list[Bytes]:
        versions = self._expected.setdefault(prompt, {})
        truth = versions.get(version)
        if truth is None:
            truth = versions[version] = [prompt.blocks(layer, heads, version) for layer, heads in enumerate(self.heads)]
        return truth

    def _heads_of(self, slices: Sequence[HeadSlice] | None) -> Iterator[tuple[int, slice]]:
        if slices is None:
            yield from ((layer, slice(None)) for layer in range(len(self.views)))
        else:
            yield from ((s.layer, slice(s.consumer_head, s.consumer_head + s.num_heads)) for s in slices)

    def _pieces(self, layer: int, start: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Yield (first block, end block, bytes of a run): part of a first block, whole blocks, part of a last one."""
        size, width = self._model.shapes[layer].block_tokens, self._model.shapes[layer].token_bytes
        while start < end:
            first, into = divmod(start, size)
            whole = (end - start) // size if into == 0 else 0
            if whole:
                yield first, first + whole, slice(None)
                start += whole * size
            else:
                count = min(size - into, end - start)
                yield first, first + 1, slice(into * width, (into + count) * width)
                start += count
