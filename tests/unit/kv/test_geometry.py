"""Geometry from what an engine registers: every layout that can be moved, each that cannot by name, and M3's page sizes as vLLM computes them."""

from dataclasses import dataclass

import pytest

from pdserve.errors import ProtocolMismatch
from pdserve.kv.geometry import Geometry, LayerSpec, Sharding, from_registered, natural_key
from pdserve.kv.plan import require_equal_layers

HEAD_DIM = 128
M3_BLOCK = 128
M3_HEADS = 4
KIB = 1024


@dataclass
class FakeTensor:
    """Shape, strides in elements, dtype and element size of a cache that is not there."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int = 2
    dtype: object = "torch.bfloat16"

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.item


@dataclass
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    num_head_slots: int | None = None


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    """Named as vLLM's class is: the name says that heads are not split."""


def contiguous(*shape: int) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def tensor(*shape: int, item: int = 2, dtype: object = "torch.bfloat16") -> FakeTensor:
    return FakeTensor(shape, contiguous(*shape), item, dtype)


def geometry(caches: dict[str, FakeTensor], specs: dict[str, tuple[int, LayerSpec]], *, heads: int = 4, tp: int = 1) -> Geometry:
    return from_registered(caches, specs, total_kv_heads=heads, tensor_parallel_size=tp, rank=tp - 1)


