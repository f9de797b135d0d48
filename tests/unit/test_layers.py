"""What decides and what serves never loads an engine, not even through a third package.

import-linter reads the package's own imports; this asks a running interpreter.
"""

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

ENGINE_LIBRARIES = ("torch", "vllm", "ray")
LIGHT_ROOMS = ("server", "control", "routing", "planner", "sim", "observe", "cli.main")

LOADED = """
import sys
from importlib import import_module
for name in sys.argv[2].split(","):
    import_module(name)
print(",".join(library for library in sys.argv[1].split(",") if library in sys.modules))
"""


def modules(room: str) -> list[str]:
    """Return every module of a room."""
    package = import_module(f"pdserve.{room}")
    inside = pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}.")
    return [package.__name__, *(module.name for module in inside)]


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_room_loads_no_engine_library(room: str) -> None:
    """Importing everything in the room leaves torch, vLLM and Ray unloaded; so does starting the command line."""
    command = [sys.executable, "-c", LOADED, ",".join(ENGINE_LIBRARIES), ",".join(modules(room))]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == ""


def test_the_probe_sees_a_loaded_library() -> None:
    """The probe that the test above relies on reports what is loaded."""
    loaded = subprocess.run([sys.executable, "-c", LOADED, "json,torch", "json"], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "json"
