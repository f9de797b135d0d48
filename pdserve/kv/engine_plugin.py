"""vLLM's `general_plugins` entry point: gives the engine core and its ranks one method each, through which the agent asks and tells.

A utility call to `EngineCore.pdserve` runs between two steps, so its answer is a consistent view and a proof that the loop turns; after an abort
it is a barrier. It reaches the ranks through vLLM's own `collective_rpc`. Answers are plain builtins.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.kv.connector import PdserveConnector
from pdserve.kv.metadata import RankHandshake

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

ENGINE_METHOD = "pdserve"
RANK_METHOD = "pdserve_rank"


def register() -> None:
    """Add the two methods. Called by vLLM in every one of its processes; idempotent."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(EngineCore, ENGINE_METHOD, engine_call)
    setattr(WorkerBase, RANK_METHOD, rank_call)


def engine_call(core: "EngineCore", operation: str, argument: Any = None) -> Any:
    """Answer one question of the agent, on the engine loop.

    Args:
        core: the engine core that it was called on.
        operation: ``status``, ``peers``, ``records``, ``blocks``, ``kept`` or ``close``.
        argument: ``peers``: (version, rows); ``records``: the cursor; ``close``: the core's ids of finished requests whose transfers are to end.

    Raises:
        ValueError: an operation that does not exist, or a connector that is not ours.
    """
    scheduler = core.scheduler
    connector = scheduler.get_kv_connector()
    if not isinstance(connector, PdserveConnector) or connector.scheduler is None:
        raise ValueError("this engine does not run PdserveConnector")
    match operation:
        case "blocks":
            return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        case "kept":
            kept = [request_id for request_id, request in scheduler.requests.items() if request.is_finished()]
            return scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), kept
        case "close":
            connector.scheduler.close(argument)
            return None
        case "records":
            cursor, records = connector.scheduler.records.after(int(argument))
            return {"next": cursor, "records": msgspec.to_builtins(list(records))}
        case "peers":
            core.model_executor.collective_rpc(RANK_METHOD, args=("peers", argument))
            return {}
        case "status":
            handshakes = core.model_executor.collective_rpc(RANK_METHOD, args=("handshakes", None))
            return {
                "blocks_total": scheduler.kv_cache_config.num_blocks,
                "blocks_free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                "running": len(scheduler.running),
                "waiting": len(scheduler.requests) - len(scheduler.running),
                "transfers_open": connector.scheduler.num_open,
                "block_tokens": scheduler.block_size,
                "ranks": [_address(entry) for _, entry in sorted(connector.rank_handshakes.items())],
                "handshakes": [row for rows in handshakes for row in rows],
            }
        case _:
            raise ValueError(f"unknown operation {operation!r}")


def rank_call(worker: "WorkerBase", operation: str, argument: Any = None) -> Any:
    """Carry one question to this rank's half of the connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    if not isinstance(connector, PdserveConnector) or connector.worker is None:
        raise ValueError("this rank does not run PdserveConnector")
    if operation == "handshakes":
        return connector.worker.handshakes()
    if operation == "peers":
        version, rows = argument
        connector.worker.set_peers(version, [tuple(row) for row in rows])
        return None
    raise ValueError(f"unknown operation {operation!r}")


def _address(entry: RankHandshake) -> dict[str, object]:
    return {"rank": entry.rank, "host": entry.host, "port": entry.port}
