"""Batches of sequences in paged caches, for tests of M3's kernels: contents are random, pages lie in random order among strangers' pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 128
DIM = 128


def blocks_of(tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


@dataclass
class Batch:
    """Requests of which the first `prefix` tokens were cached before and the rest are this step's queries.

    `keys`, `values` [tokens, kv heads, 128] and `index_keys` [tokens, 128] of each request are float64 copies of what the caches hold.
    """

    prefixes: list[int]
    lengths: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    index_keys: list[torch.Tensor]
    kv_cache: torch.Tensor
    index_cache: torch.Tensor
    block_table: torch.Tensor

    @property
    def queries(self) -> list[int]:
        return [length - prefix for prefix, length in zip(self.prefixes, self.lengths, strict=True)]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0, *self.queries]).cumsum(0).int()

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)

    @property
    def prefix_lens(self) -> torch.Tensor:
        return torch.tensor(self.prefixes, dtype=torch.int32)

    def requests(self) -> list[tuple[int, int]]:
        """Return (request, tokens it sees) of each query, in order."""
        return [
            (request, seen + 1)
            for request, (prefix, length) in enumerate(zip(self.prefixes, self.lengths, strict=True))
            for seen in range(prefix, length)
        ]


def make_batch(spans: Sequence[tuple[int, int]], num_kv_heads: int, seed: int, index_dtype: torch.dtype = torch.bfloat16) -> Batch:
    """Fill caches for requests given as (prefix, length). What no request owns, and every page's tail, holds huge values that must not be read."""
    generator = torch.Generator().manual_seed(seed)
    needed = [blocks_of(length) for _, length in spans]
    pages = torch.randperm(sum(needed) + 3, generator=generator)
    kv_cache = torch.full((len(pages), num_kv_heads, BLOCK, 2 * DIM), 1e4)
    index_cache = torch.full((len(pages), BLOCK, DIM), 1e4, dtype=index_dtype)
    block_table = torch.full((len(spans), max(needed, default=1) + 2), int(pages[-1]), dtype=torch.int32)
    batch = Batch([p for p, _ in spans], [n for _, n in spans], [], [], [], kv_cache, index_cache, block_table)
    used = 0
    for request, (_, length) in enumerate(spans):
        own = pages[used : used + needed[request]]
        used += needed[request]
        block_table[request, : len(own)] = own
        kv = torch.randn(length, num_kv_heads, 2 * DIM, generator=generator)
        index = torch.randn(length, DIM, generator=generator).to(index_dtype)
        for token in range(length):
            kv_cache[own[token // BLOCK], :, token % BLOCK] = kv[token]
            index_cache[own[token // BLOCK], token % BLOCK] = index[token]
        batch.keys.append(kv[..., :DIM].double())
        batch.values.append(kv[..., DIM:].double())
        batch.index_keys.append(index.double())
    return batch
