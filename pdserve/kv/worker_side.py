"""The connector's half in each rank: turns step metadata and layer hooks into calls on the rank's I/O thread, and its reports into vLLM's.

The calls of one engine step come in this order (vLLM 0.32, V1 runner; with spec decode `end_step` comes after `results`, which nothing here minds):

    begin_preemptions → begin_step → [forward: wrote_layer …] → start_loads → end_step → results → build_reports

The hooks are an optimisation; the sweep in `end_step` is what guarantees that everything written is sent. Knows vLLM's cache objects; takes no
decision about transfers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.platforms import current_platform

from pdserve.clock import MonotonicClock
from pdserve.errors import ConfigError
from pdserve.kv.actions import Actions, PeerRank, ReportSent
from pdserve.kv.fingerprint import config_digest, weights_digest
from pdserve.kv.geometry import Geometry, LayerSpec, from_registered
from pdserve.kv.metadata import RankHandshake, RankReports, SendProgress, StepMetadata
from pdserve.kv.pages import CachePages, Memory
from pdserve.kv.peers import PeerAddress
from pdserve.kv.rank import RankIo
from pdserve.kv.settings import KvSettings, read_secret
from pdserve.kv.transports import make_transport
from pdserve.kv.wire import Identity
from pdserve.types import TransferRecord

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

IDLE_NAP_S = 0.01
"""an engine step with nothing to compute waits this long for a transfer to end, instead of spinning"""


class WorkerSide:
    """One rank.

    Args:
        settings: of this worker.
        vllm_config: the engine's configuration.
        kv_cache_config: groups and specs.
        rank: tensor-parallel rank.
    """

    def __init__(self, settings: KvSettings, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", rank: int) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._io: RankIo | None = None
        self._layer_index: dict[str, int] = {}
        self._all_layers = range(0)
        self._step = StepMetadata()
        self._records: list[TransferRecord] = []
        self._open = 0
        """orders given whose reports have not come back"""

    # ---- start and stop -------------------------------------------------------------------------------------------------------------

    def register(self, caches: "Mapping[str, torch.Tensor]") -> None:
        """Take this rank's caches and start its I/O thread.

        Raises:
            ProtocolMismatch: a layer's layout cannot be moved; names it.
            ConfigError: slots too small for a block, or too few.
        """
        parallel, model = self._vllm_config.parallel_config, self._vllm_config.model_config
        geometry = from_registered(
            caches,
            layer_specs(self._kv_cache_config),
            total_kv_heads=model.get_total_num_kv_heads(),
            tensor_parallel_size=parallel.tensor_parallel_size,
            rank=self._rank,
            has_head_major_planes=current_platform.is_rocm(),
        )
        largest = max(layer.block_bytes for layer in geometry.layers)
        if largest > self._settings.slot_bytes:
            raise ConfigError("kv.slot_bytes", self._settings.slot_bytes, f"give at least one block of one layer, {largest} bytes")
        places = {name: Memory(tensor.data_ptr(), tensor.shape[0]) for name, tensor in caches.items()}
        self._layer_index = {layer.name: index for index, layer in enumerate(geometry.layers)}
        self._all_layers = range(len(geometry.layers))
        self._io = RankIo(
            self._settings,
            read_secret(),
            geometry,
            lambda arenas: self._identity(geometry, arenas),
            CachePages(geometry, [places[layer.name] for layer in geometry.layers]),
            make_transport(self._settings.transport),
            MonotonicClock(),
        )
        self._io.start()

    def _identity(self, geometry: Geometry, arenas: dict[str, str]) -> Identity:
        return Identity(
            vllm_version=vllm.__version__,
            weights_digest=weights_digest(self._vllm_config.model_config.model),
            config_digest=config_digest(self._vllm_config),
            geometry=geometry,
            arenas=arenas,
            slot_bytes=self._settings.slot_bytes,
        )

    @property
    def io(self) -> RankIo:
        if self._io is None:
            raise ConfigError("kv_cache", None, "register caches before using the connector")
        return self._io

    def handshake(self) -> RankHandshake:
        host, port = self.io.address
        return RankHandshake(self._rank, host, port)

    def set_peers(self, version: int, rows: list[tuple[str, str, int, str, int, int]]) -> None:
        """Install a peer table; rows are (worker, incarnation, rank, host, port, tensor-parallel size)."""
        entries = [
            PeerAddress(PeerRank(worker, incarnation, rank), host, port, size) for worker, incarnation, rank, host, port, size in rows
        ]
        self.io.set_peers(version, entries)

    def handshakes(self) -> list[tuple[str, str, int, int, str, str]]:
        """Return rows (peer worker, peer incarnation, our rank, peer rank, state, reason)."""
        return [(*entry.peer[:2], self._rank, entry.peer.rank, entry.state, entry.reason) for entry in self.io.handshakes()]

    def close(self) -> None:
        if self._io is not None:
            self._io.close()

    # ---- one engine step ------------------------------------------------------------------------------------------------------------

    def begin_preemptions(self, metadata: StepMetadata) -> None:
        """Blocks were taken from these transfers: the only wait a step may make, for a local copy of at most one slot."""
        if metadata.preempted:
            io = self.io

            def begin() -> None:
                for key, pass_number in metadata.preempted:
                    io.sends.begin_pass(key, pass_number)

            io.submit(begin).result(timeout=30)

    def begin_step(self, metadata: StepMetadata) -> None:
        """Open what this step's prefill requests send, before the first layer is written."""
        self._step = metadata
        if not (metadata.sends or metadata.progress or metadata.cancelled_sends):
            return
        self._open += len(metadata.sends)
        io, now_s = self.io, MonotonicClock().now_s()

        def begin() -> Actions:
            actions = list(io.open(metadata.sends, now_s))
            for key, reason in metadata.cancelled_sends:
                actions += io.sends.cancel(key, reason)
            for progress in metadata.progress:
                io.sends.set_blocks(progress.key, progress.block_ids, progress.cached_tokens)
            return actions

        io.submit(begin)

    def wrote_layer(self, name: str) -> None:
        """One layer's attention ran: its share of this step may leave."""
        if self._step.progress and (index := self._layer_index.get(name)) is not None:
            self._wrote([index], flush=False)

    def start_loads(self) -> None:
        """Open what this step's decode requests receive. Runs after vLLM has queued its block zeroing, so moved bytes are not wiped."""
        metadata, io = self._step, self.io
        if not (metadata.receives or metadata.declines or metadata.cancelled_receives):
            return
        self._open += len(metadata.receives)
        now_s = MonotonicClock().now_s()

        def start() -> Actions:
            actions = list(io.open(metadata.receives, now_s))
            for decline in metadata.declines:
                actions += io.receives.decline(*decline)
            for key, reason in metadata.cancelled_receives:
                actions += io.receives.cancel(key, reason, now_s)
            return actions

        io.submit(start)

    def end_step(self) -> None:
        """Sweep what no hook reported, and seal the prompts that are complete."""
        if self._step.progress:
            self._wrote(self._all_layers, flush=True)

    def results(self, finished_request_ids: set[str]) -> KVConnectorTransferResults:
        """Return what ended. Each request is reported once per rank, also one that moved nothing."""
        io = self.io
        if finished_request_ids:
            ids = sorted(finished_request_ids)
            io.submit(lambda: [action for request_id in ids for action in io.sends.finished(request_id)])
        if self._open and not self._step.num_scheduled_tokens:
            io.wait_report(IDLE_NAP_S)
        results = KVConnectorTransferResults()
        for report in io.take_reports():
            self._open -= 1
            self._records.append(replace(report.record, transport=self._settings.transport))
            if isinstance(report, ReportSent):
                results.finished_sending.add(report.request_id)
            else:
                results.finished_recving.add(report.request_id)
                if not report.landed:
                    results.failed_recving.add(report.request_id)
        return results

    def build_reports(self) -> RankReports | None:
        """Return the records of what `results` reported, for the scheduler's half."""
        records, self._records = self._records, []
        return RankReports(records) if records else None

    def _wrote(self, layers: list[int] | range, *, flush: bool) -> None:
        """Raise the marks of this step's prefill requests for some layers; at the step's end also seal those that are complete."""
        io, progress, now_s = self.io, tuple(self._step.progress), MonotonicClock().now_s()

        def wrote() -> Actions:
            return [action for entry in progress for action in self._wrote_one(io, entry, layers, now_s, flush=flush)]

        io.submit(wrote)

    @staticmethod
    def _wrote_one(io: RankIo, entry: SendProgress, layers: list[int] | range, now_s: float, *, flush: bool) -> Actions:
        io.sends.wrote(entry.key, entry.pass_number, layers, entry.end_token)
        if flush and entry.is_last:
            return io.sends.seal(entry.key, entry.pass_number, now_s)
        return io.sends.pump(entry.key, now_s, flush=flush)


def layer_specs(kv_cache_config: "KVCacheConfig") -> dict[str, tuple[int, LayerSpec]]:
    """Return group index and spec of every layer that may be transferred; a group of mixed layers names each layer's own spec."""
    specs: dict[str, tuple[int, LayerSpec]] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            specs[name] = (index, own.get(name, group.kv_cache_spec))
    return specs
