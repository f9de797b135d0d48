"""The made-up M3 model: the same bytes everywhere, sizes that every tensor-parallel size can share, and a tokenizer of bytes."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pdserve.errors import ConfigError
from pdserve.models import m3_files, m3_tiny
from pdserve.models.catalog import resolve

WEIGHTS_SHA256 = "69621fa4ecd47e972a3691b1535094bfb8667c9d73d99534c5f66e5bfba161e3"
TOKENIZER = m3_files.byte_tokenizer(m3_tiny.SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, made once."""
    return m3_tiny.prepare(tmp_path_factory.mktemp("models"), lambda stage, fraction: None)


def test_name_is_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--model m3-tiny` makes it below the home folder, and finds it there the next time."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    stages: list[str] = []
    model = resolve("m3-tiny", lambda stage, fraction: stages.append(stage))
    assert model.served_name == "m3-tiny"
    assert model.path.parent == tmp_path / "models"
    assert "make" in stages
    stages.clear()
    assert resolve("m3-tiny", lambda stage, fraction: stages.append(stage)) == model
    assert "make" not in stages


def test_weights_are_the_same_everywhere(folder: Path) -> None:
    """Two machines that make the model hold the same bytes; another seed, size or order of drawing needs a new revision."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        hasher.update(f"{name} {tensor.shape} {tensor.dtype}".encode() + tensor.tobytes())
    assert hasher.hexdigest() == WEIGHTS_SHA256
    assert (folder / "model.safetensors").stat().st_size < 8 << 20


def test_other_sizes_are_another_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model made by an older release is not taken for this one."""
    monkeypatch.setattr(m3_tiny, "SEED", m3_tiny.SEED + 1)
    assert m3_tiny.prepare(tmp_path, lambda stage, fraction: None).name != folder.name


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the `cpu` extra the error says what to install, and nothing is left behind."""
    monkeypatch.setitem(sys.modules, "pdserve.models.m3_files", None)
    monkeypatch.delattr("pdserve.models.m3_files")
    with pytest.raises(ConfigError, match="install the extra `cpu`"):
        m3_tiny.prepare(tmp_path, lambda stage, fraction: None)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_tensor_parallel_size_divides_the_model(ranks: int) -> None:
    """Query heads and MLPs split evenly, KV and index heads split or repeat evenly, and there is an expert for each rank."""
    text = m3_tiny.TEXT_CONFIG
    for size in ("num_attention_heads", "intermediate_size", "dense_intermediate_size", "shared_intermediate_size"):
        assert text[size] % ranks == 0
    assert text["num_key_value_heads"] % ranks == 0 or ranks % text["num_key_value_heads"] == 0
    assert text["num_local_experts"] >= ranks


def test_model_has_every_kind_of_layer_and_a_choice_to_make(folder: Path) -> None:
    """Dense and sparse layers, four KV heads with an index head each, and fewer chosen blocks than the longest prompt has."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    sparse = text["sparse_attention_config"]
    assert set(sparse["sparse_attention_freq"]) == set(text["moe_layer_freq"]) == {0, 1}
    assert text["num_key_value_heads"] == sparse["sparse_num_index_heads"] == 4
    assert text["head_dim"] == sparse["sparse_index_dim"] == sparse["sparse_block_size"] == 128
    assert 4 * sparse["sparse_topk_blocks"] * sparse["sparse_block_size"] < text["max_position_embeddings"]


def test_weights_match_the_config(folder: Path) -> None:
    """The tensors of one dense and one sparse layer have the shapes that vLLM expects, and all are float32."""
    tensors = load_file(folder / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}
    attention = {name: tensors[f"model.layers.4.self_attn.{name}_proj.weight"].shape for name in ("q", "k", "v", "o", "index_q", "index_k")}
    assert attention == {"q": (1024, 64), "k": (512, 64), "v": (512, 64), "o": (64, 1024), "index_q": (512, 64), "index_k": (128, 64)}
    assert "model.layers.0.self_attn.index_k_proj.weight" not in tensors
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (64, 128)
    assert tensors["model.layers.3.block_sparse_moe.experts.7.w2.weight"].shape == (64, 64)
    assert tensors["model.layers.3.block_sparse_moe.gate.weight"].shape == (8, 64)


def test_only_printable_tokens_can_be_answered(folder: Path) -> None:
    """Greedy text is whole characters and never ends by itself."""
    output = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert [token for token in range(len(output)) if output[token].any()] == list(range(0x20, 0x7F))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_is_its_bytes(text: str) -> None:
    """Any text becomes the bytes of its UTF-8, one token each, and comes back unchanged."""
    tokens = TOKENIZER.encode(text).ids
    if not any(token in text for token in m3_tiny.SPECIAL_TOKENS):
        assert tokens == list(text.encode())
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == text


def test_stored_tokenizer_knows_special_tokens_and_chats(folder: Path) -> None:
    """What transformers reads numbers the special tokens behind the bytes and renders the chat template with them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    assert tokenizer.encode("hello") == list(b"hello")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    special = [token for token in tokenizer.encode(rendered) if token >= m3_tiny.BYTE_TOKENS]
    start, end = m3_tiny.SPECIAL_TOKENS.index("<|im_start|>") + 256, m3_tiny.SPECIAL_TOKENS.index("<|im_end|>") + 256
    assert special == [start, end, start, end, start]
    assert tokenizer.eos_token_id == m3_tiny.END_OF_TEXT
    assert tokenizer.pad_token_id == m3_tiny.PADDING


def test_generation_ends_at_both_end_tokens(folder: Path) -> None:
    """A sampled end of text or end of turn ends an answer."""
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [m3_tiny.END_OF_TEXT, m3_tiny.END_OF_TURN]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(m3_tiny.END_OF_TURN) == "<|im_end|>"
