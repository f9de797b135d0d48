"""Puts M3's experts into vLLM's modular MoE on CPU, whose own kernels lack M3's activation.

Routing, shared experts, weight loading and the sum over ranks stay vLLM's.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from pdserve.models.m3_cpu.experts import run_experts


def with_swiglu_oai(upstream: Callable[[Any], list[type]], backend: Any) -> list[type]:
    """Return vLLM's expert classes for a backend; those for CPUs are joined by ours, which takes only the activation that no other does."""
    classes = upstream(backend)
    return [*classes, SwigluOaiExperts] if backend is UnquantizedMoeBackend.CPU else classes


class SwigluOaiExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Experts whose first weight holds all gates, then all ups."""

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_ep

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights are used as they were loaded."""

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **unused: Any,
    ) -> None:
        """Write what `run_experts` returns into `output`; workspaces, scales and expert maps are not used."""
        swiglu = self.quant_config
        activation = (swiglu.gemm1_alpha, swiglu.gemm1_beta, swiglu.gemm1_clamp_limit)
        output.copy_(run_experts(hidden_states, w1, w2, topk_weights, topk_ids, *activation))
