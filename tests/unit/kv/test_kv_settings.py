"""What an engine reads at its start: the settings that the configuration writes, and a secret that never shows."""

import secrets
from typing import Any

import pytest

from pdserve.config import KvConfig
from pdserve.errors import ConfigError
from pdserve.kv.settings import SECRET_VARIABLE, KvSettings, read_secret, read_settings

NEEDED: dict[str, Any] = {"worker_id": "prefill-0", "incarnation": "a1"}


def test_every_setting_of_the_configuration_is_understood() -> None:
    """By the same name and with the same default, so that a worker without settings is as documented."""
    written = KvConfig().model_dump()
    assert read_settings(NEEDED | written) == read_settings(NEEDED) == KvSettings("prefill-0", "a1")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"slot_byte": 1}, "slot_byte"),
        ({"slot_bytes": "4096"}, "slot_bytes"),
        ({"lease_s": None}, "lease_s"),
        ({"worker_id": 3}, "worker_id"),
    ],
)
def test_setting_that_is_unknown_or_of_another_type_is_refused(extra: dict[str, Any], named: str) -> None:
    """At the start of the engine, with its name."""
    with pytest.raises(ConfigError) as refusal:
        read_settings(NEEDED | extra)
    assert named in refusal.value.fix


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_worker_must_know_who_it_is(name: str) -> None:
    """Id and incarnation have no default."""
    with pytest.raises(ConfigError) as refusal:
        read_settings({key: value for key, value in NEEDED.items() if key != name})
    assert name in refusal.value.fix


@pytest.mark.parametrize(("arena_bytes", "slots"), [(4096, 1), (8191, 1), (8192, 2), (1, 1)])
def test_arena_holds_whole_slots_and_at_least_one(arena_bytes: int, slots: int) -> None:
    """A remainder is not used; an arena smaller than a slot still has one."""
    assert KvSettings("w", "i", slot_bytes=4096, arena_bytes=arena_bytes).num_slots == slots


def test_secret_is_read_from_the_environment() -> None:
    """As bytes; sixteen are enough."""
    secret = secrets.token_bytes(16)
    assert read_secret({SECRET_VARIABLE: secret.hex()}) == secret


@pytest.mark.parametrize("text", [None, "", "ab" * 15, "zz" * 16, "a" * 33], ids=["missing", "empty", "short", "no hex", "half a byte"])
def test_secret_that_will_not_do_is_refused_without_showing_it(text: str | None) -> None:
    """The variable is named, its value is not."""
    with pytest.raises(ConfigError) as refusal:
        read_secret({} if text is None else {SECRET_VARIABLE: text})
    assert refusal.value.field == SECRET_VARIABLE
    assert not text or text not in str(refusal.value)
