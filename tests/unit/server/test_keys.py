"""Keys files: what they say, what is wrong with them, and that they are followed."""

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.server.key_file import KeyFile
from pdserve.server.keys import KeyRing, Scope, new_key, parse_keys

DIGEST = hashlib.sha256(b"secret-key").hexdigest()
ALL_DIGITS = "1234567890" * 6 + "1234"


def test_a_new_key_is_found_by_the_line_it_comes_with() -> None:
    """The line is one entry of a YAML list; the key is in it by digest only."""
    key, line = new_key("alice", [Scope.INFERENCE, Scope.METRICS], 60, 1000, datetime(2030, 1, 1, tzinfo=UTC))
    assert key not in line
    ring = parse_keys(f"# keys\n{line}\n{new_key('bob')[1]}\n")
    found = ring.find(key.encode())
    assert found is not None
    assert (found.name, found.scopes, found.limits) == ("alice", {Scope.INFERENCE, Scope.METRICS}, (60, 1000))
    assert found.expires == datetime(2030, 1, 1, tzinfo=UTC)
    assert ring.find(key.encode() + b"x") is None


def test_json_lines_say_the_same_as_yaml() -> None:
    """One object a line, comments and empty lines between."""
    lines = [
        json.dumps({"name": "a", "sha256": DIGEST}),
        "# b is new",
        "",
        json.dumps({"name": "b", "sha256": ALL_DIGITS, "expires": None}),
    ]
    ring = parse_keys("\n".join(lines))
    assert [(key.name, key.sha256) for key in ring.keys] == [("a", DIGEST), ("b", ALL_DIGITS)]
    assert parse_keys(f"- {lines[0]}\n- {lines[3]}").keys == ring.keys


def test_values_are_read_as_what_they_are() -> None:
    """A digest of digits only is no number, a time is a time, null is nothing; scopes are inference by default."""
    (key,) = parse_keys(f"- {{name: a, sha256: {ALL_DIGITS}, requests_per_minute: null, expires: 2027-01-01T00:00:00Z}}").keys
    assert (key.sha256, key.requests_per_minute, key.scopes) == (ALL_DIGITS, None, {Scope.INFERENCE})
    assert key.is_expired(datetime(2027, 1, 1, tzinfo=UTC).timestamp())
    assert not key.is_expired(datetime(2026, 12, 31, tzinfo=UTC).timestamp())


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n", "[]"])
def test_a_file_without_keys_opens_nothing(text: str) -> None:
    """It is valid: nobody gets in."""
    assert parse_keys(text).find(b"") is None


GOOD = f"name: a, sha256: {DIGEST}"


@pytest.mark.parametrize(
    ("text", "value", "fix"),
    [
        ("- {name: a, sha256: CANARY}", "entry 1, sha256", "64 hex digits"),
        (f"- {{{GOOD}}}\n- {{name: 'a CANARY', sha256: {ALL_DIGITS}}}", "entry 2, name", "letters"),
        (f"- {{sha256: {DIGEST}}}", "entry 1, name", "letters"),
        (f"- {{{GOOD}, CANARY: 1}}", "entry 1", "no other fields"),
        (f"- {{{GOOD}, scopes: [CANARY]}}", "entry 1, scopes", "inference"),
        (f"- {{{GOOD}, scopes: CANARY}}", "entry 1, scopes", "inference"),
        (f"- {{{GOOD}, requests_per_minute: 0}}", "entry 1, requests_per_minute", "above 0"),
        (f"- {{{GOOD}, tokens_per_minute: CANARY}}", "entry 1, tokens_per_minute", "above 0"),
        (f"- {{{GOOD}, expires: 2027-01-01}}", "entry 1, expires", "zone"),
        (f"- {{{GOOD}, expires: 2027-01-01T00:00:00}}", "entry 1, expires", "zone"),
        ("- CANARY", "entry 1", "object"),
        ("CANARY", "the file", "list"),
        ("CANARY: 1", "the file", "list"),
        ("- {CANARY", "the file", "syntax"),
        ('{"name": "CANARY"', "the file", "syntax"),
        (f"- {{{GOOD}}}\n- {{name: b, sha256: {DIGEST.upper()}}}", "entry 2", "same key as entry 1"),
        (f"- {{{GOOD}}}\n- {{name: a, sha256: {ALL_DIGITS}, requests_per_minute: 5}}", "entry 2", "share their limits"),
    ],
)
def test_a_wrong_entry_is_named_and_not_quoted(text: str, value: str, fix: str) -> None:
    """Entry, field and fix; never what is there, since that may be a key someone put in the wrong place."""
    with pytest.raises(ConfigError) as raised:
        parse_keys(text)
    assert (raised.value.field, raised.value.value) == ("router.keys_file", value)
    assert fix in raised.value.fix
    assert "CANARY" not in str(raised.value)


