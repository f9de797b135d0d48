"""M3's normalisation and position step: Gemma RMS norm, partial rotary embedding, and insertion into the paged caches.

    norm(x) = x / sqrt(mean(x²) + eps) × (1 + weight)
    rotary: dimension i < r/2 is paired with i + r/2 (r = rotary_dim); (a, b) → (a·cos − b·sin, b·cos + a·sin); dimensions from r on stay

One worked pair: r = 2, angle 90°: (1, 0) → (0, 1). Values are computed in float32 whatever the model's dtype.
"""

import torch

HEAD_DIM = 128
FP8_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension.

    Args:
        x: [..., dim], any float dtype.
        weight: [dim]; 0 leaves the scale at 1.
        eps: added to the mean square.

    Returns:
        [..., dim] float32.
    """
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def norm_forward(
    self: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`forward` of vLLM's norm layer: x and residual [num_tokens, hidden] → norm(x), or (norm(x + residual), x + residual), in x's dtype."""
    if residual is None:
        return gemma_rms_norm(x, self.weight, self.variance_epsilon).to(x.dtype)
    total = x.float() + residual.float()
    return gemma_rms_norm(total, self.weight, self.variance_epsilon).to(x.dtype), total.to(residual.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Turn the first rotary_dim dimensions by each token's angles.

    Args:
        x: [num_tokens, num_heads, dim] float32.
        cos_sin: [num_tokens, rotary_dim] float32, cosines in the first half, sines in the second.

    Returns:
        [num_tokens, num_heads, dim] float32.
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None].chunk(2, -1)
    a, b = x[..., :rotary_dim].chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], -1)


def qknorm_rope_insert(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotary_dim: int,
    eps: float,
    index_q_norm_weight: torch.Tensor | None = None,
    index_k_norm_weight: torch.Tensor | None = None,
    num_index_heads: int = 0,
    slot_mapping: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    kv_cache: torch.Tensor | None = None,
    index_cache: torch.Tensor | None = None,
    block_size: int = 0,
    q_out: torch.Tensor | None = None,
    index_q_out: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    skip_index_branch: bool = False,
    q_fp8_out: torch.Tensor | None = None,
    q_fp8_scale: float = 1.0,
    kv_k_scale: torch.Tensor | None = None,
    kv_v_scale: torch.Tensor | None = None,
) -> None:
    """Normalise and rotate q, k and the index heads in place, and write k, v and the index key into their pages.

    Args:
        qkv: [num_tokens, width] with heads of 128 side by side: q, k, v, and on sparse layers the index queries and the one index key.
        q_norm_weight: [128]; k_norm_weight, index_q_norm_weight and index_k_norm_weight likewise.
        cos_sin_cache: [max_position, rotary_dim]; positions: [num_tokens] int64, rows of it.
        num_index_heads: 0 on dense layers, which have no index and whose cache vLLM's attention writes itself.
        slot_mapping: [≤ num_tokens] int64, block × block_size + offset of each token; −1 is padding and not written.
        index_slot_mapping: the same for the index cache; None takes `slot_mapping`.
        kv_cache: [num_blocks, num_kv_heads, block_size, 256], key then value; uint8 where `kv_cache_dtype` is an fp8 one.
        index_cache: [num_blocks, block_size, 128].
        q_out: [num_tokens, num_heads × 128]; takes q instead of `qkv`. index_q_out likewise for the index queries.
        skip_index_branch: leave the index part alone.

    Raises:
        NotImplementedError: fp8 queries or 4-bit caches, which only some GPUs have.
    """
    if q_fp8_out is not None or kv_k_scale is not None or kv_v_scale is not None:
        raise NotImplementedError("fp8 queries and scaled 4-bit KV caches of MiniMax-M3 need a GPU")
    cos_sin = cos_sin_cache[positions].float()
    heads = qkv.view(qkv.shape[0], -1, HEAD_DIM)
    q, k, v = heads[:, : num_heads + 2 * num_kv_heads].split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    _put(q, rotate(gemma_rms_norm(q, q_norm_weight, eps), cos_sin), q_out)
    _put(k, rotate(gemma_rms_norm(k, k_norm_weight, eps), cos_sin), None)
    if kv_cache is not None and slot_mapping is not None:
        insert(kv_cache, slot_mapping, torch.cat([k, v], -1), FP8_DTYPES.get(kv_cache_dtype))
    if num_index_heads > 0 and not skip_index_branch:
        index_q, index_k = heads[:, num_heads + 2 * num_kv_heads :].split([num_index_heads, 1], dim=1)
        _put(index_q, rotate(gemma_rms_norm(index_q, index_q_norm_weight, eps), cos_sin), index_q_out)
        _put(index_k, rotate(gemma_rms_norm(index_k, index_k_norm_weight, eps), cos_sin), None)
        slots = slot_mapping if index_slot_mapping is None else index_slot_mapping
        if index_cache is not None and slots is not None:
            insert(index_cache.unsqueeze(1), slots, index_k)


def insert(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, fp8: torch.dtype | None = None) -> None:
    """Write tokens into their slots, in the cache's dtype.

    Args:
        cache: [num_blocks, num_heads, block_size, width]; uint8 if `fp8` is given.
        slots: [n] int64; negative ones are skipped.
        values: [≥ n, num_heads, width]; the first n are written.
        fp8: what the cache's bytes mean; values are clamped to its range.
    """
    block_size = cache.shape[2]
    kept = slots >= 0
    slots, values = slots[kept], values[: slots.shape[0]][kept]
    if fp8 is not None:
        limit = torch.finfo(fp8).max
        values = values.float().clamp(-limit, limit).to(fp8).view(torch.uint8)
    cache[slots // block_size, :, slots % block_size] = values.to(cache.dtype)


def _put(place: torch.Tensor, values: torch.Tensor, instead: torch.Tensor | None) -> None:
    """Store [num_tokens, num_heads, dim] values in `place`, or flat in `instead`, in the target's dtype."""
    if instead is None:
        place.copy_(values)
    else:
        instead.copy_(values.flatten(1))
