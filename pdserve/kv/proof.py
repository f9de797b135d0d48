"""Digests of what a rank read and wrote, for transfers whose ticket asks for proof.

The producer hashes each run in its own blocks when it gathers it; the consumer reads each run back from its own blocks when everything has
landed, before its request may run. Comparing the two lists is the caller's business (`pdserve verify`): this module only tells what was there.
"""

from collections.abc import Iterable
from dataclasses import replace

from pdserve.kv.actions import PostParcel, ReceiveOrder, Report, ReportReceived, Scatter, SendOrder
from pdserve.kv.geometry import Geometry, LayerGeometry, Sharding
from pdserve.kv.pages import CachePages
from pdserve.kv.plan import held_heads
from pdserve.kv.ticket import TransferKey
from pdserve.types import RunDigest, TransferSide

_Runs = dict[tuple[int, int, int], RunDigest]
"""by layer, local head and block by position"""


class Proofs:
    """One rank's digests of transfers that are not reported yet.

    Args:
        geometry: of this rank.
        pages: its blocks.
    """

    def __init__(self, geometry: Geometry, pages: CachePages) -> None:
        self._rank = geometry.rank
        self._names = [_name(layer, geometry) for layer in geometry.layers]
        self._pages = pages
        self._sent: dict[TransferKey, _Runs] = {}
        self._scattered: dict[TransferKey, list[Scatter]] = {}

    def open(self, order: SendOrder | ReceiveOrder) -> None:
        """Begin to collect, if the order asks for it."""
        if order.proof:
            if isinstance(order, SendOrder):
                self._sent[order.key] = {}
            else:
                self._scattered[order.key] = []

    def gathered(self, post: PostParcel) -> None:
        """Hash what a parcel was gathered from; call before anything else may run."""
        found = self._sent.get(post.key)
        if found is not None:
            heads = [(slice_.producer_head, slice_.num_heads) for slice_ in post.slices]
            self._note(found, self._pages.run_digests(post.items, heads, post.block_ids))

    def scattered(self, scatter: Scatter) -> None:
        """Remember where a parcel went."""
        if scatter.key in self._scattered:
            self._scattered[scatter.key].append(scatter)

    def complete(self, report: Report) -> Report:
        """Return the report with this side's digests in its record; what was received is read back now."""
        key = TransferKey(report.record.transfer_id, report.record.attempt)
        if report.record.side is TransferSide.SEND:
            digests = tuple(self._sent.pop(key, {}).values())
        else:
            scatters = self._scattered.pop(key, [])
            digests = self._read_back(scatters) if isinstance(report, ReportReceived) and report.landed else ()
        return report._replace(record=replace(report.record, digests=digests)) if digests else report

    def _read_back(self, scatters: list[Scatter]) -> tuple[RunDigest, ...]:
        found: _Runs = {}
        for scatter in scatters:
            heads = [(slice_.consumer_head, slice_.num_heads) for slice_ in scatter.slices]
            self._note(found, self._pages.run_digests(scatter.parcel.items, heads, scatter.block_ids))
        return tuple(found.values())

    def _note(self, found: _Runs, rows: Iterable[tuple[int, int, int, str]]) -> None:
        """Add runs under the names that both sides share; a later pass replaces an earlier one."""
        for layer, head, block, digest in rows:
            name, first = self._names[layer]
            found[layer, head, block] = RunDigest(self._rank, name, first + head, block, digest)


def _name(layer: LayerGeometry, geometry: Geometry) -> tuple[str, int]:
    """Return what both sides call a layer, and the number over all ranks of this rank's first head."""
    if layer.sharding is Sharding.SPLIT:
        return layer.name, held_heads(layer.total_heads, geometry.tensor_parallel_size, geometry.rank).start
    return layer.name, 0
