"""The caches of the built-in model, and prompts for it."""

from pdserve.models.m3_tiny import BLOCK_TOKENS

HEADS = 4
MAIN_LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(5)]
INDEX_LAYERS = [f"model.layers.{layer}.self_attn.attn.index_cache" for layer in (3, 4)]
LAYERS = len(MAIN_LAYERS) + len(INDEX_LAYERS)
MAIN_RUN_BYTES = BLOCK_TOKENS * 2 * 128 * 4
"""of one head: keys and values of 128 float32"""
INDEX_RUN_BYTES = BLOCK_TOKENS * 128 * 2
"""one key of 128 bfloat16 a token"""


def block_bytes(decode_ranks: int) -> int:
    """Return what one block of all layers takes to all ranks of a decode engine: heads are split or repeated, the index is on every rank."""
    return len(MAIN_LAYERS) * max(HEADS, decode_ranks) * MAIN_RUN_BYTES + len(INDEX_LAYERS) * decode_ranks * INDEX_RUN_BYTES


def letters(count: int, seed: int) -> list[int]:
    """Return printable prompt tokens that no other test uses."""
    return [0x20 + (seed * 7919 + position * position * 31 + position * 104729) % 95 for position in range(count)]
