"""M3's block-sparse attention: grouped queries attend, causally, to the tokens of the blocks that the indexer chose for their KV head.

    out = softmax(q · Kᵀ × scale) · V    over the tokens that are both visible and in a chosen block

Prefill multiplies with the whole context and masks; decode gathers the chosen pages only. Both are computed in float32.
"""

import math

import torch

from pdserve.models.m3_cpu.index import BLOCK_TOKENS, spans, visible_tokens


def sparse_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attend for the queries of prefill chunks.

    Args:
        q: [num_queries, num_heads, dim].
        kv_cache: [num_blocks, num_kv_heads, 128, 2 × dim], key then value; float or fp8.
        topk_idx: [num_kv_heads, num_queries, topk] int32, block numbers within the sequence; −1 is none.
        block_table: [num_requests, max_blocks] int32.
        cu_seqlens_q: [num_requests + 1] int32, where each request's queries start.
        prefix_lens: [num_requests] int32, tokens before this chunk.
        output: [num_queries, num_heads, dim], written.
        k_scale: [1] float32, multiplies stored keys; v_scale likewise.
    """
    visible = visible_tokens(cu_seqlens_q, prefix_lens)
    for request, queries in enumerate(spans(cu_seqlens_q)):
        if queries.stop > queries.start:
            seen = visible[queries]
            pages = block_table[request, : int(-(-seen.max() // BLOCK_TOKENS))].long()
            keys, values = _read(kv_cache, pages, k_scale, v_scale)
            allowed = _chosen_tokens(topk_idx[:, queries].long(), seen, len(pages))
            output[queries] = _attend(
                q[queries], keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2), allowed, sm_scale
            )


def sparse_attention_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    decode_query_len: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attend for decoding requests, which all have `decode_query_len` queries at their sequence's end.

    Args:
        q: [num_requests × decode_query_len, num_heads, dim], request by request.
        kv_cache: as for `sparse_attention`, and `topk_idx`, `block_table`, `k_scale` and `v_scale` too.
        seq_lens: [num_requests] int32, tokens in the cache, the queries included; 0 for a padding row, whose output is zero.
        output: [num_requests × decode_query_len, num_heads, dim], written.
    """
    num_queries, num_heads, dim = q.shape
    request = torch.arange(num_queries, device=q.device) // decode_query_len
    visible = seq_lens.long()[request] - decode_query_len + torch.arange(num_queries, device=q.device) % decode_query_len + 1
    blocks = topk_idx.long()
    pages = block_table.long()[request].expand(num_kv_heads, -1, -1).gather(-1, blocks.clamp(min=0))
    head = torch.arange(num_kv_heads, device=q.device)[:, None, None]
    keys, values = _read(kv_cache, (pages, head), k_scale, v_scale)
    token = blocks[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=q.device)
    allowed = ((blocks[..., None] >= 0) & (token < visible[:, None, None])).flatten(-2)
    grouped = q.float().view(num_queries, num_kv_heads, -1, dim).transpose(0, 1)
    weights = _softmax(torch.einsum("hqgd,hqkd->hqgk", grouped, keys.flatten(2, 3)) * sm_scale, allowed[:, :, None])
    attended = torch.einsum("hqgk,hqkd->hqgd", weights, values.flatten(2, 3))
    output.copy_(attended.transpose(0, 1).reshape(num_queries, num_heads, dim))


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend densely under a mask.

    Args:
        q: [num_queries, num_heads, dim].
        keys: [num_kv_heads, num_tokens, dim] float32; values likewise.
        allowed: [num_kv_heads, num_queries, num_tokens] bool.

    Returns:
        [num_queries, num_heads, dim] in q's dtype.
    """
    num_queries, num_heads, dim = q.shape
    num_kv_heads, num_tokens, _ = keys.shape
    grouped = q.float().view(num_queries, num_kv_heads, -1, dim).permute(1, 2, 0, 3)
    products = grouped.flatten(1, 2) @ keys.transpose(1, 2)
    weights = _softmax(products.view(num_kv_heads, -1, num_queries, num_tokens) * scale, allowed[:, None])
    attended = (weights.flatten(1, 2) @ values).view(num_kv_heads, -1, num_queries, dim)
    return attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, dim).to(q.dtype)


def _chosen_tokens(blocks: torch.Tensor, visible: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return [num_kv_heads, num_queries, num_blocks × 128] bool from block numbers [num_kv_heads, num_queries, topk] and visible [num_queries]."""
    # −1 falls into a column of its own, which is cut off again.
    chosen = torch.zeros(*blocks.shape[:2], num_blocks + 1, dtype=torch.bool, device=blocks.device)
    chosen.scatter_(-1, torch.where(blocks < 0, num_blocks, blocks), value=True)
    token = torch.arange(num_blocks * BLOCK_TOKENS, device=blocks.device)
    return chosen[..., :num_blocks].repeat_interleave(BLOCK_TOKENS, -1) & (token < visible[:, None])


def _softmax(products: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return weights over the last dimension; a row with nothing allowed gets zeros."""
    weights = products.masked_fill(~allowed, -math.inf).softmax(-1)
    return weights.masked_fill(~allowed, 0.0)


def _read(
    kv_cache: torch.Tensor, index: object, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the indexed pages, [..., 128, dim] float32 each."""
    # Not every indexing kernel of torch knows fp8: take the bytes.
    found = kv_cache.view(torch.uint8)[index].view(kv_cache.dtype) if kv_cache.element_size() == 1 else kv_cache[index]
    keys, values = found.float().chunk(2, -1)
    return (keys if k_scale is None else keys * k_scale), (values if v_scale is None else values * v_scale)
