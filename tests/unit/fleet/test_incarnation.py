"""The incarnation record and the clean-up that reads it."""

import mmap
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from pdserve.fleet.files import write_json
from pdserve.fleet.incarnation import Cleaned, IncarnationRecord, clean_up, new_scratch, read_record
from pdserve.fleet.processes import current
from pdserve.fleet.shm import entries

HERE = socket.gethostname()


def record(host: str, scratch: Path, shared_memory: tuple[str, ...]) -> IncarnationRecord:
    return IncarnationRecord(
        host=host,
        incarnation=secrets.token_hex(8),
        processes=(),
        scratch=str(scratch),
        shared_memory=shared_memory,
        shared_memory_before=(),
    )


@pytest.fixture
def segment() -> Iterator[Path]:
    """A new name in /dev/shm; gone afterwards."""
    path = Path(f"/dev/shm/pdtest_{secrets.token_hex(6)}")
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def test_record_survives_the_file(tmp_path: Path) -> None:
    """What is written is what is read."""
    written = IncarnationRecord("here", "ab", (current(),), "/tmp/x", ("psm_a",), ("psm_b",))
    write_json(tmp_path / "record", asdict(written))
    assert read_record(tmp_path / "record") == written


@pytest.mark.parametrize("content", ["{}", '{"host": "a", "incarnation": "b", "processes": 3}', "no json"])
def test_broken_record_cleans_nothing(tmp_path: Path, content: str) -> None:
    """A record that cannot be read names nothing, so nothing is touched."""
    path = tmp_path / "record"
    path.write_text(content)
    assert clean_up(path, 0) == Cleaned()


def test_record_of_another_host_is_left_alone(tmp_path: Path, segment: Path) -> None:
    """A state folder on shared storage names another node's pids and memory."""
    path = tmp_path / "record"
    write_json(path, asdict(record("another-host", tmp_path, (segment.name,))))
    assert clean_up(path, 0) == Cleaned()
    assert path.exists()
    assert segment.name in entries()


def test_clean_up_removes_memory_scratch_and_record(tmp_path: Path, segment: Path) -> None:
    """Without living processes, what the record names is given back, once."""
    path, scratch = tmp_path / "record", new_scratch("abcdef0123")
    (scratch / "socket").touch()
    write_json(path, asdict(record(HERE, scratch, (segment.name,))))
    assert clean_up(path, 0) == Cleaned((), (segment.name,), str(scratch), ())
    assert not scratch.exists()
    assert not path.exists()
    assert clean_up(path, 0) == Cleaned()


def test_memory_that_another_process_holds_stays(tmp_path: Path, segment: Path) -> None:
    """A peer that mapped the same segment keeps it when this worker is cleaned."""
    path = tmp_path / "record"
    write_json(path, asdict(record(HERE, tmp_path / "none", (segment.name,))))
    with segment.open("rb+") as file, mmap.mmap(file.fileno(), 4096):
        assert clean_up(path, 0).shared_memory == ()
    assert segment.name in entries()


def test_folder_that_is_no_scratch_is_not_removed(tmp_path: Path) -> None:
    """A record cannot make the clean-up delete a folder of another name."""
    precious = tmp_path / "precious"
    precious.mkdir()
    write_json(tmp_path / "record", asdict(record(HERE, precious, ())))
    clean_up(tmp_path / "record", 0)
    assert precious.exists()


def test_scratch_path_is_short_under_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix sockets below it must fit, however long TMPDIR is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 10)))
    scratch = new_scratch("abcdef0123")
    scratch.rmdir()
    assert len(str(scratch)) <= 32
