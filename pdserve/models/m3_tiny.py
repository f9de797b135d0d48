"""The built-in model `m3-tiny`: MiniMax-M3's architecture in 5.6 MB of float32 weights that are drawn from a seed.

Owns its sizes and when a made folder is out of date. It has every kind of layer that M3 has: dense and sparse attention, the index, dense and
routed MLPs. It chooses 4 blocks of 128 tokens, so beyond 512 tokens its answers depend on the index cache. It answers with text that means nothing;
it is there to prove that KV caches of M3's kinds are moved right, on a machine without a GPU.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError
from pdserve.models import store

NAME = "m3-tiny"
SEED = 3
REVISION = 2
"""grows when the same sizes and seed would give other files"""

BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_OF_TEXT, _, END_OF_TURN, PADDING = range(BYTE_TOKENS, BYTE_TOKENS + len(SPECIAL_TOKENS))
SPARSE_LAYERS = [0, 0, 0, 1, 1]
BLOCK_TOKENS = 128

TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_text",
    "dtype": "float32",
    "vocab_size": BYTE_TOKENS + len(SPECIAL_TOKENS),
    "hidden_size": 64,
    "dense_intermediate_size": 128,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_hidden_layers": len(SPARSE_LAYERS),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
    "swiglu_limit": 7.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "num_mtp_modules": 0,
    "moe_layer_freq": SPARSE_LAYERS,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": SPARSE_LAYERS,
        "sparse_disable_index_value": SPARSE_LAYERS,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_block_size": BLOCK_TOKENS,
        "sparse_topk_blocks": 4,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
    },
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": PADDING,
}
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_vl",
    "dtype": "float32",
    "text_config": TEXT_CONFIG,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": PADDING,
}


def prepare(models_folder: Path, on_progress: Callable[[str, float], None]) -> Path:
    """Return the model's folder, making it first if it is not there whole; that takes under a second.

    Args:
        models_folder: where made models are kept.
        on_progress: told a stage, ``check`` or ``make``, and the share of it that is done, in [0, 1].

    Raises:
        ConfigError: a library of the `cpu` extra is missing.
        OSError: the folder cannot be written.
    """
    identity = json.dumps([REVISION, SEED, CONFIG], sort_keys=True)
    folder = models_folder / f"{NAME}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def build(target: Path) -> None:
        on_progress("make", 0)
        _make(target)
        on_progress("make", 1)

    on_progress("check", 0)
    store.ensure(folder, build)
    on_progress("check", 1)
    return folder


def _make(target: Path) -> None:
    try:
        from pdserve.models import m3_files  # its libraries belong to the `cpu` extra
    except ModuleNotFoundError as error:
        raise ConfigError("--model", NAME, f"install the extra `cpu` ({error.name} is missing), or give a model folder") from error
    m3_files.write(target, CONFIG, SPECIAL_TOKENS, SEED)