def m3(tp: int, main_item: int, index_item: int) -> Geometry:
    """Return the geometry of the 60-layer M3 text model: 3 dense layers, 57 sparse ones, each of those with an index cache."""
    local = max(1, M3_HEADS // tp)
    caches: dict[str, FakeTensor] = {}
    specs: dict[str, tuple[int, LayerSpec]] = {}
    main_dtype, index_dtype = ({1: "torch.uint8", 2: "torch.bfloat16"}[item] for item in (main_item, index_item))
    for layer in reversed(range(60)):
        name = f"model.layers.{layer}.self_attn.attn"
        caches[name] = tensor(10, local, M3_BLOCK, 2 * HEAD_DIM, item=main_item, dtype=main_dtype)
        specs[name] = (0, FullAttentionSpec(M3_BLOCK, local))
        if layer >= 3:
            caches[name + ".index"] = tensor(10, M3_BLOCK, HEAD_DIM, item=index_item, dtype=index_dtype)
            specs[name + ".index"] = (0, MLAAttentionSpec(M3_BLOCK, 1))
    return geometry(caches, specs, heads=M3_HEADS, tp=tp)


@pytest.mark.parametrize(
    ("tp", "main_item", "index_item", "main_kib", "index_kib", "block_bytes", "token_bytes"),
    [
        (1, 2, 2, 256, 32, 17_596_416, 137_472),
        (2, 2, 2, 128, 32, 9_732_096, 76_032),
        (4, 2, 2, 64, 32, 5_799_936, 45_312),
        (8, 2, 2, 64, 32, 5_799_936, 45_312),
        (1, 1, 2, 128, 32, 9_732_096, 76_032),
        (2, 1, 2, 64, 32, 5_799_936, 45_312),
        (4, 1, 2, 32, 32, 3_833_856, 29_952),
        (8, 1, 2, 32, 32, 3_833_856, 29_952),
        (1, 1, 1, 128, 16, 8_798_208, 68_736),
        (2, 1, 1, 64, 16, 4_866_048, 38_016),
        (4, 1, 1, 32, 16, 2_899_968, 22_656),
        (8, 1, 1, 32, 16, 2_899_968, 22_656),
    ],
)
def test_m3_has_the_page_sizes_that_vllm_computes(
    tp: int, main_item: int, index_item: int, main_kib: int, index_kib: int, block_bytes: int, token_bytes: int
) -> None:
    """All 117 caches of one block, per rank, as bf16 and fp8, with the index in either."""
    found = m3(tp, main_item, index_item)
    main = {layer.block_bytes for layer in found.layers if layer.sharding is Sharding.SPLIT}
    index = {layer.block_bytes for layer in found.layers if layer.sharding is Sharding.REPLICATED}
    assert (len(found.layers), main, index) == (117, {main_kib * KIB}, {index_kib * KIB})
    total = sum(layer.block_bytes for layer in found.layers)
    assert (total, total // M3_BLOCK) == (block_bytes, token_bytes)


def test_layers_come_in_the_order_of_their_numbers() -> None:
    """The order of registration means nothing: group first, then names with numbers read as numbers."""
    found = m3(4, 2, 2)
    names = [layer.name for layer in found.layers]
    assert names[2:6] == [
        "model.layers.2.self_attn.attn",
        "model.layers.3.self_attn.attn",
        "model.layers.3.self_attn.attn.index",
        "model.layers.4.self_attn.attn",
    ]
    assert natural_key("layers.9.attn") < natural_key("layers.10.attn")


def test_dense_layer_is_described_by_its_strides() -> None:
    """Bytes of a run and of both strides, also where another layer's page lies between two blocks."""
    cache = FakeTensor((6, 2, 16, 64), (5000, 1024, 64, 1), item=4, dtype="torch.float32")
    (layer,) = geometry({"a": cache}, {"a": (0, FullAttentionSpec(16, 2))}, heads=4, tp=2).layers
    assert (layer.run_bytes, layer.block_stride_bytes, layer.head_stride_bytes) == (4096, 20000, 4096)
    assert (layer.total_heads, layer.local_heads, layer.block_bytes, layer.dtype) == (4, 2, 8192, "float32")
    assert layer.kind == "FullAttentionSpec"


def test_latent_without_a_head_dimension_is_one_replicated_head() -> None:
    """A 3-D view is one head that every rank holds, whatever the model's KV heads are."""
    cache = FakeTensor((6, 64, 576), (40000, 576, 1))
    (layer,) = geometry({"a": cache}, {"a": (0, MLAAttentionSpec(64, 1))}, heads=128, tp=4).layers
    assert (layer.sharding, layer.total_heads, layer.local_heads) == (Sharding.REPLICATED, 1, 1)
    assert (layer.run_bytes, layer.block_stride_bytes) == (64 * 576 * 2, 80000)


def test_groups_keep_block_sizes_of_their_own() -> None:
    """No number is shared between layers: block sizes 4, 64 and 256, latents of 576 and 132 values."""
    caches = {"c": tensor(9, 2, 4, 32), "b": tensor(9, 64, 576), "a": tensor(9, 256, 132)}
    specs: dict[str, tuple[int, LayerSpec]] = {
        "c": (0, FullAttentionSpec(4, 2)),
        "b": (1, MLAAttentionSpec(64, 1)),
        "a": (2, MLAAttentionSpec(256, 1)),
    }
    found = geometry(caches, specs, heads=2)
    assert [(layer.name, layer.group, layer.block_tokens, layer.run_bytes) for layer in found.layers] == [
        ("c", 0, 4, 256),
        ("b", 1, 64, 73728),
        ("a", 2, 256, 67584),
    ]
    assert (found.num_groups, found.layers_of(1)) == (3, (1,))


def test_group_without_a_cache_keeps_its_number() -> None:
    """Block tables come by group number, so a group that registers nothing still counts."""
    found = geometry({"a": tensor(9, 4, 16, 64)}, {"a": (2, FullAttentionSpec(16, 4))})
    assert (found.num_groups, found.layers_of(0), found.layers_of(2)) == (3, (), (0,))


@pytest.mark.parametrize(
    ("cache", "spec", "what"),
    [
        (tensor(2, 9, 2, 16, 64), FullAttentionSpec(16, 2), "cache dimensions"),
        (tensor(9, 64), FullAttentionSpec(16, 2), "cache dimensions"),
        (FakeTensor((9, 2, 16, 64), (2048, 64, 128, 1)), FullAttentionSpec(16, 2), "cache strides"),
        (FakeTensor((9, 2, 16, 64), (2048, 1024, 1, 16)), FullAttentionSpec(16, 2), "cache strides"),
        (FakeTensor((9, 64, 576), (80000, 1200, 1)), MLAAttentionSpec(64, 1), "cache strides"),
        (tensor(9, 2, 32, 64), FullAttentionSpec(16, 2), "tokens of a block"),
        (tensor(9, 4, 16, 64), FullAttentionSpec(16, 2), "head slots"),
        (tensor(9, 2, 16, 256), FullAttentionSpec(16, 2, 2), "head slots"),
        (tensor(9, 4, 16, 64), FullAttentionSpec(16, 2, 4), "head slots"),
        (tensor(9, 3, 16, 64), FullAttentionSpec(16, 3), "KV heads per rank"),
    ],
    ids=[
        "planes",
        "flat",
        "heads inside tokens",
        "tokens innermost",
        "padded tokens",
        "block size",
        "two slots per head",
        "planes by token",
        "slots by head",
        "heads",
    ],
)
def test_layout_that_cannot_be_moved_is_refused_by_name(cache: FakeTensor, spec: LayerSpec, what: str) -> None:
    """At registration, with the layer, what is wrong and both values."""
    with pytest.raises(ProtocolMismatch) as refusal:
        geometry({"layers.7.attn": cache}, {"layers.7.attn": (0, spec)}, heads=2)
    assert refusal.value.field == f"layers.7.attn: {what}"
    assert refusal.value.ours != refusal.value.theirs


@pytest.mark.parametrize("outermost", ["block", "plane"])
def test_planes_of_keys_and_values_hold_a_run_in_two_pieces(outermost: str) -> None:
    """ROCm's shuffled caches: two head slots, each with all heads' tiles one after the other, inside a block or spanning all blocks."""
    blocks, heads, tokens, content, item = 9, 4, 16, 64, 2
    slot = tokens * heads * content
    strides = (2 * slot, slot) if outermost == "block" else (slot, blocks * slot)
    cache = FakeTensor((blocks, 2, tokens, heads * content), (*strides, heads * content, 1), item)
    specs: dict[str, tuple[int, LayerSpec]] = {"a": (0, FullAttentionSpec(tokens, heads, 2))}
    found = from_registered({"a": cache}, specs, total_kv_heads=8, tensor_parallel_size=2, rank=0, has_head_major_planes=True).layers[0]
    assert (found.planes, found.local_heads, found.total_heads, found.run_bytes) == (2, heads, 8, 2 * tokens * content * item)
    assert (found.head_stride_bytes, found.plane_stride_bytes) == (tokens * content * item, strides[1] * item)
    assert found.block_stride_bytes == strides[0] * item


def test_planes_and_one_piece_runs_do_not_meet() -> None:
    """Runs of equal size whose keys and values lie otherwise are another layout: refused between peers by name."""
    joined = tensor(9, 2, 16, 128)
    split = tensor(9, 2, 16, 128)
    ours = geometry({"a": joined}, {"a": (0, FullAttentionSpec(16, 2))}, heads=2)
    theirs = from_registered(
        {"a": split}, {"a": (0, FullAttentionSpec(16, 2, 2))}, total_kv_heads=2, tensor_parallel_size=1, rank=0, has_head_major_planes=True
    )
    assert ours.layers[0].run_bytes == theirs.layers[0].run_bytes
    with pytest.raises(ProtocolMismatch) as refusal:
        require_equal_layers(ours, theirs)
    assert (refusal.value.field, refusal.value.ours, refusal.value.theirs) == ("a: planes", 1, 2)
