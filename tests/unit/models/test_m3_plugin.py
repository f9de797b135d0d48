"""The plugin costs other models nothing, and what it exchanges in vLLM is there and is called the same way."""

import ast
import inspect
import json
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pdserve.errors import ConfigError
from pdserve.fleet.engine_command import PLUGINS
from pdserve.models.m3_cpu import attention, index, model, plugin, rotary

LOADED_BY_REGISTER = """
import json, sys, time
from vllm.model_executor.models.registry import ModelRegistry
from pdserve.models.m3_cpu.plugin import ARCHITECTURES, register
before, start = set(sys.modules), time.perf_counter()
register()
register()
spent_s = time.perf_counter() - start
models = {name: ModelRegistry.models[name].module_name for name in ARCHITECTURES}
print(json.dumps({"loaded": sorted(set(sys.modules) - before), "spent_s": spent_s, "models": models}))
"""
LOADED_MODEL = """
import json, sys, warnings
warnings.simplefilter("ignore")
from pdserve.models.m3_cpu.plugin import register
register()
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.layers.fused_moe.oracle import unquantized
untouched = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
loaded = ModelRegistry.models["MiniMaxM3SparseForCausalLM"].load_model_cls()
module = sys.modules[loaded.__module__]
classes = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
names = {
    "norm": module.MiniMAXGemmaRMSNorm.forward.__module__,
    "fused": module.ops.fused_minimax_m3_qknorm_rope_kv_insert.__module__,
    "score": sys.modules["vllm.models.minimax_m3.common.indexer"].minimax_m3_index_score.__module__,
    "attend": sys.modules["vllm.models.minimax_m3.common.sparse_attention"].minimax_m3_sparse_attn.__module__,
    "decode": sys.modules["vllm.models.minimax_m3.common.sparse_attention"].minimax_m3_sparse_attn_decode.__module__,
    "experts": classes[-1].__module__,
    "step": module.MiniMaxM3SparseAttention._run_attention.__wrapped__.__module__,
}
print(json.dumps({
    "class": loaded.__module__,
    "names": names,
    "other experts": classes[:-1] == untouched,
    "stand-in left": "vllm.transformers_utils.processors.minimax_m3" in sys.modules,
    "same again": ModelRegistry.models["MiniMaxM3SparseForCausalLM"].load_model_cls() is loaded,
}))
"""


def run_python(code: str) -> dict[str, object]:
    """Run code in an interpreter of its own and return the JSON of its last line."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_entry_point_is_installed_and_allowed() -> None:
    """vLLM finds the plugin, and the engine's command lets it load."""
    [found] = [point for point in entry_points(group="vllm.general_plugins") if point.value == "pdserve.models.m3_cpu.plugin:register"]
    assert found.load() is plugin.register
    assert found.name in PLUGINS


def test_other_models_pay_nothing() -> None:
    """Registering loads no module, takes no time worth naming, and may happen twice."""
    found = run_python(LOADED_BY_REGISTER)
    assert found["loaded"] == []
    assert float(str(found["spent_s"])) < 0.05
    assert found["models"] == dict.fromkeys(plugin.ARCHITECTURES, "pdserve.models.m3_cpu.model")


def test_loaded_model_is_vllms_own_with_our_leaves() -> None:
    """The class is vLLM's; kernels, hooks and experts are ours; the stand-in for vision is gone again."""
    found = run_python(LOADED_MODEL)
    package = "pdserve.models.m3_cpu"
    assert found["class"] == "vllm.models.minimax_m3.nvidia.model"
    assert found["names"] == {
        "norm": f"{package}.rotary",
        "fused": f"{package}.rotary",
        "score": f"{package}.index",
        "attend": f"{package}.attention",
        "decode": f"{package}.attention",
        "experts": f"{package}.moe",
        "step": "vllm.models.minimax_m3.nvidia.model",
    }
    assert found["other experts"] is True
    assert found["stand-in left"] is False
    assert found["same again"] is True


def parameters(file: str, name: str) -> list[str]:
    """Return the parameter names of a function in vLLM's source."""
    origin = find_spec("vllm")
    assert origin is not None
    assert origin.origin is not None
    tree = ast.parse((Path(origin.origin).parent / file).read_text(encoding="utf-8"))
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [argument.arg for argument in function.args.args]


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        ("_custom_ops.py", "fused_minimax_m3_qknorm_rope_kv_insert", rotary.qknorm_rope_insert),
        ("models/minimax_m3/common/ops/index_topk.py", "minimax_m3_index_score", index.index_score),
        ("models/minimax_m3/common/ops/index_topk.py", "minimax_m3_index_topk", index.index_topk),
        ("models/minimax_m3/common/ops/index_topk.py", "minimax_m3_index_decode", index.index_decode),
        ("models/minimax_m3/common/ops/sparse_attn.py", "minimax_m3_sparse_attn", attention.sparse_attention),
        ("models/minimax_m3/common/ops/sparse_attn.py", "minimax_m3_sparse_attn_decode", attention.sparse_attention_decode),
    ],
)
def test_kernels_take_what_vllm_passes(file: str, name: str, ours: object) -> None:
    """Parameters have the names and the order of what they stand in for."""
    assert callable(ours)
    assert list(inspect.signature(ours).parameters) == parameters(file, name)


def test_name_that_vllm_lacks_stops_the_load() -> None:
    """A kernel is never put where nothing calls it."""
    with pytest.raises(ImportError, match=r"ops\.renamed does not exist"):
        model._exchange(ModuleType("ops"), "renamed", object())


def test_vision_model_is_refused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the text architecture."""
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True)))
    with pytest.raises(ConfigError, match="MiniMaxM3SparseForCausalLM"):
        model.MiniMaxM3SparseForConditionalGeneration  # noqa: B018
