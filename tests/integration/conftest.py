"""Fixtures that several files of real-engine tests share: starting a pair of engines costs most of a minute on two cores."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_requests import MODEL, TEMPLATE
from engines import Pair, running_engines

from pdserve.config import load_config
from pdserve.fleet.engine_command import ServedModel
from pdserve.models.catalog import resolve


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill and a decode engine; at the end all blocks must be free on both."""
    folder = tmp_path_factory.mktemp("engines")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    extra = ("--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--trust-request-chat-template")
    config = load_config(overrides={"engine.extra_args": extra, "kv.lease_s": 5})
    model = resolve(config.model)
    with running_engines(config, ServedModel(Path(model.path), MODEL), folder) as (prefill, decode):
        free = [engine.status().blocks_free for engine in (prefill, decode)]
        yield Pair(prefill, decode)
        for engine, blocks in zip((prefill, decode), free, strict=True):
            engine.wait_blocks(blocks)


@pytest.fixture
def clean(pair: Pair) -> Iterator[None]:
    """No test leaves a block, a transfer or a request behind on either engine."""
    free = [engine.status().blocks_free for engine in (pair.prefill, pair.decode)]
    yield
    for engine, blocks in zip((pair.prefill, pair.decode), free, strict=True):
        engine.wait_blocks(blocks)
        assert engine.status().running == engine.status().waiting == 0
