"""Geometry from vLLM's own specs and views: MiniMax-M3's 117 caches and others, in every layout, and bytes that cross between layouts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheTensor, MLAAttentionSpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdserve.errors import ProtocolMismatch
from pdserve.kv.geometry import Geometry, Sharding, from_registered
from pdserve.kv.pages import CachePages, Memory
from pdserve.kv.plan import HeadSlice
from pdserve.kv.wire import Item

BLOCK, DIM, HEADS = 128, 128, 4
NUM_BLOCKS = 3
KIB = 1024
MAIN = [f"model.layers.{layer}.self_attn.attn" for layer in range(60)]
INDEX = [f"{name}.index_cache" for name in MAIN[3:]]


class Registered(NamedTuple):
    """What vLLM would register, and the memory under it."""

    caches: dict[str, torch.Tensor]
    specs: dict[str, tuple[int, AttentionSpec]]

    def geometry(self, ranks: int, *, heads: int = HEADS) -> Geometry:
        return from_registered(self.caches, self.specs, total_kv_heads=heads, tensor_parallel_size=ranks, rank=ranks - 1)

    def pages(self, geometry: Geometry) -> CachePages:
        places = [Memory(self.caches[layer.name].data_ptr(), NUM_BLOCKS) for layer in geometry.layers]
        return CachePages(geometry, places)


def main_spec(ranks: int, dtype: torch.dtype) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=max(1, HEADS // ranks), head_size=DIM, head_size_v=DIM, dtype=dtype)


def index_spec(dtype: torch.dtype) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=dtype)


def register(layers: Sequence[tuple[Sequence[str], int, AttentionSpec]], layout: KVCacheLayout = KVCacheLayout.LBHNC) -> Registered:
    """Lay caches into one allocation as vLLM does: layer by layer, or block by block with the pages of all layers side by side.

    Args:
        layers: names, group and spec of layers of one shape each.
    """
    block_outermost = layout.is_block_outermost
    whole_block = sum(len(names) * spec.page_size_bytes for names, _, spec in layers)
    buffer = torch.zeros(whole_block * NUM_BLOCKS, dtype=torch.int8)
    caches: dict[str, torch.Tensor] = {}
    offset = 0
    for names, _, spec in layers:
        page = spec.page_size_bytes
        head = page // spec.num_heads
        strides = {
            KVCacheLayout.LHBNC: (page * NUM_BLOCKS, head),
            KVCacheLayout.BHLNC: (head, whole_block),
            KVCacheLayout.BLHNC: (page, whole_block),
            KVCacheLayout.BLNHC: (page, whole_block),
        }.get(layout, (page * NUM_BLOCKS, page))
        tensor = KVCacheTensor(size=len(buffer), layers=list(names), layer_stride=strides[0], block_stride=strides[1], offset=offset)
        views = create_kv_cache_views(buffer, spec, NUM_BLOCKS, layout, tensor)
        squeezed = [view.squeeze(1) if isinstance(spec, MLAAttentionSpec) else view for view in views]
        caches |= dict(zip(names, squeezed, strict=True))
        offset += len(names) * page * (1 if block_outermost else NUM_BLOCKS)
    return Registered(caches, {name: (group, spec) for names, group, spec in layers for name in names})


def m3(ranks: int, main: torch.dtype, index: torch.dtype, layout: KVCacheLayout = KVCacheLayout.LBHNC) -> Registered:
    return register([(MAIN, 0, main_spec(ranks, main)), (INDEX, 0, index_spec(index))], layout)


BF16, FP8 = torch.bfloat16, torch.uint8


@pytest.mark.parametrize(
    ("ranks", "main", "index", "main_kib", "index_kib", "block_bytes", "token_bytes"),
    [
        (1, BF16, BF16, 256, 32, 17_596_416, 137_472),
        (2, BF16, BF16, 128, 32, 9_732_096, 76_032),
        (4, BF16, BF16, 64, 32, 5_799_936, 45_312),
        (8, BF16, BF16, 64, 32, 5_799_936, 45_312),
        (1, FP8, BF16, 128, 32, 9_732_096, 76_032),
        (2, FP8, BF16, 64, 32, 5_799_936, 45_312),
        (4, FP8, BF16, 32, 32, 3_833_856, 29_952),
        (8, FP8, BF16, 32, 32, 3_833_856, 29_952),
    ],
)
def test_sixty_layers_of_m3_as_vllm_registers_them(
    ranks: int, main: torch.dtype, index: torch.dtype, main_kib: int, index_kib: int, block_bytes: int, token_bytes: int
) -> None:
    """Page sizes of every tensor-parallel size; fp8 changes the main caches and leaves the index as it is."""
    registered = m3(ranks, main, index)
    found = registered.geometry(ranks)
    sizes = {layer.name: layer.block_bytes for layer in found.layers}
    assert sizes == dict.fromkeys(MAIN, main_kib * KIB) | dict.fromkeys(INDEX, index_kib * KIB)
    assert sizes == {name: spec.page_size_bytes for name, (_, spec) in registered.specs.items()}
    assert (sum(sizes.values()), sum(sizes.values()) // BLOCK) == (block_bytes, token_bytes)
    assert {layer.name: layer.sharding for layer in found.layers} == dict.fromkeys(MAIN, Sharding.SPLIT) | dict.fromkeys(
        INDEX, Sharding.REPLICATED
    )
    assert {layer.total_heads for layer in found.layers if layer.name in MAIN} == {HEADS}
    assert {layer.local_heads for layer in found.layers if layer.name in MAIN} == {max(1, HEADS // ranks)}


WHOLE_RUNS = {KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC}


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_layout_is_taken_if_its_runs_are_whole_and_refused_by_name_if_not(layout: KVCacheLayout) -> None:
    """With several heads, tokens outside heads tear every run apart; with one head there is nothing to tear."""
    several = register([(MAIN[:3], 0, main_spec(1, BF16))], layout)
    if layout in WHOLE_RUNS:
        assert {layer.run_bytes for layer in several.geometry(1).layers} == {64 * KIB}
    else:
        with pytest.raises(ProtocolMismatch, match="LBHNC") as refusal:
            several.geometry(1)
        assert refusal.value.field == "model.layers.0.self_attn.attn: cache strides"
    one = register([(MAIN[:3], 0, main_spec(4, BF16))], layout)
    assert {layer.run_bytes for layer in one.geometry(4).layers} == {64 * KIB}


@pytest.mark.parametrize("layout", sorted(WHOLE_RUNS, key=lambda layout: layout.name), ids=lambda layout: layout.name)
def test_runs_cross_between_layouts(layout: KVCacheLayout) -> None:
    """What is gathered from one layout and scattered into another is the same cache, head by head and block by block."""
    layers = [(MAIN[:2], 0, main_spec(1, BF16))]
    source, target = register(layers, layout), register(layers)
    generator = np.random.default_rng(7)
    for cache in source.caches.values():
        cache.view(torch.int16).copy_(torch.from_numpy(generator.integers(-9999, 9999, size=tuple(cache.shape), dtype=np.int16)))
    geometry = source.geometry(1)
    items = [Item(0, 0, 2), Item(1, 0, 2)]
    slices = [HeadSlice(0, 1, 0, 2), HeadSlice(1, 0, 2, 2)]
    parcel = np.empty(2 * 2 * 2 * 64 * KIB, dtype=np.uint8)
    source.pages(geometry).gather(items, slices, ((2, 0),), parcel)
    target.pages(target.geometry(1)).scatter(items, slices, ((0, 1),), parcel)
    for name, part in zip(MAIN[:2], slices, strict=True):
        taken = source.caches[name][[2, 0], part.producer_head : part.producer_head + part.num_heads]
        placed = target.caches[name][[0, 1], part.consumer_head : part.consumer_head + part.num_heads]
        assert torch.equal(taken.view(torch.int16), placed.view(torch.int16))
    untouched = target.caches[MAIN[0]][2].view(torch.int16)
    assert not untouched.any()


def test_index_pages_lie_between_main_pages_of_the_same_block() -> None:
    """Blocks outermost: pages of other layers lie between two blocks of one, and are not part of either."""
    found = m3(1, BF16, BF16, KVCacheLayout.BLHNC).geometry(1)
    assert {layer.block_stride_bytes for layer in found.layers} == {17_596_416}
    assert {layer.run_bytes for layer in found.layers if layer.name in INDEX} == {32 * KIB}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_latents_are_one_head_on_every_rank(ranks: int) -> None:
    """An MLA model: 576 values a token, whatever the number of attention heads."""
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=BF16)
    (layer,) = register([(["model.layers.0.self_attn.attn"], 0, spec)]).geometry(ranks, heads=1).layers
    assert (layer.sharding, layer.total_heads, layer.local_heads, layer.run_bytes) == (Sharding.REPLICATED, 1, 1, 64 * 576 * 2)


def test_groups_have_block_sizes_of_their_own() -> None:
    """A hybrid model: groups of 16, 64 and 128 tokens a block, each with its own bytes and block table."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, head_size_v=32, dtype=torch.float32)
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    found = register([(["a.0", "a.1"], 0, full), (["b.0"], 1, latent), (["c.0"], 2, main_spec(2, BF16))]).geometry(2)
    assert [(layer.name, layer.group, layer.block_tokens, layer.run_bytes) for layer in found.layers] == [
        ("a.0", 0, 16, 16 * 96 * 4),
        ("a.1", 0, 16, 16 * 96 * 4),
        ("b.0", 1, 64, 64 * 132),
        ("c.0", 2, 128, 64 * KIB),
    ]
    assert (found.num_groups, [found.layers_of(group) for group in range(3)]) == (3, [(0, 1), (2,), (3,)])
