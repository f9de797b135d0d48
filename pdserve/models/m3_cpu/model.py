"""The module that vLLM's registry loads M3's classes from: vLLM's own ones, after hooks and kernels have been put in place.

Owns which of vLLM's names are exchanged. A name that this vLLM does not have stops the load: a kernel that is never called would be worse.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

from pdserve.errors import ConfigError

PACKAGE = "vllm.models.minimax_m3"
VISION_PROCESSORS = "vllm.transformers_utils.processors.minimax_m3"
TEXT_MODEL = "MiniMaxM3SparseForCausalLM"


def __getattr__(name: str) -> Any:
    """Return vLLM's class of this name.

    Raises:
        AttributeError: vLLM's package has no such class.
        ConfigError: the vision model, on a CPU.
        ImportError: this vLLM lacks something that has to be exchanged.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and name != TEXT_MODEL:
        raise ConfigError("--model", name, f"on a CPU, give a model whose config.json names the text architecture {TEXT_MODEL}")
    return getattr(_prepared(on_cpu=current_platform.is_cpu()), name)


@cache
def _prepared(*, on_cpu: bool) -> ModuleType:
    """Import vLLM's package once and exchange what has to be."""
    from pdserve.models.m3_cpu.hooks import add_connector_hooks

    with _without_vision() if on_cpu else _as_it_is():
        package = importlib.import_module(PACKAGE)
    module = sys.modules[package.MiniMaxM3SparseForCausalLM.__module__]
    add_connector_hooks(module.MiniMaxM3SparseAttention)
    if on_cpu:
        _install_kernels(module)
    return package


def _install_kernels(module: ModuleType) -> None:
    """Exchange the GPU kernels that `module`, vLLM's model code, reaches."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.models.minimax_m3.common import indexer, sparse_attention

    from pdserve.models.m3_cpu import attention, index, moe, rotary

    _exchange(module.MiniMAXGemmaRMSNorm, "forward", rotary.norm_forward)
    _exchange(_custom_ops, "fused_minimax_m3_qknorm_rope_kv_insert", rotary.qknorm_rope_insert)
    _exchange(indexer, "minimax_m3_index_score", index.index_score)
    _exchange(indexer, "minimax_m3_index_topk", index.index_topk)
    _exchange(indexer, "minimax_m3_index_decode", index.index_decode)
    _exchange(sparse_attention, "minimax_m3_sparse_attn", attention.sparse_attention)
    _exchange(sparse_attention, "minimax_m3_sparse_attn_decode", attention.sparse_attention_decode)
    _exchange(unquantized, "backend_to_kernel_cls", partial(moe.with_swiglu_oai, unquantized.backend_to_kernel_cls))
    # vLLM's router for CPUs knows sigmoid scores only in groups: one group of all experts is the same thing.
    one_group = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
    _exchange(module, "FusedMoEFactory", partial(module.FusedMoEFactory, **one_group))


def _exchange(owner: Any, name: str, replacement: object) -> None:
    if not hasattr(owner, name):
        raise ImportError(f"{owner.__name__}.{name} does not exist in this vLLM; MiniMax-M3 on CPU was written for 0.32")
    setattr(owner, name, replacement)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _without_vision() -> Iterator[None]:
    """Import M3 as a text model: its image processors want torchvision, whose builds for PyPI need CUDA."""
    stand_in = _Placeholders(VISION_PROCESSORS)
    before = sys.modules.get(VISION_PROCESSORS)
    sys.modules[VISION_PROCESSORS] = before or stand_in
    try:
        yield
    finally:
        if before is None:
            del sys.modules[VISION_PROCESSORS]


class _Placeholders(ModuleType):
    """A module that has an empty class for every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
