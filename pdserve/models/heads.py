"""Which tensor-parallel sizes can split a model's attention heads: asked before anything is started, not after an engine has loaded for a minute.

Reads a model's `config.json`. Knows nothing of engines; a model that does not say how many heads it has is left for vLLM to judge.
"""

import json
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError

SIZES = (1, 2, 4, 8)


def require_divisible(model: Path, field: str, tensor_parallel_size: int) -> None:
    """Check that every rank gets whole attention heads.

    Args:
        model: folder with a `config.json`.
        field: the setting that is judged, for the error.

    Raises:
        ConfigError: names the sizes that fit this model; or `config.json` is no JSON object.
    """
    heads, kv_heads = _heads(model)
    if not _fits(heads, kv_heads, tensor_parallel_size):
        fitting = ", ".join(str(size) for size in SIZES if _fits(heads, kv_heads, size))
        raise ConfigError(field, tensor_parallel_size, f"{model.name} has {heads} attention heads and {kv_heads} KV heads: give {fitting}")


def _fits(heads: int | None, kv_heads: int | None, size: int) -> bool:
    """vLLM splits query heads evenly; KV heads it splits, or copies each to as many ranks as the others (`QKVParallelLinear`)."""
    if heads is not None and heads % size:
        return False
    return kv_heads is None or kv_heads % size == 0 or size % kv_heads == 0


def _heads(model: Path) -> tuple[int | None, int | None]:
    """Return the numbers of query and KV heads, None for what the file does not say."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(str(path), "not JSON", "give a model folder whose config.json is complete") from error
    if not isinstance(config, dict):
        raise ConfigError(str(path), type(config).__name__, "give a model folder whose config.json holds an object")
    text = config.get("text_config")
    inner: dict[str, Any] = text if isinstance(text, dict) else config
    heads, kv_heads = inner.get("num_attention_heads"), inner.get("num_key_value_heads")
    heads = heads if isinstance(heads, int) and heads > 0 else None
    return heads, kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads
