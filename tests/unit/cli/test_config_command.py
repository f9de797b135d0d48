"""`pdserve config` and the profiles that ship."""

import json
import os
from pathlib import Path

import pytest
import yaml

from pdserve.cli import main
from pdserve.config import Config, load_config

PROFILES = sorted(Path(__file__).parents[3].glob("configs/*.yaml"))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take settings of the caller's environment away."""
    for name in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(name)


def test_show_prints_what_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment wins over the file, the file over defaults; what is printed is a file that gives the same."""
    file = tmp_path / "mine.yaml"
    file.write_text("router: {port: 9001, max_n: 2}")
    monkeypatch.setenv("PDSERVE_ROUTER__PORT", "9002")
    assert main.run(["config", "show", "--config", str(file)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["router"]["port"], shown["router"]["max_n"], shown["decode"]["count"]) == (9002, 2, 1)
    assert Config(**shown) == load_config(file)
    assert main.run(["config", "show", "--config", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown


def test_schema_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """An editor can complete and check a file with it."""
    assert main.run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["EngineConfig"]["properties"]["kv_cache_bytes"]["description"] == "per rank"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.name)
def test_profiles_that_ship_are_valid(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`config validate` accepts every file in configs/."""
    assert main.run(["config", "validate", str(profile)]) == 0
    assert capsys.readouterr().out == f"{profile}: valid\n"


def test_cpu_profile_lists_every_setting_with_its_default() -> None:
    """The commented file is the reference: a new setting, or a changed default, must show there."""
    (profile,) = (path for path in PROFILES if path.name == "cpu-default.yaml")
    assert yaml.safe_load(profile.read_text()) == Config().model_dump(mode="json")
