"""What cannot be moved is refused when an engine starts, by the name of the option or of the layer, not at the first request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1 import kv_cache_interface as vllm_kv
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from pdserve.errors import ConfigError
from pdserve.kv.connector import PdserveConnector
from pdserve.kv.support import PARALLEL, require_supported

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
DENSE = vllm_kv.FullAttentionSpec(**SHAPE)
LATENT = vllm_kv.MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1})
MAMBA = vllm_kv.MambaSpec(block_size=16, shapes=((4, 4), (4,)), dtypes=(torch.bfloat16, torch.float32))


def vllm_config(**parallel: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(**dict.fromkeys(PARALLEL, 1) | parallel))


def caches(*specs: KVCacheSpec, **group: Any) -> KVCacheConfig:
    """One group per spec, each with one layer."""
    groups = [KVCacheGroupSpec([f"model.layers.{number}.attn"], spec, **group) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    "specs",
    [
        (DENSE,),
        (LATENT,),
        (DENSE, LATENT),
        (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"model.layers.0.attn": DENSE}),),
        (vllm_kv.FullAttentionSpec(**SHAPE, sliding_window=128),),
    ],
    ids=["dense", "latent", "two groups", "mixed group", "window computed over a full cache"],
)
def test_caches_of_every_token_are_supported(specs: tuple[KVCacheSpec, ...]) -> None:
    """Blocks hold every token of the prompt and stay."""
    require_supported(vllm_config(), caches(*specs))


@pytest.mark.parametrize("option", sorted(PARALLEL))
def test_other_parallelism_is_refused_by_its_option(option: str) -> None:
    """Field, value, fix."""
    with pytest.raises(ConfigError) as refusal:
        require_supported(vllm_config(**{option: 2}), caches(DENSE))
    assert refusal.value.args[:2] == ("--" + option.replace("_", "-"), 2)
    assert "give 1" in refusal.value.fix


OTHERS: dict[str, KVCacheSpec] = {
    "SlidingWindowSpec": vllm_kv.SlidingWindowSpec(**SHAPE, sliding_window=128),
    "ChunkedLocalAttentionSpec": vllm_kv.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=128),
    "MambaSpec": MAMBA,
    "CrossAttentionSpec": vllm_kv.CrossAttentionSpec(**SHAPE),
    "EncoderOnlyAttentionSpec": vllm_kv.EncoderOnlyAttentionSpec(**SHAPE),
    "SinkFullAttentionSpec": vllm_kv.SinkFullAttentionSpec(**SHAPE, sink_len=4),
    "HiddenStateCacheSpec": vllm_kv.HiddenStateCacheSpec(**SHAPE),
}


@pytest.mark.parametrize("kind", sorted(OTHERS))
@pytest.mark.parametrize("is_mixed", [False, True], ids=["own group", "mixed group"])
def test_other_caches_are_refused_by_layer_and_kind(kind: str, is_mixed: bool) -> None:
    """Also where only one layer of many is of that kind."""
    if is_mixed:
        specs = {"model.layers.0.attn": DENSE, "model.layers.9.attn": OTHERS[kind]}
        mixed = object.__new__(UniformTypeKVCacheSpecs)
        object.__setattr__(mixed, "kv_cache_specs", specs)
        config = caches(DENSE)
        config.kv_cache_groups = [KVCacheGroupSpec(list(specs), mixed)]
        layer = "model.layers.9.attn"
    else:
        config, layer = caches(DENSE, OTHERS[kind]), "model.layers.1.attn"
    with pytest.raises(ConfigError) as refusal:
        require_supported(vllm_config(), config)
    assert refusal.value.args[:2] == (f"cache of {layer}", kind)


def test_every_kind_of_cache_that_vllm_has_is_decided() -> None:
    """A kind that a new vLLM brings is refused until someone decides: by exact name, subclasses included."""
    kinds = {name for name, value in vars(vllm_kv).items() if isinstance(value, type) and issubclass(value, vllm_kv.AttentionSpec)}
    refused = kinds - {"AttentionSpec", "FullAttentionSpec", "MLAAttentionSpec"}
    for kind in refused:
        spec = object.__new__(getattr(vllm_kv, kind))
        with pytest.raises(ConfigError, match=kind):
            require_supported(vllm_config(), caches(spec))


def test_states_of_several_tokens_are_refused() -> None:
    """A compressed cache is paired with the prompt otherwise."""
    compressed = vllm_kv.MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1}, tokens_per_state=4)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.attn.*4 tokens in one state"):
        require_supported(vllm_config(), caches(compressed))


def test_group_that_vllm_keeps_out_of_transfers_is_refused() -> None:
    """Decode would lack it."""
    with pytest.raises(ConfigError, match=r"cache group 0: 'model\.layers\.0\.attn'"):
        require_supported(vllm_config(), caches(DENSE, enable_kv_transfer=False))


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_connector_refuses_in_its_constructor(role: KVConnectorRole) -> None:
    """In the engine core and in every rank: vLLM makes both before it serves."""
    config = vllm_config(pipeline_parallel_size=2)
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"worker_id": "w", "incarnation": "i"})
    with pytest.raises(ConfigError, match="--pipeline-parallel-size"):
        PdserveConnector(config, role, caches(DENSE))
