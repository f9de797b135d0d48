"""From what an operator writes after `--model` to a folder that vLLM can load.

Owns the list of built-in models. Does not look inside a model beyond its `config.json` being there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import DEFAULT_MODEL, home
from pdserve.errors import ConfigError
from pdserve.models import m3_tiny, smollm2

Progress = Callable[[str, float], None]
BUILT_IN: dict[str, Callable[[Path, Progress], Path]] = {DEFAULT_MODEL: smollm2.prepare, m3_tiny.NAME: m3_tiny.prepare}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is ready to load."""

    path: Path
    """absolute folder"""
    served_name: str
    """what clients call it unless the operator says otherwise"""


def resolve(name_or_path: str, on_progress: Progress | None = None) -> ResolvedModel:
    """Find a model; the first use of a built-in one converts it, in 5 to 20 s.

    Args:
        name_or_path: a built-in name, else a folder; a folder that has a built-in's name is reached as ``./NAME``.
        on_progress: told a stage and the share of it that is done, in [0, 1]; called on this thread.

    Raises:
        ConfigError: no such model, a folder without `config.json`, or `$PDSERVE_HOME` cannot be written.
    """
    prepare = BUILT_IN.get(name_or_path)
    if prepare is None:
        return _local(name_or_path)
    try:
        folder = prepare(home() / "models", on_progress or (lambda stage, fraction: None))
    except OSError as error:
        raise ConfigError(
            "PDSERVE_HOME", str(home()), f"make it a folder that can be written, with 600 MB free ({error.strerror})"
        ) from error
    return ResolvedModel(folder, name_or_path)


def _local(name_or_path: str) -> ResolvedModel:
    folder = Path(name_or_path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError("--model", name_or_path, f"give a model folder, or a built-in name: {', '.join(BUILT_IN)}")
    if not (folder / "config.json").is_file():
        raise ConfigError("--model", name_or_path, "give a model folder that holds a config.json")
    return ResolvedModel(folder, folder.resolve().name)
