"""Sparse layers call the connector as dense ones do, and a captured graph runs those calls at every replay."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.compilation.breakable_cudagraph as breakable
import vllm.distributed.kv_transfer as kv_transfer
import vllm.forward_context as forward_context

from pdserve.models.m3_cpu.hooks import add_connector_hooks, with_hooks

LAYER = "model.layers.3.self_attn.attn"
INDEX = f"{LAYER}.index_cache"


@dataclass
class Connector:
    """Remembers what it was told, in order."""

    bound: bool = True
    events: list[tuple[Any, ...]] = field(default_factory=list)

    def has_connector_metadata(self) -> bool:
        return self.bound

    def wait_for_layer_load(self, name: str) -> None:
        self.events.append(("wait", name))

    def save_kv_layer(self, name: str, cache: object, metadata: object) -> None:
        self.events.append(("save", name, cache, metadata))


class SparseLayer:
    """The part of vLLM's sparse attention layer that the hooks need."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self.layer_name = LAYER
        self.kv_cache = "kv pages"
        self.indexer = SimpleNamespace(index_cache=SimpleNamespace(prefix=INDEX, kv_cache="index pages"))
        self.events = events

    def _run_attention(self, query: str, *, scale: float = 1.0) -> str:
        self.events.append(("attend", query, scale))
        return f"{query} attended"


EXPECTED = [
    ("wait", LAYER),
    ("wait", INDEX),
    ("attend", "q", 2.0),
    ("save", LAYER, "kv pages", "main metadata"),
    ("save", INDEX, "index pages", "index metadata"),
]


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Connector:
    """A connector that vLLM would find, in a forward pass with metadata for both caches."""
    found = Connector()
    context = SimpleNamespace(attn_metadata={LAYER: "main metadata", INDEX: "index metadata"}, cudagraph_runtime_mode=None)
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: found)
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    return found


def test_both_caches_are_announced_around_the_attention(connector: Connector) -> None:
    """Main and index cache are waited for before and saved after; arguments and result pass through."""
    layer = SparseLayer(connector.events)
    assert with_hooks(SparseLayer._run_attention)(layer, "q", scale=2.0) == "q attended"
    assert connector.events == EXPECTED


@pytest.mark.parametrize("why", ["no group", "not v1", "no metadata bound", "profiling"])
def test_without_a_connector_step_only_the_attention_runs(connector: Connector, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """No connector, one that has nothing for this step, or a profiling run: the layer is as vLLM made it."""
    if why == "no group":
        monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: False)
    elif why == "not v1":
        monkeypatch.setattr(kv_transfer, "is_v1_kv_transfer_group", lambda: False)
    elif why == "no metadata bound":
        connector.bound = False
    else:
        monkeypatch.setattr(forward_context, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    layer = SparseLayer(connector.events)
    assert with_hooks(SparseLayer._run_attention)(layer, "q", scale=2.0) == "q attended"
    assert connector.events == [("attend", "q", 2.0)]


@dataclass
class Capture:
    """A graph capture that keeps what it is to run eagerly at replay."""

    _capturing: bool = True
    eager: list[Callable[[], Any]] = field(default_factory=list)

    def add_eager(self, call: Callable[[], Any]) -> Any:
        self.eager.append(call)


def hooked_class() -> type[SparseLayer]:
    """A fresh layer class whose attention step vLLM has made a break of captured graphs, as in its model code."""
    step = breakable.eager_break_during_capture(SparseLayer._run_attention)
    layer_class = type("HookedLayer", (SparseLayer,), {"_run_attention": step})
    add_connector_hooks(layer_class)
    return layer_class


def test_replay_of_a_captured_graph_calls_the_connector(connector: Connector, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured nothing happens but the break; each replay then runs hooks and attention, once."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    layer = hooked_class()(connector.events)
    capture = Capture()
    monkeypatch.setattr(breakable.BreakableCUDAGraphCapture, "current", staticmethod(lambda: capture))
    monkeypatch.setattr(breakable, "is_forward_context_available", lambda: False)
    monkeypatch.setattr(breakable, "_weak_ref_capture_arg", lambda argument: argument)
    layer._run_attention("q", scale=2.0)
    assert connector.events == []
    assert len(capture.eager) == 1
    for _ in range(2):
        connector.events.clear()
        capture.eager[0]()
        assert connector.events == EXPECTED


@pytest.mark.parametrize("breaks", ["0", "1"])
def test_hooked_layer_runs_once_outside_a_capture(connector: Connector, monkeypatch: pytest.MonkeyPatch, breaks: str) -> None:
    """With and without breakable graphs, an eager step is announced once."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breaks)
    layer = hooked_class()(connector.events)
    assert layer._run_attention("q", scale=2.0) == "q attended"
    assert connector.events == EXPECTED


def test_class_without_the_step_is_refused() -> None:
    """A vLLM that names the step otherwise is found at load, not by caches that are never sent early."""
    with pytest.raises(ImportError, match="no _run_attention"):
        add_connector_hooks(type("Renamed", (), {}))
