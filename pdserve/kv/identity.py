"""What makes two prompts the same prompt for their KV: the digest that both sides compare before the first parcel.

The two legs of a request render their templates apart. If they differ in one field, the tokens differ, and moving the one's KV to the other
would be wrong with perfect checksums; so the digest is over what the engine computes from, not over the request's text.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash


class _Feature(Protocol):
    identifier: str


class EngineRequest(Protocol):
    """The part of vLLM's `Request` that determines its KV."""

    prompt_token_ids: Sequence[int] | None
    mm_features: Sequence[_Feature]
    cache_salt: str | None

    @property
    def lora_request(self) -> object | None: ...


def prompt_digest(request: EngineRequest) -> bytes:
    """Return 16 bytes, xxh3-128 over token ids (int64, little endian), multimodal identifiers, LoRA name and cache salt."""
    hasher = xxhash.xxh3_128()
    tokens = np.asarray(request.prompt_token_ids or (), dtype="<i8")
    hasher.update(len(tokens).to_bytes(8, "little"))
    hasher.update(tokens.tobytes())
    lora = getattr(request.lora_request, "lora_name", "") or ""
    for text in (*(feature.identifier for feature in request.mm_features or ()), f"lora={lora}", f"salt={request.cache_salt or ''}"):
        encoded = text.encode()
        hasher.update(len(encoded).to_bytes(4, "little"))
        hasher.update(encoded)
    return hasher.digest()
