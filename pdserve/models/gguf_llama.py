"""Turns a GGUF file of a Llama-architecture model with a byte-level BPE tokenizer into the folder that vLLM loads.

Owns the mapping of names, weight layout, hyper-parameters and tokenizer. Works tensor by tensor on numpy arrays, so that no engine library
is loaded; weights come out in float32, which holds every dequantised value exactly. Knows nothing of where either end lives.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.constants import TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path, on_fraction: Callable[[float], None]) -> None:
    """Write config, generation config, tokenizer with chat template, and weights into `target`.

    Args:
        source: the GGUF file.
        target: an existing, empty folder.
        on_fraction: told the share of weights done, in [0, 1].

    Raises:
        KeyError: the file lacks a field, or holds a tensor that this architecture does not have.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(target / "config.json", _config(fields, tied=tied))
    _write_json(target / "generation_config.json", _special_ids(fields))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields))
    _tokenizer(fields).save(str(target / "tokenizer.json"))
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    save_file(dict(_weights(reader, heads, on_fraction)), target / "model.safetensors", metadata={"format": "pt"})


def _weights(reader: GGUFReader, heads: dict[str, int], on_fraction: Callable[[float], None]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for done, tensor in enumerate(reader.tensors, start=1):
        weight: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        name = _TOP_LEVEL.get(tensor.name)
        if name is None:
            _, layer, part, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{_IN_BLOCK[part]}.{suffix}"
            if part in heads:
                weight = _rotary_halves(weight, heads[part])
        yield name, np.ascontiguousarray(weight)
        on_fraction(done / len(reader.tensors))


def _rotary_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head from GGUF's interleaved rotary pairs (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # GGUF stores a float32; its shortest decimal is the number that the model was published with.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE with GGUF's `smollm` pre-tokenizer: every digit by itself, then GPT-2's words."""
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise KeyError(f"tokenizer.ggml.pre={fields['tokenizer.ggml.pre']}")
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=fields["tokenizer.ggml.add_space_prefix"], use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
