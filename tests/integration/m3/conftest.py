"""The engines of the package, and what every test leaves behind: nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_requests import MODEL
from engines import Engine, Pair, running_engines
from verify_command import Answer, Member, publish, verify

from pdserve.config import load_config
from pdserve.fleet.engine_command import PLUGINS, ServedModel
from pdserve.models.catalog import resolve
from pdserve.models.m3_tiny import NAME

from .kv_plugin import FAULT, TRACE, Event, Fault, engine_environment, read_trace

CONFIG = Path(__file__).parents[3] / "configs" / "m3-tiny.yaml"
SIZES = (1, 1, 2, 4)

Verify = Callable[..., Answer]
Inject = Callable[[Fault], object]
Trace = Callable[[], list[Event]]


class Engines:
    """Engines by tensor-parallel size; each can produce and consume."""

    def __init__(self, engines: list[Engine], plugin_folder: Path) -> None:
        self.all = engines
        self.plugin_folder = plugin_folder

    def pair(self, prefill_ranks: int, decode_ranks: int) -> Pair:
        """Return two different engines of these sizes."""
        prefill = self.all[SIZES.index(prefill_ranks)]
        decode = self.all[len(SIZES) - 1 - SIZES[::-1].index(decode_ranks)]
        assert prefill is not decode
        return Pair(prefill, decode)


@pytest.fixture(scope="package")
def m3_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines that know each other and load the test's plugin, which does nothing until a test asks for it."""
    folder = tmp_path_factory.mktemp("m3")
    (folder / "plugin").mkdir()
    config = load_config(CONFIG, {"engine.env": engine_environment(folder / "plugin", PLUGINS)})
    with running_engines(config, ServedModel(resolve(NAME).path, MODEL), folder, SIZES) as engines:
        yield Engines(engines, folder / "plugin")


@pytest.fixture(autouse=True)
def clean(m3_engines: Engines) -> Iterator[None]:
    """No test leaves a block, a transfer or a request behind on any engine."""
    free = [engine.status().blocks_free for engine in m3_engines.all]
    yield
    for engine, blocks in zip(m3_engines.all, free, strict=True):
        engine.wait_blocks(blocks)
        assert engine.status().running == engine.status().waiting == 0


@pytest.fixture
def inject(m3_engines: Engines) -> Iterator[Inject]:
    """A way to damage KV on its way, which ends with the test."""
    path = m3_engines.plugin_folder / FAULT
    yield lambda fault: path.write_bytes(msgspec.json.encode(fault))
    path.unlink(missing_ok=True)


@pytest.fixture
def trace(m3_engines: Engines) -> Iterator[Trace]:
    """What the engines gathered so far, and when forward passes ended; watching ends with the test."""
    path = m3_engines.plugin_folder / TRACE
    path.touch()
    yield lambda: read_trace(path)
    path.unlink()


@pytest.fixture
def verify_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    """`pdserve verify` over one pair of engines, with prompts of the lengths given."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))

    def run(pair: Pair, *lengths: int) -> Answer:
        publish(tmp_path, MODEL, pair.prefill.secret, [member(pair.prefill)], [member(pair.decode)])
        chosen: tuple[Any, ...] = ("--lengths", ",".join(map(str, lengths))) if lengths else ()
        return verify(capsys, *chosen)

    return run


def member(engine: Engine) -> Member:
    return Member(engine.worker_id, engine.incarnation, str(engine.client.base_url).rstrip("/"))
