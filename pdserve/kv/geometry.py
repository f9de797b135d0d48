"""How each layer's KV cache lies in memory: one record per logical layer, built from vLLM's spec and the strides it really registered.

Nothing here is a scalar for the whole model: block size, heads, bytes and sharding are per layer, since one model may mix dense K/V,
key-only index caches and latents. Layers that share storage stay apart. The canonical order inside a block is (head, then the head's bytes),
which vLLM's LBHNC layout already has; `from_registered` refuses anything whose (block, head) run is not one contiguous piece. The exception are
caches that keep keys and values in planes of their own, as ROCm's shuffled ones do: there a run is one piece in each plane.

Knows shapes and strides only: it never reads a cache. Byte views are made in `pages`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from pdserve.errors import ProtocolMismatch

PLANES = 2
"""keys, values"""


class Sharding(StrEnum):
    """How a layer's heads lie over tensor-parallel ranks."""

    SPLIT = "split"
    """each rank holds total/tp heads; beyond one head per rank, heads repeat on neighbouring ranks"""
    REPLICATED = "replicated"
    """every rank holds all of it (key-only index, latents)"""


class LayerGeometry(msgspec.Struct, frozen=True):
    """One logical layer's cache. What peers must agree on comes first; what is local comes last."""

    name: str
    group: int
    """KV cache group, i.e. which block table it uses"""
    block_tokens: int
    sharding: Sharding
    total_heads: int
    """distinct heads over all ranks"""
    run_bytes: int
    """bytes of one (block, head) run, equal on both sides"""
    dtype: str
    kind: str
    """vLLM's spec class, for people"""
    local_heads: int
    """heads this rank holds"""
    block_stride_bytes: int
    head_stride_bytes: int
    planes: int = 1
    """pieces of one (block, head) run: 2 where keys and values lie apart; equal on both sides"""
    plane_stride_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.local_heads * self.run_bytes

    def shared(self) -> tuple[object, ...]:
        """Return the part that must be equal on both sides of a transfer."""
        return tuple(getattr(self, field) for field in SHARED_FIELDS)


SHARED_FIELDS = ("name", "group", "block_tokens", "sharding", "total_heads", "run_bytes", "dtype", "kind", "planes")
"""what must be equal on both sides"""


class Geometry(msgspec.Struct, frozen=True):
    """All layers of one rank, in canonical order (group, then natural order of the layer's name)."""

    tensor_parallel_size: int
    rank: int
    layers: tuple[LayerGeometry, ...]
    num_groups: int

    def layers_of(self, group: int) -> tuple[int, ...]:
        """Return the indices of the layers that use one block table."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.group == group)


class CacheTensor(Protocol):
    """The part of a torch tensor that geometry needs; logical shape [blocks, heads, tokens, content] or [blocks, tokens, content]."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    def stride(self) -> Sequence[int]: ...

    def element_size(self) -> int: ...


class LayerSpec(Protocol):
    """The part of vLLM's `AttentionSpec` that geometry needs."""

    block_size: int
    num_kv_heads: int
    num_head_slots: int | None
    """head dimension of a page where it is not `num_kv_heads`"""


def from_registered(
    caches: Mapping[str, CacheTensor],
    specs: Mapping[str, tuple[int, LayerSpec]],
    *,
    total_kv_heads: int,
    tensor_parallel_size: int,
    rank: int,
    has_head_major_planes: bool = False,
) -> Geometry:
    """Build the geometry of one rank.

    Args:
        caches: what vLLM registered, by layer name.
        specs: group index and spec of each layer.
        total_kv_heads: the model's KV heads over all ranks; latents and index keys do not count here.
        tensor_parallel_size: ranks of this engine.
        rank: this rank, in [0, tensor_parallel_size).
        has_head_major_planes: where keys and values lie in planes of their own, each head's tokens are one piece of them. ROCm's kernels shuffle
            whole (head, block) tiles, so it is true there (vLLM 0.32, v1/attention/backends/rocm_aiter_fa.py, ops/paged_attn.py); kernels that keep
            a token's heads together (b12x.py) have planes that no head can be taken from.

    Raises:
        ProtocolMismatch: names the layer and what cannot be moved.
    """
    layers = [
        _layer(name, _pages(name, cache, specs[name][1], has_head_major_planes), *specs[name], total_kv_heads, tensor_parallel_size)
        for name, cache in caches.items()
    ]
    layers.sort(key=lambda layer: (layer.group, natural_key(layer.name)))
    groups = {layer.group for layer in layers}
    return Geometry(tensor_parallel_size, rank, tuple(layers), num_groups=max(groups, default=-1) + 1)


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key in which ``layers.9`` comes before ``layers.10``."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.split("."))


