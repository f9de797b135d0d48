"""What two engines compare besides their caches: each thing that changes weights or KV changes a digest, and nothing else does."""

import json
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import AttentionConfig, CacheConfig, ModelConfig, SpeculativeConfig, VllmConfig

from pdserve.kv.fingerprint import TAIL_BYTES, config_digest, weights_digest

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PADDING_BYTES = 4 * TAIL_BYTES
"""tensor data, so that the header and the tail are far apart"""


def safetensors(*, shape: tuple[int, ...] = (2, 2), data: bytes = bytes(PADDING_BYTES)) -> bytes:
    header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def model(folder: Path, **files: bytes) -> str:
    """Lay down a small model folder; keywords replace or add files, with `__` for the dot."""
    folder.mkdir()
    content = {CONFIG: b'{"a": 1}', "tokenizer.json": b"{}", WEIGHTS: safetensors()}
    for name, data in (content | {name.replace("__", "."): data for name, data in files.items()}).items():
        (folder / name).write_bytes(data)
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Return the digest of the model that the others are compared with."""
    return weights_digest(model(tmp_path / "base"))


def test_same_files_in_another_place_are_the_same_weights(tmp_path: Path, base: str) -> None:
    """Hosts keep models where they like; files that vLLM does not load mean nothing."""
    elsewhere = model(tmp_path / "elsewhere", README__md=b"read me", __gitattributes=b"x", manifest__json=b"{}")
    assert weights_digest(elsewhere) == base
    assert len(bytes.fromhex(base)) == 16


@pytest.mark.parametrize(
    "files",
    [
        {"config__json": b'{"a": 2}'},
        {"tokenizer__json": b'{"x": 1}'},
        {"chat_template__jinja": b""},
        {"model__safetensors": safetensors(shape=(4, 1))},
        {"model__safetensors": safetensors(data=bytes(PADDING_BYTES + 2))},
        {"model__safetensors": safetensors(data=bytes(PADDING_BYTES - 1) + b"\x01")},
        {"model__safetensors": safetensors(data=bytes(PADDING_BYTES - TAIL_BYTES) + b"\x01" + bytes(TAIL_BYTES - 1))},
        {"model2__safetensors": b""},
        {"model__gguf": b"GGUF"},
    ],
    ids=["config", "tokenizer", "template", "shape in the header", "size", "last byte", "first byte of the tail", "shard more", "gguf"],
)
def test_each_ingredient_changes_the_weights_digest(tmp_path: Path, base: str, files: dict[str, bytes]) -> None:
    """One file changed or added."""
    assert weights_digest(model(tmp_path / "other", **files)) != base


def test_file_that_was_renamed_or_removed_is_noticed(tmp_path: Path, base: str) -> None:
    """The names are part of the digest."""
    folder = Path(model(tmp_path / "other"))
    (folder / WEIGHTS).rename(folder / "renamed.safetensors")
    renamed = weights_digest(str(folder))
    (folder / "renamed.safetensors").unlink()
    assert len({base, renamed, weights_digest(str(folder))}) == 3


def test_text_files_do_not_run_into_each_other(tmp_path: Path) -> None:
    """A file's end is part of the digest: one that holds the next one's name and text is not both."""
    both = model(tmp_path / "both", config__json=b"{}", generation_config__json=b"{}")
    one = model(tmp_path / "one", config__json=b"{}generation_config.json{}")
    assert weights_digest(both) != weights_digest(one)


def test_middle_of_large_weights_is_not_read(tmp_path: Path, base: str) -> None:
    """Stated as it is: hundreds of gigabytes are not hashed, so bytes between header and tail do not count."""
    data = b"\x01" + bytes(PADDING_BYTES - 1)
    assert weights_digest(model(tmp_path / "other", model__safetensors=safetensors(data=data))) == base


@pytest.mark.parametrize("data", [b"", b"\x01\x02", b"\xff" * 12], ids=["empty", "no room for a length", "length beyond the file"])
def test_broken_weights_have_a_digest_too(tmp_path: Path, base: str, data: bytes) -> None:
    """vLLM tells what is wrong with them; the digest only tells them apart."""
    assert weights_digest(model(tmp_path / "broken", model__safetensors=data)) != base


def test_weights_in_one_file_are_told_apart_by_content(tmp_path: Path) -> None:
    """A model may be a lone GGUF file: two hosts may hold different ones under one name, or one in two places."""
    digests = []
    for folder, data in (("a", b"GGUF1"), ("b", b"GGUF2"), ("c", b"GGUF1")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "model.gguf"
        file.write_bytes(data)
        digests.append(weights_digest(str(file)))
    assert digests[0] == digests[2] != digests[1]


def test_model_that_is_no_local_place_is_known_by_its_name() -> None:
    """A name of a model hub."""
    assert weights_digest("org/model-7b") == weights_digest("org/model-7b") != weights_digest("org/model-8b")


# ---- configuration -------------------------------------------------------------------------------------------------------------------


def configuration() -> SimpleNamespace:
    """Return the settings of vLLM that are read, as an engine without anything special has them."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype="torch.bfloat16",
            quantization=None,
            revision=None,
            hf_overrides={},
            hf_text_config=SimpleNamespace(rope_parameters={"rope_theta": 10_000.0}),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(indexer_kv_dtype="bf16"),
        speculative_config=SimpleNamespace(method="eagle3", num_speculative_tokens=3, model="org/draft"),
        lora_config=None,
    )


