"""The locks say what is installed: nothing missing, nothing of another version, and nothing that was left out on purpose."""

import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK: dict[str, Any] = runpy.run_path(str(ROOT / "requirements" / "lock.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*extras: str) -> list[Requirement]:
    """Return the project's own requirements, those of `extras` included."""
    optional = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra]))]


@pytest.mark.parametrize("requirement", requirements("cpu", "dev"), ids=str)
def test_lock_satisfies_the_project(requirement: Requirement) -> None:
    """Each direct dependency is locked in a version that pyproject allows."""
    assert LOCK["locked"]()[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("requirement", requirements("cpu"), ids=str)
def test_running_needs_no_development_package(requirement: Requirement) -> None:
    """What `make up` installs holds each dependency of the package and of the `cpu` extra."""
    assert canonicalize_name(requirement.name) in LOCK["locked"]("cpu.lock", "torch-cpu.lock")


def test_installed_versions_are_the_locked_ones() -> None:
    """This environment is the one that the locks describe."""
    expected = LOCK["locked"]()
    assert {name: version(name) for name in expected} == expected


def test_every_lock_line_but_torch_has_a_hash() -> None:
    """pip verifies each file it installs; torch is the documented exception."""
    lines = [line for path in (ROOT / "requirements").glob("*.lock") for line in path.read_text(encoding="utf-8").splitlines()]
    unhashed = [line for line in lines if not line.startswith("#") and not re.search(r" --hash=sha256:[0-9a-f]{64}$", line)]
    assert [line.partition("==")[0] for line in unhashed] == [LOCK["TORCH"]]


@pytest.mark.parametrize("module", ["torchvision", "torchaudio", "torchcodec", "triton", "llama_cpp", "fastapi_cloud_cli"])
def test_omitted_package_is_absent(module: str) -> None:
    """Packages that were left out cannot be imported, whatever depends on them."""
    assert importlib.util.find_spec(module) is None


def test_only_omitted_packages_are_missing() -> None:
    """pip's own check complains about nothing else than what was left out on purpose."""
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    complaints = [line for line in check.stdout.splitlines() if line != "No broken requirements found."]
    assert complaints
    assert {line.split(" requires ")[1].partition(",")[0] for line in complaints} <= LOCK["OMITTED"].keys()


def test_vllm_imports_for_cpu() -> None:
    """vLLM starts up without the omitted packages and sees itself as its CPU build."""
    code = "from vllm import LLM; from vllm.platforms import current_platform; print(current_platform.is_cpu())"
    imported = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert imported.stdout.splitlines()[-1:] == ["True"], imported.stderr
