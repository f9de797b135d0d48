"""Writes the files of a made-up M3 model: seeded weights, a tokenizer whose tokens are bytes, and the configs.

Weights are uniform, from a bit generator whose stream is fixed for ever, by exact arithmetic: every machine gets the same bytes. Only tokens that
are printable ASCII have a row in the output matrix, so greedy text is always whole characters and ends only where it was told to.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PRINTABLE = range(0x20, 0x7F)
EMBEDDING_STD = 0.3
"""small beside what the layers add, so that answers hang on the context more than on the last token"""
LOGIT_STD = 4.0
QK_NORM_WEIGHT = 0.8
"""queries and keys are scaled by 1 + this; sharp enough attention that each block counts"""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Weights = dict[str, NDArray[np.float32]]


def write(target: Path, config: dict[str, Any], special_tokens: tuple[str, ...], seed: int) -> None:
    """Write config, generation config, tokenizer with chat template, and weights.

    Args:
        target: an existing, empty folder.
        config: Hugging Face's, with M3's `text_config`.
        special_tokens: numbered from 256 on; ``<|endoftext|>``, ``<|im_end|>`` and ``<|pad|>`` are among them.
        seed: of the weights.
    """
    number = {token: 256 + index for index, token in enumerate(special_tokens)}
    ends = [number["<|endoftext|>"], number["<|im_end|>"]]
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {"eos_token_id": ends, "pad_token_id": number["<|pad|>"]})
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["text_config"]["max_position_embeddings"],
            "eos_token": "<|endoftext|>",
            "pad_token": "<|pad|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    byte_tokenizer(special_tokens).save(str(target / "tokenizer.json"))
    save_file(weights(config["text_config"], seed), target / "model.safetensors", metadata={"format": "pt"})


def byte_tokenizer(special_tokens: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer that has one token for each byte of UTF-8, numbered by its value, and the special ones from 256 on."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: value for value, letter in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def _byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: graphic Latin-1 bytes are themselves, the others follow from U+0100 on."""
    graphic = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in graphic else next(others)) for value in range(256)]


def weights(text: dict[str, Any], seed: int) -> Weights:
    """Return every tensor of an M3 text model by its name in a checkpoint.

    Matrices [outputs, inputs] keep the size of what goes through them; norms are neutral but for those of queries and keys.
    """
    draw, hidden = _Uniform(seed), text["hidden_size"]
    output = draw.matrix(text["vocab_size"], hidden, gain=LOGIT_STD)
    output[[token for token in range(text["vocab_size"]) if token not in PRINTABLE]] = 0
    tensors: Weights = {
        "model.embed_tokens.weight": draw(text["vocab_size"], hidden, std=EMBEDDING_STD),
        "lm_head.weight": output,
        "model.norm.weight": np.zeros(hidden, np.float32),
    }
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        sparse = text["sparse_attention_config"]["sparse_attention_freq"][layer] != 0
        tensors[f"{prefix}input_layernorm.weight"] = np.zeros(hidden, np.float32)
        tensors[f"{prefix}post_attention_layernorm.weight"] = np.zeros(hidden, np.float32)
        tensors |= _attention(draw, text, f"{prefix}self_attn.", sparse=sparse)
        routed = text["moe_layer_freq"][layer] != 0
        tensors |= _routed(draw, text, f"{prefix}block_sparse_moe.") if routed else _dense(draw, text, f"{prefix}mlp.")
    return tensors


def _attention(draw: "_Uniform", text: dict[str, Any], prefix: str, *, sparse: bool) -> Weights:
    hidden, dim = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    tensors = {
        f"{prefix}q_proj.weight": draw.matrix(queries, hidden),
        f"{prefix}k_proj.weight": draw.matrix(keys, hidden),
        f"{prefix}v_proj.weight": draw.matrix(keys, hidden),
        f"{prefix}o_proj.weight": draw.matrix(hidden, queries),
        f"{prefix}q_norm.weight": np.full(dim, QK_NORM_WEIGHT, np.float32),
        f"{prefix}k_norm.weight": np.full(dim, QK_NORM_WEIGHT, np.float32),
    }
    if sparse:
        index = text["sparse_attention_config"]
        index_dim = index["sparse_index_dim"]
        tensors |= {
            f"{prefix}index_q_proj.weight": draw.matrix(index["sparse_num_index_heads"] * index_dim, hidden),
            f"{prefix}index_k_proj.weight": draw.matrix(index_dim, hidden),
            f"{prefix}index_q_norm.weight": np.zeros(index_dim, np.float32),
            f"{prefix}index_k_norm.weight": np.zeros(index_dim, np.float32),
        }
    return tensors


def _routed(draw: "_Uniform", text: dict[str, Any], prefix: str) -> Weights:
    hidden, experts = text["hidden_size"], text["num_local_experts"]
    tensors = {
        f"{prefix}gate.weight": draw.matrix(experts, hidden),
        f"{prefix}e_score_correction_bias": draw(experts, std=0.05),
    }
    shared = text["intermediate_size"] * text["n_shared_experts"]
    tensors |= _mlp(draw, hidden, shared, f"{prefix}shared_experts.", ("gate_proj", "up_proj", "down_proj"))
    for expert in range(experts):
        tensors |= _mlp(draw, hidden, text["intermediate_size"], f"{prefix}experts.{expert}.", ("w1", "w3", "w2"))
    return tensors


def _dense(draw: "_Uniform", text: dict[str, Any], prefix: str) -> Weights:
    return _mlp(draw, text["hidden_size"], text["dense_intermediate_size"], prefix, ("gate_proj", "up_proj", "down_proj"))


def _mlp(draw: "_Uniform", hidden: int, intermediate: int, prefix: str, names: tuple[str, str, str]) -> Weights:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: draw.matrix(intermediate, hidden), up: draw.matrix(intermediate, hidden), down: draw.matrix(hidden, intermediate)}


class _Uniform:
    """Draws float32 numbers, uniform around zero."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, *shape: int, std: float) -> NDArray[np.float32]:
        """Return an array of this shape whose values have this standard deviation."""
        top24 = self._bits.random_raw(math.prod(shape)) >> np.uint64(40)
        unit = top24.astype(np.float64) * 2.0**-23 - 1.0
        return (unit * (std * math.sqrt(3.0))).astype(np.float32).reshape(shape)

    def matrix(self, outputs: int, inputs: int, *, gain: float = 1.0) -> NDArray[np.float32]:
        """Return [outputs, inputs] that scales the size of what goes through it by `gain`."""
        return self(outputs, inputs, std=gain / math.sqrt(inputs))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
