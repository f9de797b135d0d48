"""What the KV layer cannot move: forms of parallelism and kinds of cache. Found when an engine starts, refused by name, before any request.

What can be moved is a cache whose blocks hold every token of the prompt, once, and stay until the request ends: attention over everything, dense
or latent, and key-only indexes. Knows vLLM's configuration; nothing of layouts, which `geometry` checks when caches are registered.
"""

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

MOVABLE = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""vLLM's spec classes, by exact name: what they are subclassed for (windows, sinks, hidden states) changes which blocks hold what"""
PARALLEL = {
    "pipeline_parallel_size": "each worker must hold all layers: give 1, and more tensor parallelism instead",
    "prefill_context_parallel_size": "each rank must hold whole prompts: give 1",
    "decode_context_parallel_size": "each rank must hold whole prompts: give 1",
    "data_parallel_size": "a worker is one engine: give 1, and start more workers instead",
}


def require_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Check what an engine is about to start with.

    Raises:
        ConfigError: names the option, or the layer and its kind of cache.
    """
    for option, fix in PARALLEL.items():
        size = getattr(vllm_config.parallel_config, option, 1)
        if size != 1:
            raise ConfigError("--" + option.replace("_", "-"), size, fix)
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if number not in kv_cache_config.transfer_group_ids:
            raise ConfigError(
                f"cache group {number}", group.layer_names[0], "vLLM keeps it out of transfers: serve this model without pdserve"
            )
        own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            _require_movable(name, own.get(name, group.kv_cache_spec))


def _require_movable(layer: str, spec: "KVCacheSpec") -> None:
    kind = type(spec).__name__
    if kind not in MOVABLE:
        raise ConfigError(f"cache of {layer}", kind, f"only {' and '.join(sorted(MOVABLE))} can be moved: serve another model")
    tokens = getattr(spec, "tokens_per_state", 1)
    if tokens != 1:
        raise ConfigError(f"cache of {layer}", f"{tokens} tokens in one state", "only caches of one state a token can be moved")
