"""Command line and environment of an engine."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import Config, EngineConfig, PoolConfig
from pdserve.fleet.engine_command import EngineCommand, EnginePlace, ServedModel, cpus_per_rank, engine_command
from pdserve.ports import WorkerSpec
from pdserve.types import Role

SECRET = "5e" * 32
MODEL = ServedModel(Path("/models/some"), "some-model")
PLACE = EnginePlace(incarnation="ab12", host="127.0.0.1", endpoint_file=Path("/run/endpoint.json"), platform="cpu", cpus_per_rank=3)
OWN_ARGUMENTS = 4
"""interpreter, -m, module, endpoint file; the rest is vLLM's"""

PARSE = """
import json, sys
from pdserve.fleet.engine_main import parse_engine_arguments
wanted = json.loads(sys.stdin.read())
for arguments in wanted["command_lines"]:
    parsed = parse_engine_arguments(arguments)
    kv = parsed.kv_transfer_config
    transfer = {"kv_role": kv.kv_role, "policy": kv.kv_load_failure_policy, "extra": kv.kv_connector_extra_config}
    print("PARSED" + json.dumps({name: getattr(parsed, name) for name in wanted["names"]} | transfer))
"""


def build(config: Config | None = None, tensor_parallel_size: int = 1, place: EnginePlace = PLACE) -> EngineCommand:
    spec = WorkerSpec("decode-1", Role.DECODE, tensor_parallel_size)
    return engine_command(config or Config(), spec, MODEL, SECRET, place)


def value_of(command: EngineCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_secret_is_in_the_environment_alone() -> None:
    """Command lines are public."""
    command = build()
    assert command.env["PDSERVE_SECRET"] == SECRET
    assert not any(SECRET in word for word in command.argv)


def test_vllm_loads_both_plugins_and_the_lock() -> None:
    """The agent's routes, the core's method and the secret on every path."""
    command = build()
    assert command.env["VLLM_PLUGINS"] == "pdserve_engine,pdserve_m3_cpu,pdserve_agent"
    assert command.env["PDSERVE_WORKER"] == "decode-1"
    assert value_of(command, "--middleware") == "pdserve.fleet.agent.SecretMiddleware"


def test_connector_learns_who_and_where_it_is() -> None:
    """The transfer settings carry worker, incarnation and address; a failed load recomputes."""
    transfer = json.loads(value_of(build(), "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "pdserve.kv.connector"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["engine_id"] == "decode-1-ab12"
    extra = transfer["kv_connector_extra_config"]
    assert (extra["worker_id"], extra["incarnation"], extra["host"], extra["transport"]) == ("decode-1", "ab12", "127.0.0.1", "tcp")


def test_cpu_engine_is_eager_and_bounded_in_threads() -> None:
    """On CPU nothing is compiled or bound, and the threads are the node's share."""
    command = build()
    assert "--enforce-eager" in command.argv
    assert (command.env["OMP_NUM_THREADS"], command.env["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")


def test_gpu_engine_compiles_and_leaves_threads_alone() -> None:
    """On GPU vLLM's own defaults hold."""
    command = build(place=replace(PLACE, platform="gpu"))
    assert "--enforce-eager" not in command.argv
    assert "OMP_NUM_THREADS" not in command.env


def test_operators_arguments_and_environment_win() -> None:
    """What the operator adds comes after ours, but cannot take the secret."""
    engine = EngineConfig(extra_args=("--max-num-seqs", "2"), env={"OMP_NUM_THREADS": "7", "PDSERVE_SECRET": "no"})
    command = build(Config(engine=engine))
    assert command.argv[-2:] == ("--max-num-seqs", "2")
    assert command.env["OMP_NUM_THREADS"] == "7"
    assert command.env["PDSERVE_SECRET"] == SECRET


@pytest.mark.parametrize(
    ("cpus", "prefill", "decode", "expected"),
    [(2, (2, 1), (1, 1), 1), (16, (2, 1), (1, 2), 4), (8, (1, 4), (1, 4), 1), (1, (1, 1), (1, 1), 1)],
)
def test_cpus_are_shared_between_all_ranks(cpus: int, prefill: tuple[int, int], decode: tuple[int, int], expected: int) -> None:
    """Every rank of both pools counts; none gets less than one."""
    pools = [PoolConfig(count=count, tensor_parallel_size=size) for count, size in (prefill, decode)]  # type: ignore[arg-type]
    assert cpus_per_rank(Config(prefill=pools[0], decode=pools[1]), cpus) == expected


def parse_with_vllm(commands: list[EngineCommand], names: list[str]) -> list[dict[str, Any]]:
    """Let vLLM's parser read the command lines in a process of its own, as the engines will."""
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps({"command_lines": [command.argv[OWN_ARGUMENTS:] for command in commands], "names": names}),
        capture_output=True,
        text=True,
        env={**os.environ, **commands[0].env},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line.removeprefix("PARSED")) for line in done.stdout.splitlines() if line.startswith("PARSED")]


def expected_arguments(config: Config, tensor_parallel_size: int, platform: str) -> dict[str, Any]:
    return {
        "model": "/models/some",
        "served_model_name": ["some-model"],
        "dtype": config.engine.dtype,
        "max_model_len": config.engine.max_model_len,
        "max_num_seqs": config.engine.max_num_seqs,
        "max_num_batched_tokens": config.engine.max_num_batched_tokens,
        "block_size": config.engine.block_tokens,
        "kv_cache_memory_bytes": config.engine.kv_cache_bytes,
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": "mp" if tensor_parallel_size > 1 else None,
        "enforce_eager": platform == "cpu",
        "enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
        "enable_log_requests": False,
        "host": "127.0.0.1",
        "port": 0,
        "middleware": ["pdserve.fleet.agent.SecretMiddleware"],
    }


def test_vllm_accepts_every_flag() -> None:
    """vLLM's own parser takes both platforms' command lines and reads from them what the settings say."""
    config = Config()
    expected = [expected_arguments(config, 1, "cpu"), expected_arguments(config, 4, "gpu")]
    commands = [build(config, 1), build(config, 4, replace(PLACE, platform="gpu"))]
    for parsed, wanted in zip(parse_with_vllm(commands, list(expected[0])), expected, strict=True):
        assert {name: parsed[name] for name in wanted} == wanted
        assert (parsed["policy"], parsed["kv_role"]) == ("recompute", "kv_both")
        assert parsed["extra"]["slot_bytes"] == config.kv.slot_bytes
