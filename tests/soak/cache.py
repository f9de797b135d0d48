"""A worker's cache in a soak: blocks that belong to one request at a time, and contents that say whose they are.

What a run holds depends on transfer, pass, layer, head and position. Blocks that nobody owns are spoilt, so a read too late brings the wrong
bytes to a peer, and a write too late shows at rest. Blocks freed last are given out first: whoever is late meets a new owner.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.kv.geometry import Geometry, LayerGeometry, Sharding
from pdserve.kv.pages import CachePages, Memory
from tests.soak.script import BLOCK_TOKENS, MAX_TOKENS, Transfer

Words = npt.NDArray[np.uint64]
BlockIds = tuple[tuple[int, ...], ...]

WORD_BYTES = 8
NUM_BLOCKS = (112, 64)
"""by group"""
SPOILT = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
OWN = 0
"""the pass of what decode has cached itself"""


def _layer(name: str, group: int, sharding: Sharding, heads: int, run_bytes: int) -> LayerGeometry:
    return LayerGeometry(
        name, group, BLOCK_TOKENS[group], sharding, heads, run_bytes, "uint8", "FullAttentionSpec", heads, heads * run_bytes, run_bytes
    )


GEOMETRY = Geometry(
    1,
    0,
    (
        _layer("layers.0", 0, Sharding.SPLIT, 2, 128),
        _layer("layers.1", 0, Sharding.SPLIT, 2, 128),
        _layer("layers.1.index", 1, Sharding.REPLICATED, 1, 64),
    ),
    2,
)


def _patterns() -> list[Words]:
    made = np.random.default_rng(7)
    shapes = ((MAX_TOKENS // layer.block_tokens, layer.local_heads, layer.run_bytes // WORD_BYTES) for layer in GEOMETRY.layers)
    return [made.integers(0, 1 << 63, shape, dtype=np.uint64) for shape in shapes]


PATTERNS = _patterns()
"""per layer: [positions, heads, words]"""


def word(number: int, pass_number: int) -> np.uint64:
    """Return what sets the contents of one pass of one transfer apart from all others."""
    mixed = (number * 64 + pass_number + 1) * 0x9E37_79B9_7F4A_7C15 & 0xFFFF_FFFF_FFFF_FFFF
    return np.uint64(mixed ^ mixed >> 29)


def blocks_of(tokens: int) -> list[int]:
    """Return how many blocks of each group so many tokens take."""
    return [-(-tokens // size) for size in BLOCK_TOKENS]


class Cache:
    """All blocks of one worker."""

    def __init__(self) -> None:
        self._layers: list[Words] = [
            np.full((NUM_BLOCKS[layer.group], layer.local_heads, layer.run_bytes // WORD_BYTES), SPOILT) for layer in GEOMETRY.layers
        ]
        places = [Memory(array.ctypes.data, len(array)) for array in self._layers]
        self.pages = CachePages(GEOMETRY, places)
        self._free = [list(range(count)) for count in NUM_BLOCKS]

    def take(self, tokens: int) -> BlockIds | None:
        """Give blocks for so many tokens to one owner; None where too few are free."""
        counts = blocks_of(tokens)
        if any(count > len(free) for count, free in zip(counts, self._free, strict=True)):
            return None
        return tuple(tuple(free.pop() for _ in range(count)) for count, free in zip(counts, self._free, strict=True))

    def give(self, block_ids: BlockIds) -> None:
        """Take blocks back and spoil them."""
        for array, layer in zip(self._layers, GEOMETRY.layers, strict=True):
            array[list(block_ids[layer.group])] = SPOILT
        for free, ids in zip(self._free, block_ids, strict=True):
            free.extend(ids)

    def write(self, one: Transfer, pass_number: int, block_ids: BlockIds, start: int, end: int, layers: Sequence[int]) -> None:
        """Compute some layers of the tokens in [start, end). A block stays spoilt until the last of its tokens is there."""
        contents = word(one.number, pass_number)
        for index in layers:
            layer = GEOMETRY.layers[index]
            first = start // layer.block_tokens
            last = -(-end // layer.block_tokens) if end >= one.tokens else end // layer.block_tokens
            if first < last:
                self._layers[index][list(block_ids[layer.group][first:last])] = PATTERNS[index][first:last] ^ contents

    def wrong(self, one: Transfer, block_ids: BlockIds, *, landed: bool) -> str:
        """Return what is wrong with a decode request's blocks at its report, empty if nothing is."""
        passes = {int(word(one.number, number)): number for number in range(1, one.passes + 1)}
        found = set[int]()
        for index, layer in enumerate(GEOMETRY.layers):
            ids, cached = list(block_ids[layer.group]), one.first_token // layer.block_tokens
            end = -(-one.tokens // layer.block_tokens)
            if cached and (self._layers[index][ids[:cached]] ^ PATTERNS[index][:cached] != word(one.number, OWN)).any():
                return f"{layer.name}: what was cached is damaged"
            if (self._layers[index][ids[end:]] != SPOILT).any():
                return f"{layer.name}: written beyond the prompt"
            if landed:
                words = self._layers[index][ids[cached:end]] ^ PATTERNS[index][cached:end]
                found.add(int(words[0, 0, 0]))
                if (words != words[0, 0, 0]).any():
                    return f"{layer.name}: bytes of more than one origin"
        if landed and (len(found) != 1 or not found <= passes.keys()):
            return f"bytes of another transfer or pass, {len(found)} origins"
        return ""

    def at_rest(self) -> str:
        """Return what is wrong when nobody owns a block, empty if nothing is."""
        if any(sorted(free) != list(range(count)) for free, count in zip(self._free, NUM_BLOCKS, strict=True)):
            return f"free blocks {[len(free) for free in self._free]} of {NUM_BLOCKS}"
        written = [layer.name for layer, array in zip(GEOMETRY.layers, self._layers, strict=True) if (array != SPOILT).any()]
        return f"blocks written that nobody owns: {written}" if written else ""
