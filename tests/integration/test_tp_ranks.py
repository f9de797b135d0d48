"""All pairs of prefill and decode sizes with MiniMax-M3's full geometry, between processes: every decode rank has its own heads, byte for byte."""

from pathlib import Path

import pytest
from m3_ranks import BLOCK_BYTES, NUM_CACHES, Moved, Prompt, move

from pdserve.types import CloseReason

RESULTS = Path(__file__).parents[1] / "results" / "kv-tp-pairs.txt"
SIZES = (1, 2, 4, 8)
PROMPTS = (Prompt(1, 1), Prompt(2, 2 * 128 + 5), Prompt(3, 3 * 128, first_token=128))
"""shorter than a block; with a part of a block at its end; with a prefix that decode has"""
BLOCKS_MOVED = 1 + 3 + 2


def acks_of(producer_ranks: int, consumer_ranks: int) -> list[int]:
    """Return how many decode ranks each prefill rank must hear from. Of eight prefill ranks two hold each head: one of them may have no reader."""
    if producer_ranks <= consumer_ranks:
        return [consumer_ranks // producer_ranks] * producer_ranks
    return [int(producer_ranks <= 4 or rank % 2 == 0) for rank in range(producer_ranks)]


def check(moved: Moved, producer_ranks: int, consumer_ranks: int) -> int:
    """Compare with what must be; returns the bytes that crossed."""
    assert moved.wrong == [[]] * consumer_ranks
    for rank, records in enumerate(moved.sent):
        acks = acks_of(producer_ranks, consumer_ranks)[rank]
        assert [record.outcome for record in records] == [CloseReason.RELEASED] * len(PROMPTS)
        assert [(record.acks, record.acks_expected) for record in records] == [(acks, acks)] * len(PROMPTS)
    for records in moved.received:
        assert [record.outcome for record in records] == [CloseReason.LANDED] * len(PROMPTS)
        assert [record.tokens_moved for record in records] == [prompt.tokens - prompt.first_token for prompt in PROMPTS]
        assert [(record.layers_sealed, record.layers_expected) for record in records] == [(NUM_CACHES, NUM_CACHES)] * len(PROMPTS)
        assert sum(record.bytes_moved for record in records) == BLOCKS_MOVED * BLOCK_BYTES[consumer_ranks]
    num_bytes = sum(record.bytes_moved for records in moved.received for record in records)
    assert num_bytes == sum(record.bytes_moved for records in moved.sent for record in records)
    return num_bytes


@pytest.mark.parametrize(("producer_ranks", "consumer_ranks"), [(4, 8), (8, 1), (1, 4), (8, 8)])
def test_every_decode_rank_gets_its_own_heads(producer_ranks: int, consumer_ranks: int) -> None:
    """Fan-out where heads repeat, fan-in, ranks that nobody reads, and a change of nothing."""
    check(move(producer_ranks, consumer_ranks, PROMPTS), producer_ranks, consumer_ranks)


@pytest.mark.long
def test_all_sixteen_pairs() -> None:
    """Each pair of 1, 2, 4 and 8 ranks; the results are kept."""
    lines = [
        f"MiniMax-M3: 60 layers, {NUM_CACHES} caches, bfloat16; {len(PROMPTS)} prompts at once, together {BLOCKS_MOVED} blocks of 128 tokens.",
        "tcp on loopback, one process per worker, one RankIo per rank. Seconds include making contents up; acks: what each prefill rank heard.",
        "",
        "prefill  decode  bytes of every decode rank  MB moved  seconds  acks",
    ]
    for producer_ranks in SIZES:
        for consumer_ranks in SIZES:
            moved = move(producer_ranks, consumer_ranks, PROMPTS)
            num_bytes = check(moved, producer_ranks, consumer_ranks)
            acks = " ".join(str(records[0].acks) for records in moved.sent)
            lines.append(f"TP{producer_ranks:<7}TP{consumer_ranks:<6}{'exact':<28}{num_bytes / 1e6:>8.1f}{moved.elapsed_s:>9.2f}  {acks}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n")
