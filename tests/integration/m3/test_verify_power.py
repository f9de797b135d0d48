"""`pdserve verify` fails when it must: engines whose KV is damaged on its way, and a comparison whose arms share a cache."""

import secrets

import pytest
from engine_requests import body_of, complete, computed, text_of, through_both

from pdserve.cli import verify as command
from pdserve.models.m3_tiny import BLOCK_TOKENS
from pdserve.types import CloseReason

from .caches import INDEX_LAYERS, LAYERS, MAIN_LAYERS, letters
from .conftest import Engines, Inject, Verify
from .kv_plugin import Fault

pytestmark = pytest.mark.engine

LENGTH = 5 * BLOCK_TOKENS + 1
PAIRS = [(1, 1), pytest.param(4, 2, marks=pytest.mark.long)]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("place", ["gather", "scatter"])
@pytest.mark.parametrize(
    ("layer", "block", "head"),
    [(INDEX_LAYERS[0], 2, 0), (INDEX_LAYERS[1], 5, 0), (MAIN_LAYERS[0], 0, 0), (MAIN_LAYERS[4], 3, 0)],
    ids=["index page", "last index page", "head of a dense layer", "head of a sparse layer"],
)
def test_one_damaged_run_is_found_and_its_layer_named(
    m3_engines: Engines, verify_pair: Verify, inject: Inject, prefill: int, decode: int, place: str, layer: str, block: int, head: int
) -> None:
    """One index page, or one block of one head of one main layer: nothing else differs, and the exit code is 1."""
    inject(Fault(place, layer, block, head))
    answer = verify_pair(m3_engines.pair(prefill, decode), LENGTH)
    assert (answer.code, answer.verdict["ok"]) == (1, False)
    (case,) = answer.verdict["cases"]
    assert (case["layers_different"], case["layers_equal"], case["layers_total"]) == ([layer], LAYERS - 1, LAYERS)
    assert f"layers differ: {layer}" in case["faults"]


def test_verify_is_content_again_once_the_fault_is_gone(m3_engines: Engines, verify_pair: Verify) -> None:
    """Damaged blocks are in no cache that a later request could meet."""
    assert verify_pair(m3_engines.pair(1, 1), LENGTH).code == 0


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_bytes_that_change_on_the_wire_are_refused_by_serving_and_unproven(
    m3_engines: Engines, verify_pair: Verify, inject: Inject, prefill: int, decode: int
) -> None:
    """Decode computes the prompt itself and answers right; `verify` says why nothing was proven."""
    pair = m3_engines.pair(prefill, decode)
    inject(Fault("wire"))
    prompt, before = letters(LENGTH, seed=31 + prefill), computed(pair.decode)
    answer, sent, received = through_both(pair, "/v1/completions", body_of(prompt, stream=False, salt=secrets.token_hex(8)))
    external, local = (after - start for after, start in zip(computed(pair.decode), before, strict=True))
    assert received.outcome is CloseReason.DIGEST_MISMATCH
    assert sent.outcome is not CloseReason.RELEASED
    assert (external, local) == (0, LENGTH)
    alone = complete(pair.decode, "/v1/completions", body_of(prompt, stream=False, salt=secrets.token_hex(8)))
    assert text_of(answer) == text_of(alone)

    answer_of_verify = verify_pair(pair, LENGTH)
    (case,) = answer_of_verify.verdict["cases"]
    assert (answer_of_verify.code, case["path"], case["tokens_equal"]) == (1, "unproven: digest_mismatch", True)


def test_arms_that_share_a_salt_prove_nothing(m3_engines: Engines, verify_pair: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second arm would answer from the blocks of the first: equal tokens, and still a failure that says why."""
    monkeypatch.setattr(command, "new_salts", lambda: (salt := secrets.token_hex(8), salt))
    answer = verify_pair(m3_engines.pair(1, 1), LENGTH)
    (case,) = answer.verdict["cases"]
    assert (answer.code, case["tokens_equal"]) == (1, True)
    assert case["faults"] == [f"unproven: the aggregated arm took {LENGTH - 1} tokens from the cache"]


def test_cases_that_share_a_salt_prove_nothing(m3_engines: Engines, verify_pair: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that decode holds from an earlier case does not move again."""
    arms = secrets.token_hex(8), secrets.token_hex(8)
    monkeypatch.setattr(command, "new_salts", lambda: arms)
    answer = verify_pair(m3_engines.pair(1, 2), LENGTH, LENGTH)
    first, second = answer.verdict["cases"]
    assert answer.code == 1
    assert first["faults"] == []
    assert second["path"].startswith("unproven: ")
