"""What a process writes: one JSON object per line, whoever logs, and nothing private in it."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from pdserve.errors import UpstreamError
from pdserve.observe import log
from pdserve.observe.log import PRIVATE_FIELDS


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The log file of a configured process; afterwards logging is as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    log.configure("router", tmp_path / "router.log")
    yield tmp_path / "router.log"
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    structlog.reset_defaults()
    assert root.handlers == handlers


def lines(path: Path) -> list[dict[str, Any]]:
    """Return every line of a file, parsed."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_says_when_how_bad_what_and_who(path: Path) -> None:
    """Values that JSON has no form for are written as text."""
    structlog.get_logger().info("request", status=200, where=Path("x"), note="two\nlines")
    (line,) = lines(path)
    assert line.pop("time").endswith("Z")
    assert line == {"level": "info", "event": "request", "process": "router", "status": 200, "where": "x", "note": "two\nlines"}


@pytest.mark.parametrize("name", sorted(PRIVATE_FIELDS))
def test_a_private_field_is_dropped_whoever_passes_it(path: Path, name: str) -> None:
    """Neither a call nor a bound logger can write it; the rest of the line stays."""
    structlog.get_logger().bind(**{name: "diary"}).info("request", kept=1)
    structlog.get_logger().warning("request", kept=1, **{name: "diary"})
    assert [line["kept"] for line in lines(path)] == [1, 1]
    assert b"diary" not in path.read_bytes()


def test_the_fields_that_could_hold_a_prompt_an_answer_or_a_key_are_private() -> None:
    """The names under which requests carry them."""
    assert {"prompt", "messages", "content", "text", "body", "secret", "api_key", "authorization"} <= PRIVATE_FIELDS


def test_an_engines_words_are_not_in_a_traceback(path: Path) -> None:
    """An engine's error may quote the prompt; the line names worker and status only."""
    error = UpstreamError("d0", 400, b"diary")
    try:
        raise error
    except UpstreamError:
        structlog.get_logger().exception("request failed")
    (line,) = lines(path)
    assert "worker d0 answered 400" in line["exception"]
    assert b"diary" not in path.read_bytes()


def test_lines_of_libraries_come_in_the_same_form(path: Path) -> None:
    """Warnings and worse, with the library's name and its traceback; chatter stays out."""
    library = logging.getLogger("some.library")
    library.info("chatter")
    library.warning("slow: %d s", 3)
    try:
        raise ValueError("broken")
    except ValueError:
        library.exception("gave up")
    slow, gave_up = lines(path)
    assert (slow["level"], slow["event"], slow["logger"], slow["process"]) == ("warning", "slow: 3 s", "some.library", "router")
    assert gave_up["level"] == "error" and "ValueError: broken" in gave_up["exception"]


@pytest.mark.parametrize(("number", "level"), [(35, "warning"), (45, "error"), (99, "critical")])
def test_a_librarys_own_level_counts_as_the_one_below(path: Path, number: int, level: str) -> None:
    """A level without a name of ours is no error of the one who logs."""
    logging.getLogger("some.library").log(number, "odd")
    assert [line["level"] for line in lines(path)] == [level]


def test_a_bad_line_of_a_library_does_not_raise_into_it(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard library's own report names it, and the next line is written."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler for handler in root.handlers if type(handler).__module__ == log.__name__])
    library = logging.getLogger("some.library")
    library.warning("%d", "not a number")
    library.warning("next")
    assert [line["event"] for line in lines(path)] == ["next"]
    assert "not a number" in capsys.readouterr().err


def test_a_second_call_replaces_the_first(path: Path, tmp_path: Path) -> None:
    """Lines go to the new file once each, under the new name, and the old file is closed."""
    log.configure("worker", tmp_path / "worker.log")
    structlog.get_logger().info("request")
    logging.getLogger("some.library").warning("slow")
    assert lines(path) == []
    assert [(line["process"], line["event"]) for line in lines(tmp_path / "worker.log")] == [("worker", "request"), ("worker", "slow")]


def test_a_file_is_appended_to(path: Path) -> None:
    """A restart keeps what was logged."""
    structlog.get_logger().info("before")
    log.configure("router", path)
    structlog.get_logger().info("after")
    assert [line["event"] for line in lines(path)] == ["before", "after"]


def test_without_a_file_lines_go_to_stderr(path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """And stderr stays open after the next call."""
    log.configure("router", None)
    structlog.get_logger().info("request")
    assert orjson.loads(capfdbinary.readouterr().err)["event"] == "request"
    log.configure("router", path)
    log.configure("router", None)
    structlog.get_logger().info("again")
    assert orjson.loads(capfdbinary.readouterr().err)["event"] == "again"
