"""`pdserve up` with tensor parallelism, through Ray and placement groups: it becomes ready, proves itself, answers, and goes without a trace."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from test_up_down import Site

from pdserve.cli.main import run

CONFIGS = Path(__file__).parents[2] / "configs"
LENGTHS = (1, 128, 129, 513)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site that is taken down whatever a test does to it, and must then be empty."""
    site = Site(tmp_path)
    yield site
    site.run("down")
    site.assert_nothing_left()


def bring_up_and_prove(site: Site, config: Path, layers: int) -> dict[str, Any]:
    """Start, verify every pair, ask as a client does, stop; returns what `verify` moved."""
    code, _, errors = site.run(
        "up", "--config", str(config), "--name", "default", "--prefill", "1", "--decode", "1", "--port", "0", "--detach"
    )
    assert (code, errors) == (0, "")
    site.look()

    code, output, errors = site.run("verify", "--json", "--lengths", ",".join(map(str, LENGTHS)))
    assert (code, errors) == (0, ""), output
    verdict = json.loads(output)
    assert verdict["ok"]
    assert [(case["prompt_tokens"], case["layers_equal"], case["path"]) for case in verdict["cases"]] == [
        (length, layers, "disaggregated") for length in LENGTHS
    ]

    status = json.loads(site.run("status", "--json")[1])
    client = openai.OpenAI(base_url=f"{status['url']}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=status["model"], messages=[{"role": "user", "content": "Name a river. " * 50}], max_tokens=8, temperature=0
    )
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 8)

    code, _, errors = site.run("down")
    assert (code, errors) == (0, "")
    site.assert_nothing_left()
    return dict(verdict["transfer"])


@pytest.mark.engine
@pytest.mark.long
def test_four_ranks_on_each_side(site: Site) -> None:
    """The shape of the full MiniMax-M3: four acknowledgements for each prompt."""
    moved = bring_up_and_prove(site, CONFIGS / "m3-tiny-tp4.yaml", layers=7)
    assert moved["acks"] == 4 * len(LENGTHS)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_sides_of_unequal_sizes(site: Site, tmp_path: Path, prefill: int, decode: int) -> None:
    """A configuration may give each role a size of its own."""
    text = (CONFIGS / "m3-tiny.yaml").read_text()
    for role, size in (("prefill", prefill), ("decode", decode)):
        before = f"{role}: {{count: 1, tensor_parallel_size: 1}}"
        assert before in text
        text = text.replace(before, f"{role}: {{count: 1, tensor_parallel_size: {size}}}")
    config = tmp_path / "unequal.yaml"
    config.write_text(text)
    moved = bring_up_and_prove(site, config, layers=7)
    assert moved["acks"] == 2 * len(LENGTHS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("size", [0, 3, 6, 16])
def test_impossible_size_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str, size: int
) -> None:
    """Exit 2 with field, value and fix."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path / "home"))
    config = tmp_path / "bad.yaml"
    config.write_text(f"model: m3-tiny\n{role}: {{tensor_parallel_size: {size}}}\n")
    assert run(["up", "--config", str(config), "--port", "0", "--detach"]) == 2
    assert capsys.readouterr().err == f"{role}.tensor_parallel_size: {size}: give a value that is 1, 2, 4 or 8\n"
    assert not (tmp_path / "home").exists()
