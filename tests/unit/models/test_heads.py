"""A tensor-parallel size that cannot split the model's heads is refused before anything starts, with the sizes that can."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve import assembly
from pdserve.config import load_config
from pdserve.errors import ConfigError
from pdserve.models.heads import SIZES, require_divisible


def folder(tmp_path: Path, config: Any) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"),
    [
        (9, 3, {1}),
        (64, 4, {1, 2, 4, 8}),
        (32, 8, {1, 2, 4, 8}),
        (12, 3, {1}),
        (12, 1, {1, 2, 4}),
        (8, None, {1, 2, 4, 8}),
        (None, None, {1, 2, 4, 8}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_only_sizes_that_split_the_heads_pass(
    tmp_path: Path, heads: int | None, kv_heads: int | None, fitting: set[int], nested: bool
) -> None:
    """Query heads are split; KV heads are split or copied; a model that says nothing is not judged."""
    own = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = folder(tmp_path, {"text_config": own} if nested else own)
    for size in SIZES:
        if size in fitting:
            require_divisible(model, "decode.tensor_parallel_size", size)
        else:
            with pytest.raises(ConfigError, match=r"decode\.tensor_parallel_size") as caught:
                require_divisible(model, "decode.tensor_parallel_size", size)
            assert str(caught.value).endswith("give " + ", ".join(str(fit) for fit in sorted(fitting)))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"x"'])
def test_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    """Truncated or of another type: the file is named."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        require_divisible(folder(tmp_path, text), "prefill.tensor_parallel_size", 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_deployment_is_refused_whichever_pool_cannot_be_split(tmp_path: Path, role: str) -> None:
    """Both pools are checked when the model is resolved."""
    model = folder(tmp_path, {"num_attention_heads": 9, "num_key_value_heads": 3})
    config = load_config(overrides={"model": str(model), f"{role}.tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=rf"{role}\.tensor_parallel_size.*9 attention heads and 3 KV heads: give 1"):
        assembly.resolve_model(config, lambda stage, share: None)
