"""M3's lightning indexer: which KV blocks a query may attend to.

    score(query, block) = max over the block's visible tokens of (index query · index key)

Each index head chooses for its own group of attention heads. The `init_blocks` first blocks of the sequence are preferred to all others, then
the `local_blocks` last visible ones, then the highest scores; of equal scores the earlier block wins. A block has 128 tokens: one page of the cache.
Scores are float32; their scale is left out, since only their order counts.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

BLOCK_TOKENS = 128
INIT_SCORE = 1e30
LOCAL_SCORE = 1e29
NAN_SCORE = -1e30


def index_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Score every block for the queries of prefill chunks.

    Args:
        idx_q: [num_queries, num_index_heads, dim].
        index_kv_cache: [num_blocks, 128, dim].
        block_table: [num_requests, max_blocks] int32.
        cu_seqlens_q: [num_requests + 1] int32, where each request's queries start.
        seq_lens: [num_requests] int32, tokens in the cache, this chunk's included.
        prefix_lens: [num_requests] int32, tokens before this chunk.
        max_seq_len: the longest of `seq_lens`.

    Returns:
        [num_index_heads, num_queries, ceil(max_seq_len / 128)] float32; −inf where a query sees nothing of a block.
    """
    visible = visible_tokens(cu_seqlens_q, prefix_lens)
    scores = idx_q.new_full((idx_q.shape[1], idx_q.shape[0], -(-max_seq_len // BLOCK_TOKENS)), -math.inf, dtype=torch.float32)
    for request, queries in enumerate(spans(cu_seqlens_q)):
        if queries.stop > queries.start:
            found = block_scores(idx_q[queries], index_kv_cache, block_table[request], visible[queries])
            scores[:, queries, : found.shape[-1]] = found
    return scores


def index_topk(
    score: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose blocks from the scores of prefill chunks.

    Args:
        score: what `index_score` returned.
        cu_seqlens_q: as for `index_score`, and `prefix_lens` too.
        topk: blocks a query may attend to.
        out: [num_index_heads, ≥ num_queries, topk] int32, takes the result.

    Returns:
        [num_index_heads, num_queries, topk] int32: block numbers within the sequence, best first, then −1.
    """
    chosen = choose_blocks(score, visible_tokens(cu_seqlens_q, prefix_lens), topk, init_blocks, local_blocks)
    return _into(out, chosen)


def index_decode(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: torch.Tensor | None = None,
    score_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score and choose blocks for decoding requests, which all have `decode_query_len` queries at their sequence's end.

    Args:
        idx_q: [num_requests × decode_query_len, num_index_heads, dim], request by request.
        index_kv_cache: [num_blocks, 128, dim].
        block_table: [num_requests, max_blocks] int32.
        seq_lens: [num_requests] int32, tokens in the cache, the queries included; 0 for a padding row.
        out: as for `index_topk`.

    Returns:
        As `index_topk`.

    Raises:
        NotImplementedError: `score_out` is given; only vLLM's GPU kernels share a score buffer.
    """
    if score_out is not None:
        raise NotImplementedError("a shared score buffer for MiniMax-M3's indexer needs a GPU")
    ends = torch.arange(0, idx_q.shape[0] + 1, decode_query_len, device=idx_q.device)
    score = index_score(
        idx_q, index_kv_cache, block_table, ends, seq_lens, seq_lens - decode_query_len, decode_query_len, max_seq_len, num_kv_heads
    )
    return index_topk(score, ends, seq_lens - decode_query_len, decode_query_len, topk, init_blocks, local_blocks, out)


def block_scores(index_q: torch.Tensor, index_cache: torch.Tensor, block_row: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Score one request's blocks.

    Args:
        index_q: [num_queries, num_index_heads, dim].
        index_cache: [num_blocks, 128, dim].
        block_row: [max_blocks] int32, pages of the request's blocks in order.
        visible: [num_queries] int64, leading tokens that each query sees.

    Returns:
        [num_index_heads, num_queries, blocks seen by any query] float32.
    """
    num_blocks = int(-(-visible.max() // BLOCK_TOKENS))
    keys = index_cache[block_row[:num_blocks].long()].flatten(0, 1).float()
    products = torch.einsum("qhd,kd->hqk", index_q.float(), keys)
    unseen = torch.arange(keys.shape[0], device=keys.device) >= visible[:, None]
    return products.masked_fill_(unseen, -math.inf).unflatten(-1, (num_blocks, BLOCK_TOKENS)).amax(-1)


def choose_blocks(scores: torch.Tensor, visible: torch.Tensor, topk: int, init_blocks: int, local_blocks: int) -> torch.Tensor:
    """Choose at most `topk` visible blocks for each query.

    Args:
        scores: [num_index_heads, num_queries, num_blocks] float32.
        visible: [num_queries] int64, leading tokens that each query sees.
        topk: how many blocks are chosen where that many are visible.
        init_blocks: forced at the sequence's start.
        local_blocks: forced at the query's own end.

    Returns:
        [num_index_heads, num_queries, topk] int32, best first, then −1.
    """
    block = torch.arange(scores.shape[-1], device=scores.device)
    num_visible = -(-visible[:, None].clamp(min=0) // BLOCK_TOKENS)
    ranked = torch.where(scores.isnan(), NAN_SCORE, scores)
    ranked = torch.where(block < init_blocks, INIT_SCORE, ranked)
    ranked = torch.where(block >= num_visible - local_blocks, LOCAL_SCORE, ranked)
    ranked = torch.where(block < num_visible, ranked, -math.inf)
    best = ranked.sort(dim=-1, descending=True, stable=True)
    chosen = torch.where(best.values == -math.inf, -1, best.indices)[..., :topk].to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1)


def visible_tokens(cu_seqlens_q: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Return [num_queries] int64: how many tokens from its sequence's start each query sees, itself included."""
    starts, lengths = cu_seqlens_q[:-1].long(), cu_seqlens_q.long().diff()
    offsets = (prefix_lens.long() - starts).repeat_interleave(lengths)
    return offsets + torch.arange(offsets.shape[0], device=offsets.device) + 1


def spans(cu_seqlens_q: torch.Tensor) -> Iterator[slice]:
    """Yield the queries of each request."""
    bounds = cu_seqlens_q.tolist()
    return (slice(start, stop) for start, stop in pairwise(bounds))


def _into(out: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
    if out is None:
        return chosen
    place = out[:, : chosen.shape[1]]
    place.copy_(chosen)
    return place