def put(path: str, value: object) -> Callable[[SimpleNamespace], None]:
    """Return a change of one setting, by its dotted name."""
    *parents, name = path.split(".")

    def change(config: SimpleNamespace) -> None:
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", "torch.float16"),
        ("model_config.quantization", "fp8"),
        ("model_config.revision", "v2"),
        ("model_config.hf_overrides", {"num_hidden_layers": 2}),
        ("model_config.hf_text_config.rope_parameters", {"rope_theta": 20_000.0}),
        ("cache_config.cache_dtype", "fp8"),
        ("attention_config.indexer_kv_dtype", "fp8"),
        ("speculative_config", None),
        ("speculative_config.method", "mtp"),
        ("speculative_config.num_speculative_tokens", 4),
        ("speculative_config.model", "org/other-draft"),
        ("lora_config", SimpleNamespace(max_loras=1)),
    ],
)
def test_each_setting_that_shapes_kv_changes_the_config_digest(path: str, value: object) -> None:
    """One setting, all others equal."""
    changed = configuration()
    put(path, value)(changed)
    assert config_digest(changed) != config_digest(configuration())


def test_older_rope_settings_count_as_well() -> None:
    """Configurations of before rope_parameters name it rope_scaling."""
    digests = set()
    for scaling in (None, {"type": "linear", "factor": 2.0}, {"type": "linear", "factor": 4.0}):
        config = configuration()
        config.model_config.hf_text_config = SimpleNamespace(rope_scaling=scaling)
        digests.add(config_digest(config))
    assert len(digests) == 3


def test_settings_that_do_not_shape_kv_are_each_engines_own() -> None:
    """Places, sizes and names may differ between the two pools."""
    other = configuration()
    other.model_config.model, other.model_config.max_model_len = "/elsewhere", 4096
    other.cache_config.gpu_memory_utilization = 0.5
    assert config_digest(other) == config_digest(configuration())


@pytest.mark.parametrize(
    ("name", "vllm_class"),
    [
        ("", VllmConfig),
        ("model_config", ModelConfig),
        ("cache_config", CacheConfig),
        ("attention_config", AttentionConfig),
        ("speculative_config", SpeculativeConfig),
    ],
)
def test_settings_that_are_read_are_vllms(name: str, vllm_class: type) -> None:
    """The fake above has no field that the installed vLLM does not have: a renamed one would else be compared as absent for ever."""
    fake = getattr(configuration(), name) if name else configuration()
    assert set(vars(fake)) <= {field.name for field in fields(vllm_class)}
