"""Files by which a deployment's processes talk."""

from pathlib import Path

import pytest

from pdserve.fleet.endpoint import Endpoint, publish, read_endpoint
from pdserve.fleet.files import read_json, write_json


def test_written_file_is_private_and_leaves_no_part(tmp_path: Path) -> None:
    """Only the owner reads it, and the partial file is gone."""
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "3"])
def test_missing_or_broken_file_reads_as_none(tmp_path: Path, content: str | None) -> None:
    """A reader gets an object or nothing."""
    path = tmp_path / "value.json"
    if content is not None:
        path.write_text(content)
    assert read_json(path) is None


def test_endpoint_of_another_incarnation_does_not_count(tmp_path: Path) -> None:
    """A port that an earlier start published is not this one's."""
    path = tmp_path / "endpoint.json"
    endpoint = Endpoint("aa", "127.0.0.1", 4321, 7)
    publish(path, endpoint)
    assert read_endpoint(path, "aa") == endpoint
    assert read_endpoint(path, "bb") is None
