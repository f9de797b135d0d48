"""What `pdserve verify` says and how it exits, over workers whose answers and records a test makes up."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verify_agents import SECRET, Agent, good_records, serving
from verify_command import NAME, Answer, Member, publish, verify

from pdserve.cli import verify as command
from pdserve.cli.main import run
from pdserve.types import CloseReason, RunDigest

A, B = "a" * 16, "b" * 16
DIGESTS = (RunDigest(0, "layer.0", 0, 0, A), RunDigest(0, "layer.0", 1, 0, B), RunDigest(0, "index.0", 0, 0, A))
SENT, RECEIVED = good_records(DIGESTS)

Deploy = Callable[..., tuple[Agent, Agent]]


@pytest.fixture
def deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deploy]:
    """A deployment of one prefill and one decode worker; what differs from good ones is given."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    with ExitStack() as stack:

        def begin(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> tuple[Agent, Agent]:
            agents = (
                Agent(**{"worker_id": "p", "record": SENT} | (prefill or {})),
                Agent(**{"worker_id": "d", "record": RECEIVED} | (decode or {})),
            )
            first, second = stack.enter_context(serving(*agents))
            publish(tmp_path, "m", SECRET, [first], [second])
            return agents

        yield begin


def test_equal_runs_and_outputs_are_verified(deploy: Deploy, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, and the JSON that scripts read."""
    prefill, decode = deploy()
    answer = verify(capsys, "--lengths", "5,33")
    assert (answer.code, answer.errors) == (0, "")
    assert answer.verdict == {
        "ok": True,
        "cases": [
            {
                "prefill_worker": "p",
                "decode_worker": "d",
                "prompt_tokens": length,
                "tokens_equal": True,
                "layers_equal": 2,
                "layers_total": 2,
                "layers_different": [],
                "path": "disaggregated",
                "faults": [],
            }
            for length in (5, 33)
        ],
        "transfer": {"sealed": 4, "acks": 4, "bytes": 2000},
    }
    salts = [request["cache_salt"] for request in decode.requests]
    assert len(set(salts)) == 4
    assert [request["cache_salt"] for request in prefill.requests] == salts[::2]
    assert all(request["kv_transfer_params"]["proof"] for request in prefill.requests)
    assert [request["max_tokens"] for request in prefill.requests] == [1, 1]


def changed(**changes: object) -> dict[str, Any]:
    return {"record": replace(RECEIVED, **changes)}  # type: ignore[arg-type]


OTHER_INDEX = (*DIGESTS[:2], DIGESTS[2]._replace(xxh3=B))
OTHER_HEAD = (DIGESTS[0], DIGESTS[1]._replace(xxh3=A), DIGESTS[2])


@pytest.mark.parametrize(
    ("prefill", "decode", "faults"),
    [
        ({}, changed(digests=OTHER_INDEX), ["layers differ: index.0"]),
        ({}, changed(digests=OTHER_HEAD), ["layers differ: layer.0"]),
        ({}, changed(digests=DIGESTS[1:]), ["layers differ: layer.0"]),
        ({}, changed(digests=DIGESTS[:2]), ["layers differ: index.0"]),
        ({"record": replace(SENT, digests=())}, changed(digests=()), ["no digests: the engines recorded none"]),
        ({}, changed(outcome=CloseReason.DIGEST_MISMATCH), ["unproven: digest_mismatch"]),
        ({"record": replace(SENT, outcome=CloseReason.EXPIRED)}, {}, ["unproven: sender: expired"]),
        ({}, changed(tokens_moved=0), ["unproven: 0 of 40 tokens moved, of 40 prefilled"]),
        ({}, changed(layers_sealed=1), ["unproven: 1 of 2 layers sealed"]),
        ({"record": replace(SENT, acks=1)}, {}, ["unproven: 1 of 2 acknowledgements"]),
        ({}, {"tokens_alone": [7, 8, 1]}, ["output differs: [7, 8, 9] with moved KV, [7, 8, 1] alone"]),
        ({}, {"cached_alone": 32}, ["unproven: the aggregated arm took 32 tokens from the cache"]),
        (
            {},
            changed(digests=OTHER_INDEX) | {"tokens_alone": [1]},
            ["output differs: [7, 8, 9] with moved KV, [1] alone", "layers differ: index.0"],
        ),
    ],
    ids=[
        *(
            "index page",
            "head",
            "run missing",
            "layer missing",
            "no digests",
            "refused on the wire",
            "not released",
            "not moved",
            "a layer short",
            "an ack short",
        ),
        *("output", "shared cache", "two faults"),
    ],
)
def test_whatever_is_not_proven_or_not_equal_fails_and_is_named(
    deploy: Deploy, capsys: pytest.CaptureFixture[str], prefill: dict[str, Any], decode: dict[str, Any], faults: list[str]
) -> None:
    """Exit 1; the JSON says what, and so does the text."""
    deploy(prefill, decode)
    answer = verify(capsys, "--lengths", "40")
    assert (answer.code, answer.verdict["ok"], answer.verdict["cases"][0]["faults"]) == (1, False, faults)
    assert run(["verify", "--name", NAME, "--lengths", "40"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"p to d, 40 tokens: {fault}" in text for fault in faults)
    assert "NOT verified" in text


def test_one_bad_case_among_good_ones_fails_the_whole(deploy: Deploy, capsys: pytest.CaptureFixture[str]) -> None:
    """The good ones stay good in the report."""
    _, decode = deploy()
    answers = iter([decode.tokens] * 3 + [(1, 2)])
    complete = decode.complete
    decode.complete = lambda body: complete(body) | {"choices": [{"token_ids": list(next(answers))}]}  # type: ignore[method-assign]
    answer = verify(capsys, "--lengths", "8,9")
    assert answer.code == 1
    assert [bool(case["faults"]) for case in answer.verdict["cases"]] == [False, True]


def test_lengths_lie_around_blocks_and_choices_of_blocks_as_far_as_there_is_room(
    deploy: Deploy, capsys: pytest.CaptureFixture[str]
) -> None:
    """One block, and the 4 and 16 that M3's models choose; half of the cache at most, and room for the output."""
    _, decode = deploy()
    lengths = lambda answer: [case["prompt_tokens"] for case in answer.verdict["cases"]]  # noqa: E731
    assert lengths(verify(capsys)) == [1, 15, 16, 17, 64, 65, 80, 81, 256, 257, 272, 273]
    decode.max_model_len = 88
    assert lengths(verify(capsys)) == [1, 15, 16, 17, 64, 65, 80]
    decode.max_model_len, decode.blocks_total = 1000, 9
    assert lengths(verify(capsys)) == [1, 15, 16, 17, 64]


def test_every_prefill_is_tried_with_every_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deployment of two and two has four pairs."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    agents = [Agent("p0", SENT), Agent("p1", SENT), Agent("d0", RECEIVED), Agent("d1", RECEIVED)]
    with serving(*agents) as members:
        publish(tmp_path, "m", SECRET, members[:2], members[2:])
        answer = verify(capsys, "--lengths", "3")
    pairs = [(case["prefill_worker"], case["decode_worker"]) for case in answer.verdict["cases"]]
    assert (answer.code, pairs) == (0, [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")])


@pytest.mark.parametrize("who", [0, 1])
def test_worker_that_fails_is_named_in_one_line(deploy: Deploy, capsys: pytest.CaptureFixture[str], who: int) -> None:
    """Exit 1, and no verdict that a script could take for one."""
    deploy()[who].status_code = 503
    answer = verify(capsys, "--lengths", "3")
    assert (answer.code, answer.verdict) == (1, {})
    assert answer.errors == f'{"pd"[who]}: answered 503: {{"error": "no"}}\n'


def test_worker_without_a_record_is_named(deploy: Deploy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that nobody noted is not proven by its answer."""
    monkeypatch.setattr(command, "RECORD_TIMEOUT_S", 0.2)
    deploy({"record": None})
    answer = verify(capsys, "--lengths", "3")
    assert (answer.code, answer.verdict) == (1, {})
    assert answer.errors.startswith("p: has no record of transfer ")


def test_worker_that_is_gone_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody listens at the address of a state file that outlived its workers."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    publish(tmp_path, "m", SECRET, [Member("p", "i", "http://127.0.0.1:9")], [Member("d", "i", "http://127.0.0.1:9")])
    answer = verify(capsys)
    assert (answer.code, answer.errors.count("\n")) == (1, 1)
    assert answer.errors.startswith("d: cannot be reached: ")


@pytest.mark.parametrize(("prefills", "decodes"), [(0, 1), (1, 0), (0, 0)])
def test_deployment_without_a_pair_is_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prefills: int, decodes: int
) -> None:
    """Zero cases are no proof."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    somebody = [Member("w", "i", "http://127.0.0.1:9")]
    publish(tmp_path, "m", SECRET, somebody[:prefills], somebody[:decodes])
    answer = verify(capsys)
    assert (answer.code, answer.verdict) == (1, {})
    assert "needs a ready prefill and a ready decode worker" in answer.errors


@pytest.mark.parametrize("lengths", ["", "0", "3,", "-1", "a", "1.5", "3;4"])
def test_bad_lengths_are_refused(deploy: Deploy, capsys: pytest.CaptureFixture[str], lengths: str) -> None:
    """Exit 2, naming field, value and fix, before anything is sent."""
    prefill, decode = deploy()
    answer: Answer = verify(capsys, "--lengths", lengths)
    assert (answer.code, answer.errors) == (
        2,
        f"--lengths: {lengths!r}: give whole numbers of tokens, each at least 1, separated by commas\n",
    )
    assert prefill.requests == decode.requests == []


def test_nothing_to_verify_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with the flag to change."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    answer = verify(capsys)
    assert (answer.code, answer.verdict) == (2, {})
    assert answer.errors.startswith(f"--name: {NAME!r}: no such deployment here")
