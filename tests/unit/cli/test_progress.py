"""What a person sees while a deployment comes up."""

import io
import json
import shlex
from collections.abc import Mapping

from rich.console import Console

from pdserve.cli.progress import LiveProgress, PlainProgress, curl_line, progress, summary
from pdserve.control.state import DeploymentReport, Phase, RouterReport, WorkerReport
from pdserve.types import Role, WorkerState

S = WorkerState


def report(entered_s: Mapping[WorkerState, float], detail: str = "", phase: Phase = Phase.STARTING) -> DeploymentReport:
    worker = WorkerReport("decode-0", Role.DECODE, list(entered_s)[-1], "ab", 7, "http://127.0.0.1:1", detail, entered_s)
    return DeploymentReport("default", "tiny", phase, 1, 0.0, 12.0, "", RouterReport(2, "http://127.0.0.1:8000", 1), (worker,))


LOADING = {S.PENDING: 0.0, S.PLACED: 2.5, S.LOADING: 3.0}
READY = {**LOADING, S.WARMING: 33.0, S.READY: 34.5}


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)


def text(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_view_fits_where_it_is_shown() -> None:
    """A table in place for a terminal, lines for everything else."""
    assert isinstance(progress(console(terminal=True)), LiveProgress)
    assert isinstance(progress(console(terminal=False)), PlainProgress)


def test_plain_view_prints_changes_only() -> None:
    """A report that says nothing new prints nothing; a failure brings its reason."""
    shown = console(terminal=False)
    with PlainProgress(shown) as view:
        view.show(report(LOADING))
        view.show(report(LOADING, "still at it"))
        view.show(report({**LOADING, S.FAILED: 9.0}, "its engine ended [signal 9]"))
    assert text(shown) == "    3.0 s  decode-0     loading\n    9.0 s  decode-0     failed  its engine ended [signal 9]\n"


def test_live_view_shows_how_long_each_step_took() -> None:
    """Steps that are over show their length, ready shows when it was reached."""
    shown = console(terminal=True)
    with LiveProgress(shown) as view:
        view.show(report(READY))
    row = next(line for line in text(shown).splitlines() if "decode-0" in line)
    assert [cell.strip() for cell in row.split("  ") if cell.strip()] == ["decode-0", "0.5 s", "30.0 s", "1.5 s", "34.5 s"]


def test_summary_lists_the_workers() -> None:
    """Who serves, where, and since when."""
    shown = console(terminal=False)
    shown.print(summary(report(READY, phase=Phase.READY)))
    assert "default serves tiny" in text(shown)
    assert all(word in text(shown) for word in ("decode-0", "decode", "ready", "http://127.0.0.1:1", "34.5 s"))


def test_curl_line_is_a_valid_request() -> None:
    """A shell splits it into one URL and one JSON body that names the served model."""
    words = shlex.split(curl_line(report(READY)))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["messages"][0]["role"]) == ("tiny", "user")


def test_curl_line_says_where_the_key_goes() -> None:
    """Where one is wanted, and nowhere else."""
    words = shlex.split(curl_line(report(READY), wants_key=True))
    assert words[words.index("authorization: Bearer KEY") - 1] == "-H"
    assert "authorization" not in curl_line(report(READY))
