"""Caches that keep keys and values in planes of their own: a head's two pieces cross together, whatever the sizes of the two sides."""

from itertools import product

import numpy as np
import pytest
import xxhash
from test_geometry import FakeTensor, FullAttentionSpec

from pdserve.kv.geometry import Geometry, LayerGeometry, from_registered
from pdserve.kv.pages import Bytes, CachePages, Memory
from pdserve.kv.plan import held_heads, make_plan
from pdserve.kv.wire import Item

HEADS, BLOCKS, TOKENS, CONTENT = 4, 6, 2, 3
TILE = TOKENS * CONTENT
"""bytes of one head and block in one plane"""


class Side:
    """One rank's cache of one layer, as ROCm's shuffling kernels have it: [blocks, planes, heads, tile], blocks or planes outermost."""

    def __init__(self, ranks: int, rank: int, outermost: str) -> None:
        self.heads = held_heads(HEADS, ranks, rank)
        count = len(self.heads)
        shape = (BLOCKS, 2, count, TILE) if outermost == "block" else (2, BLOCKS, count, TILE)
        self.raw: Bytes = np.zeros(shape, dtype=np.uint8)
        self.tiles = self.raw if outermost == "block" else self.raw.transpose(1, 0, 2, 3)
        strides = (self.tiles.strides[0], self.tiles.strides[1], count * CONTENT, 1)
        cache = FakeTensor((BLOCKS, 2, TOKENS, count * CONTENT), strides, item=1, dtype="torch.uint8")
        self.geometry: Geometry = from_registered(
            {"a": cache},
            {"a": (0, FullAttentionSpec(TOKENS, count, 2))},
            total_kv_heads=HEADS,
            tensor_parallel_size=ranks,
            rank=rank,
            has_head_major_planes=True,
        )
        self.pages = CachePages(self.geometry, [Memory(self.raw.ctypes.data, BLOCKS)])

    @property
    def layer(self) -> LayerGeometry:
        return self.geometry.layers[0]


def tile(block: int, plane: int, head: int) -> Bytes:
    """What a head's tile of a block of the prompt holds."""
    return np.frombuffer(xxhash.xxh3_128_digest(bytes([block, plane, head])), dtype=np.uint8)[:TILE]


@pytest.mark.parametrize("layouts", list(product(["block", "plane"], repeat=2)), ids=" to ".join)
@pytest.mark.parametrize(("producers", "consumers"), list(product([1, 2, 4, 8], repeat=2)))
def test_both_pieces_of_every_head_arrive(producers: int, consumers: int, layouts: tuple[str, str]) -> None:
    """Every tile of the prompt's blocks is in its plane, block and head on every decode rank, no other byte has changed, and digests agree."""
    ours, theirs, item = [4, 0, 1], [2, 3, 5], Item(0, 0, 3)
    sources = [Side(producers, rank, layouts[0]) for rank in range(producers)]
    sinks = [Side(consumers, rank, layouts[1]) for rank in range(consumers)]
    for side in sources:
        for (position, block), plane, (local, head) in product(enumerate(ours), range(2), enumerate(side.heads)):
            side.tiles[block, plane, local] = tile(position, plane, head)
    digests: set[tuple[int, int, str]] = set()
    for (producer, consumer), slices in make_plan((sources[0].layer,), producers, consumers).slices.items():
        for piece in slices:
            parcel: Bytes = np.zeros(len(ours) * piece.num_heads * sources[0].layer.run_bytes, dtype=np.uint8)
            sources[producer].pages.gather([item], [piece], [ours], parcel)
            sinks[consumer].pages.scatter([item], [piece], [theirs], parcel)
            for _, local, block, digest in sources[producer].pages.run_digests([item], [(piece.producer_head, piece.num_heads)], [ours]):
                digests.add((sources[producer].heads[local], block, digest))
    for side in sinks:
        expected = np.zeros_like(side.tiles)
        for (position, block), plane, (local, head) in product(enumerate(theirs), range(2), enumerate(side.heads)):
            expected[block, plane, local] = tile(position, plane, head)
        assert np.array_equal(side.tiles, expected)
        for _, local, block, digest in side.pages.run_digests([item], [(0, len(side.heads))], [theirs]):
            assert (side.heads[local], block, digest) in digests
    assert len(digests) == HEADS * len(ours)