class _Pages(NamedTuple):
    """One layer's cache as [blocks, heads, planes, bytes]: shape, and strides in bytes."""

    heads: int
    tokens: int
    planes: int
    plane_bytes: int
    """of one head and block"""
    strides: tuple[int, int, int]
    """from block to block, head to head, plane to plane"""
    dtype: str


def _pages(name: str, cache: CacheTensor, spec: LayerSpec, has_head_major_planes: bool) -> _Pages:
    """Read a registered cache's shape. Raises `ProtocolMismatch` where a (block, head) run is torn into more than its planes."""
    shape, stride, item = tuple(cache.shape), tuple(cache.stride()), cache.element_size()
    if len(shape) == 3:
        shape, stride = (shape[0], 1, *shape[1:]), (stride[0], shape[1] * shape[2], *stride[1:])
    if len(shape) != 4:
        raise ProtocolMismatch(f"{name}: cache dimensions", shape, "[blocks, heads, tokens, content]")
    _, slots, tokens, content = shape
    if stride[3] != 1 or stride[2] != content:
        raise ProtocolMismatch(f"{name}: cache strides", stride, "a (block, head) run that is one piece (layout LBHNC)")
    dtype, slot_bytes, heads = str(cache.dtype).removeprefix("torch."), tokens * content * item, spec.num_kv_heads
    if spec.num_head_slots is None:
        return _Pages(slots, tokens, 1, slot_bytes, (stride[0] * item, stride[1] * item, 0), dtype)
    if not (has_head_major_planes and slots == spec.num_head_slots == PLANES and slot_bytes % heads == 0):
        raise ProtocolMismatch(f"{name}: head slots", slots, f"the spec's {heads} KV heads, or on ROCm {PLANES} planes of them")
    return _Pages(heads, tokens, PLANES, slot_bytes // heads, (stride[0] * item, slot_bytes // heads, stride[1] * item), dtype)


def _layer(name: str, pages: _Pages, group: int, spec: LayerSpec, total_kv_heads: int, tensor_parallel_size: int) -> LayerGeometry:
    if pages.tokens != spec.block_size:
        raise ProtocolMismatch(f"{name}: tokens of a block", pages.tokens, spec.block_size)
    sharding, total_heads = _sharding(name, spec, pages.heads, total_kv_heads, tensor_parallel_size)
    return LayerGeometry(
        name=name,
        group=group,
        block_tokens=pages.tokens,
        sharding=sharding,
        total_heads=total_heads,
        run_bytes=pages.planes * pages.plane_bytes,
        dtype=pages.dtype,
        kind=type(spec).__name__,
        local_heads=pages.heads,
        block_stride_bytes=pages.strides[0],
        head_stride_bytes=pages.strides[1],
        planes=pages.planes,
        plane_stride_bytes=pages.strides[2],
    )


def _sharding(name: str, spec: LayerSpec, heads: int, total_kv_heads: int, tensor_parallel_size: int) -> tuple[Sharding, int]:
    """Decide from the spec, not from the model, whether heads are split or repeated."""
    if heads != spec.num_kv_heads:
        raise ProtocolMismatch(f"{name}: head slots", heads, f"the spec's {spec.num_kv_heads} KV heads")
    if spec.num_kv_heads == 1 and "MLA" in type(spec).__name__:
        return Sharding.REPLICATED, 1
    if spec.num_kv_heads == max(1, total_kv_heads // tensor_parallel_size):
        return Sharding.SPLIT, total_kv_heads
    raise ProtocolMismatch(f"{name}: KV heads per rank", spec.num_kv_heads, f"{total_kv_heads} over {tensor_parallel_size} ranks")
