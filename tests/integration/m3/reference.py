"""MiniMax-M3's text model in float64, written down from its formulas: no paging, no kernels, no cache, every token against every other.

Two things are narrower on purpose, as the model defines them: rotary angles are float32, and the index works on bfloat16 queries and keys.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HEAD_DIM = 128
BLOCK_TOKENS = 128
EPS = 1e-6


class Reference:
    """One model.

    Args:
        folder: holds `model.safetensors`.
        text: the `text_config` of its `config.json`.
    """

    def __init__(self, folder: Path, text: dict[str, Any]) -> None:
        self._text = text
        self._weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return [len(tokens), vocabulary] float64."""
        position = torch.arange(len(tokens))
        x = self._weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(self._text["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(f"{prefix}self_attn.", layer, self._norm(x, f"{prefix}input_layernorm"), position)
            routed = self._text["moe_layer_freq"][layer]
            normed = self._norm(x, f"{prefix}post_attention_layernorm")
            x = x + (self._routed(f"{prefix}block_sparse_moe.", normed) if routed else self._mlp(f"{prefix}mlp.", normed))
        return self._norm(x, "model.norm") @ self._weights["lm_head.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + self._weights[f"{name}.weight"])

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ self._weights[f"{name}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM))

    def _rotated(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        half = self._text["rotary_dim"] // 2
        frequency = self._text["rope_theta"] ** -(torch.arange(half, dtype=torch.float32) / half)
        angle = position[:, None].float() * frequency
        turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)[:, None]
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)

    def _attention(self, prefix: str, layer: int, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(x, f"{prefix}{name}") for name in "qkv")
        q = self._rotated(self._norm(q, f"{prefix}q_norm"), position)
        k = self._rotated(self._norm(k, f"{prefix}k_norm"), position)
        group = q.shape[1] // k.shape[1]
        allowed = (position[:, None] >= position).expand(k.shape[1], -1, -1)
        if self._text["sparse_attention_config"]["sparse_attention_freq"][layer]:
            allowed = allowed & self._chosen(prefix, x, position)
        products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / math.sqrt(HEAD_DIM)
        weights = products.masked_fill(~allowed.repeat_interleave(group, 0), -math.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
        return out.flatten(1) @ self._weights[f"{prefix}o_proj.weight"].T

    def _chosen(self, prefix: str, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return [index heads, queries, keys] bool: the key's block is among those that the query's index head chose."""
        sparse = self._text["sparse_attention_config"]
        q = self._rotated(self._norm(self._heads(x, f"{prefix}index_q"), f"{prefix}index_q_norm"), position).bfloat16().double()
        k = self._rotated(self._norm(self._heads(x, f"{prefix}index_k"), f"{prefix}index_k_norm"), position).bfloat16().double()
        products = torch.einsum("qhd,kd->hqk", q, k[:, 0]).masked_fill(position[:, None] < position, -math.inf)
        block = position // BLOCK_TOKENS
        scores = torch.stack([products[..., block == number].amax(-1) for number in range(int(block.max()) + 1)], -1)
        assert (sparse["sparse_init_block"], sparse["sparse_local_block"]) == (0, 1)
        scores.scatter_(-1, block[None, :, None].expand(scores.shape[0], -1, 1), math.inf)
        best = scores.topk(min(sparse["sparse_topk_blocks"], scores.shape[-1]), -1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -math.inf)
        return chosen[..., block]

    def _routed(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self._weights[f"{prefix}gate.weight"].T).sigmoid()
        chosen = (scores + self._weights[f"{prefix}e_score_correction_bias"]).topk(self._text["num_experts_per_tok"], -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * self._text["routed_scaling_factor"]
        out = self._mlp(f"{prefix}shared_experts.", x)
        for expert in range(scores.shape[-1]):
            out = out + weights[:, expert, None] * self._mlp(f"{prefix}experts.{expert}.", x, ("w1", "w3", "w2"))
        return out

    def _mlp(self, prefix: str, x: torch.Tensor, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> torch.Tensor:
        gate, up, down = (self._weights[f"{prefix}{name}.weight"] for name in names)
        limit, alpha, beta = (self._text[f"swiglu_{name}"] for name in ("limit", "alpha", "beta"))
        g, u = (x @ gate.T).clamp(max=limit), (x @ up.T).clamp(-limit, limit)
        return (g * (alpha * g).sigmoid() * (u + beta)) @ down.T