@pytest.mark.parametrize(("name", "limit"), [("", None), ("a b", None), ("a" * 65, None), ("a", 0)])
def test_no_key_is_made_that_no_file_may_hold(name: str, limit: int | None) -> None:
    """The mistake is told before the key is handed out."""
    with pytest.raises(ConfigError):
        new_key(name, requests_per_minute=limit)


def test_two_keys_of_one_name_are_one_tenant() -> None:
    """The old one and the new one both open, until the old one is taken out."""
    (old, old_line), (new, new_line) = new_key("a"), new_key("a")
    ring = parse_keys(f"{old_line}\n{new_line}")
    found = [ring.find(key.encode()) for key in (old, new)]
    assert [key and key.name for key in found] == ["a", "a"]


class Followed:
    """A keys file and what came of following it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loaded: list[KeyRing] = []
        self.refused = 0
        path.write_text("")
        self.file = KeyFile(path)
        self.first = self.file.load()

    async def poll(self) -> None:
        def refused() -> None:
            self.refused += 1

        await self.file.poll(self.loaded.append, refused)

    @property
    def names(self) -> list[list[str]]:
        return [[key.name for key in ring.keys] for ring in self.loaded]


async def test_a_change_is_taken_over_once(tmp_path: Path) -> None:
    """Rewritten in place or replaced by another file, with the same length or not; nothing happens without a change."""
    followed = Followed(tmp_path / "keys.yaml")
    await followed.poll()
    assert followed.loaded == []
    followed.path.write_text(f"- {{name: a, sha256: {DIGEST}}}")
    await followed.poll()
    await followed.poll()
    other = tmp_path / "new.yaml"
    other.write_text(f"- {{name: b, sha256: {DIGEST}}}")
    other.replace(followed.path)
    await followed.poll()
    assert followed.names == [["a"], ["b"]]
    assert followed.refused == 0


async def test_a_link_that_is_turned_is_a_change(tmp_path: Path) -> None:
    """Mounted secrets change so."""
    for name in "ab":
        (tmp_path / name).write_text(f"- {{name: {name}, sha256: {DIGEST}}}")
    link = tmp_path / "keys.yaml"
    link.symlink_to(tmp_path / "a")
    file, loaded = KeyFile(link), list[KeyRing]()
    assert [key.name for key in file.load().keys] == ["a"]
    link.unlink()
    link.symlink_to(tmp_path / "b")
    await file.poll(loaded.append, lambda: None)
    assert [key.name for ring in loaded for key in ring.keys] == ["b"]


async def test_a_bad_file_is_told_of_once_and_the_next_good_one_is_taken(tmp_path: Path) -> None:
    """Broken, gone, not text: whatever is wrong leaves the keys alone."""
    followed = Followed(tmp_path / "keys.yaml")
    followed.path.write_text("- {name: ")
    for _ in range(3):
        await followed.poll()
    assert (followed.refused, followed.loaded) == (1, [])
    followed.path.unlink()
    for _ in range(3):
        await followed.poll()
    assert (followed.refused, followed.loaded) == (2, [])
    followed.path.write_bytes(b"\xff")
    await followed.poll()
    assert (followed.refused, followed.loaded) == (3, [])
    followed.path.write_text(f"- {{name: a, sha256: {DIGEST}}}")
    await followed.poll()
    assert followed.names == [["a"]]


async def test_following_ends_when_told(tmp_path: Path) -> None:
    """Cancellation leaves no task."""
    followed = Followed(tmp_path / "keys.yaml")
    watch = asyncio.create_task(followed.file.watch(followed.loaded.append, lambda: None))
    await asyncio.sleep(0)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("content", [None, b"- {", b"\xff"])
def test_a_router_does_not_start_on_a_bad_file(tmp_path: Path, content: bytes | None) -> None:
    """The first load names the setting."""
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        KeyFile(path).load()
    assert raised.value.field == "router.keys_file"
