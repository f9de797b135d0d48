"""What two engines must share, besides the cache geometry, for the one's KV to mean the same to the other: weights and configuration.

The weights digest does not read hundreds of gigabytes: it covers each file's name and size, a safetensors file's header (names, shapes, dtypes,
offsets) and the file's last 64 KiB. It tells models, revisions and quantisations apart; it is no defence against someone who forges weights.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TAIL_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def weights_digest(model: str) -> str:
    """Return 32 hex digits over a model's folder or lone file; over the name alone where there is neither."""
    hasher = hashlib.blake2b(digest_size=16)
    place = Path(model)
    if place.is_dir():
        paths = [path for path in sorted(place.iterdir()) if path.suffix in WEIGHT_SUFFIXES or path.name in TEXT_FILES]
    elif place.is_file():
        paths = [place]
    else:
        hasher.update(model.encode())
        return hasher.hexdigest()
    for path in paths:
        hasher.update(f"{path.name}:{path.stat().st_size}\n".encode())
        for piece in _pieces(path):
            hasher.update(piece)
    return hasher.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the parts of a file that stand for it."""
    if path.name in TEXT_FILES:
        yield path.read_bytes()
        return
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            yield file.read(min(length, MAX_HEADER_BYTES))
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        yield file.read(TAIL_BYTES)


def config_digest(config: "VllmConfig") -> str:
    """Return 32 hex digits over the settings that change what a token's KV is: revision, dtypes, rope, quantisation, overrides, draft model, LoRA."""
    model, cache = config.model_config, config.cache_config
    speculative = config.speculative_config
    facts = {
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "hf_overrides": repr(model.hf_overrides),
        "rope": repr(getattr(model.hf_text_config, "rope_parameters", None) or getattr(model.hf_text_config, "rope_scaling", None)),
        "attention": repr(getattr(config.attention_config, "indexer_kv_dtype", None)),
        "speculative": f"{speculative.method}:{speculative.num_speculative_tokens}:{speculative.model}" if speculative else "",
        "lora": bool(config.lora_config),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
