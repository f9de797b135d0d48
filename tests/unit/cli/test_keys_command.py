"""`pdserve keys`: a key that opens, a line that holds no key, and errors that name what to change."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.config import Config, check_access, load_config
from pdserve.errors import ConfigError
from pdserve.server.keys import Scope, parse_keys


def run(*arguments: str) -> int:
    return main.run(["keys", *arguments])


def test_a_new_key_opens_by_the_line_that_is_printed_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Both appear once; the line goes into the file as it is."""
    assert run("new", "alice", "--scope", "inference", "--scope", "metrics", "--tokens-per-minute", "500", "--expires-in-days", "30") == 0
    lines = capsys.readouterr().out.splitlines()
    key, line = lines[2].strip(), lines[-1]
    assert key not in line
    found = parse_keys(line).find(key.encode())
    assert found is not None
    assert (found.name, found.scopes, found.limits) == ("alice", {Scope.INFERENCE, Scope.METRICS}, (None, 500))
    assert found.expires is not None
    assert 29 <= (found.expires - datetime.now(UTC)).days <= 30


def test_scripts_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Key and line apart; no two keys are the same."""
    made = []
    for _ in range(2):
        assert run("new", "alice", "--json") == 0
        made.append(json.loads(capsys.readouterr().out))
    assert parse_keys(made[0]["line"]).find(made[0]["key"].encode()) is not None
    assert made[0]["key"] != made[1]["key"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["new", "a b"], "NAME: 'a b': give 1 to 64 letters, digits, '.', '_' or '-'"),
        (["new", "a", "--tokens-per-minute", "0"], "--tokens-per-minute: 0: give a whole number above 0"),
        (["new", "a", "--requests-per-minute", "-5"], "--requests-per-minute: -5: give a whole number above 0"),
    ],
)
def test_what_no_file_may_hold_is_refused(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, and no key."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.strip()) == ("", line)


@pytest.mark.parametrize("arguments", [["new", "a", "--scope", "root"], ["new", "a", "--expires-in-days", "0"], ["new"]])
def test_misuse_is_told_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As of every command."""
    assert run(*arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_is_checked_without_a_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid, or the entry and the fix."""
    assert run("new", "alice", "--json") == 0
    line = json.loads(capsys.readouterr().out)["line"]
    file = tmp_path / "keys.yaml"
    file.write_text(f"{line}\n")
    assert run("check", str(file)) == 0
    assert capsys.readouterr().out == f"{file}: valid, 1 keys of 1 names\n"
    file.write_text(f"{line}\n{line}\n")
    assert run("check", str(file)) == 2
    assert "entry 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "is_refused"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("", True)]
)
def test_an_address_that_others_reach_wants_keys(
    host: str, is_refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config validate` says so before anything starts; keys or the operator's word open it."""
    monkeypatch.delenv("PDSERVE_ROUTER__HOST", raising=False)
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"router": {"host": host}}))
    assert main.run(["config", "validate", str(file)]) == (2 if is_refused else 0)
    assert capsys.readouterr().err.startswith(f"router.host: {host!r}: " if is_refused else "")
    for allowed in ({"allow_open": True}, {"keys_file": "keys.yaml"}):
        check_access(Config.model_validate({"router": {"host": host, **allowed}}).router)


def test_up_does_not_start_what_others_could_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is loaded; the error names the flag."""
    assert main.run(["up", "--host", "0.0.0.0", "--port", "0", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("--host: '0.0.0.0': other hosts reach this address")


def test_the_files_place_does_not_depend_on_who_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router runs in another folder than the command that set it."""
    monkeypatch.chdir(tmp_path)
    settings = load_config(None, {"router.keys_file": "keys.yaml"}).router
    assert settings.keys_file == str(tmp_path / "keys.yaml")
    with pytest.raises(ConfigError):
        load_config(None, {"router.keys_file": 5})
