"""Gather and scatter against a slow reference, for any block numbers and strides."""

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import M3_SMALL, Model, Prompt, RankMemory, Shape

from pdserve.kv.geometry import Geometry, Sharding
from pdserve.kv.pages import Bytes, CachePages, Memory
from pdserve.kv.plan import HeadSlice
from pdserve.kv.wire import Item

NUM_BLOCKS = 12

ONE_LAYER = Model((Shape("layers.0.attn", 0, 2, 3, Sharding.SPLIT),), heads=4)


def reference(memory: RankMemory, items: list[Item], slices: list[HeadSlice], block_ids: list[list[int]]) -> bytes:
    """Read a parcel one byte run at a time: item by item, block by block, head by head."""
    parts: list[bytes] = []
    for item, piece in zip(items, slices, strict=True):
        ids = block_ids[memory.geometry.layers[item.layer].group]
        for block in range(item.first_block, item.end_block):
            heads = range(piece.producer_head, piece.producer_head + piece.num_heads)
            parts += [memory.views[item.layer][ids[block], head].tobytes() for head in heads]
    return b"".join(parts)


@st.composite
def parcels(draw: st.DrawFn) -> tuple[list[Item], list[HeadSlice], list[list[int]], list[list[int]], int, int]:
    """Draw items, head slices, block tables of both sides, and paddings of both sides."""
    tables = [draw(st.permutations(range(NUM_BLOCKS))) for _ in range(4)]
    items, slices = [], []
    for layer in draw(st.lists(st.integers(0, 3), min_size=1, unique=True)):
        first = draw(st.integers(0, 6))
        items.append(Item(layer, first, draw(st.integers(first + 1, 7))))
        total = 1 if layer == 2 else 4
        count = draw(st.integers(1, total))
        slices.append(HeadSlice(layer, draw(st.integers(0, total - count)), draw(st.integers(0, total - count)), count))
    return items, slices, tables[:2], tables[2:], draw(st.integers(0, 5)), draw(st.integers(0, 5))


@settings(max_examples=80, deadline=None)
@given(parcels())
def test_gathered_pages_scatter_to_their_blocks(
    drawn: tuple[list[Item], list[HeadSlice], list[list[int]], list[list[int]], int, int],
) -> None:
    """The parcel is what the reference reads; scattered, each run is in its block and head, and nothing else has changed."""
    items, slices, ours, theirs, our_padding, their_padding = drawn
    producer = RankMemory(M3_SMALL, M3_SMALL.geometry(1, 0, padding=our_padding), NUM_BLOCKS)
    consumer = RankMemory(M3_SMALL, M3_SMALL.geometry(1, 0, padding=their_padding), NUM_BLOCKS)
    for index, view in enumerate(producer.views):
        view[...] = np.random.default_rng(index).integers(0, 250, size=view.shape, dtype=np.uint8)
    wanted = reference(producer, items, slices, ours)
    pages: Bytes = np.zeros(len(wanted), dtype=np.uint8)
    producer.pages.gather(items, slices, ours, pages)
    assert pages.tobytes() == wanted

    expected = [view.copy() for view in consumer.views]
    for item, piece in zip(items, slices, strict=True):
        group = M3_SMALL.shapes[item.layer].group
        for block in range(item.first_block, item.end_block):
            for step in range(piece.num_heads):
                source = producer.views[item.layer][ours[group][block], piece.producer_head + step]
                expected[item.layer][theirs[group][block], piece.consumer_head + step] = source
    consumer.pages.scatter(items, slices, theirs, pages)
    assert all(np.array_equal(view, want) for view, want in zip(consumer.views, expected, strict=True))


def test_heads_may_lie_further_apart_than_blocks() -> None:
    """All blocks of one head first, then the next head's: strides alone say where a run is, the parcel's order stays the same."""
    run, heads = 6, 4
    layer = ONE_LAYER.geometry(1, 0).layers[0]
    layer = msgspec.structs.replace(layer, block_stride_bytes=run, head_stride_bytes=run * NUM_BLOCKS)
    raw = np.arange(heads * NUM_BLOCKS * run, dtype=np.uint16).astype(np.uint8)
    pages = CachePages(Geometry(1, 0, (layer,), 1), [Memory(raw.ctypes.data, NUM_BLOCKS)])
    by_head = raw.copy().reshape(heads, NUM_BLOCKS, run)
    items, slices = [Item(0, 0, 3)], [HeadSlice(0, 1, 2, 2)]
    parcel: Bytes = np.zeros(3 * 2 * run, dtype=np.uint8)
    pages.gather(items, slices, [[4, 5, 0]], parcel)
    assert np.array_equal(parcel.reshape(3, 2, run), by_head[1:3, [4, 5, 0]].transpose(1, 0, 2))
    pages.scatter(items, slices, [[11, 2, 3]], parcel)
    by_head[2:4, [11, 2, 3]] = by_head[1:3, [4, 5, 0]]
    assert np.array_equal(raw, by_head.ravel())


