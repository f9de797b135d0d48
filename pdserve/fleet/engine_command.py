"""Config and worker → the command line and environment of one engine. Pure: no I/O, no clock, no process.

Knows vLLM's flags and nothing of who starts the process. The secret travels in the environment only: command lines are public.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve.config import Config
from pdserve.ports import WorkerSpec

Platform = Literal["cpu", "gpu"]

PLUGINS = ("pdserve_engine", "pdserve_m3_cpu", "pdserve_agent")
"""our entry points in vLLM's groups ``general_plugins`` and ``endpoint_plugins``; vLLM loads no other plugin"""
MIDDLEWARE = "pdserve.fleet.agent.SecretMiddleware"
CONNECTOR = "PdserveConnector"
CONNECTOR_MODULE = "pdserve.kv.connector"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The weights that every engine of a deployment serves."""

    path: Path
    """folder in Hugging Face layout, on every node"""
    name: str
    """what clients call it"""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """What is known of an engine only once its worker is placed."""

    incarnation: str
    host: str
    """address that the private server and the KV listeners bind"""
    endpoint_file: Path
    """where the engine publishes its port"""
    platform: Platform
    cpus_per_rank: int
    """threads that one rank may use for compute; used on CPU only"""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One engine process, ready to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """added to the environment of the process that starts it; holds the secret"""


def engine_command(config: Config, spec: WorkerSpec, model: ServedModel, secret: str, place: EnginePlace) -> EngineCommand:
    """Return how to start one engine. `config.engine.extra_args` come last, so they win."""
    argv = (
        sys.executable,
        "-m",
        "pdserve.fleet.engine_main",
        str(place.endpoint_file),
        *_model_args(config, spec, model),
        *_server_args(place),
        *_platform_args(spec, place),
        "--kv-transfer-config",
        json.dumps(_kv_transfer_config(config, spec, place)),
        *config.engine.extra_args,
    )
    return EngineCommand(argv=argv, env=_environment(config, spec, secret, place))


def cpus_per_rank(config: Config, cpus: int) -> int:
    """Share a node's CPUs evenly between all ranks of the deployment; at least one each."""
    ranks = sum(pool.count * pool.tensor_parallel_size for pool in (config.prefill, config.decode))
    return max(1, cpus // ranks)


def _model_args(config: Config, spec: WorkerSpec, model: ServedModel) -> tuple[str, ...]:
    engine = config.engine
    return (
        *("--model", str(model.path)),
        *("--served-model-name", model.name),
        *("--dtype", engine.dtype),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--max-num-batched-tokens", str(engine.max_num_batched_tokens)),
        *("--block-size", str(engine.block_tokens)),
        *("--kv-cache-memory-bytes", str(engine.kv_cache_bytes)),
        *("--tensor-parallel-size", str(spec.tensor_parallel_size)),
        "--enable-prefix-caching",
    )


def _server_args(place: EnginePlace) -> tuple[str, ...]:
    return (
        *("--host", place.host),
        *("--port", "0"),
        *("--middleware", MIDDLEWARE),
        "--enable-prompt-tokens-details",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
        *("--uvicorn-log-level", "warning"),
    )


def _platform_args(spec: WorkerSpec, place: EnginePlace) -> tuple[str, ...]:
    # Compiling for the CPU takes longer than a small model's whole start, once per engine, on the cores that serve.
    eager = ("--enforce-eager",) if place.platform == "cpu" else ()
    executor = ("--distributed-executor-backend", "mp") if spec.tensor_parallel_size > 1 else ()
    return (*eager, *executor)


def _kv_transfer_config(config: Config, spec: WorkerSpec, place: EnginePlace) -> dict[str, object]:
    kv = config.kv
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": f"{spec.worker_id}-{place.incarnation}",
        "kv_connector_extra_config": {
            "worker_id": spec.worker_id,
            "incarnation": place.incarnation,
            "host": place.host,
            "transport": kv.transport,
            "slot_bytes": kv.slot_bytes,
            "arena_bytes": kv.arena_bytes,
            "digest": kv.digest,
            "transfer_timeout_s": kv.transfer_timeout_s,
            "lease_s": kv.lease_s,
        },
    }


def _environment(config: Config, spec: WorkerSpec, secret: str, place: EnginePlace) -> dict[str, str]:
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(place.cpus_per_rank)} if place.platform == "cpu" else {}
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": ",".join(PLUGINS),
        **threads,
        **config.engine.env,
        # vLLM's process titles stay within argv, so that /proc/PID/environ keeps the incarnation's mark.
        "SPT_NOENV": "1",
        "PDSERVE_SECRET": secret,
        "PDSERVE_WORKER": spec.worker_id,
    }
