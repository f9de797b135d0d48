"""Byte views of this rank's KV blocks, and the two copies a parcel takes: gather out of blocks, scatter into blocks.

A parcel's bytes are, in order: item by item, block by block, head by head, plane by plane. Both sides agree on that order and on nothing else
about each other's memory. Where strides allow it an item is one call that runs without the interpreter's lock, so that an engine's thread is
not held up.

Knows addresses of this process's memory; nothing of transfers or peers.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pdserve.kv.geometry import Geometry, LayerGeometry
from pdserve.kv.plan import HeadSlice
from pdserve.kv.wire import Item

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]


class Memory(NamedTuple):
    """Where one layer's cache lies: a region of this process's memory that outlives the object."""

    address: int
    num_blocks: int


class CachePages:
    """The blocks of all layers of one rank, as bytes.

    Args:
        geometry: of this rank.
        memory: one entry per layer, in the geometry's order.
    """

    def __init__(self, geometry: Geometry, memory: Sequence[Memory]) -> None:
        self._layers = [_LayerPages(layer, place) for layer, place in zip(geometry.layers, memory, strict=True)]

    def gather(self, items: Sequence[Item], slices: Sequence[HeadSlice], block_ids: Sequence[Sequence[int]], out: Bytes) -> None:
        """Copy a parcel's pages out of this rank's blocks. `out` is uint8 of exactly the parcel's length."""
        for layer, ids, slice_, piece in self._pieces(items, slices, block_ids, out):
            layer.gather(ids, slice_.producer_head, piece)

    def scatter(self, items: Sequence[Item], slices: Sequence[HeadSlice], block_ids: Sequence[Sequence[int]], pages: Bytes) -> None:
        """Copy a parcel's pages into this rank's blocks. `pages` is uint8 of exactly the parcel's length."""
        for layer, ids, slice_, piece in self._pieces(items, slices, block_ids, pages):
            layer.scatter(ids, slice_.consumer_head, piece)

    def run_digests(
        self, items: Sequence[Item], heads: Sequence[tuple[int, int]], block_ids: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, int, str]]:
        """Hash runs where they lie in this rank's blocks.

        Args:
            heads: per item, the first local head and how many.

        Yields:
            (layer, local head, block by position, 16 hex digits of xxh3-64).
        """
        for item, (first_head, num_heads) in zip(items, heads, strict=True):
            layer = self._layers[item.layer]
            ids = block_ids[layer.shape.group]
            for block in range(item.first_block, item.end_block):
                for head in range(first_head, first_head + num_heads):
                    yield item.layer, head, block, layer.digest(ids[block], head)

    def _pieces(
        self, items: Sequence[Item], slices: Sequence[HeadSlice], block_ids: Sequence[Sequence[int]], flat: Bytes
    ) -> Iterator[tuple["_LayerPages", Indices, HeadSlice, Bytes]]:
        """Yield, per item: its layer, its blocks, which heads, and its bytes of the parcel as [blocks, heads, run_bytes]."""
        offset = 0
        for item, slice_ in zip(items, slices, strict=True):
            layer = self._layers[item.layer]
            ids = layer.checked(block_ids[layer.shape.group][item.first_block : item.end_block])
            size = len(ids) * slice_.num_heads * layer.shape.run_bytes
            yield layer, ids, slice_, flat[offset : offset + size].reshape(len(ids), slice_.num_heads, layer.shape.run_bytes)
            offset += size
        if offset != len(flat):
            raise ValueError(f"parcel of {len(flat)} bytes, its items hold {offset}")


class _LayerPages:
    """One layer's blocks."""

    def __init__(self, shape: LayerGeometry, place: Memory) -> None:
        self.shape = shape
        self._num_blocks = place.num_blocks
        self._plane_bytes = shape.run_bytes // shape.planes
        strides = (shape.block_stride_bytes, shape.head_stride_bytes, shape.plane_stride_bytes)
        counts = (place.num_blocks, shape.local_heads, shape.planes)
        span = sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True)) + self._plane_bytes
        self._flat: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(place.address))
        self._memory = self._flat.data
        self._view: Bytes = np.lib.stride_tricks.as_strided(self._flat, (*counts, self._plane_bytes), (*strides, 1))
        self._steps = None if any(stride % self._plane_bytes for stride in strides) else [stride // self._plane_bytes for stride in strides]
        """strides in plane pieces, where they are whole ones"""

    def checked(self, ids: Sequence[int]) -> Indices:
        """Return block numbers as an array. Raises IndexError for one that this layer does not have."""
        if ids and not 0 <= min(ids) <= max(ids) < self._num_blocks:
            raise IndexError(f"{self.shape.name} has {self._num_blocks} blocks, not {min(ids)} to {max(ids)}")
        return np.array(ids, dtype=np.intp)

    def scatter(self, ids: Indices, first_head: int, piece: Bytes) -> None:
        """Copy into neighbouring heads of some blocks. `piece` is [blocks, heads, run_bytes]."""
        num_heads = piece.shape[1]
        self._view[ids, first_head : first_head + num_heads] = piece.reshape(len(ids), num_heads, *self._view.shape[2:])

    def gather(self, ids: Indices, first_head: int, out: Bytes) -> None:
        """Copy neighbouring heads of some blocks. `out` is [blocks, heads, run_bytes]."""
        num_heads = out.shape[1]
        if self._steps is None:
            for block, piece in zip(ids, out.reshape(len(ids), num_heads, *self._view.shape[2:]), strict=True):
                np.copyto(piece, self._view[block, first_head : first_head + num_heads])
            return
        block_step, head_step, plane_step = self._steps
        joined = 1
        if self.shape.planes == head_step == 1:
            joined = math.gcd(num_heads, first_head, block_step)
        row_bytes = joined * self._plane_bytes
        inside = (first_head + np.arange(0, num_heads, joined))[:, None] * head_step + np.arange(self.shape.planes) * plane_step
        indices = (ids[:, None] * block_step + inside.ravel()) // joined
        rows = self._flat[: len(self._flat) // row_bytes * row_bytes].reshape(-1, row_bytes)
        # The numbers are in range; numpy copies `out` in every other mode.
        rows.take(indices.ravel(), axis=0, out=out.reshape(-1, row_bytes), mode="clip")

    def digest(self, block: int, head: int) -> str:
        """Return 16 hex digits of xxh3-64 of one run's bytes."""
        if self.shape.planes > 1:
            return xxhash.xxh3_64_hexdigest(self._view[block, head].tobytes())
        start = block * self.shape.block_stride_bytes + head * self.shape.head_stride_bytes
        return xxhash.xxh3_64_hexdigest(self._memory[start : start + self.shape.run_bytes])