@pytest.mark.parametrize("order", [("block", "plane", "head"), ("plane", "block", "head"), ("block", "head", "plane")], ids="-".join)
@pytest.mark.parametrize("padding", [0, 1])
def test_keys_and_values_may_lie_in_planes_of_their_own(order: tuple[str, ...], padding: int) -> None:
    """A run's two pieces travel one after the other, wherever the planes are; its digest is of both."""
    piece, counts = 6, {"block": NUM_BLOCKS, "head": 4, "plane": 2}
    strides, step = {}, piece + padding
    for name in reversed(order):
        strides[name] = step
        step *= counts[name]
    layer = msgspec.structs.replace(
        ONE_LAYER.geometry(1, 0).layers[0],
        run_bytes=2 * piece,
        planes=2,
        block_stride_bytes=strides["block"],
        head_stride_bytes=strides["head"],
        plane_stride_bytes=strides["plane"],
    )
    raw = np.random.default_rng(1).integers(0, 255, size=step, dtype=np.uint8)
    runs = np.lib.stride_tricks.as_strided(raw, (NUM_BLOCKS, 4, 2, piece), (*(strides[name] for name in ("block", "head", "plane")), 1))
    pages = CachePages(Geometry(1, 0, (layer,), 1), [Memory(raw.ctypes.data, NUM_BLOCKS)])
    items, slices = [Item(0, 0, 3)], [HeadSlice(0, 1, 2, 2)]
    parcel: Bytes = np.zeros(3 * 2 * 2 * piece, dtype=np.uint8)
    pages.gather(items, slices, [[4, 5, 0]], parcel)
    wanted = runs[[4, 5, 0], 1:3].copy()
    assert np.array_equal(parcel, wanted.ravel())
    before = runs.copy()
    pages.scatter(items, slices, [[11, 2, 3]], parcel)
    before[[11, 2, 3], 2:4] = wanted
    assert np.array_equal(runs, before)
    assert [row[3] for row in pages.run_digests([Item(0, 1, 2)], [(2, 1)], [[11, 2, 3]])] == [
        xxhash.xxh3_64_hexdigest(wanted[1, 0].tobytes())
    ]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_block_that_the_cache_does_not_have_is_refused(block: int, padding: int) -> None:
    """Neither read nor written, and no other block in its place."""
    memory = RankMemory(ONE_LAYER, ONE_LAYER.geometry(1, 0, padding=padding), NUM_BLOCKS)
    pages: Bytes = np.zeros(48, dtype=np.uint8)
    for copy in (memory.pages.gather, memory.pages.scatter):
        with pytest.raises(IndexError, match=f"layers.0.attn has {NUM_BLOCKS} blocks"):
            copy([Item(0, 0, 2)], [HeadSlice(0, 0, 0, 4)], [[3, block]], pages)


@pytest.mark.parametrize("size", [23, 25])
def test_parcel_of_another_length_is_refused(size: int) -> None:
    """Too few or too many bytes for its items: an error, not a copy beyond the end."""
    memory = RankMemory(ONE_LAYER, ONE_LAYER.geometry(1, 0), NUM_BLOCKS)
    pages: Bytes = np.zeros(size, dtype=np.uint8)
    with pytest.raises(ValueError, match=r"parcel of|reshape"):
        memory.pages.scatter([Item(0, 0, 1)], [HeadSlice(0, 0, 0, 4)], [[3]], pages)


def test_block_table_that_is_too_short_is_refused() -> None:
    """A block beyond the table is an error, never somebody else's block."""
    memory = RankMemory(ONE_LAYER, ONE_LAYER.geometry(1, 0), NUM_BLOCKS)
    pages: Bytes = np.zeros(48, dtype=np.uint8)
    with pytest.raises(ValueError, match="parcel of 48 bytes, its items hold 24"):
        memory.pages.gather([Item(0, 0, 2)], [HeadSlice(0, 0, 0, 4)], [[3]], pages)


def test_digest_of_a_run_is_of_its_bytes_alone() -> None:
    """Equal bytes at other addresses, strides and ranks have equal digests; one byte makes another."""
    prompt = Prompt(ONE_LAYER, 5, 4)
    whole = RankMemory(ONE_LAYER, ONE_LAYER.geometry(1, 0), NUM_BLOCKS)
    half = RankMemory(ONE_LAYER, ONE_LAYER.geometry(2, 1, padding=3), NUM_BLOCKS)
    whole.write(prompt, ((4, 9),), 0, 4)
    half.write(prompt, ((1, 0),), 0, 4)
    ours = [row[3] for row in whole.pages.run_digests([Item(0, 0, 2)], [(2, 2)], [[4, 9]])]
    theirs = [row[3] for row in half.pages.run_digests([Item(0, 0, 2)], [(0, 2)], [[1, 0]])]
    assert ours == theirs
    assert len(set(ours)) == 4
    half.views[0][0, 1, 0] ^= 1
    changed = [row[3] for row in half.pages.run_digests([Item(0, 0, 2)], [(0, 2)], [[1, 0]])]
    assert [a == b for a, b in zip(ours, changed, strict=True)] == [True, True, True, False]
