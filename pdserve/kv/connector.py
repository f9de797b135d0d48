"""What vLLM loads (`kv_connector_module_path=pdserve.kv.connector`, `kv_connector=PdserveConnector`): a facade with no logic.

vLLM makes one instance in the engine core (scheduler side) and one in each rank (worker side); every method goes to the half that exists.
Written against vLLM 0.32; 0.33 differs only in optional methods.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from pdserve.kv.metadata import RankHandshake, RankReports, StepMetadata
from pdserve.kv.scheduler_side import SchedulerSide
from pdserve.kv.settings import read_settings
from pdserve.kv.support import require_supported
from pdserve.kv.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PdserveConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both halves behind vLLM's one interface."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported(vllm_config, kv_cache_config)
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(settings, vllm_config.parallel_config.tensor_parallel_size)
        else:
            self.worker = WorkerSide(settings, vllm_config, kv_cache_config, get_tensor_model_parallel_rank())
        self._rank_handshakes: dict[int, RankHandshake] = {}

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        return "LBHNC"

    # ---- worker side ----------------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> RankHandshake:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._worker.begin_preemptions(_step(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(_step(connector_metadata))

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous to the step: a request is scheduled only after its KV has landed."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any) -> None:
        self._worker.wrote_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results(finished_req_ids)

    def build_connector_worker_meta(self) -> RankReports | None:
        return self._worker.build_reports()

    # ---- scheduler side -------------------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankHandshake]) -> None:
        self._rank_handshakes = dict(metadata)

    @property
    def rank_handshakes(self) -> dict[int, RankHandshake]:
        """Where each rank listens, by rank; empty until vLLM has collected it."""
        return self._rank_handshakes

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.num_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.on_output(connector_output)

    def request_finished_all_groups(self, request: "Request", block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request)

    # ---- both -----------------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None
        return self.worker

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None
        return self.scheduler


def _step(metadata: KVConnectorMetadata) -> StepMetadata:
    assert isinstance(metadata, StepMetadata)
    return metadata
