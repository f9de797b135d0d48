"""Sizes, docstrings and names of the package's own code."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "pdserve").rglob("*.py"))
MODULES = [*PACKAGE, *sorted((ROOT / "requirements").rglob("*.py"))]

MAX_MODULE_LINES = 400
MAX_MEDIAN_MODULE_LINES = 150
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "manager", "helper", "helpers", "common", "misc"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    """Return the name that a failure shows."""
    return str(path.relative_to(ROOT))


def parsed(path: Path) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[Function]:
    """Yield every function and method of a module."""
    return (node for node in ast.walk(parsed(path)) if isinstance(node, Function))


def lines(node: Function) -> int:
    """Return how many lines a function takes, without its decorators."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_is_small_enough_to_hold_in_mind(path: Path) -> None:
    """No module beyond 400 lines, no function beyond 60."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_MODULE_LINES
    assert {node.name: lines(node) for node in functions(path) if lines(node) > MAX_FUNCTION_LINES} == {}


def test_modules_are_small_as_a_rule() -> None:
    """Half of the modules are at most 150 lines long."""
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE if path.name != "__init__.py"]
    assert statistics.median(sizes) <= MAX_MEDIAN_MODULE_LINES


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_says_what_it_owns(path: Path) -> None:
    """Every module opens with a docstring."""
    assert ast.get_docstring(parsed(path))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_name_says_something(path: Path) -> None:
    """No room and no module is named after being useful."""
    assert not VAGUE_NAMES & {*path.relative_to(ROOT).with_suffix("").parts}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=relative)
def test_every_test_says_what_it_shows(path: Path) -> None:
    """Each test has a docstring."""
    assert [node.name for node in functions(path) if node.name.startswith("test_") and not ast.get_docstring(node)] == []
