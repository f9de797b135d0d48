"""Who sends which heads to whom: a pure function of two geometries, computed once per pair of workers.

Rank r of T ranks holds, of a layer with H distinct heads split over them, the heads [r·H/T, (r+1)·H/T) if T ≤ H, else the one head ⌊r·H/T⌋
(vLLM repeats heads on neighbouring ranks then). A consumer rank takes each of its heads from exactly one producer rank that holds it; where
several do, the one at the consumer's own relative position, so that work spreads. Replicated layers come whole from one producer rank.

Knows no addresses, blocks or requests.
"""

import msgspec
import xxhash

from pdserve.errors import ProtocolMismatch
from pdserve.kv.geometry import SHARED_FIELDS, Geometry, LayerGeometry, Sharding


class HeadSlice(msgspec.Struct, frozen=True):
    """Neighbouring heads of one layer that cross from one rank to another. Local head numbers on both sides."""

    layer: int
    """index into the geometry's layers"""
    producer_head: int
    consumer_head: int
    num_heads: int


class PairPlan(msgspec.Struct, frozen=True):
    """The whole plan between a producer of P ranks and a consumer of D ranks."""

    producer_ranks: int
    consumer_ranks: int
    slices: dict[tuple[int, int], tuple[HeadSlice, ...]]
    """(producer rank, consumer rank) → slices in canonical order, at most one per layer; pairs that share nothing are absent"""

    def producers_of(self, consumer_rank: int) -> tuple[int, ...]:
        """Return the producer ranks that one consumer rank must hear from."""
        return tuple(sorted(p for p, c in self.slices if c == consumer_rank))

    def consumers_of(self, producer_rank: int) -> tuple[int, ...]:
        """Return the consumer ranks that must acknowledge to one producer rank; empty for a rank that nobody reads."""
        return tuple(sorted(c for p, c in self.slices if p == producer_rank))


NO_PLAN = PairPlan(0, 0, {})
"""between workers that cannot exchange anything now"""


def held_heads(total_heads: int, ranks: int, rank: int) -> range:
    """Return the distinct heads that one rank holds of a split layer. Raises ValueError where heads cannot be split so."""
    if max(total_heads, ranks) % min(total_heads, ranks):
        raise ValueError(f"{total_heads} heads cannot lie evenly over {ranks} ranks")
    if ranks <= total_heads:
        count = total_heads // ranks
        return range(rank * count, (rank + 1) * count)
    head = rank * total_heads // ranks
    return range(head, head + 1)


def make_plan(layers: tuple[LayerGeometry, ...], producer_ranks: int, consumer_ranks: int) -> PairPlan:
    """Compute the plan from the shared part of the layers.

    Raises:
        ProtocolMismatch: heads that cannot be split so; names both sizes.
    """
    collected: dict[tuple[int, int], list[HeadSlice]] = {}
    for index, layer in enumerate(layers):
        for consumer in range(consumer_ranks):
            try:
                pieces = _pieces(layer, producer_ranks, consumer_ranks, consumer)
            except ValueError as error:
                raise ProtocolMismatch(f"{layer.name}: tensor parallel sizes", producer_ranks, consumer_ranks) from error
            for producer, slice_ in pieces:
                collected.setdefault((producer, consumer), []).append(HeadSlice(index, *slice_))
    return PairPlan(producer_ranks, consumer_ranks, {pair: tuple(items) for pair, items in collected.items()})


def _pieces(layer: LayerGeometry, producers: int, consumers: int, consumer: int) -> list[tuple[int, tuple[int, int, int]]]:
    """Return (producer rank, (producer head, consumer head, number of heads)) for one consumer rank of one layer."""
    if layer.sharding is Sharding.REPLICATED:
        return [(consumer * producers // consumers, (0, 0, layer.total_heads))]
    pieces: list[tuple[int, tuple[int, int, int]]] = []
    for local, head in enumerate(held_heads(layer.total_heads, consumers, consumer)):
        holders = [rank for rank in range(producers) if head in held_heads(layer.total_heads, producers, rank)]
        twins = [rank for rank in range(consumers) if head in held_heads(layer.total_heads, consumers, rank)]
        producer = holders[twins.index(consumer) * len(holders) // len(twins)]
        producer_head = head - held_heads(layer.total_heads, producers, producer).start
        if pieces and pieces[-1][0] == producer:
            first, (start, into, count) = pieces[-1]
            pieces[-1] = (first, (start, into, count + 1))
        else:
            pieces.append((producer, (producer_head, local, 1)))
    return pieces


def layer_table_digest(geometry: Geometry) -> str:
    """Return 32 hex digits over the shared part of all layers; equal tables make equal plans."""
    return xxhash.xxh3_128(msgspec.msgpack.encode([layer.shared() for layer in geometry.layers])).hexdigest()


def require_equal_layers(ours: Geometry, theirs: Geometry) -> None:
    """Compare two layer tables.

    Raises:
        ProtocolMismatch: names the first layer and field that differ, with both values.
    """
    if len(ours.layers) != len(theirs.layers):
        raise ProtocolMismatch("number of KV layers", len(ours.layers), len(theirs.layers))
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for field, a, b in zip(SHARED_FIELDS, mine.shared(), other.shared(), strict=True):
            if a != b:
                raise ProtocolMismatch(f"{mine.name}: {field}", a, b)
