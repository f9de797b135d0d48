"""Tells the KV connector about M3's sparse layers, whose attention vLLM calls outside the path that has its hooks.

A sparse layer writes two caches, its keys and values and its index keys; both are announced. Knows nothing of who listens.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

Run = Callable[..., Any]


def add_connector_hooks(attention_class: Any) -> None:
    """Wrap the attention step of a sparse layer class, between what vLLM runs eagerly and the step itself.

    The break of a captured graph stays outermost: what the connector does must run at every replay, not once while capturing.

    Args:
        attention_class: has `_run_attention`, `layer_name`, `kv_cache` and `indexer`; changed in place.

    Raises:
        ImportError: the class has no such step.
    """
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    step = getattr(attention_class, "_run_attention", None)
    if step is None:
        raise ImportError(
            f"{attention_class.__name__} has no _run_attention in this vLLM: sparse layers would not be transferred layer by layer"
        )
    attention_class._run_attention = eager_break_during_capture(with_hooks(getattr(step, "__wrapped__", step)))


def with_hooks(step: Run) -> Run:
    """Return `step` with the connector asked before it and told after it. Without a connector, or while profiling, it is the step alone."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, is_v1_kv_transfer_group
    from vllm.forward_context import get_forward_context

    @wraps(step)
    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_kv_transfer_group() or not is_v1_kv_transfer_group():
            return step(layer, *args, **kwargs)
        metadata = get_forward_context().attn_metadata
        connector = get_kv_transfer_group()
        if not isinstance(metadata, dict) or not connector.has_connector_metadata():
            return step(layer, *args, **kwargs)
        index_cache = layer.indexer.index_cache
        caches = ((layer.layer_name, layer), (index_cache.prefix, index_cache))
        for name, _ in caches:
            connector.wait_for_layer_load(name)
        output = step(layer, *args, **kwargs)
        for name, owner in caches:
            connector.save_kv_layer(name, owner.kv_cache, metadata[name])
        return output

    return run
