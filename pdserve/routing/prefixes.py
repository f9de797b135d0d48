"""Which prompts share a beginning, and which worker holds it: hashes of 512-byte chunks of a prompt's text, each chained to the one before it.

A chained hash names a whole prefix, so a set of them is a trie: a worker holds a prefix if it holds its last hash. Prompts that are never to share
cache entries start from different salts. Keeps no text. Knows no worker and no lease; what is put into `Holdings` is the caller's to prove.
"""

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

CHUNK_BYTES = 512
MAX_CHUNKS = 1024
"""longest prefix of one prompt that is told apart: half a megabyte of text"""
MAX_HELD_CHUNKS = 1 << 16
"""of one worker, whatever it says its cache holds; about 8 MiB of memory"""

Prefix = tuple[int, ...]
"""one hash per whole chunk, in order; the text after the last whole chunk is in none"""


def prefix_of(text: bytes, *salts: str) -> Prefix:
    """Return the chunk hashes of a prompt's canonical text.

    Args:
        salts: what cache entries are kept apart by: model, tenant, the client's own salt.
    """
    hashed = xxhash.xxh3_64_intdigest("\0".join(salts).encode())
    view = memoryview(text)
    chunks: list[int] = []
    for start in range(0, min(len(text) // CHUNK_BYTES, MAX_CHUNKS) * CHUNK_BYTES, CHUNK_BYTES):
        hashed = xxhash.xxh3_64_intdigest(view[start : start + CHUNK_BYTES], hashed)
        chunks.append(hashed)
    return tuple(chunks)


class Holdings:
    """The prefixes that one worker incarnation holds, the least recently used forgotten first.

    A prefix is used from its end to its beginning, so no chunk is forgotten before those that follow it and what is left is always whole prefixes.
    """

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, prefix: Prefix, capacity: int = MAX_HELD_CHUNKS) -> None:
        """Note that the worker holds this prefix; `capacity` is how many chunks its cache can hold at all."""
        capacity = min(capacity, MAX_HELD_CHUNKS)
        for chunk in reversed(prefix[:capacity]):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > capacity:
            self._chunks.popitem(last=False)

    def depth(self, prefix: Sequence[int]) -> int:
        """Return how many chunks of this prefix, from its beginning, the worker holds."""
        if not self._chunks or not prefix or prefix[0] not in self._chunks:
            return 0
        low, high = 1, len(prefix)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if prefix[middle - 1] in self._chunks else (low, middle - 1)
        return low
